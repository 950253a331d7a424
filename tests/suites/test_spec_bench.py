"""Spec-Bench: which questions, in which order, from where; and that its kinds stay apart.

Made-up questions of its form; the 480 themselves where MTBENCH_DATA_DIR names a folder with spec_bench/question.jsonl.
"""

import hashlib
import http.server
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole import finish, start

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite
from mtbench.runs.plan import REFILLS, Item, RunRequest
from mtbench.runs.planner import _blocks, make_plan

KINDS = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
SUBJECTS = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with spec_bench/question.jsonl")


def chat(messages: Messages) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


def questions() -> list[dict[str, Any]]:
    """As the file has them: subject by subject, two of each, then kind by kind, sixteen of each."""
    categories = [s for s in SUBJECTS for _ in range(2)] + [k for k in KINDS[1:] for _ in range(16)]
    return [
        {"question_id": 81 + n, "category": category, "turns": [f"{category} {n}?", "And now?"]}
        for n, category in enumerate(categories)
    ]


def write(folder: Path, rows: Sequence[Any]) -> Path:
    file = folder / "spec_bench" / "question.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def suite(folder: Path | None = None, **how: Any) -> Suite:
    made: Suite = SUITES["spec-bench"]("", Source(data_dir=folder, **how))
    return made


def test_the_first_turn_is_asked_and_its_kind_is_the_task(tmp_path: Path) -> None:
    """MT-bench's eight subjects are one kind; nothing is scored; the budget is the benchmark's."""
    made = suite(write(tmp_path, questions()))
    prompts = made.prompts(chat, None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(KINDS, 16)
    assert prompts[0].item == "mt_bench/81/0"
    assert prompts[0].text == "<user>writing 0?</><assistant>"
    assert (made.metric, made.max_new_tokens) == (None, 1024)


def test_a_limit_is_of_each_kind(tmp_path: Path) -> None:
    """So many of every kind, the kinds in turn; within MT-bench no subject is ahead of another by more than one."""
    made = suite(write(tmp_path, questions()))
    for limit in range(1, 17):
        items = [p.item.split("/") for p in made.prompts(chat, limit)]
        subjects = Counter((int(name) - 81) // 2 for kind, name, _ in items if kind == "mt_bench")

        assert [kind for kind, _, _ in items] == KINDS * limit
        assert max(subjects.values()) - min(subjects[s] for s in range(8)) <= 1


def test_offline_without_data_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and nobody is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    with pytest.raises(UserError, match=r"^[^\n]*--data-dir DIR with spec_bench/question\.jsonl[^\n]*--offline$"):
        suite(offline=True)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Made-up questions behind an address on this machine, in place of the authors'; yields what was asked for."""
    asked: list[str] = []
    data = "".join(json.dumps(row) + "\n" for row in questions()).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/question.jsonl" else 404)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(SUITES["spec-bench"], "url", f"http://127.0.0.1:{server.server_port}/question.jsonl")
    monkeypatch.setattr(SUITES["spec-bench"], "sha256", hashlib.sha256(data).hexdigest())
    yield asked
    server.shutdown()
    server.server_close()


def test_questions_are_fetched_once(served: list[str]) -> None:
    """From then on they are there, offline too; what is kept and spoilt is fetched again."""
    first = suite().prompts(chat, None)

    assert len(first) == 96
    assert suite(offline=True).prompts(chat, None) == first
    assert served == ["/question.jsonl"]
    kept = Path(os.environ["XDG_CACHE_HOME"], "mtbench", "data", "spec_bench", "question.jsonl")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert suite().prompts(chat, None) == first
    assert len(served) == 2


def test_another_file_at_the_address_is_not_taken(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched is the benchmark, byte for byte, or nothing."""
    monkeypatch.setattr(SUITES["spec-bench"], "sha256", "0" * 64)
    with pytest.raises(UserError, match="is not the file it was; pass --data-dir"):
        suite()


def test_an_address_that_does_not_answer_says_what_to_pass(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause and the way out."""
    monkeypatch.setattr(SUITES["spec-bench"], "url", SUITES["spec-bench"].url + ".gone")
    with pytest.raises(UserError, match=r"cannot fetch http\S+\.gone \(HTTP Error 404.*\); pass --data-dir DIR with"):
        suite()


# --- Kinds apart --------------------------------------------------------------------------------------------------


def items(tasks: Sequence[str]) -> list[Item]:
    return [Item(item=f"{task}/{n}/0", prompt_ids=[1], stop=[]) for n, task in enumerate(tasks)]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(0, 99),
    st.sampled_from(["static", "refill"]),
)
def test_a_block_holds_one_task(tasks: list[str], size: int, seed: int, batching: str) -> None:
    """Every item once; per task as many and as full blocks as if it were alone; the tasks take turns."""
    blocks = _blocks(items(tasks), size, seed, batching)
    of_block = [{tasks[i] for i in block} for block in blocks]

    assert sorted(i for block in blocks for i in block) == list(range(len(tasks)))
    assert all(len(kinds) == 1 for kinds in of_block)
    for task in set(tasks):
        sizes = [len(block) for block, kinds in zip(blocks, of_block, strict=True) if task in kinds]
        count = tasks.count(task)
        assert len(sizes) == (-(-count // size) if batching == "static" else max(1, count // (REFILLS * size)))
        assert max(sizes) - min(sizes[:-1], default=max(sizes)) <= (batching == "refill")
    for before, after in pairwise(turns(of_block)):
        assert after <= before


def turns(of_block: Sequence[set[str]]) -> list[set[str]]:
    """The tasks of each turn, which ends where one comes again."""
    found: list[set[str]] = []
    for kinds in of_block:
        if not found or found[-1] & kinds:
            found.append(set())
        found[-1] |= kinds
    return found


def test_the_first_blocks_have_all_tasks() -> None:
    """What the smaller batch sizes and the later rounds time is not one kind more than another."""
    tasks = [kind for kind in KINDS for _ in range(80)]
    blocks = _blocks(items(tasks), 8, 0)

    assert len(blocks) == 60
    for count in (6, 18, 24):
        assert Counter(tasks[block[0]] for block in blocks[:count]) == dict.fromkeys(KINDS, count // 6)


@pytest.mark.parametrize(("batching", "sizes"), [("static", [3, 3, 3, 1]), ("refill", [10])])
def test_one_task_alone_is_shuffled_and_cut(batching: str, sizes: list[int]) -> None:
    """As plans of one task have always been: the same items in the same blocks, by the seed."""
    order = list(range(10))
    random.Random(7).shuffle(order)
    blocks = _blocks(items(["arithmetic"] * 10), 3, 7, batching)

    assert [i for block in blocks for i in block] == order
    assert [len(block) for block in blocks] == sizes


def run_on(folder: Path, path: Path, **changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"suite": ["spec-bench"], "family": "tiny", "method": ["ar", "ar:engine=eager"]}
    asked |= {"limit": 1, "rounds": 1, "batch_size": (2,), "max_new_tokens": 4, "data_dir": str(folder)}
    return finish(start(path, RunRequest(**asked | changes)))


def test_it_runs_from_questions_to_results(tmp_path: Path) -> None:
    """On `tiny`, six kinds in six blocks, no accuracy, flagged out of domain."""
    cells = run_on(write(tmp_path / "data", questions()), tmp_path / "run")["cells"]

    assert [c["status"] for c in cells] == ["ok", "ok"]
    for cell in cells:
        assert (cell["items"], cell["blocks"], cell["accuracy"]) == (6, 6, None)
        assert "out of domain" in cell["flags"]
        assert cell["task"]["name"] == "spec-bench"


# --- The 480 themselves -------------------------------------------------------------------------------------------


@real
def test_all_questions_are_there() -> None:
    """480, 80 of each kind, the authors' file byte for byte; ten of each of MT-bench's subjects."""
    made = suite(Path(REAL or ""))
    prompts = made.prompts(chat, None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(KINDS, 80)
    assert len({p.item for p in prompts}) == 480
    assert made.task["sha256"] == SUITES["spec-bench"].sha256
    assert [p.item for p in prompts[:12:6]] == ["mt_bench/81/0", "mt_bench/91/0"]


@real
def test_all_questions_fit_the_embedded_family() -> None:
    """The longest prompt and the whole budget have room in its context; kinds are apart at both batch sizes."""
    plan = make_plan(RunRequest(suite=["spec-bench"], family="tiny", method=["ar"], data_dir=REAL, offline=True))
    tasks = [item.item.split("/")[0] for item in plan.suites[0].items]

    assert [len(group.blocks) for group in plan.groups] == [24, 60]
    assert all(len({tasks[i] for i in block}) == 1 for group in plan.groups for block in group.blocks)


@real
def test_the_real_questions_run(tmp_path: Path) -> None:
    """One of each kind, thousands of prompt tokens among them."""
    cells = run_on(Path(REAL or ""), tmp_path / "run", method=["ar"], batch_size=(1,))["cells"]

    assert [(c["status"], c["items"], c["tokens"]) for c in cells] == [("ok", 6, 24)]
