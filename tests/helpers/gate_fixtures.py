"""Fixtures of gates between made-up builds: `pytest_plugins = ["gate_fixtures"]`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_build import build
from fake_gate import a_gate
from stages import begin_run
from whole import plan_of

from mtbench.experiments.gate.format import Gate


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the plan that every made-up build makes: two cells, four blocks."""
    return begin_run(tmp_path_factory.mktemp("plan") / "run", plan_of(4)).path


@pytest.fixture
def gate(tmp_path: Path, plan: Path) -> Callable[..., Gate]:
    """Run a gate between a build and one with these faults."""

    def run(base: dict[str, Any] | None = None, asked: dict[str, Any] | None = None, **faults: Any) -> Gate:
        builds = build(tmp_path / "base", plan, **base or {}), build(tmp_path / "head", plan, **faults)
        return a_gate(tmp_path / "runs" / "gate", *builds, **asked or {}).run()

    return run
