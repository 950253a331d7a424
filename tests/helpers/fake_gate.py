"""A gate between made-up builds (tests/helpers/fake_build.py), without the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtbench.experiments.gate.builds import resolve
from mtbench.experiments.gate.format import GateRequest
from mtbench.experiments.gate.stages import GateRun

AR, MARS = "arithmetic.ar.ar.graph.b1", "arithmetic.mars.mars.graph.b1"
ARGUMENTS = ["--method", "ar", "--method", "mars"]


def request(base: Path, head: Path, **asked: Any) -> GateRequest:
    values: dict[str, Any] = {
        "base": str(base),
        "head": str(head),
        "plan_arguments": ARGUMENTS,
        "margin": 0.02,
        "blocks": 4,
        "pairs": None,
        "interleave": False,
        "counts_only": False,
        "allow_changed": False,
        "allow_torch": False,
        "allow_dirty": False,
        "process_limit_s": 60.0,
        "seed": 0,
    }
    return GateRequest(**values | asked)


def a_gate(
    directory: Path, base: Path, head: Path, note: Callable[[str], None] = lambda _: None, **asked: Any
) -> GateRun:
    asked_for = request(base, head, **asked)
    builds = [resolve(env, note) for env in (asked_for.base, asked_for.head)]
    return GateRun(directory, asked_for, builds[0], builds[1], note)
