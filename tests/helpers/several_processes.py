"""Trainings in several processes of one machine, which communicate by gloo, and what each step's gradient was.

accelerate shards a model (FSDP) only between accelerators; `shard_on_cpu` makes it do the same between processes on a
CPU. Everything else is what `accelerate launch` and `mtbench train` do.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from trainings import exact

from mtbench.training import trainer
from mtbench.training.loss import attach_loss
from mtbench.training.train import TrainingRequest, train

DDP: Mapping[str, str] = {}
FSDP = {  # what `accelerate launch --use_fsdp --fsdp_version 2 …` sets
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


class Step(NamedTuple):
    """What the optimizer gets in one step: the whole gradient of each parameter that learns, and its norm."""

    gradients: dict[str, Tensor]  # before clipping
    norm: float


def shard_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let accelerate take processes on a CPU for processes with an accelerator each."""
    start = PartialState.__init__

    def started(self: PartialState, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    patch.setattr(PartialState, "__init__", started)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered if each process holds a part of it. Every process must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Compute in float64, and keep what each step's optimizer gets."""
    steps: list[Step] = []
    clip = trainer.ObjectiveTrainer._clip_grad_norm

    def clipped(self: trainer.ObjectiveTrainer, model: Any) -> Any:
        named = self.accelerator.unwrap_model(model).named_parameters()
        gradients = {name: whole(tensor.grad) for name, tensor in named if tensor.grad is not None}
        norm = clip(self, model)
        steps.append(Step(gradients, float(norm)))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "attach_loss", lambda model, *rest: attach_loss(exact(model), *rest))
        patch.setattr(trainer.ObjectiveTrainer, "_clip_grad_norm", clipped)
        yield steps


def _work(rank: int, count: int, port: int, cases: Sequence[tuple[Mapping[str, str], TrainingRequest]]) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    for environment, request in cases:
        with pytest.MonkeyPatch.context() as patch, recorded() as steps:
            for name, value in environment.items():
                patch.setenv(name, value)
            if environment:
                shard_on_cpu(patch)
            AcceleratorState._reset_state(reset_partial_state=True)
            train(request)
        if rank == 0:
            torch.save([tuple(step) for step in steps], steps_file(request.out))
    torch.distributed.destroy_process_group()


def steps_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.steps.pt")


def train_in_processes(count: int, cases: Sequence[tuple[Mapping[str, str], TrainingRequest]]) -> None:
    """Train as requested, one case after the other, in float64; `steps_of` returns the steps of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_work, (count, port, cases), nprocs=count)  # type: ignore[no-untyped-call] # raises if one fails


def steps_of(out: Path) -> list[Step]:
    return [Step(*step) for step in torch.load(steps_file(out))]
