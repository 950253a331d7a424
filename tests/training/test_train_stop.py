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
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_nonfinite_loss_stops_with_step_and_rate(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Saved checkpoints stay good, and the same command stops at the same step."""
    settings, out = replace(USUAL, save_steps=1), tmp_path / "out"
    schedule = plan(base, rows, Ar(), settings)
    text = schedule.examples[schedule.conversations(2)[1]].ids
    build = Ar.build

    def with_bad_weight(self: Ar, example: packing.Example, *rest: Any) -> packing.TrainingSequence:
        sequence = build(self, example, *rest)
        return sequence._replace(weight=sequence.weight * value) if torch.equal(example.ids, text) else sequence

    monkeypatch.setattr(Ar, "build", with_bad_weight)
    for _ in range(2):
        with pytest.raises(UserError) as error:
            run(Ar(), base, rows, settings, out)
        assert f"the loss of step 3 is {value}, at a learning rate of 0.01; lower" in str(error.value)
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
    with pytest.raises(UserError, match=f"the gradient of step {step} is (inf|nan), at a learning rate of"):
        run(Ar(), base, rows, replace(USUAL, save_steps=save_steps), out)
    found = last_checkpoint(out)
    assert found is not None
    assert found.name == left
    assert_complete(found)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_an_out_of_memory_error_says_what_to_halve(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """First the options that change no loss. Nothing is left that another command would have to remove."""
    monkeypatch.setattr(loss, "target_states", broken_by(error))
    with pytest.raises(UserError, match=r"^out of memory with 3 rows a forward; halve `--rows` or `--pack`[^\n]*$"):
        run(Mars(block_size=2), base, rows, USUAL, tmp_path / "out")
    assert not list(tmp_path.iterdir())
