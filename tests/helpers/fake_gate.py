"""A gate between made-up builds (tests/helpers/fake_build.py), without the command line. Also a plugin of fixtures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_gates
import pytest
from fake_build import build
from whole import plan_of

from mtbench.experiments.gate.builds import resolve
from mtbench.experiments.gate.format import Gate
from mtbench.experiments.gate.stages import GateRun
from mtbench.runs.planner import begin_run

AR, MARS = "arithmetic.ar.ar.graph.b1", "arithmetic.mars.mars.graph.b1"
ARGUMENTS = ["--method", "ar", "--method", "mars"]


def a_gate(
    directory: Path, base: Path, head: Path, note: Callable[[str], None] = lambda _: None, **asked: Any
) -> GateRun:
    given = {"base": str(base), "head": str(head), "plan_arguments": ARGUMENTS, "blocks": 4}
    asked_for = made_gates.request(**given | asked)
    builds = [resolve(env, note) for env in (asked_for.base, asked_for.head)]
    return GateRun(directory, asked_for, builds[0], builds[1], note)


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the plan that every made-up build makes: two cells, four blocks."""
    return begin_run(tmp_path_factory.mktemp("plan") / "run", plan_of(4), ["mtbench"]).path


@pytest.fixture
def gate(tmp_path: Path, plan: Path) -> Callable[..., Gate]:
    """Run a gate between a build and one with these faults."""

    def run(base: dict[str, Any] | None = None, asked: dict[str, Any] | None = None, **faults: Any) -> Gate:
        builds = build(tmp_path / "base", plan, **base or {}), build(tmp_path / "head", plan, **faults)
        return a_gate(tmp_path / "runs" / "gate", *builds, **asked or {}).run()

    return run
