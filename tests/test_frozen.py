"""What an earlier version measured gives the same results today, and what it left unfinished goes on.

tests/helpers/freeze.py has the stored runs, and says what to do when a text is meant to change.
"""

import json
from pathlib import Path
from typing import Any

import freeze
import pytest

import mtbench
from mtbench.plan.directory import DIRECTORIES, RunDirectory, command_of

DIGITS = 12  # processors differ in the last ones: each sums the numbers of a vector in its own order


def comparable(text: str) -> str:
    """Return JSON, one value a line, its numbers rounded."""
    return json.dumps(_comparable(json.loads(text)), indent=1)


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _comparable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_comparable(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


@pytest.mark.parametrize("experiment", freeze.EXPERIMENTS)
def test_a_stored_experiment_gives_the_same_files(experiment: str, tmp_path: Path) -> None:
    """Results have the same keys in the same order, and the same values; what people read has the same words."""
    for name, text in freeze.rebuilt(experiment, tmp_path / "DIR").items():
        expected = (freeze.FOLDER / experiment / "expected" / name).read_text(encoding="utf-8")
        if name.endswith(".json"):
            expected, text = comparable(expected), comparable(text)
        assert text.splitlines() == expected.splitlines(), f"{experiment}/{name}"
    assert command_of(tmp_path / "DIR") == (experiment if experiment in {*DIRECTORIES} - {"gate"} else None)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["run", "choose"])
def test_a_half_finished_run_goes_on(experiment: str, tmp_path: Path) -> None:
    """An answer that is decoded again is the one that was lost. A race may eliminate its arms at other blocks."""
    folder = tmp_path / "DIR"
    freeze.unpack(experiment, folder)
    files = sorted(folder.glob("generations/*.jsonl"))
    before = {file.name: tokens_of(file) for file in files}
    for file in files:
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]))
    for file in folder.glob("timings/*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: len(lines) // 2]))
    (folder / "eliminated.jsonl").unlink(missing_ok=True)
    resume = mtbench.run if experiment == "run" else mtbench.choose
    resume(out=folder, resume=True)
    for file in files:
        again, lost = tokens_of(file), before[file.name]
        both = again.keys() & lost.keys()
        assert {item: again[item] for item in both} == {item: lost[item] for item in both}
        assert experiment == "choose" or again.keys() == lost.keys()
    assert RunDirectory(folder).has("results.json")


def tokens_of(file: Path) -> dict[str, list[int]]:
    return {line["item"]: line["token_ids"] for line in map(json.loads, file.read_text().splitlines())}
