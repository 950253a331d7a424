"""Trainings in several processes of one machine that communicate by gloo, and what the optimizer gets in each step.

accelerate splits a model by FSDP only between accelerators; `split_on_cpu` makes it do the same between processes on a
CPU. All else is what `accelerate launch` and `mtbench train` do. As a program, this file is `mtbench` of which a
process may be killed: `KILLED="1@5"` kills process 1 at step 5.
"""

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from trainings import exact

from mtbench.cli import main
from mtbench.training import trainer
from mtbench.training.loss import attach_loss
from mtbench.training.train import TrainingRequest, train

HANG_S = 60  # a process that waits longer for another one ends with an error
FSDP = {  # what `accelerate launch` sets for the options in docs/train.md
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


class Step(NamedTuple):
    """What the optimizer gets in a step, of each parameter that learns."""

    gradients: dict[str, Tensor]  # whole, before clipping
    norm: float
    split: bool  # each process held a part


class Case(NamedTuple):
    """A training in several processes."""

    request: TrainingRequest
    environment: Mapping[str, str] = {}  # with FSDP's, each process holds a part of the model


def split_on_cpu(patch: pytest.MonkeyPatch) -> None:
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
    """Compute in float64, and keep what the optimizer gets in each step."""
    steps: list[Step] = []
    clip = trainer.ObjectiveTrainer._clip_grad_norm

    def clipped(self: trainer.ObjectiveTrainer, model: Any) -> Any:
        named = self.accelerator.unwrap_model(model).named_parameters()
        learning = {name: tensor for name, tensor in named if tensor.grad is not None}
        gradients = {name: whole(tensor.grad) for name, tensor in learning.items()}
        norm = clip(self, model)
        split = all(isinstance(tensor, DTensor) for tensor in learning.values())
        steps.append(Step(gradients, float(norm), split))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.ObjectiveTrainer, "_clip_grad_norm", clipped)
        patch.setattr(trainer, "attach_loss", lambda model, *rest: attach_loss(exact(model), *rest))
        yield steps


def train_alone(request: TrainingRequest) -> list[Step]:
    """Train in this process; return the steps."""
    with recorded() as steps:
        train(request)
    return steps


def train_together(count: int, cases: Sequence[Case]) -> None:
    """Train the cases one after the other in `count` processes; `steps_of` returns the steps of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # forked, so that none imports torch; raises if a process fails
    start_processes(_work, (count, port, cases), nprocs=count, start_method="fork")


def steps_of(case: Case) -> list[Step]:
    return [Step(*step) for step in torch.load(_steps_file(case))]


def _steps_file(case: Case) -> Path:
    return case.request.out.with_name(f"{case.request.out.name}.steps.pt")


def _work(rank: int, count: int, port: int, cases: Sequence[Case]) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=HANG_S))
    for case in cases:
        with pytest.MonkeyPatch.context() as patch, recorded() as steps:
            for name, value in case.environment.items():
                patch.setenv(name, value)
            if case.environment:
                split_on_cpu(patch)
            AcceleratorState._reset_state(reset_partial_state=True)
            train(case.request)
        if rank == 0:
            torch.save([tuple(step) for step in steps], _steps_file(case))
    torch.distributed.destroy_process_group()


def _kill_at(patch: pytest.MonkeyPatch, killed: Sequence[str]) -> None:
    """Kill this process as `killed` says."""
    log = trainer.ObjectiveTrainer.log

    def killing(self: trainer.ObjectiveTrainer, *args: Any, **kwargs: Any) -> None:
        if f"{os.environ['RANK']}@{self.state.global_step}" in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        log(self, *args, **kwargs)

    patch.setattr(trainer.ObjectiveTrainer, "log", killing)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched:
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            split_on_cpu(patched)
        _kill_at(patched, os.environ.get("KILLED", "").split())
        main.main()
