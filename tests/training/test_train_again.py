"""The same training again gives the same weights: repeated, in less memory, or stopped and resumed."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thinned import one_in
from trainings import (
    MARS,
    STEPS,
    USUAL,
    Killed,
    Watch,
    assert_complete,
    assert_same_training,
    broken_after,
    broken_by,
    last_checkpoint,
    losses_of,
    record,
    resume_folder,
    run,
)

from mtbench.errors import UserError
from mtbench.training import checkpoint, trainer
from mtbench.training import train as training
from mtbench.training.draft_objectives import Eagle, Mtp
from mtbench.training.objectives import Ar, Objective

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


@pytest.fixture(scope="module")
def interrupted(base: str, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Path], Path]:
    """Return a function that puts a training killed at a step into a folder. Each one is made once."""
    made: dict[int, Path] = {}

    def copy(kill_at: int, folder: Path) -> Path:
        if kill_at not in made:
            out = tmp_path_factory.mktemp("interrupted") / "out"
            with pytest.raises(Killed):
                run(MARS, base, rows, USUAL, out, progress=Watch(kill_at))
            assert not out.exists()
            made[kill_at] = out
        out = folder / "out"
        shutil.copytree(resume_folder(made[kill_at]), resume_folder(out))
        return out

    return copy


def test_the_same_command_makes_the_same_weights(base: str, rows: str, undisturbed: Path, tmp_path: Path) -> None:
    """Training is a function of its request. Another seed gives another training."""
    assert_same_training(run(MARS, base, rows, USUAL, tmp_path / "same" / "out"), undisturbed)
    other = run(MARS, base, rows, replace(USUAL, seed=20261121), tmp_path / "other" / "out")
    assert losses_of(other) != losses_of(undisturbed)


@pytest.mark.parametrize("objective", [MARS, Eagle(steps=2), Mtp()], ids=lambda objective: objective.name)
@pytest.mark.parametrize("changes", [{"rows": 1}, {"rows": 8}, {"pack": 120}, {"checkpointing": True}], ids=str)
def test_saving_memory_changes_no_loss(
    objective: Objective, changes: dict[str, Any], deeper: str, rows: str, tmp_path: Path
) -> None:
    """Fewer rows per forward pass, packing and recomputed activations give the same curve."""
    plain = run(objective, deeper, rows, USUAL, tmp_path / "plain")
    out = run(objective, deeper, rows, replace(USUAL, **changes), tmp_path / "out")
    assert losses_of(out) == pytest.approx(losses_of(plain), abs=1e-4)
    assert record(out)["tokens"] == record(plain)["tokens"]


def test_a_long_training_has_a_curve_of_at_least_fifty_points(base: str, rows: str, tmp_path: Path) -> None:
    """The last step has a point."""
    entries = record(run(Ar(), base, rows, replace(USUAL, batch_size=1, epochs=7, save_steps=None), tmp_path / "out"))
    assert entries["steps"] == 105
    assert [point["step"] for point in entries["curve"]] == [*range(2, 105, 2), 105]
    assert entries["tokens"]["conversations"] == 105


def test_the_curve_has_the_learning_rate_of_each_step(undisturbed: Path) -> None:
    """From 0 up to the peak in a fifth of the steps, then along a cosine."""
    rates = [point["learning_rate"] for point in record(undisturbed)["curve"]]
    warm = math.ceil(0.2 * STEPS)
    cosine = [0.5 * (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) for step in range(warm, STEPS)]
    assert rates == pytest.approx([1e-2 * x for x in [*(step / warm for step in range(warm)), *cosine]])


def test_a_training_ends_when_its_minutes_are_over(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate follows the time: up, then down to 0. Killed, it resumes with the time that is left."""
    ticks, out, watch = count(), tmp_path / "out", Watch()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: 0.1 * next(ticks)))
    limited = replace(USUAL, epochs=1000, minutes=0.2, save_steps=None)
    with pytest.raises(Killed):
        run(MARS, base, rows, limited, out, progress=Watch(20))
    entries = record(run(MARS, base, rows, limited, out, progress=watch))
    assert watch.started_at is not None
    assert watch.steps[0] > watch.started_at[1] > 0
    assert watch.steps[-1] == entries["steps"]
    assert 12 <= entries["train_s"] < 14
    rates = [point["learning_rate"] for point in entries["curve"]]
    top = rates.index(max(rates))
    assert 0 < top < len(rates) / 2
    assert max(rates) == pytest.approx(1e-2, rel=0.1)
    assert rates == [*sorted(rates[:top]), *sorted(rates[top:], reverse=True)]
    assert rates[-1] < 1e-3


def test_a_training_ends_when_the_held_out_loss_no_longer_falls_and_keeps_its_best_weights(
    base: str, rows: str, tmp_path: Path
) -> None:
    """Killed after the best step, it resumes to the same weights."""
    early, out, again = replace(USUAL, epochs=30, patience=2), tmp_path / "once" / "out", tmp_path / "again" / "out"
    entries = record(run(MARS, base, rows, early, out))
    losses = {point["step"]: point["held_out"] for point in entries["curve"] if "held_out" in point}
    best = min(losses, key=losses.__getitem__)
    assert list(losses) == list(range(2, best + 5, 2))  # two evaluations follow the best
    assert (entries["steps"], entries["evaluation"]["loss"]) == (best + 4, losses[best])
    with pytest.raises(Killed):
        run(MARS, base, rows, early, again, progress=Watch(best + 4))
    assert_same_training(run(MARS, base, rows, early, again), out)


def test_the_rate_of_a_limited_training_may_rise_to_its_end(base: str, rows: str, tmp_path: Path) -> None:
    """A warmup over the whole training leaves no step for the fall."""
    rising = replace(USUAL, epochs=1, minutes=60, warmup=1)
    rates = [point["learning_rate"] for point in record(run(Ar(), base, rows, rising, tmp_path / "out"))["curve"]]
    assert rates == sorted(rates)
    assert max(rates) <= 1e-2


@pytest.mark.parametrize("kill_at", [1, 5, STEPS])
def test_a_killed_and_resumed_training_equals_the_undisturbed_one(
    base: str, rows: str, undisturbed: Path, interrupted: Callable[[int, Path], Path], tmp_path: Path, kill_at: int
) -> None:
    """Before the first save, right after one, and at the last step: curve, tokens and weights are equal to the bit.

    Saved steps are not repeated.
    """
    out, watch = interrupted(kill_at, tmp_path), Watch()
    assert_same_training(run(MARS, base, rows, USUAL, out, progress=watch), undisturbed)
    saved = (kill_at - 1) // 2 * 2
    assert (watch.started_at, watch.steps) == ((STEPS, saved), list(range(saved + 1, STEPS + 1)))


@pytest.mark.parametrize(
    ("where", "what", "times"),
    one_in(
        2,
        [
            (torch, "save", 4),  # of a later checkpoint
            (trainer, "write_record", 2),
            (Path, "rename", 2),
            (shutil, "rmtree", 2),
            (Path, "rename", 4),  # of the finished checkpoint
            (training, "write_checkpoint", 0),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_checkpoint_is_complete_or_absent(
    base: str, rows: str, undisturbed: Path, tmp_path: Path, where: Any, what: str, times: int
) -> None:
    """If writing, moving or removing one is interrupted, the last one is complete, and the same command finishes."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, what, broken_after(getattr(where, what), times))
        with pytest.raises(Killed):
            run(MARS, base, rows, USUAL, out)
    for folder in resume_folder(out).glob("checkpoint-*"):
        if folder == last_checkpoint(out):
            assert_complete(folder)
    if out.exists():  # it is complete; only the resume folder could not be removed
        assert_complete(out)
        return
    assert_same_training(run(MARS, base, rows, USUAL, out), undisturbed)


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (torch, "save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")),
        (checkpoint, "write_record", OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk_is_one_line_and_the_same_command_resumes(
    base: str,
    rows: str,
    undisturbed: Path,
    tmp_path: Path,
    where: Any,
    what: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a resumable checkpoint, whose writer has errors of its own, and in the finished one."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(where, what, broken_by(error))
        with pytest.raises(UserError, match=r"^cannot write [^\n]*out[^\n]*Make room, then repeat the command[^\n]*$"):
            run(MARS, base, rows, USUAL, out)
    assert_same_training(run(MARS, base, rows, USUAL, out), undisturbed)


def test_a_training_resumes_with_fewer_rows(
    base: str, rows: str, undisturbed: Path, interrupted: Callable[[int, Path], Path], tmp_path: Path
) -> None:
    """As the error of a full memory advises: the same curve, and the record has the new setting."""
    out, watch = interrupted(5, tmp_path), Watch()
    run(MARS, base, rows, replace(USUAL, rows=1), out, progress=watch)
    assert watch.started_at == (STEPS, 4)
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=1e-5)
    assert record(out)["settings"]["rows"] == 1


@pytest.mark.parametrize(
    ("changes", "objective", "what"),
    [
        ({"learning_rate": 2e-2}, MARS, "settings.learning_rate was 0.01, not 0.02"),
        ({}, Ar(), 'objective was "mars", not "ar"'),
    ],
    ids=str,
)
def test_an_interrupted_training_is_not_resumed_by_another_request(
    base: str,
    rows: str,
    interrupted: Callable[[int, Path], Path],
    tmp_path: Path,
    changes: dict[str, Any],
    objective: Objective,
    what: str,
) -> None:
    """One line names the difference; every file stays as it was."""
    out = interrupted(5, tmp_path)
    before = {path: path.read_bytes() for path in resume_folder(out).rglob("*") if path.is_file()}
    with pytest.raises(UserError) as refusal:
        run(objective, base, rows, replace(USUAL, **changes), out)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert {path: path.read_bytes() for path in resume_folder(out).rglob("*") if path.is_file()} == before


def test_other_data_and_another_base_are_another_request(
    base: str, rows: str, undisturbed: Path, tmp_path: Path
) -> None:
    """They are compared by content, not by name."""
    out, file, start = tmp_path / "out", tmp_path / "rows.jsonl", tmp_path / "base"
    shutil.copy(rows, file)
    shutil.copytree(base, start)
    with pytest.raises(Killed):
        run(MARS, str(start), str(file), USUAL, out, progress=Watch(2))
    shutil.copy(undisturbed / "model.safetensors", start)
    with pytest.raises(UserError, match="base_sha256 was"):
        run(MARS, str(start), str(file), USUAL, out)
    shutil.copy(Path(base) / "model.safetensors", start)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(UserError, match=r"data\.sha256 was"):
        run(MARS, str(start), str(file), USUAL, out)
