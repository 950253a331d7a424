"""Stage exact: every difference between two builds is found, and head is never held to more than base repeats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_records import generation_line, timing_line

from mtbench.experiments.gate.exact import ExactCell, Read, compare, read
from mtbench.plan.directory import RunDirectory
from mtbench.records import dump

ITEMS = ("arithmetic/0/0", "arithmetic/1/0", "arithmetic/2/0")


def cell(items: dict[str, dict[str, Any]] | None = None, **given: Any) -> Read:
    """What a run stored of a cell: three answers in two blocks. `items`: changed fields by item."""
    same = {"token_ids": [5, 6, 7], "forwards": 2, "commits": [2, 1], "positions_fed": 8, "draft_forwards": 0}
    same |= {"surplus": 1, "finish_reason": "end"}
    answers = {
        item: generation_line(item=item, block=number // 2, **same | (items or {}).get(item, {}))
        for number, item in enumerate(ITEMS)
    }
    blocks = {block: timing_line(block=block, batch_forwards=4, kv_bytes=1000) for block in (0, 1)}
    return Read(answers, blocks, None, 10_000_000)._replace(**given)


def head_of(head: Read, again: Read | None = None, *, allow_changed: bool = False) -> ExactCell:
    return compare("cell", cell(), again or cell(), head, allow_changed=allow_changed)


def found(outcome: ExactCell) -> list[tuple[str, str]]:
    return [(finding.kind, finding.level) for finding in outcome.findings]


def test_other_tokens_fail_and_name_the_first_item() -> None:
    outcome = head_of(cell({ITEMS[1]: {"token_ids": [5, 6, 8]}}))
    assert found(outcome) == [("changed", "fail")]
    assert "tokens in 1 of 3 items, first in arithmetic/1/0" in outcome.findings[0].text
    assert outcome.changed


def test_the_first_item_is_the_first_of_the_plan(tmp_path: Path) -> None:
    """Not the one that was decoded first, nor the first name."""
    order = ["arithmetic/10/0", "arithmetic/9/0", "arithmetic/8/0"]
    runs = [RunDirectory.create(tmp_path / side) for side in ("base", "head", "short")]
    for token, run in enumerate(runs):
        lines = [dump(generation_line(item=item, token_ids=[token])) for item in sorted(order, reverse=token == 1)]
        run.append("generations/cell.jsonl", lines[: 1 if run is runs[2] else 3])
    base, head, short = (read(run, "cell", order) for run in runs)

    def text(head: Read) -> str:
        return compare("cell", base, base, head, allow_changed=False, items=order).findings[0].text

    assert text(head) == "head has other tokens in 3 of 3 items, first in arithmetic/10/0"
    assert text(short) == "head has no answer to 2 items, first to arithmetic/9/0"


SHORTER = {"token_ids": [5, 6], "forwards": 1, "commits": [2]}  # other tokens take other forwards
AGAIN = {"forwards": 3, "commits": [1, 1, 1]}
CASES: list[tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], bool, list[tuple[str, str]]]] = [
    # by item, what head and base's second run have changed; whether other tokens are allowed; what is found
    ({1: SHORTER}, {}, True, [("changed", "note")]),
    ({0: {"finish_reason": "length"}}, {}, False, [("changed", "fail")]),
    ({0: {"forwards": 3}, 1: {"forwards": 1}}, {}, False, [("more work", "fail")]),  # equal totals hide nothing
    ({1: AGAIN | {"positions_fed": 99}}, {0: AGAIN}, False, [("unstable", "note")]),
    ({1: {"token_ids": [5, 6, 8]}}, {0: AGAIN}, False, [("unstable", "note"), ("changed", "fail")]),
]


@pytest.mark.parametrize(("head", "again", "allowed", "expected"), CASES)
def test_what_differs_in_answers(head: Any, again: Any, allowed: bool, expected: list[tuple[str, str]]) -> None:
    changed, second = ({ITEMS[n]: fields for n, fields in one.items()} for one in (head, again))
    assert found(head_of(cell(changed), again=cell(second), allow_changed=allowed)) == expected


@pytest.mark.parametrize(
    ("field", "more", "less"), [("forwards", 3, 1), ("positions_fed", 9, 7), ("draft_forwards", 1, None)]
)
def test_the_same_tokens_from_other_work(field: str, more: int, less: int | None) -> None:
    """More of one counter fails; less is worth a note."""
    assert found(head_of(cell({ITEMS[2]: {field: more}}))) == [("more work", "fail")]
    if less is not None:
        assert found(head_of(cell({ITEMS[2]: {field: less}}))) == [("less work", "note")]


def test_more_forward_passes_of_a_batch_fail() -> None:
    """Rows that wait for each other: each answer takes as many forwards, the batch takes more."""
    for forwards in ((5, 5), (5, 3), (5, 2)):
        slow = {block: timing_line(block=block, batch_forwards=n, kv_bytes=1000) for block, n in enumerate(forwards)}
        assert found(head_of(cell(blocks=slow))) == [("more work", "fail")]
    fast = {block: timing_line(block=block, batch_forwards=3, kv_bytes=1000) for block in (0, 1)}
    assert found(head_of(cell(blocks=fast))) == [("less work", "note")]


def test_a_cell_whose_tokens_base_does_not_repeat_leaves_the_stage() -> None:
    """Head's tokens differ in another item, and with them its work: chance, as in base. Memory still counts."""
    again = cell({ITEMS[0]: {"token_ids": [5, 6, 8]}})
    head = cell({ITEMS[1]: {"token_ids": [5, 6, 8], "forwards": 3, "positions_fed": 99}}, memory_bytes=10_200_000)
    outcome = head_of(head, again=again)
    assert found(outcome) == [("unstable", "note"), ("memory", "fail")]
    assert "base disagrees with itself in: tokens; head is not compared in tokens and work" in outcome.findings[0].text
    assert not outcome.changed


def test_memory_beyond_one_percent() -> None:
    """Peak memory and the bytes of keys and values, each beyond 1 %; base's own scatter widens what is allowed."""
    assert found(head_of(cell(memory_bytes=10_099_000))) == []
    assert found(head_of(cell(memory_bytes=10_200_000))) == [("memory", "fail")]
    assert found(head_of(cell(memory_bytes=9_800_000))) == [("memory", "note")]
    assert found(head_of(cell(memory_bytes=10_150_000), again=cell(memory_bytes=10_080_000))) == []
    assert found(head_of(cell(memory_bytes=12_000_000), again=cell(memory_bytes=10_300_000))) == [("unstable", "note")]
    larger = {0: timing_line(block=0, batch_forwards=4, kv_bytes=1020), 1: timing_line(block=1, batch_forwards=4)}
    assert found(head_of(cell(blocks=larger))) == [("memory", "fail")]
    assert found(head_of(cell(memory_bytes=None))) == []


@pytest.mark.parametrize(
    ("base", "head", "level"), [(None, "boom", "fail"), ("boom", None, "note"), ("boom", "boom", "inconclusive")]
)
def test_a_cell_that_fails(base: str | None, head: str | None, level: str) -> None:
    """In head only it fails; in both nothing is shown; in base only it is a note."""
    outcome = compare("cell", cell(error=base), cell(error=base), cell(error=head), allow_changed=False)
    assert found(outcome) == [("failed", level)]
    assert not outcome.decoded


def test_missing_answers_are_no_pass() -> None:
    """Of head they fail; builds that decode nothing have not the same tokens."""
    none = cell(answers={})
    assert found(head_of(none)) == [("failed", "fail")]
    assert found(compare("cell", none, none, none, allow_changed=False, items=ITEMS)) == [("failed", "inconclusive")]


def test_hidden_counts_are_equal() -> None:
    """An external engine hides its work: null equals null."""
    hidden: Callable[[], Read] = lambda: cell({item: {"forwards": None, "commits": None} for item in ITEMS})  # noqa: E731
    assert compare("cell", hidden(), hidden(), hidden(), allow_changed=False).findings == []
