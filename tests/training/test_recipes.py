"""Recipes: the order of their stages, their states, and what they take."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtbench.cli.train import app
from mtbench.errors import UserError
from mtbench.training import recipe_runner
from mtbench.training.objectives import Ar, Mars
from mtbench.training.recipes import Stage
from mtbench.training.trainer import Settings

# Replaces `mtbench`: writes down when it begins and ends; `bad` fails, `long` waits to be interrupted.
FAKE = """
import json, os, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
note = lambda word: print(word, out.name, time.monotonic(), file=open(out.parent / "notes", "a"))
note("begin")
print("step 1/2 loss 3.2", flush=True)
if out.name == "bad":
    sys.exit("error: no luck")
if out.name == "long":
    note(os.getpid())
time.sleep(60 if out.name == "long" else 0.4)
note("end")
out.mkdir()
record = {"objective": sys.argv[2], "options": {}, "settings": json.loads(os.environ["SETTINGS"]), "words": sys.argv}
(out / "mtbench_training.json").write_text(json.dumps(record))
"""


def chain(*pairs: tuple[str, str | None]) -> tuple[Stage, ...]:
    """Stages of next-token training, each with its base."""
    return tuple(Stage(name=name, objective=Ar(), base=base or "model", data=("text",)) for name, base in pairs)


TREE = chain(("a", None), ("b", "a"), ("c", "a"), ("d", "c"))


def run(stages: Sequence[Stage], folder: Path, workers: int = 1) -> tuple[bool, list[str]]:
    """Return whether all stages are complete, and the lines that were printed."""
    printed: list[str] = []
    launch = [sys.executable, "-S", "-c", FAKE]
    return recipe_runner.run(stages, folder, workers, launch, [], printed.append), printed


def notes(folder: Path) -> list[tuple[str, str]]:
    """The events in order: begin or end, and the stage."""
    lines = [line.split() for line in (folder / "notes").read_text().splitlines()]
    return [(word, name) for word, name, at in sorted(lines, key=lambda line: float(line[2]))]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that the fake training writes into its record."""
    monkeypatch.setenv("SETTINGS", json.dumps(asdict(Settings())))


@pytest.mark.whole
def test_a_stage_waits_for_those_it_needs_and_others_run_in_parallel(tmp_path: Path) -> None:
    """One worker runs them in order; two run b and c together, after a."""
    assert run(TREE, tmp_path / "one")[0]
    assert notes(tmp_path / "one") == [(word, name) for name in "abcd" for word in ("begin", "end")]
    assert run(TREE, tmp_path / "two", workers=2)[0]
    words = notes(tmp_path / "two")
    assert words[:2] == [("begin", "a"), ("end", "a")]
    assert {words[2], words[3]} == {("begin", "b"), ("begin", "c")}
    assert words.index(("begin", "d")) > words.index(("end", "c"))


@pytest.mark.whole
def test_a_complete_stage_is_not_repeated(tmp_path: Path) -> None:
    """The same command trains the missing stages, from the checkpoints that exist."""
    run(TREE[:1], tmp_path)
    assert run(TREE, tmp_path, workers=2)[0]
    assert notes(tmp_path).count(("begin", "a")) == 1
    words = json.loads((tmp_path / "b" / "mtbench_training.json").read_text())["words"]
    assert words[words.index("--base") + 1] == str(tmp_path / "a")


@pytest.mark.whole
def test_a_failed_stage_stops_only_those_that_need_it(tmp_path: Path) -> None:
    """Its error message is printed."""
    stages = chain(("bad", None), ("after", "bad"), ("later", "after"), ("other", None))
    complete, printed = run(stages, tmp_path)
    assert not complete
    assert printed == [
        f"bad begins; its output: {tmp_path}/bad.log",
        "bad failed: error: no luck",
        f"other begins; its output: {tmp_path}/other.log",
        "other is complete",
        "after is left out; it needs a stage that failed",
        "later is left out; it needs a stage that failed",
    ]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"other"}


@pytest.mark.whole
def test_an_interruption_ends_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves no process running and no checkpoint that looks complete."""

    def interrupt(_: float) -> None:
        deadline = time.monotonic() + 20
        while "long" not in (tmp_path / "notes").read_text() and time.monotonic() < deadline:
            real(0.05)
        real(0.2)
        raise KeyboardInterrupt

    real = time.sleep
    (tmp_path / "notes").touch()
    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(chain(("long", None)), tmp_path)
    process = next(int(word) for word, _ in notes(tmp_path) if word.isdigit())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert not (tmp_path / "long").exists()


@pytest.mark.whole
def test_another_checkpoint_in_a_stages_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete checkpoint must have the stage's objective and options. The dry run refuses it, too."""
    run(TREE[:1], tmp_path)
    stages = (replace(TREE[0], objective=Mars()),)
    refusal = "is not the stage 'a' of this recipe"
    with pytest.raises(UserError, match=refusal):
        run(stages, tmp_path)
    monkeypatch.setattr("mtbench.training.recipes.RECIPES", {"toy": stages})
    result = CliRunner().invoke(app, ["--recipe", "toy", "-o", str(tmp_path), "--dry-run"])
    assert isinstance(result.exception, UserError)
    assert refusal in str(result.exception)


def test_a_recipe_trains_on_answers_that_its_first_stage_writes() -> None:
    """`--base` and `--data` take the place of the recipe's own, wherever those name no stage."""
    words = ["--recipe", "eagle-cpu", "--base", "./mine", "--data", "a.jsonl", "--data", "b.jsonl", "-o", "out"]
    answers, eagle = CliRunner().invoke(app, [*words, "--dry-run"]).output.splitlines()
    assert answers.startswith("mtbench train answers --teacher ./mine --data a.jsonl --data b.jsonl --examples 768 ")
    assert answers.endswith(" --max-new-tokens 160 --keep-cut --out out/answers.jsonl")
    assert eagle.startswith("mtbench train eagle --base ./mine --data out/answers.jsonl --steps 3 ")


def test_a_dry_run_prints_the_command_of_each_stage() -> None:
    """In the recipe's order; each can be run by hand, and nothing is fetched."""
    result = CliRunner().invoke(app, ["--recipe", "mars-qwen2.5-7b", "--dry-run"], env={"HF_HUB_OFFLINE": "1"})
    assert result.exception is None, result.output
    first, second, *_ = result.stdout.splitlines()
    data = "--data allenai/Dolci-Instruct-SFT --rows 2 --out checkpoints/mars-qwen2.5-7b"
    assert first == f"mtbench train ar --base Qwen/Qwen2.5-7B-Instruct {data}/ar"
    assert second == f"mtbench train mars --base checkpoints/mars-qwen2.5-7b/ar {data}/mars"
