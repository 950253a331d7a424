"""A gate between made-up builds (tests/helpers/fake_build.py), without the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_gates

from mtbench.experiments.gate.builds import resolve
from mtbench.experiments.gate.stages import GateRun

AR, MARS = "arithmetic.ar.ar.graph.b1", "arithmetic.mars.mars.graph.b1"
ARGUMENTS = ["--method", "ar", "--method", "mars"]


def a_gate(
    directory: Path, base: Path, head: Path, note: Callable[[str], None] = lambda _: None, **asked: Any
) -> GateRun:
    given = {"base": str(base), "head": str(head), "plan_arguments": ARGUMENTS, "blocks": 4}
    asked_for = made_gates.request(**given | asked)
    builds = [resolve(env, note) for env in (asked_for.base, asked_for.head)]
    return GateRun(directory, asked_for, builds[0], builds[1], note)
