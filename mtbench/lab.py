"""The lab: a plan's models, each loaded once, on the device and in the type they will be measured in."""

from collections.abc import Mapping
from typing import Any

import torch

from mtbench.errors import UserError
from mtbench.lane import Lane
from mtbench.method import Lanes, Method
from mtbench.models import DTYPES, Checkpoint, load
from mtbench.plan import Cell, Plan
from mtbench.registry import METHODS
from mtbench.rundir import Record
from mtbench.stopwatch import Stopwatch

SMALL_MODEL = 50_000_000  # parameters: on a CPU a forward of fewer is too short to share among threads


class Lab:
    """The models of a plan, each loaded once and shared by the cells that use it."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.device = resolve_device(request["device"])
        self.dtype = resolve_dtype(request["dtype"], self.device)
        self.offline = request["offline"]
        self.checkpoints: dict[str, Checkpoint] = {}
        self.lanes: dict[tuple[str, str], Lane] = {}  # by role too: a draft of the same weights has its own cache

    def lane(self, role: str, source: str) -> Lane:
        if source not in self.checkpoints:
            self.checkpoints[source] = load(source, dtype=DTYPES[self.dtype], device=self.device, offline=self.offline)
        if (role, source) not in self.lanes:
            self.lanes[role, source] = Lane(self.checkpoints[source])
        return self.lanes[role, source]

    def load(self, plan: Plan) -> None:
        """Load every checkpoint of the plan; a small model gets one thread, for two only wait for each other."""
        for cell in plan.cells:
            self.lanes_of(cell)
        largest = max(checkpoint.model.num_parameters() for checkpoint in self.checkpoints.values())
        if self.device == "cpu" and largest < SMALL_MODEL:
            torch.set_num_threads(1)

    def clear(self) -> None:
        """Let go of all models."""
        self.lanes.clear()
        self.checkpoints.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> Record:
        """What results need to know of this session: device, type, threads, the cost of a synchronisation."""
        stopwatch = Stopwatch(torch.device(self.device))
        began = stopwatch.now()
        for _ in range(10):
            ended = stopwatch.now()
        return {
            "device": self.device,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "synchronisation_s": (ended - began) / 10,
        }

    def lanes_of(self, cell: Cell) -> Lanes:
        return Lanes(cell.on, {role: self.lane(role, source) for role, source in cell.checkpoints.items()})


def resolve_device(asked: str) -> str:
    """`auto` is the GPU if there is one. Raises UserError for a device that is not there."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda") or (asked == "cuda" and not torch.cuda.is_available()):
        have = "cpu, cuda" if torch.cuda.is_available() else "cpu (no GPU is visible)"
        raise UserError(f"--device {asked!r} is not here; there is: {have}.")
    return asked


def resolve_dtype(asked: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU, float32 on a CPU."""
    return ("bfloat16" if device == "cuda" else "float32") if asked == "auto" else asked


def method_of(cell: Cell) -> Method:
    """The cell's method with its resolved options."""
    method: Method = METHODS[cell.method](**cell.options)
    return method
