"""The output of a training for people: progress while it runs, and the page of its results."""

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trainings import MARS, USUAL, run
from transformers.utils import logging

from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.report.phrases import DEMONSTRATION
from mtbench.report.progress import TrainingProgress
from mtbench.training.document import calibration_error, write_training_page

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]

BINS = [
    {"low": 0.4, "high": 0.5, "n": 100, "confidence": 0.45, "accuracy": 0.4},
    {"low": 0.8, "high": 0.9, "n": 100, "confidence": 0.86, "accuracy": 0.84},
    {"low": 0.95, "high": 1.0, "n": 800, "confidence": 0.99, "accuracy": 0.93},
]


def record(objective: str = "mars", parts: tuple[str, ...] = ("mask", "ar"), **changes: Any) -> dict[str, Any]:
    """A training record with few entries."""
    points = [dict.fromkeys(parts, 4.0 / step) for step in (1, 2, 4)]
    curve = [
        {"step": 7 * n, "loss": sum(point.values()), **point, "learning_rate": 1e-3}
        for n, point in enumerate(points, 1)
    ]
    return {
        "objective": objective,
        "options": {"block_size": 4, "timestep_weight": False},
        "settings": {"batch_size": 32, "held_out": 512, "pack": None, "learning_rate": 1e-3},
        "data": {"data": ["rows.jsonl"], "examples": 7400, "read": 7473, "dropped": 61, "cut": 12, "sha256": "ab" * 32},
        "base": "qwen/base",
        "base_sha256": "cd" * 32,
        "teacher": None,
        "teacher_sha256": None,
        "steps": 21,
        "tokens": {"fed": 2899213, "predicted": 1688012, "conversations": 672},
        "train_s": 4321.0,
        "tokens_per_s": 671.0,
        "curve": curve,
        "evaluation": {
            "conversations": 512,
            "loss": 2.5,
            **dict.fromkeys(parts, 1.2345),
            "ahead": [{"ahead": 1, "n": 200, "accuracy": 0.9}, {"ahead": 5, "n": 100, "accuracy": 0.5}],
            "calibration": BINS,
        },
        "command": "mtbench train mars --data rows.jsonl",
        "versions": {"python": "3.12.1", "torch": "2.13.0", "accelerate": None},
        **changes,
    }


def folder(parent: Path, name: str, entries: Any) -> Path:
    """A folder with the parts of a trained checkpoint that its page reads."""
    (parent / name).mkdir()
    (parent / name / RECORD).write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return parent / name


def text_of(page: Path) -> str:
    """The visible text of the page, of tables and figures, too."""
    markup = re.sub(r"<(style|script)>.*?</\1>|<wbr>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_the_calibration_error_weighs_bins_by_their_predictions() -> None:
    """By hand: 5 points of 100, 2 of 100, 6 of 800."""
    assert calibration_error({"calibration": BINS}) == pytest.approx((100 * 0.05 + 100 * 0.02 + 800 * 0.06) / 1000)


def test_texts_of_a_record_are_escaped(tmp_path: Path) -> None:
    """Names, options, data and command are shown unchanged, in text and figures; the page loads nothing."""
    nasty = "<script>x()</script>&amp;\"'$y$"
    entries = record(base=nasty, command=nasty, options={nasty: nasty}, versions={nasty: nasty}, teacher=nasty)
    entries["data"]["data"] = [nasty]
    folders = [folder(tmp_path, f"<b onload=x>&{n}$\\frac$", entries) for n in range(2)]
    page = write_training_page(folders, tmp_path / "page.html")
    markup = page.read_text()
    assert markup.count("<script") == 1
    assert "<b onload" not in markup
    assert not re.search(r"https?:|url\([^#]|@import|\bsrc=", markup)
    text = text_of(page)
    assert text.count(nasty) >= 2 * 7
    assert text.count("1 <b onload=x>&0$\\frac$") >= 4  # in headings, in the figure's key


def test_the_page_says_that_nothing_was_measured(tmp_path: Path) -> None:
    """A training still running or without held-out conversations, and nothing to predict: the losses alone."""
    unmeasured = record()
    del unmeasured["evaluation"]
    none = folder(tmp_path, "none", unmeasured)
    nothing = {"conversations": 1, "loss": 0, "ahead": [], "calibration": []}
    empty = folder(tmp_path, "empty", record(evaluation=nothing))
    for trained in (none, empty):
        page = write_training_page([trained])
        assert "Accuracy and confidence were not measured: the training has not ended, or no" in text_of(page)
        assert page.read_text().count("<svg") == 1
    together = write_training_page([folder(tmp_path, "measured", record()), none], tmp_path / "all.html")
    assert "2 none: Accuracy and confidence were not measured" in text_of(together)


@pytest.mark.parametrize(
    ("data", "demonstration"),
    [
        (["arithmetic"], True),
        (["arithmetic:sums", "arithmetic"], True),
        (["arithmetic", "rows.jsonl"], False),
        (["owner/arithmetic"], False),
    ],
)
def test_a_training_on_a_synthetic_task_is_titled_a_demonstration(
    tmp_path: Path, data: list[str], demonstration: bool
) -> None:
    """The page and its figures, unless some of the data are real."""
    entries = record()
    entries["data"]["data"] = data
    page = write_training_page([folder(tmp_path, "one", entries)])
    assert (f'<p class="mark">{DEMONSTRATION}.</p>' in page.read_text()) == demonstration
    assert (text_of(page).count(DEMONSTRATION) >= 3) == demonstration


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (None, "holds no mtbench"),
        ("{", "not a training record"),
        ("[]", "not a training record"),
        ({}, "no loss curve"),
        ({"curve": [5]}, "no page can be made"),
        ({"curve": {"a": []}, "settings": 5}, "no page can be made"),
    ],
)
def test_a_folder_without_a_training_is_refused(tmp_path: Path, entries: Any, reason: str) -> None:
    """It is named, and nothing is written."""
    trained = tmp_path / "one" if entries is None else folder(tmp_path, "one", entries)
    with pytest.raises(UserError, match=f"one.*{reason}"):
        write_training_page([trained])
    assert not list(tmp_path.glob("*.html"))


def test_a_training_prints_a_line_per_step_and_has_a_page(
    base: str, rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script can parse the lines; no library prints a progress bar; the page is made from a real record."""
    logging.enable_progress_bar()
    printed = io.StringIO()
    out = run(MARS, base, rows, USUAL, tmp_path / "out", progress=TrainingProgress(Console(file=printed)))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    number = r"\d[\d,.]*"
    pattern = rf"step (\d+)/8 loss {number} mask {number} ar {number} {number} tokens/s \d+:\d\d left"
    assert [re.fullmatch(pattern, line)[1] for line in lines] == [*map(str, range(1, 9))]  # type: ignore[index]
    assert "it/s" not in "".join(capfd.readouterr())
    text = text_of(write_training_page([out]))
    assert "On 1 held-out conversations" in text
    assert "16 conversations read, 0 dropped, 0 cut; 15 to train on, 1 held out" in text


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
