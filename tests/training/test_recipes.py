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
from mtbench.training.recipes import RECIPES, Stage, changed, seeded
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


def test_each_seed_has_stages_of_its_own() -> None:
    """They start from the stages of the same seed, or from a checkpoint outside of the recipe."""
    stages = seeded(TREE[:2], 2)
    assert [(stage.name, stage.base, stage.settings.seed) for stage in stages] == [
        ("a-1", "model", 42),
        ("b-1", "a-1", 42),
        ("a-2", "model", 43),
        ("b-2", "a-2", 43),
    ]


def test_trainings_of_equal_cost_differ_in_their_objective_alone() -> None:
    """Base, data, block size and FLOPs are one; other ones are of all trainings."""
    stages = changed(RECIPES["equal-cost"], "other", ("mine.jsonl",), 2e9)
    assert [stage.name for stage in stages] == ["ar", "mars", "mars_no_sft", "self_distill", "block_diffusion"]
    assert {(stage.base, stage.data, stage.settings) for stage in stages} == {
        ("other", ("mine.jsonl",), replace(RECIPES["equal-cost"][0].settings, flops=2e9))
    }
    assert {asdict(stage.objective).get("block_size", 4) for stage in stages if stage.objective} == {4}


@pytest.mark.slow
def test_a_recipe_trains_all_stages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end, by the command: two stages in their own processes. A second run does nothing."""
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    settings = Settings(epochs=1, batch_size=8)
    data = ("arithmetic",)
    stages = (
        Stage(name="init", objective=None, data=data, examples=30, settings=settings, shape=shape),
        Stage(name="ar", objective=Ar(), base="init", data=data, examples=18, settings=settings),
    )
    monkeypatch.setattr("mtbench.training.recipes.RECIPES", {"toy": stages})
    for begun in (2, 0):
        result = CliRunner().invoke(app, ["--recipe", "toy", "-o", str(tmp_path / "toy"), "--offline"])
        assert result.exception is None, result.output
        assert result.stderr.count("begins") == begun
        assert result.stdout.strip() == str(tmp_path / "toy")
