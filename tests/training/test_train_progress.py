"""The progress that a training prints."""

import io

import pytest
from rich.console import Console

from mtbench.report.progress import TrainingProgress

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


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
