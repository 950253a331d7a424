"""GPQA with made-up questions in its columns: the authors' archive, the order of the choices, reading answers."""

import base64
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from made_up import chat, gpqa, right, write_csv

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source, Suite

# dataset/gpqa_diamond.csv with the question "What?", encrypted with the authors' password as `zip -e` does it.
ENCRYPTED = base64.b64decode(
    "UEsDBBQAAQAIAAAAIQBCWni+QgAAAF8AAAAYAAAAZGF0YXNldC9ncHFhX2RpYW1vbmQuY3N2mBxO2snj5MYZIl5REMJn68serlzLXlXnsLCgihBl"
    "ox0JqeOEafyq8OMRhnmWwMTLlI0AROL6yItV4PnpOVYP15ZmUEsBAhQAFAABAAgAAAAhAEJaeL5CAAAAXwAAABgAAAAAAAAAAAAAAAAAAAAAAGRh"
    "dGFzZXQvZ3BxYV9kaWFtb25kLmNzdlBLBQYAAAAAAQABAEYAAAB4AAAAAAA="
)
ROWS = gpqa()


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def as_csv(tmp_path: Path, rows: list[dict[str, Any]]) -> bytes:
    return write_csv(tmp_path / "plain.csv", rows).read_bytes()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a data folder with an archive like the authors', but not encrypted, and without the plain text."""
    plain = as_csv(tmp_path, ROWS)
    (tmp_path / "plain.csv").unlink()
    files = {f"dataset/gpqa_{subset}.csv": plain for subset in ("diamond", "main", "extended", "experts")}
    write_archive(tmp_path / "data/gpqa/dataset.zip", {"dataset/license.txt": b"CC BY 4.0", **files})
    return tmp_path / "data"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    write_csv(tmp_path / "data/gpqa/gpqa_diamond.csv", ROWS)
    return tmp_path / "data"


def opened(folder: Path, spec: str = "gpqa") -> Suite:
    name, _, variant = spec.partition(":")
    suite: Suite = SUITES[name](variant, Source(data_dir=folder, offline=True))
    return suite


# --- The archive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        ("gpqa", "gpqa_diamond_cot_zeroshot"),
        ("gpqa:diamond", "gpqa_diamond_cot_zeroshot"),
        ("gpqa:main", "gpqa_main_cot_zeroshot"),
        ("gpqa:extended", "gpqa_extended_cot_zeroshot"),
        ("gpqa-paper", "gpqa_main_cot_zeroshot"),
    ],
)
def test_the_authors_archive_is_read(spec: str, task: str, packed: Path) -> None:
    """It holds each subset; reference answers score 1, others 0; the suite is private."""
    suite = opened(packed, spec)
    prompts = suite.prompts(chat, None)

    assert suite.private
    assert suite.task["name"] == task
    assert [p.item for p in prompts] == [f"{task}/{n}/0" for n in range(len(ROWS))]
    answers = right("gpqa", prompts) | {prompt.item: "None of them" for prompt in prompts[1::2]}
    assert list(suite.score(answers).values()) == [1.0, 0.0] * (len(ROWS) // 2)


def test_the_authors_password_opens_their_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is refused in one line."""
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa/dataset.zip").write_bytes(ENCRYPTED)

    assert "What?" in opened(tmp_path).prompts(chat, None)[0].text
    monkeypatch.setattr("mtbench.suites.gpqa.PASSWORD", b"another-one")
    with pytest.raises(UserError, match=r"^[^\n]*dataset\.zip[^\n]*assword[^\n]*$"):
        opened(tmp_path)


def test_an_unpacked_file_has_priority_over_the_archive(packed: Path) -> None:
    """If both exist, the suite reads the plain file."""
    write_csv(packed / "gpqa/gpqa_diamond.csv", ROWS[:2])

    assert len(opened(packed).prompts(chat, None)) == 2


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_the_questions_are_never_written(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite opens no file for writing, and afterwards no file holds a question."""
    code = f"""
import sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(args) if event == "open" else None)
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
suite = SUITES["gpqa"]("", Source(data_dir=Path({str(packed)!r}), offline=True))
prompts = suite.prompts(lambda messages: messages[-1]["content"], None)
suite.score({{prompts[0].item: "(A)"}})
written = [a[0] for a in opened if isinstance(a[0], str) and isinstance(a[1], str) and set(a[1]) & set("wax+")]
print([name for name in written if not name.endswith(".pyc") and "/dev/" not in name and ".pyc." not in name])
"""
    home = tmp_path / "home"
    home.mkdir()
    places = {name: str(home) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **places})

    assert process.stdout == "[]\n", process.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"times ten" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (lambda path, plain: path.write_bytes(b"PK, but no archive"), "not a zip file"),
        (lambda path, plain: write_archive(path, {"dataset/gpqa_other.csv": plain}), "has no gpqa_diamond.csv in it"),
        (lambda path, plain: write_archive(path, {"gpqa_diamond.csv": b"Frage,Antwort\n1,2\n"}), "Incorrect Answer 1"),
    ],
    ids=["no archive", "another archive", "other columns"],
)
def test_an_unusable_archive_has_its_reason(archive: Any, reason: str, tmp_path: Path) -> None:
    """The error has the file or its folder and the cause in one line."""
    plain, path = as_csv(tmp_path, ROWS), tmp_path / "data/gpqa/dataset.zip"
    path.parent.mkdir(parents=True)
    archive(path, plain)
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "data")

    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "data") in message
    assert reason in message


# --- The order of the choices -------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_the_order_is_that_of_lm_eval_alone(unpacked: Path, tmp_path: Path) -> None:
    """The prompts equal those of `simple_evaluate` with its defaults, in a process that imports lm-eval anew."""
    # "or so" makes them texts: lm-eval's reader of CSV files would read numbers.
    rows = [{**row, "Correct Answer": f"{row['Correct Answer']} or so"} for row in ROWS]
    for n in (1, 2, 3):
        rows = [{**row, f"Incorrect Answer {n}": f"{row[f'Incorrect Answer {n}']} or so"} for row in rows]
    write_csv(unpacked / "gpqa/gpqa_diamond.csv", rows)
    code = f"""
import json, sys
import datasets.config, huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
datasets.config.HF_DATASETS_CACHE = {str(tmp_path / "cache")!r}
for name in list(sys.modules):
    if name.partition(".")[0] == "lm_eval":
        del sys.modules[name]
import lm_eval, lm_eval.evaluator
from lm_eval.api.model import LM
lm_eval.evaluator.add_env_info = lambda results: None
class Spy(LM):
    tokenizer_name = "spy"
    def generate_until(self, requests):
        print("PROMPTS", json.dumps([r.args[0] for r in requests]))
        return ["" for _ in requests]
    def apply_chat_template(self, messages, add_generation_prompt=True):
        return "".join(f"<{{turn['role']}}>{{turn['content']}}</>" for turn in messages) + "<assistant>"
    loglikelihood = loglikelihood_rolling = generate_until
files = {{"train": {str(unpacked / "gpqa/gpqa_diamond.csv")!r}}}
data = {{"dataset_path": "csv", "dataset_name": None, "dataset_kwargs": {{"data_files": files}}}}
from pathlib import Path
index = lm_eval.tasks.TaskManager(
    include_defaults=False, include_path=Path(lm_eval.__file__).parent / "tasks/gpqa/cot_zeroshot"
)
lm_eval.simple_evaluate(
    model=Spy(), tasks=[{{"group": "own", "task": [{{"task": "gpqa_diamond_cot_zeroshot", **data}}]}}],
    apply_chat_template=True, bootstrap_iters=0, task_manager=index,
)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (prompts,) = re.findall(r"^PROMPTS (.*)$", process.stdout, re.MULTILINE) or [process.stderr]

    assert [p.text for p in opened(unpacked).prompts(chat, None)] == json.loads(prompts)


def test_the_order_is_the_same_when_planning_and_when_scoring(packed: Path) -> None:
    """It does not depend on the caller's random state, the limit or the instance; letters differ by question."""
    random.seed(7)
    first = opened(packed)
    planned = first.prompts(chat, 5)
    random.seed(8)
    answers = right("gpqa", planned)
    second = opened(packed)

    assert second.score(answers) == first.score(answers) == dict.fromkeys(answers, 1.0)
    assert second.prompts(chat, None)[:5] == planned
    assert len(set(answers.values())) > 1
