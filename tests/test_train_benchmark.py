"""The script that trains a MARS checkpoint on a GPU, run on a CPU on the embedded model: killed, and called again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import forking

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train_mars.py"
ARMS = ["ar@ar", "ar@mars", "mars@mars", "mars:tau=0.95@mars", "mars:tau=0.9@mars", "mars:tau=0.8@mars"]

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forks")]


class Dry(NamedTuple):
    """A dry run that was killed while it trained, and its second call."""

    out: Path
    answered_at: int  # nanoseconds: when the answers were written
    code: int
    text: str


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--out", str(out), *options]


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    out = tmp_path_factory.mktemp("dry") / "out"
    with forking():
        process = subprocess.Popen(command(out, "--dry-run"), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not list(out.glob("mars.training/checkpoint-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        answered_at = (out / "answers.jsonl").stat().st_mtime_ns
        done = subprocess.run(command(out, "--dry-run"), capture_output=True, text=True)
    return Dry(out, answered_at, done.returncode, done.stdout + done.stderr)


def test_every_threshold_has_a_row_at_every_batch_size(dry: Dry) -> None:
    """With an accuracy, tokens per forward and, but for the baselines, speedups; the same in both files."""
    assert dry.code == 0, dry.text
    found: Any = json.loads((dry.out / "train_mars.json").read_text())
    names = [(cell["batch_size"], cell["arm"].removesuffix("/graph")) for cell in found["cells"]]
    assert names == [(size, arm) for size in (16, 8, 1) for arm in ARMS]
    for cell in found["cells"]:
        assert cell["status"] == "ok"
        assert cell["accuracy"]["n"] == cell["items"] > 0
        assert cell["tokens_per_forward"] >= 1
    table = [line.split(" | ") for line in (dry.out / "train_mars.md").read_text().splitlines()[2:]]
    assert [(int(row[0].strip("| ")), row[1].removesuffix("/graph")) for row in table] == names
    baselines = {"ar@ar/graph", "ar@mars/graph"}
    assert {row[4] for row in table if row[1] in baselines} == {"–"}
    assert {row[4] for row in table if row[1] not in baselines} != {"–"}  # a busy machine may cost some of them
    assert (dry.out / "train_mars.md").read_text() in dry.text
    assert found["training"]["tokens_per_s"] > 0


def test_a_killed_script_goes_on_and_repeats_nothing(dry: Dry) -> None:
    """The answers are kept, and the training goes on from its last checkpoint."""
    assert "answers   done before" in dry.text
    assert (dry.out / "answers.jsonl").stat().st_mtime_ns == dry.answered_at
    assert "continuing from step " in (dry.out / "training.txt").read_text()


def test_prompts_of_the_test_are_not_trained_on(tmp_path: Path) -> None:
    """Nor is one trained on twice. Without time, what is left is named."""
    files = {"a": ["Why?", "How?", "Why?"], "b": ["Who?", "How?"], "t": ["Who?"]}
    for name, texts in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    a, b, test = (str(tmp_path / f"{name}.jsonl") for name in files)
    options = ["--prompts", a, "--prompts", b, "--test", test, "--dry-run", "--minutes", "0.001"]
    done = subprocess.run(command(tmp_path / "out", *options), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "answers" in done.stdout
    assert "its time is over; the same command resumes it" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == ["How?", "Why?"]
    again = subprocess.run(command(tmp_path / "out", "--prompts", a), capture_output=True, text=True)
    assert again.returncode == 2
    assert "give both --prompts and --test" in again.stderr
