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


counters: dict[tuple[object, ...], Tensor] = {}  # of arrivals. They stay: CUDA graphs hold their address


def arrivals(device: torch.device, size: int) -> Tensor:
    """Return counters, zero between kernels, of this thread and its current stream: they run one kernel at a time.

    The stream alone does not tell who replays a graph: all threads capture on one.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = device, size, stream, threading.get_ident()
    if key not in counters:
        counters[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return counters[key]
