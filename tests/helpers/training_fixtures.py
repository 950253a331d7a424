"""Fixtures of the tests that train, made once for all processes: `pytest_plugins = ["training_fixtures"]`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import made_once
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
    lines = "".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(COUNT))
    folder = made_once(tmp_path_factory, "rows", lambda folder: (folder / "rows.jsonl").write_text(lines))
    return str(folder / "rows.jsonl")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint."""

    def make(folder: Path) -> None:
        initialise(map(conversation, range(COUNT)), folder / "init", seed=1, data={}, **SHAPE)

    return str(made_once(tmp_path_factory, "base", make) / "init")


@pytest.fixture(scope="session")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained checkpoint of two layers: drafts read one before the last."""
    folder = tmp_path_factory.mktemp("deeper") / "init"
    return str(initialise(map(conversation, range(COUNT)), folder, seed=1, data={}, **SHAPE | {"num_hidden_layers": 2}))


@pytest.fixture(scope="session")
def undisturbed(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training without interruption."""
    with one_thread():
        make = lambda folder: run(MARS, base, rows, USUAL, folder / "out")  # noqa: E731
        return made_once(tmp_path_factory, "training", make) / "out"


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def load(_: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(training, "_load", load)
