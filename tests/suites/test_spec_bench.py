"""Spec-Bench: its questions, their order and download; and batches that hold one kind of question each.

The questions are made up; evaluation/test_multi_turn.py reads the real ones.
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
from made_up import chat, write_lines

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source, Suite
from mtbench.lineup.planner import _blocks
from mtbench.plan.plan import Item
from mtbench.plan.request import REFILLS

KINDS = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
SUBJECTS = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def questions() -> list[dict[str, Any]]:
    """Return rows in the order of the file: two of each subject, then sixteen of each other kind."""
    categories = [s for s in SUBJECTS for _ in range(2)] + [k for k in KINDS[1:] for _ in range(16)]
    return [
        {"question_id": 81 + n, "category": category, "turns": [f"{category} {n}?", "And now?"]}
        for n, category in enumerate(categories)
    ]


def write(folder: Path, rows: Sequence[Any]) -> Path:
    write_lines(folder / "spec_bench/question.jsonl", rows)
    return folder


def open_suite(folder: Path | None = None, **options: Any) -> Suite:
    suite: Suite = SUITES["spec-bench"]("", Source(data_dir=folder, **options))
    return suite


def test_only_the_first_turn_is_used_and_its_kind_is_the_subtask(tmp_path: Path) -> None:
    """MT-bench's eight subjects are one kind; the suite has no metric and the benchmark's budget."""
    suite = open_suite(write(tmp_path, questions()))
    prompts = suite.prompts(chat, None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(KINDS, 16)
    assert prompts[0].item == "mt_bench/81/0"
    assert prompts[0].text == "<user>writing 0?</><assistant>"
    assert (suite.metric, suite.max_new_tokens) == (None, 1024)


def test_a_limit_applies_to_each_kind(tmp_path: Path) -> None:
    """The kinds are interleaved; the counts of MT-bench's subjects differ by at most one."""
    suite = open_suite(write(tmp_path, questions()))
    for limit in range(1, 17):
        items = [p.item.split("/") for p in suite.prompts(chat, limit)]
        subjects = Counter((int(name) - 81) // 2 for kind, name, _ in items if kind == "mt_bench")

        assert [kind for kind, _, _ in items] == KINDS * limit
        assert max(subjects.values()) - min(subjects[s] for s in range(8)) <= 1


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve made-up questions from this machine instead of the authors' address; yield the requested paths."""
    requested: list[str] = []
    data = "".join(json.dumps(row) + "\n" for row in questions()).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
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
    yield requested
    server.shutdown()
    server.server_close()


def test_questions_are_downloaded_once(served: list[str]) -> None:
    """Later and offline the suite uses the cached file; it downloads a damaged file again."""
    with pytest.raises(UserError, match=r"^[^\n]*--data-dir DIR with spec_bench/question\.jsonl[^\n]*--offline$"):
        open_suite(offline=True)
    assert served == []
    first = open_suite().prompts(chat, None)

    assert len(first) == 96
    assert open_suite(offline=True).prompts(chat, None) == first
    assert served == ["/question.jsonl"]
    cached = Path(os.environ["XDG_CACHE_HOME"], "mtbench", "data", "spec_bench", "question.jsonl")
    cached.write_bytes(cached.read_bytes()[:-9])
    assert open_suite().prompts(chat, None) == first
    assert len(served) == 2


def test_a_changed_file_at_the_address_is_refused(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A download must have the expected SHA-256."""
    monkeypatch.setattr(SUITES["spec-bench"], "sha256", "0" * 64)
    with pytest.raises(UserError, match=r"has changed \(its hash differs\); pass --data-dir"):
        open_suite()


# --- Blocks of one kind -------------------------------------------------------------------------------------------


def items(tasks: Sequence[str]) -> list[Item]:
    return [Item(item=f"{task}/{n}/0", prompt_ids=[1], stop=[]) for n, task in enumerate(tasks)]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(0, 99),
    st.sampled_from(["static", "refill"]),
)
def test_a_block_holds_one_task(tasks: list[str], size: int, seed: int, batching: str) -> None:
    """Each item occurs once; a task has the same number and sizes of blocks as alone; tasks are interleaved."""
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
    """Return the tasks of each round of blocks; a round ends before a task repeats."""
    rounds: list[set[str]] = []
    for kinds in of_block:
        if not rounds or rounds[-1] & kinds:
            rounds.append(set())
        rounds[-1] |= kinds
    return rounds


@pytest.mark.parametrize(("batching", "sizes"), [("static", [3, 3, 3, 1]), ("refill", [10])])
def test_one_task_alone_is_shuffled_and_cut(batching: str, sizes: list[int]) -> None:
    """The seed alone determines the items of each block."""
    order = list(range(10))
    random.Random(7).shuffle(order)
    blocks = _blocks(items(["arithmetic"] * 10), 3, 7, batching)

    assert [i for block in blocks for i in block] == order
    assert [len(block) for block in blocks] == sizes
