# mypy: disable-error-code="no-untyped-call"
"""What the launchers of kernels ask of a GPU: its multiprocessors, shared memory, dependent launch, and counters."""

import threading
from functools import cache

import torch
import triton
from torch import Tensor

from mtbench.kernels import dependent_launch as dependent_launch

MULTIPROCESSORS, SHARED_BYTES = 132, 232_448  # of an H100 and an H200; taken where there is no GPU


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> tuple[int, bool]:
    """Return the bytes that a program may have, and whether the matrix unit reads its large side there (sm_90, 100)."""
    if device.type != "cuda":
        return SHARED_BYTES, True
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.device(device).index or 0)
    return int(properties["max_shared_mem"]), torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether four warps drive the matrix unit together, as on Hopper (sm_90); taken where there is no GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


CAPTURED = -1  # in place of a stream
counters: dict[tuple[object, ...], Tensor] = {}  # of arrivals. They stay: CUDA graphs hold their address


def arrivals(device: torch.device, size: int) -> Tensor:
    """Return counters, zero between kernels, of this thread and its current stream: they run one kernel at a time.

    Those of its captured graphs are made with the first of a stream: a graph would only record that they are zero.
    Raises RuntimeError if a kernel is captured that has not run before.
    """
    own = (device, size, threading.get_ident())
    stream = _stream(device)
    if (*own, stream) not in counters:
        if stream == CAPTURED:
            raise RuntimeError("a product has to run once before a graph captures it")
        for owner in (stream, CAPTURED):
            counters.setdefault((*own, owner), torch.zeros(size, dtype=torch.int32, device=device))
    return counters[*own, stream]


def _stream(device: torch.device) -> int:
    """Return the current stream; CAPTURED in a capture, which all threads make on one stream."""
    if device.type != "cuda":
        return 0
    return CAPTURED if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream
