"""What `auto` means on this machine: the device, and the dtype of some checkpoints."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mtbench.errors import UserError
from mtbench.models import gguf
from mtbench.models.checkpoint_files import stored_bytes
from mtbench.models.families import path_of
from mtbench.models.loading import without_weights
from mtbench.options import AUTO

SMALL_MODEL = 50_000_000  # parameters: on a CPU a smaller model's forward is too short for several threads


def resolve_device(device: str) -> str:
    """Return the device; `auto` is the GPU if there is one. Raises UserError for a device that is not available."""
    if device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu (no GPU is visible)"
        raise UserError(f"--device {device!r} is not available; available: {available}.")
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """Return the dtype; `auto` is bfloat16 on a GPU, float32 on a CPU."""
    if dtype != AUTO:
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


def fastest_dtype(device: str, sources: Iterable[str], *, offline: bool) -> str:
    """Return the dtype in which these checkpoints are fastest on a device of this machine.

    Raises UserError for a device that is not available.
    """
    return fastest_for(max((parameters(source, offline) for source in sources), default=0), resolve_device(device))


def fastest_for(size: int, device: str) -> str:
    """Return the dtype in which a model of so many parameters is fastest on this machine.

    On a CPU with instructions for bfloat16 a large model runs in bfloat16. On two cores with avx512_bf16, SmolLM2-135M
    takes 0.67 of float32's time for one position, and 0.42 to 0.56 for 2 to 16.
    """
    fast = device == "cpu" and computes_bfloat16() and size >= SMALL_MODEL
    return "bfloat16" if fast else resolve_dtype(AUTO, device)


def computes_bfloat16() -> bool:
    """Return whether the CPU has instructions for products of bfloat16. Without them it is slower than float32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


@cache
def parameters(source: str, offline: bool) -> int:
    """Return a checkpoint's number of parameters by its configuration.

    Of a GGUF file, and of a model that transformers does not know, it is the bytes of the weights, about as many; 0 if
    they are not here: loading reports why.
    """
    path = path_of(source)
    if gguf.is_gguf(path):
        return sum(part.stat().st_size for part in gguf.parts_of(Path(path)))
    try:
        return int(without_weights(source, offline=offline).num_parameters())
    except UserError:
        return stored_bytes(Path(path))
