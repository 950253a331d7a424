"""What people see of a training: progress while it runs, and the page of what it came to."""

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging

from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.report.progress import TrainingProgress
from mtbench.report.terminal import DEMONSTRATION
from mtbench.training.evaluation import EDGES
from mtbench.training.init_model import initialise
from mtbench.training.objectives import Mars
from mtbench.training.page import THRESHOLDS, calibration_error, passing, write_training_page
from mtbench.training.train import train
from mtbench.training.trainer import Settings

BINS = [
    {"low": 0.4, "high": 0.5, "n": 100, "confidence": 0.45, "accuracy": 0.4},
    {"low": 0.8, "high": 0.9, "n": 100, "confidence": 0.86, "accuracy": 0.84},
    {"low": 0.95, "high": 1.0, "n": 800, "confidence": 0.99, "accuracy": 0.93},
]


def record(objective: str = "mars", parts: tuple[str, ...] = ("mask", "ar"), **changes: Any) -> dict[str, Any]:
    """What `mtbench train` writes, in the small."""
    points = [dict.fromkeys(parts, 4.0 / step) for step in (1, 2, 4)]
    curve = [
        {"step": 7 * n, "loss": sum(point.values()), **point, "learning_rate": 1e-3}
        for n, point in enumerate(points, 1)
    ]
    return {
        "objective": objective,
        "options": {"block_size": 4, "random_offset": False},
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


def folder(parent: Path, name: str, told: Any) -> Path:
    """A trained checkpoint, as far as its page is concerned."""
    (parent / name).mkdir()
    (parent / name / RECORD).write_text(told if isinstance(told, str) else json.dumps(told))
    return parent / name


def text_of(page: Path) -> str:
    """What is read, tables and figures alike."""
    markup = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    """Objective, base, data, tokens, time, losses, accuracy with Wilson intervals, command, versions; three figures."""
    page = write_training_page([folder(tmp_path, "mine", record())])
    assert page == tmp_path / "mine.training.html"
    text = text_of(page)
    for said in (
        "Training of mine",
        "mars (block_size=4, random_offset=false)",
        "qwen/base (sha256 cdcdcdcdcdcd…)",
        "rows.jsonl: 7,473 conversations read, 61 dropped, 12 cut; 6,888 to train on, 512 kept apart",
        "672 conversations, 2,899,213 tokens fed, 1,688,012 predicted",
        "21 steps in 4,321.0 s (1:12:01), 671 tokens/s",
        "pack=auto",
        "mask 1.0000 1.2345",
        "On 512 conversations kept apart, 90.0% of next tokens are right, and 50.0% of those 5 ahead.",
        "Are predictions beyond the next token with p ≥ 0.95 right 95% of the time? No: 93.0% [91.0, 94.6] of 800.",
        "90.0 [85.1, 93.4] of 200",
        "50.0 [40.4, 59.6] of 100",
        "0.95 800 80.0% 93.0 [91.0, 94.6] ▼ no mean p 99.0%",
        "lie 5.5 points apart",
        "mtbench train mars --data rows.jsonl",
        "python 3.12.1, torch 2.13.0 ",
    ):
        assert said in text
    assert page.read_text().count("<svg") == 3
    assert not re.search(r"\b(None|nan|True|False)\b", text)


def test_a_threshold_keeps_its_word_only_beyond_doubt() -> None:
    """Its predictions are those of its bin and all above; `yes` and `no` need the whole interval on one side."""
    found = {one.threshold: one for one in passing({"calibration": BINS})}
    assert [one.right.n for one in found.values()] == [900, 900, 900, 900, 800, 800]
    assert found[0.8].right.value == pytest.approx((84 + 744) / 900)
    assert found[0.8].confidence == pytest.approx((0.86 * 100 + 0.99 * 800) / 900)
    assert found[0.8].share == 0.9
    assert [one.verdict for one in found.values()] == ["yes", "yes", "yes", "yes", "yes", "no"]
    few = [{"low": 0.9, "high": 0.95, "n": 20, "confidence": 0.92, "accuracy": 0.9}]
    assert [one.verdict for one in passing({"calibration": few})[-2:]] == ["cannot tell", "none pass"]
    assert set(THRESHOLDS) <= set(EDGES)


def test_the_calibration_error_weighs_bins_by_their_predictions() -> None:
    """By hand: 5 points of 100, 2 of 100, 6 of 800."""
    assert calibration_error({"calibration": BINS}) == pytest.approx((100 * 0.05 + 100 * 0.02 + 800 * 0.06) / 1000)


def test_nothing_a_record_says_is_taken_for_markup(tmp_path: Path) -> None:
    """Names, options, data, command: shown as they are, in the text and in figures; nothing is loaded from anywhere."""
    nasty = "<script>x()</script>&amp;\"'$y$"
    told = record(base=nasty, command=nasty, options={nasty: nasty}, versions={nasty: nasty}, teacher=nasty)
    told["data"]["data"] = [nasty]
    folders = [folder(tmp_path, f"<b onload=x>&{n}$\\frac$", told) for n in range(2)]
    page = write_training_page(folders, tmp_path / "page.html")
    markup = page.read_text()
    assert "<script" not in markup
    assert "<b onload" not in markup
    assert not re.search(r"https?:|url\([^#]|@import|\bsrc=", markup)
    text = text_of(page)
    assert text.count(nasty) >= 2 * 7
    assert text.count("1 <b onload=x>&0$\\frac$") >= 4  # in the list, in the figures' keys


def test_what_was_not_measured_is_said_and_why(tmp_path: Path) -> None:
    """Nothing kept apart, a training still running, nothing to predict: the losses alone, and a sentence."""
    unmeasured = record()
    del unmeasured["evaluation"]
    running = folder(tmp_path, "running", unmeasured)
    none = folder(tmp_path, "none", unmeasured | {"settings": {"held_out": 0, "batch_size": 1}})
    empty = folder(
        tmp_path, "empty", record(evaluation={"conversations": 1, "loss": 0, "ahead": [], "calibration": []})
    )
    for one, why in ((running, "has not ended"), (none, "--held-out 0"), (empty, "held nothing to predict")):
        page = write_training_page([one])
        assert re.search(rf"Accuracy and confidence were not measured: [^.]*{why}", text_of(page))
        assert page.read_text().count("<svg") == 1
    together = write_training_page([folder(tmp_path, "measured", record()), none, running], tmp_path / "all.html")
    assert "2 Accuracy and confidence were not measured" in text_of(together)
    assert together.read_text().count("<svg") == 2 + 1 + 1


def test_trainings_stand_side_by_side(tmp_path: Path) -> None:
    """A figure for each part they share, one for what one has alone, one of accuracy, one of confidence for each."""
    heads = ("head_1", "head_2", "head_3", "head_4")
    trainings = [record(), record("ar", ("ar",)), record("medusa", heads), record()]
    folders = [folder(tmp_path, f"training{n}", told) for n, told in enumerate(trainings, 1)]
    page = write_training_page(folders, tmp_path / "page.html")
    text, markup = text_of(page), page.read_text()
    for title in (
        "Loss: mask, over steps. 1:",
        "Loss: ar, over steps. 1:",
        "Loss: head_1 to head_4, over steps. head_1:",
    ):
        assert title in text
    assert markup.count("<svg") == 3 + 1 + 4
    ids = re.findall(r'\bid="([^"]+)"', markup)
    assert len(ids) == len(set(ids))
    assert write_training_page(folders, tmp_path / "again.html").read_text() == markup


def test_steps_of_different_sizes_are_compared_by_conversations(tmp_path: Path) -> None:
    """A step of 64 conversations is not a step of 32."""
    other = record(settings={"batch_size": 64, "held_out": 512})
    folders = [folder(tmp_path, "a", record()), folder(tmp_path, "b", other)]
    text = text_of(write_training_page(folders))
    assert "1: 4 to 1 at conversation 672; 2: 4 to 1 at conversation 1,344" in text


@pytest.mark.parametrize(
    ("data", "demonstration"),
    [
        (["arithmetic"], True),
        (["arithmetic:sums", "arithmetic"], True),
        (["arithmetic", "rows.jsonl"], False),
        (["owner/arithmetic"], False),
    ],
)
def test_what_learns_a_synthetic_task_alone_is_titled_a_demonstration(
    tmp_path: Path, data: list[str], demonstration: bool
) -> None:
    """The page and its figures; with real data among it the title would be false."""
    told = record()
    told["data"]["data"] = data
    page = write_training_page([folder(tmp_path, "one", told)])
    assert (f"<h1>{DEMONSTRATION}</h1>" in page.read_text()) == demonstration
    assert (text_of(page).count(DEMONSTRATION) >= 5) == demonstration
    assert "Training of one" in text_of(page)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (None, "holds no mtbench"),
        ("{", "not a training record"),
        ("[]", "not a training record"),
        ({}, "no loss curve"),
    ],
)
def test_a_folder_without_a_training_is_refused(tmp_path: Path, told: Any, reason: str) -> None:
    """It is named, and nothing is written."""
    one = tmp_path / "one" if told is None else folder(tmp_path, "one", told)
    with pytest.raises(UserError, match=f"one.*{reason}"):
        write_training_page([one])
    assert not list(tmp_path.glob("*.html"))


def test_a_training_is_told_line_by_line_and_has_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the real thing: a line a step that a script can read, no bar of a library beside it; the page opens."""
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n + 1}."}] for n in range(20)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 300}
    base = initialise(rows, tmp_path / "base", seed=0, data={}, **shape)
    capfd.readouterr()
    logging.enable_progress_bar()
    said = io.StringIO()
    settings = Settings(epochs=1, batch_size=6, max_length=64)
    out = train(
        Mars(), str(base), [str(data)], None, settings, tmp_path / "out", progress=TrainingProgress(Console(file=said))
    )
    lines = [one for one in said.getvalue().splitlines() if one.startswith("step ")]
    number = r"\d[\d,.]*"
    line = rf"step (\d+)/3 loss {number} mask {number} ar {number} {number} tokens/s \d+:\d\d left"
    assert [re.fullmatch(line, one)[1] for one in lines] == ["1", "2", "3"]  # type: ignore[index]
    assert "it/s" not in "".join(capfd.readouterr())
    text = text_of(write_training_page([out]))
    assert "On 2 conversations kept apart" in text
    assert "20 conversations read, 0 dropped, 0 cut; 18 to train on, 2 kept apart" in text


def test_time_left_is_at_the_pace_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes on at step 100 of 400 has not done those 100 in no time."""
    clock = iter([50.0, 60.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    said = io.StringIO()
    progress = TrainingProgress(Console(file=said))
    progress.begin(400, 100)
    progress.step(120, {"loss": 1.234, "mask": 0.9, "ar": 0.0334}, 6100.4)
    progress.end()
    assert said.getvalue().splitlines() == [
        "step 100/400 was reached before; going on",
        "step 120/400 loss 1.234 mask 0.9000 ar 0.03340 6,100 tokens/s 2:20 left",
    ]


def test_a_terminal_shows_one_line_that_goes_when_it_ends() -> None:
    """Live: where a training is, what it loses, how long it takes; no lines are left behind."""
    said = io.StringIO()
    progress = TrainingProgress(Console(file=said, force_terminal=True, width=90, legacy_windows=False))
    progress.begin(375, 0)
    progress.step(20, {"loss": 1.234, "mask": 0.9, "ar": 0.3}, 6100)
    progress.bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.getvalue())
    progress.end()
    assert re.search(r"step +20/375 .*loss 1.234 mask 0.9000 ar 0.3000 6,100 tokens/s \d+:\d\d left", shown)
    assert "\n" not in shown.strip()
