"""The processes of a training: one alone, or those of `accelerate launch`, which passes its options in the environment.

Data parallel (DDP): each process holds the model. FSDP2: each holds a part of every weight, and a layer's weights are
gathered while it runs. Both give the losses and gradients of one process (tests/training/test_distributed.py).
"""

import os

import torch
from accelerate import PartialState

from mtbench.errors import UserError

ALLOWED = "`accelerate launch` may have `--multi_gpu` or `--use_fsdp --fsdp_version 2`"
UNSUPPORTED = ("deepspeed", "megatron_lm", "parallelism_config")  # after `--use_`


def processes() -> PartialState:
    """Return the processes of `accelerate launch`, or this one alone."""
    return PartialState(cpu=not torch.cuda.is_available())


def refuse_other_launch() -> None:
    """Raise UserError for options of `accelerate launch` that `mtbench train` does not support."""
    for kind in UNSUPPORTED:
        if _is_on(f"ACCELERATE_USE_{kind.upper()}"):
            raise UserError(f"mtbench cannot train with `--use_{kind}`; {ALLOWED}.")
    if not _is_on("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise UserError(f"mtbench cannot train with FSDP {version}; {ALLOWED}.")
    if _is_on("FSDP_ACTIVATION_CHECKPOINTING"):
        raise UserError(
            "`--fsdp_activation_checkpointing true` runs layers again that have a state here; give `--checkpointing` "
            "to `mtbench train` instead."
        )


def fsdp_format() -> str | None:
    """Return the format of FSDP's resumable checkpoints, which resumes no other; None without FSDP."""
    return os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT") if _is_on("ACCELERATE_USE_FSDP") else None


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"
