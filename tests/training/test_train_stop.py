"""A training that cannot go on stops in one line, and keeps what it saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import OUT_OF_MEMORY, STEPS, USUAL, assert_complete, broken_by, last_checkpoint, plan, resume_folder, run

from mtbench.errors import UserError
from mtbench.training import loss, packing
from mtbench.training.objectives import Ar, Losses, Mars

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("cache")]


@pytest.mark.parametrize("rows_of_a_forward", [1, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_nonfinite_loss_stops_with_step_rate_and_conversations(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_forward: int, value: float
) -> None:
    """The conversation is named; saved checkpoints stay good, and the same command stops at the same step."""
    settings, out = replace(USUAL, rows=rows_of_a_forward, save_steps=1), tmp_path / "out"
    schedule = plan(base, rows, Ar(), settings)
    bad = schedule.conversations(2)[1]
    text = schedule.examples[bad].ids
    build = Ar.build

    def with_bad_weight(self: Ar, example: packing.Example, *rest: Any) -> packing.TrainingSequence:
        sequence = build(self, example, *rest)
        return sequence._replace(weight=sequence.weight * value) if torch.equal(example.ids, text) else sequence

    monkeypatch.setattr(Ar, "build", with_bad_weight)
    forward = next(n for n in range(schedule.forwards) if bad in schedule.conversations(2, n))
    named = ", ".join(map(str, schedule.conversations(2, forward)))
    assert (named == str(bad)) == (rows_of_a_forward == 1)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            run(Ar(), base, rows, settings, out)
        assert f"the loss of step 3 is {value}, at a learning rate of 0.01, on conversations {named};" in str(
            error.value
        )
        assert "\n" not in str(error.value)
        assert not out.exists()
        assert [folder.name for folder in resume_folder(out).glob("checkpoint-*")] == ["checkpoint-2"]
        assert_complete(resume_folder(out) / "checkpoint-2")


@pytest.mark.parametrize(("step", "save_steps", "left"), [(4, 2, "checkpoint-2"), (STEPS, 3, "checkpoint-6")])
def test_a_nonfinite_gradient_stops_before_the_weights_are_saved(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, save_steps: int, left: str
) -> None:
    """Even if the loss is finite, because the weights are lost. In the last step, too."""
    out = tmp_path / "out"
    schedule = plan(base, rows, Ar())
    forwards = iter(range(10_000))

    losses = Ar.losses

    def steep(objective: Ar, model: Any, *rest: Any) -> Losses:
        total, parts = losses(objective, model, *rest)
        if model.training and next(forwards) == (step - 1) * schedule.forwards:
            total = total + (total - total.detach()).sqrt()  # 0, with an infinite gradient
        return Losses(total, parts)

    monkeypatch.setattr(Ar, "losses", steep)
    with pytest.raises(UserError, match=f"the gradient of step {step} is (inf|nan), at a learning rate of") as error:
        run(Ar(), base, rows, replace(USUAL, save_steps=save_steps), out)
    assert f"on conversations {', '.join(map(str, schedule.conversations(step - 1)))};" in str(error.value)
    found = last_checkpoint(out)
    assert found is not None
    assert found.name == left
    assert_complete(found)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"rows": 6}, "--rows 3"),
        ({"rows": 1, "pack": 200}, "--pack 100"),
        ({"rows": 1, "pack": 110}, "--checkpointing"),
        ({"rows": 1}, "add `--checkpointing`, or halve `--max-length 48`"),
        ({"rows": 1, "checkpointing": True}, "; halve `--max-length 48`"),
    ],
    ids=str,
)
def test_an_out_of_memory_error_says_what_to_halve(
    base: str,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    changes: dict[str, Any],
    advice: str,
) -> None:
    """First the options that change no loss; a packed row still holds the longest conversation."""
    monkeypatch.setattr(loss, "target_states", broken_by(error))
    with pytest.raises(UserError, match="out of memory") as refusal:
        run(Mars(block_size=2), base, rows, replace(USUAL, **changes), tmp_path / "out")
    assert advice in str(refusal.value)


def test_another_error_is_not_reported_as_out_of_memory(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised unchanged."""
    monkeypatch.setattr(loss, "target_states", broken_by(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(Ar(), base, rows, USUAL, tmp_path / "out")
