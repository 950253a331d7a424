"""Fixtures of the tests that train, made once in each process: `pytest_plugins = ["training_fixtures"]`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainings import COUNT, MARS, SHAPE, USUAL, conversation, one_thread, run

from mtbench.training import train as training
from mtbench.training.init_model import initialise


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """Sums always have the same order."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of many lengths, no two equal."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(COUNT)))
    return str(file)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint."""
    folder = tmp_path_factory.mktemp("base") / "init"
    return str(initialise(map(conversation, range(COUNT)), folder, seed=1, data={}, **SHAPE))


@pytest.fixture(scope="session")
def undisturbed(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training without interruption."""
    with one_thread():
        return run(MARS, base, rows, USUAL, tmp_path_factory.mktemp("undisturbed") / "out")


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def load(_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(training, "_load", load)
