"""Recipes: in which order their stages run, what becomes of them, and what they cost."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mtbench.cli.train import app
from mtbench.errors import UserError
from mtbench.models.random_shapes import SHAPES
from mtbench.training import cost, recipe_runner
from mtbench.training.objectives import Ar, Mars, Medusa, Objective
from mtbench.training.packing import Example
from mtbench.training.recipes import RECIPES, Stage
from mtbench.training.trainer import Settings

# In place of `mtbench`: notes when it begins and ends; `bad` fails, `long` waits to be interrupted.
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
(out / "mtbench_training.json").write_text(json.dumps({"objective": sys.argv[2], "options": {}, "words": sys.argv}))
"""


def chain(*pairs: tuple[str, str | None]) -> tuple[Stage, ...]:
    """Stages of next-token training, each with its base."""
    return tuple(Stage(name=name, objective=Ar(), base=base or "model", data=("d",)) for name, base in pairs)


TREE = chain(("a", None), ("b", "a"), ("c", "a"), ("d", "c"))


def run(stages: Sequence[Stage], folder: Path, workers: int = 1) -> tuple[bool, str]:
    """Whether all went well, and what was said where nobody watches."""
    said = StringIO()
    launch = [sys.executable, "-c", FAKE]
    return recipe_runner.run(stages, folder, workers, launch, [], Console(file=said)), said.getvalue()


def notes(folder: Path) -> list[tuple[str, str]]:
    """What happened, in order: begin or end, and of which stage."""
    lines = [line.split() for line in (folder / "notes").read_text().splitlines()]
    return [(word, name) for word, name, at in sorted(lines, key=lambda line: float(line[2]))]


def test_stages_wait_for_what_they_need_and_otherwise_run_side_by_side(tmp_path: Path) -> None:
    """One worker goes through them in order; two take b and c together, after a."""
    assert run(TREE, tmp_path / "one")[0]
    assert notes(tmp_path / "one") == [(word, name) for name in "abcd" for word in ("begin", "end")]
    assert run(TREE, tmp_path / "two", workers=2)[0]
    words = notes(tmp_path / "two")
    assert words[:2] == [("begin", "a"), ("end", "a")]
    assert {words[2], words[3]} == {("begin", "b"), ("begin", "c")}
    assert words.index(("begin", "d")) > words.index(("end", "c"))


def test_what_is_complete_is_left_alone(tmp_path: Path) -> None:
    """The same command goes on with what is missing, from the checkpoints that are there."""
    run(TREE[:1], tmp_path)
    going, said = run(TREE, tmp_path, workers=2)
    assert going
    assert notes(tmp_path).count(("begin", "a")) == 1
    assert "a: done complete before" in said
    words = json.loads((tmp_path / "b" / "mtbench_training.json").read_text())["words"]
    assert words[words.index("--base") + 1] == str(tmp_path / "a")


def test_a_failed_stage_stops_only_those_that_need_it(tmp_path: Path) -> None:
    """Its message is shown, and where the rest of what it said is."""
    stages = chain(("bad", None), ("after", "bad"), ("later", "after"), ("other", None))
    well, said = run(stages, tmp_path)
    assert not well
    assert f"bad: failed error: no luck ({tmp_path}/bad.log)" in said
    assert "after: left out needs bad" in said
    assert "later: left out needs after" in said
    assert "other: done" in said
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"other"}


def test_progress_is_the_last_line_a_stage_said(tmp_path: Path) -> None:
    """A line per stage, for files and terminals alike."""
    _, said = run(chain(("a", None)), tmp_path)
    assert said.splitlines() == ["a: running starts", "a: running step 1/2 loss 3.2", "a: done"]


def test_an_interruption_ends_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves no process behind, and nothing that looks complete."""

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


def test_another_checkpoint_in_a_stages_place_is_refused(tmp_path: Path) -> None:
    """What is complete must be that stage: the same objective, the same options."""
    run(TREE[:1], tmp_path)
    with pytest.raises(UserError, match="is not the stage 'a' of this recipe"):
        run((replace(TREE[0], objective=Mars()),), tmp_path)


def test_only_takes_what_a_stage_needs_along() -> None:
    """In the recipe's order; an unknown stage is refused with the known ones."""
    names = [stage.name for stage in recipe_runner.needed(RECIPES["tiny"], ["draft"])]
    assert names == ["init", "sums", "ar", "draft_init", "draft"]
    with pytest.raises(UserError, match=r"unknown stage 'mras' \(did you mean 'mars'\?\)"):
        recipe_runner.needed(RECIPES["tiny"], ["mras"])


def test_a_recipe_runs_from_nothing_and_again_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end, by the command: two stages in processes of their own, then how to use what they made."""
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    settings = Settings(epochs=1, batch_size=8)
    data = ("arithmetic",)
    stages = (
        Stage(name="init", objective=None, data=data, examples=30, settings=settings, shape=shape),
        Stage(name="ar", objective=Ar(), base="init", data=data, examples=18, settings=settings),
    )
    monkeypatch.setattr("mtbench.training.recipes.RECIPES", {"toy": stages})
    for told in ("held-out loss", "complete before"):
        result = CliRunner().invoke(app, ["--recipe", "toy", "-o", str(tmp_path / "toy"), "--offline"])
        assert result.exception is None, result.output
        assert told in result.stderr
        assert result.stdout.strip().endswith(f"mtbench run --checkpoint ar={tmp_path}/toy/ar")


# --- Costs --------------------------------------------------------------------------------------------------------

HALF_B = SHAPES["qwen2.5-0.5b"]
ANSWER = Example(torch.zeros(512, dtype=torch.long), 205)  # 512 tokens, 60 % of them learned


def flop(objective: Objective, example: Example = ANSWER) -> float:
    """Of a conversation, for Qwen2.5-0.5B."""
    from transformers import AutoConfig

    model = cost.model_of(AutoConfig.for_model(**HALF_B), objective)
    return cost.flop_of(model, None, cost.traffic_of(objective, [example]))


def test_flops_are_those_of_the_published_count() -> None:
    """Six per parameter and token of the body, six per parameter of the head and prediction, twelve per pair seen."""
    body, head = 494_032_768 - 151_936 * 896, 151_936 * 896
    pairs = 511 * 512 // 2
    assert flop(Ar()) == 6 * body * 511 + 6 * head * 307 + 12 * 24 * 896 * pairs


def test_mars_costs_what_its_noisy_copy_adds() -> None:
    """At 60 % answer tokens 1.6 times the body and twice the head: 1.68 for the whole model, less attention."""
    assert flop(Mars(block_size=4)) / flop(Ar()) == pytest.approx(1.68, abs=0.03)


def test_a_frozen_body_only_goes_forwards() -> None:
    """Medusa's body costs a third; its memory is that of the heads."""
    from transformers import AutoConfig

    medusa = cost.model_of(AutoConfig.for_model(**HALF_B), Medusa(heads=2))
    assert (medusa.frozen, medusa.frozen_body) == (494_032_768, True)
    assert medusa.trained == 2 * (896 * 896 + 896 + 151_936 * 896)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up GPU, so that nothing is measured."""
    monkeypatch.setattr(cost, "this_machine", lambda _: cost.Machine("X1", True, 7e14, 140 << 30))


def dry_run(*said: str) -> str:
    result = CliRunner().invoke(app, [*said, "--dry-run"], env={"COLUMNS": "80", "HF_HUB_OFFLINE": "1"})
    assert result.exception is None, result.output
    return result.stdout


@pytest.mark.usefixtures("machine")
def test_a_dry_run_of_the_papers_recipe_needs_no_network() -> None:
    """Steps as in the paper (28 thousand a stage), time by the machine's measured speed, what does not fit by name."""
    told = dry_run("--recipe", "mars-qwen2.5-7b")
    row = next(line.split() for line in told.splitlines() if line.strip().startswith("mars "))
    assert row[1:3] == ["28,016", "10,758,000"]
    assert "X1, 700 TFLOP/s measured, of which 30% to 35% is assumed" in told
    assert "at most: " in told
    assert "more than the 150 GB of this machine: ar" in told
    assert not any("…" in line for line in told.splitlines())  # all of it fits a terminal of 80 columns


@pytest.mark.usefixtures("machine")
def test_a_dry_run_counts_the_data_that_is_there(tmp_path: Path) -> None:
    """A file's conversations, less what is held out, with a tokenizer that a recipe would still have to make."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "one two", "completion": "three " * 9}) + "\n" for _ in range(40)))
    base = Stage(name="init", objective=None, data=(str(rows),), examples=40, shape={"vocab_size": 300})
    stage = Stage(name="x", objective=Ar(), base="init", data=(str(rows),), settings=Settings(epochs=2, batch_size=8))
    estimated = cost.estimate((base, stage), tmp_path, 1)
    found = estimated.costs["x"]
    assert found is not None
    assert (found.conversations, found.steps, found.at_most) == (72, 9, False)
    assert estimated.costs["init"] is None
    assert list(tmp_path.iterdir()) == [rows]


def test_stages_side_by_side_take_less_time() -> None:
    """The time of all is that of the longest way through them."""

    def spent(seconds: float) -> cost.Cost:
        return cost.Cost(steps=1, conversations=1, fed=1, flop=1, memory_bytes=1, s=seconds, at_most=False)

    costs = {"a": spent(10), "b": spent(5), "c": spent(3), "d": spent(4)}
    machine = cost.Machine("X1", True, 1e15, 1)
    spans = [cost.Estimate(stages=TREE, costs=costs, machine=machine, workers=workers).span_s() for workers in (1, 2)]
    assert spans == [22, 17]
