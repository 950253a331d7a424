"""The progress that a training prints."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from trainings import MARS, USUAL, run
from transformers.utils import logging

from mtbench.report.progress import TrainingProgress

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


def test_a_training_prints_a_line_per_step(
    base: str, rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script can parse the lines; no library prints a progress bar."""
    logging.enable_progress_bar()
    printed = io.StringIO()
    run(MARS, base, rows, USUAL, tmp_path / "out", progress=TrainingProgress(Console(file=printed)))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    number = r"\d[\d,.]*"
    pattern = rf"step (\d+)/8 loss {number} mask {number} ar {number} {number} tokens/s \d+:\d\d left"
    assert [re.fullmatch(pattern, line)[1] for line in lines] == [*map(str, range(1, 9))]  # type: ignore[index]
    assert "it/s" not in "".join(capfd.readouterr())


def test_the_time_left_is_estimated_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed training does not count the steps of earlier processes."""
    clock = iter([50.0, 60.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    printed = io.StringIO()
    progress = TrainingProgress(Console(file=printed))
    progress.begin(400, 100)
    progress.step(120, {"loss": 1.234, "mask": 0.9, "ar": 0.0334}, 6100.4)
    progress.end()
    assert printed.getvalue().splitlines() == [
        "continuing from step 100/400",
        "step 120/400 loss 1.234 mask 0.9000 ar 0.03340 6,100 tokens/s 2:20 left",
    ]
