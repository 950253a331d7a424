"""Which samples count, in which units, and what a void arm does to the others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_records import cell_data, doubted, generation_line, timing_line

from mtbench.plan.formats import SessionRecord, TimingLine
from mtbench.plan.plan import Group, Item
from mtbench.results import acceptance
from mtbench.results import flags as flags_of_cells
from mtbench.results.comparisons import accuracies, compare
from mtbench.results.figure_formats import Verdict
from mtbench.results.samples import CellData, _timed_units, _units
from mtbench.results.subtasks import summarize


def timed(walls: Mapping[int, Sequence[float]], **given: Any) -> list[TimingLine]:
    """A clean line for every block and round. walls: block -> seconds by round."""
    return [
        timing_line(block=block, round=number, wall_s=wall_s, tokens=10, **given)
        for block, of_block in walls.items()
        for number, wall_s in enumerate(of_block, start=1)
    ]


def test_every_timed_block_has_the_same_rounds_and_the_median_of_them() -> None:
    """Blocks that the plan does not repeat are not timed, if enough others are."""
    data = cell_data([], timed({block: [1, 9, 2] for block in range(6)} | {6: [50], 7: [50]}))
    data.repeated_blocks = 6
    assert data.by_block("wall_s").tolist() == [2] * 6
    assert len(data.samples) == 18


def test_with_too_few_repeated_blocks_all_blocks_count_with_round_one() -> None:
    """So that a task with few repeated blocks still has an interval."""
    data = cell_data([], timed({0: [1, 5], 1: [2, 5]} | {block: [3] for block in range(2, 7)}))
    data.repeated_blocks = 2
    assert data.by_block("wall_s").tolist() == [1, 2, 3, 3, 3, 3, 3]


def item(number: int, follows: int | None = None) -> Item:
    return Item(item=f"chat/{number}/0", prompt_ids=[1], stop=[], follows=follows)


def test_the_turns_of_a_conversation_are_one_unit() -> None:
    """Times and tokens of later turns depend on those of the first."""
    items = [item(0), item(1), item(2, follows=0), item(3, follows=1), item(4, follows=2), item(5, follows=3), item(6)]
    blocks = [[0, 1], [2, 3], [4, 5], [6]]
    group = Group(suite="chat", batch_size=2, blocks=blocks, rounds=[4], cells=["c"], batching="static")
    units = _units(group, items)
    assert units == {0: 0, 1: 0, 2: 0, 3: 3}
    data = cell_data([], timed({0: [1], 1: [2], 2: [3], 3: [10]}))
    data.unit_of = data.timed_unit_of = units
    assert data.by_block("wall_s").tolist() == [6, 10]


def test_short_blocks_of_servers_are_timed_as_parts_of_a_second() -> None:
    """By the faster arm of each block, in the order of the run, turns of a conversation together; the rest joins."""
    walls = {"a": [0.3, 0.5, 0.9, 2.0, 0.4, 0.4], "b": [0.8, 0.4, 0.8, 1.9, 0.4, 0.4]}
    lines = [line for of_arm in walls.values() for line in timed({k: [wall_s] for k, wall_s in enumerate(of_arm)})]
    assert _timed_units({block: block for block in range(6)}, lines) == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3}
    assert _timed_units({0: 0, 1: 1, 2: 1, 3: 3, 4: 4, 5: 4}, lines) == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3}
    data = cell_data([], timed({k: [wall_s] for k, wall_s in enumerate(walls["a"])}))
    data.timed_unit_of, data.unit = {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3}, "second"
    assert data.per_unit("wall_s").tolist() == pytest.approx([1.7, 2.8])


def test_tokens_per_forward_has_an_interval_over_blocks() -> None:
    """Items of a block wait for each other, so they are not independent: six items in one block have no interval."""

    def cell(blocks: list[int]) -> CellData:
        lines = [
            generation_line(item=f"a/{i}/0", block=block, token_ids=[1] * (4 + i), forwards=3)
            for i, block in enumerate(blocks)
        ]
        return cell_data(lines, [])

    assert summarize(cell([0] * 6), None).tokens_per_forward_ci is None
    spread = summarize(cell([0, 1, 2, 3, 4, 5]), None)
    assert spread.tokens_per_forward == 39 / 18
    assert spread.tokens_per_forward_ci is not None


def test_an_acceptance_length_counts_the_forwards_that_commit() -> None:
    """Per unit of blocks; a row that waits verifies nothing. An engine that hides its commits has none."""
    commits = [[3, 0, 1], [2], [0, 8]]
    lines = [
        generation_line(item=f"a/{i}/0", block=i // 2, token_ids=[1] * sum(steps), forwards=len(steps), commits=steps)
        for i, steps in enumerate(commits)
    ]
    data = cell_data(lines, [])

    assert data.tokens_and_steps() == ([6, 8], [3, 1])
    assert acceptance.length(commits) == 14 / 4
    assert cell_data([*lines, generation_line(item="a/9/0")], []).tokens_and_steps() is None


@pytest.mark.parametrize("void", ["ar@ar/graph", "mars@ar/graph"])
def test_a_void_arm_or_baseline_has_no_verdict_and_no_part_in_the_adjustment(void: str) -> None:
    """The other arms have the words that they have alone."""
    arms = {"ar@ar/graph": 2.0, "mars@ar/graph": 1.0, "medusa@ar/graph": 1.0}
    group = {
        arm: cell_data(
            [],
            timed({b: [wall_s * (1 + b / 1e4)] for b in range(8)}),
            arm=arm,
            baselines=["ar@ar/graph"][: arm[0] != "a"],
        )
        for arm, wall_s in arms.items()
    }
    found = compare(group, 0.0, 0.02, {void})
    reason = "the baseline is void" if void.startswith("ar") else "the arm is void"
    assert found["mars@ar/graph"].speedup[0].verdict == doubted(reason, "void")
    assert found["mars@ar/graph"].speedup[0].value == pytest.approx(2)
    other = found["medusa@ar/graph"].speedup[0].verdict
    assert other == (doubted(reason, "void") if void.startswith("ar") else Verdict(word="faster"))


@pytest.mark.parametrize("short", ["ar", "mars"])
def test_an_arm_or_a_baseline_with_too_short_windows_has_no_verdict(short: str) -> None:
    """Either is reason enough."""
    group = {
        arm: cell_data(
            [], timed({b: [1e-6 if arm == short else 10.0 + b] for b in range(8)}), arm=arm, baselines=before
        )
        for arm, before in (("ar", []), ("mars", ["ar"]))
    }
    [compared] = compare(group, 0.0, 0.02)["mars"].speedup
    assert compared.verdict == doubted("8e-06 s timed, 1 s needed", "too short")


@pytest.mark.parametrize(("claims", "word"), [("lossless", "not worse"), ("lossy", "inconclusive")])
def test_the_same_tokens_leave_nothing_to_test(claims: str, word: str) -> None:
    """An arm that promises its baseline's tokens, and has them, keeps its accuracy; another may differ elsewhere."""
    lines = [generation_line(item=f"a/{i}/0", block=i) for i in range(2)]
    group = {
        arm: cell_data(lines, [], arm=arm, claims=claims, baselines=[] if arm == "ar" else ["ar"])
        for arm in ("ar", "mars")
    }
    for data in group.values():
        data.scores = {"a/0/0": 1.0, "a/1/0": 0.0}
    [compared] = compare(group, 0.0, 0.02)["mars"].accuracy_vs
    same = doubted("same tokens on all 2 items", "same tokens")
    assert compared.verdict == same.changed(word=word)


def test_a_process_that_shared_the_processor_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it computes all the time; lines of older runs do not tell."""
    monkeypatch.setattr(flags_of_cells, "PROCESSOR_SHARE", 0.95)
    sessions = [SessionRecord(device="cpu")]

    def flags(cpu_s: float | None) -> list[str]:
        return flags_of_cells._processor_flags(cell_data([], timed({0: [1.0]}, cpu_s=cpu_s)), sessions)

    assert flags(0.8) == ["shared processor: the arm waited for it in 20% of its time; end other programs"]
    assert flags(0.99) == flags(2.0) == flags(None) == []
    sessions = [SessionRecord(device="cpu", threads=2, load_of_others=0.5, waiting="OMP_WAIT_POLICY=PASSIVE")]
    assert flags(0.8) == ["threads waited passively: other programs used 50 % of the cores when the run began"]


@pytest.mark.parametrize(("right", "needed"), [(0.0, False), (1.0, True)])
def test_arms_that_are_never_right_have_no_number_of_items(right: float, needed: bool) -> None:
    """More items would not tell 0 % from 0 %. Two arms that are always right differ by chance."""
    both = [replace(cell_data([], [], arm=arm), scores=dict.fromkeys("abc", right)) for arm in ("ar@ar", "mars@mars")]
    verdict = accuracies(both[1:], both[0], 2.0, [None], 1)["mars@mars"].verdict
    assert verdict.word == "inconclusive"
    assert (verdict.needed is not None, verdict.reason is None) == (needed, needed)
