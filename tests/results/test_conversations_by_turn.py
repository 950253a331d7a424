"""Figures by turn and by context: each part is of its own turns, and its intervals are over conversations."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
from made_records import cell_data, generation_line, timing_line
from made_runs import AR, MARS, MadeRun, answer, hidden
from stages import assemble, write_report
from stored import keep_lines, stored_json, stored_lines

from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Item
from mtbench.records import dump
from mtbench.results.comparisons import compare
from mtbench.results.figure_formats import RangeFigures
from mtbench.results.format import ResultCell, Results
from mtbench.results.subtasks import by_part

TURNS = [(6, 6), (6, 5), (6, 3), (7, 6), (6, 2), (6, 6), (2, 1)]  # of the two conversations of each pair
TURN = [turn + 1 for pair in TURNS for turn in range(max(pair))]  # of each block
PAIR = np.repeat(np.arange(len(TURNS)), [max(turns) for turns in TURNS])  # of each block
ROUNDS, PARTS = 3, ["1", "2", "3", "4", "5–8"]
CONTEXTS = ["129–256", "257–512", "513–1,024", "1,025–2,048"]


def conversations() -> tuple[list[list[int]], dict[int, int]]:
    """The blocks of pairs of conversations, and which item each item follows."""
    blocks, follows, count = list[list[int]](), dict[int, int](), 0
    for pair in TURNS:
        last: dict[int, int] = {}
        for turn in range(max(pair)):
            live = [place for place, most in enumerate(pair) if turn < most]
            block = [count + n for n in range(len(live))]
            follows |= {item: last[place] for place, item in zip(live, block, strict=True) if place in last}
            last |= dict(zip(live, block, strict=True))
            blocks.append(block)
            count += len(block)
    return blocks, follows


def made(path: Path, change: Callable[[str, Any], None] = lambda cell, line: None, hide: bool = False) -> RunDirectory:
    """A run of two arms on these conversations with drawn times in three rounds; change: of each timing line."""
    draws, (blocks, follows) = np.random.default_rng(5), conversations()
    texts = ["a" * int(n) for n in draws.integers(4, 20, sum(map(len, blocks)))]
    slow, fast = ([hidden(t) if hide else answer(t, len(t) - less) for t in texts] for less in (0, 2))
    run = RunDirectory(MadeRun({AR: slow, MARS: fast}, blocks=blocks, follows=follows).write(path))
    plan = stored_json(run, "plan.json")
    plan["groups"][0]["rounds"] = [len(blocks)] * ROUNDS
    plan["cells"][1]["baselines"] = ["ar@ar/graph"]
    run.write_json("plan.json", plan)
    for cell, speed in ((AR, 1.0), (MARS, 1.5)):
        lines = stored_lines(run, f"generations/{cell}.jsonl")
        keep_lines(run, f"generations/{cell}.jsonl", [line | {"drafted": int(draws.integers(5, 9))} for line in lines])
        drawn = []
        for line, round_ in ((line, n) for line in stored_lines(run, f"timings/{cell}.jsonl") for n in range(ROUNDS)):
            wall_s = float(draws.lognormal(0, 0.1)) / speed
            prompt = TURN[line["block"]] * int(draws.integers(150, 200)) * line["items"]
            own = {"wall_s": wall_s, "ttft_s": wall_s * draws.uniform(0.1, 0.3), "prompt_tokens": prompt}
            own["cached_tokens"] = prompt // 2
            drawn.append(line | own | {"round": round_ + 1, "identical": None if round_ == 0 else line["items"]})
            change(cell, drawn[-1])
        keep_lines(run, f"timings/{cell}.jsonl", drawn)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = made(tmp_path_factory.mktemp("turns") / "run")
    write_report(run, assemble(run))
    return run


def cells_of(run: RunDirectory) -> dict[str, ResultCell]:
    return {cell.cell: cell for cell in assemble(run).cells}


def naive(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float | None, float | None]:
    """Σx / Σy with the t interval on the log scale, one value a unit; no interval below 6 units."""
    value, units = x.sum() / y.sum(), len(x)
    if units < 6:
        return value, None, None
    log_se = np.sqrt(units / (units - 1) * ((x / x.sum() - y / y.sum()) ** 2).sum())
    reach = np.exp(scipy.stats.t.ppf(0.975, units - 1) * log_se)
    return value, value / reach, value * reach


def assert_equal(found: Any, expected: tuple[float, float | None, float | None]) -> None:
    """No interval is none in both."""
    ours, theirs = (np.array(x, float) for x in ((found.value, found.ci_low, found.ci_high), expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def by_pair(blocks: Sequence[int], values: Sequence[float]) -> np.ndarray[Any, Any]:
    """The sum of the values of some blocks over each pair of conversations that has one of them."""
    return np.array(
        [sum(v for b, v in zip(blocks, values, strict=True) if PAIR[b] == p) for p in {*PAIR[blocks]}], float
    )


def timed(run: RunDirectory, cell: str, blocks: Sequence[int], of: Callable[[Any], float]) -> np.ndarray[Any, Any]:
    """The sum over each pair of a value of the timing lines of some blocks, the median over rounds."""
    lines = stored_lines(run, f"timings/{cell}.jsonl")
    return by_pair(blocks, [np.median([of(line) for line in lines if line["block"] == block]) for block in blocks])


def blocks_of(run: RunDirectory, name: str) -> dict[str, set[int]]:
    """The blocks of each part, by the turn of their first item, or by their mean prompt over both arms."""
    found: dict[str, set[int]] = {}
    lines = [line for cell in (AR, MARS) for line in stored_lines(run, f"timings/{cell}.jsonl")]
    for block, turn in enumerate(TURN):
        of_block = [line for line in lines if line["block"] == block]
        mean = sum(line["prompt_tokens"] for line in of_block) / sum(line["items"] for line in of_block)
        ends = {256: "129–256", 512: "257–512", 1024: "513–1,024", 2048: "1,025–2,048"}
        context = next(name for end, name in ends.items() if mean <= end)
        part = context if name == "contexts" else str(turn) if turn < 5 else "5–8"
        found.setdefault(part, set()).add(block)
    return found


def test_the_figures_of_a_part_are_those_of_its_own_lines(run: RunDirectory) -> None:
    """Each value and interval of every arm, by turn and by context, computed from the files by hand."""
    cells = {cell.cell: cell for cell in run.read("results.json", Results).cells}
    for name, cell in (("turns", AR), ("turns", MARS), ("contexts", MARS)):
        parts: list[RangeFigures] = getattr(cells[cell], name)
        own = blocks_of(run, name)
        assert [part.part for part in parts] == (PARTS if name == "turns" else CONTEXTS)
        for part in parts:
            blocks = sorted(own[part.part])
            of, slow = (partial(timed, run, name_, blocks) for name_ in (cell, AR))
            wall_s, tokens = of(lambda line: line["wall_s"]), of(lambda line: line["tokens"])
            expected = {
                "tokens_per_s": naive(tokens, wall_s),
                "ttft_s": naive(of(lambda line: line["ttft_s"]), of(lambda line: 1)),
                "tpot_s": naive(
                    of(lambda line: (line["wall_s"] - line["ttft_s"]) * line["rows"]),
                    tokens - of(lambda line: line["items"]),
                ),
                "cached_share": naive(of(lambda line: line["cached_tokens"]), of(lambda line: line["prompt_tokens"])),
            }
            for figure, values in expected.items():
                assert_equal(getattr(part, figure), values)
            for speedup in part.speedup:
                assert_equal(speedup, naive(slow(lambda line: line["wall_s"]), wall_s))
            assert len(part.speedup) == (cell == MARS)
            lines = [g for g in stored_lines(run, f"generations/{cell}.jsonl") if g["block"] in blocks]
            assert part.tokens == sum(len(g["token_ids"]) for g in lines)
            sums = partial(by_pair, [g["block"] for g in lines])
            forwards, drafted = sums([g["forwards"] for g in lines]), sums([g["drafted"] for g in lines])
            accepted = sums([sum(g["commits"]) - len(g["commits"]) for g in lines])
            assert part.tokens_per_forward == pytest.approx(part.tokens / forwards.sum())
            if cell == MARS:
                assert_equal(part.acceptance_rate, naive(accepted, drafted))


def test_a_conversation_that_ended_counts_in_its_own_turns_only(run: RunDirectory) -> None:
    """All answers are in one part by turn and in one by context, so that their tokens sum to the cell's."""
    for cell in run.read("results.json", Results).cells:
        assert {part.part: part.items for part in cell.turns} == {"1": 14, "2": 13, "3": 11, "4": 10, "5–8": 20}
        for parts in (cell.turns, cell.contexts):
            assert sum(part.tokens for part in parts) == cell.tokens
            assert sum(part.items for part in parts) == cell.items


def test_a_part_of_few_conversations_has_values_without_intervals(tmp_path: Path) -> None:
    """Six pairs have a fifth turn; here one of them is in no block that counts, so five are left."""

    def drop(cell: str, line: Any) -> None:
        if line["block"] in (4, 5):
            line["dropped"] = "disturbed"

    cell = cells_of(made(tmp_path / "run", drop))[MARS]
    late, first = cell.turns[-1], cell.turns[0]
    for found in (late.tokens_per_s, late.ttft_s, late.tpot_s, late.cached_share, late.speedup[0]):
        assert (found.value or 0) > 0
        assert (found.ci_low, found.ci_high) == (None, None)
    assert late.speedup[0].verdict.reason is not None
    assert late.speedup[0].verdict.reason.text == "5 of 6 blocks of conversations"
    assert None not in (late.tokens_per_forward_ci, first.ttft_s.ci_low, first.speedup[0].ci_low)


def test_what_an_engine_hides_is_null_and_what_it_counts_is_taken(tmp_path: Path) -> None:
    """Nothing kept is a share of 0; nothing reported is no share."""

    def silent(cell: str, line: Any) -> None:
        line.update(ttft_s=None, cached_tokens=None)

    def counted(cell: str, line: Any) -> None:
        line.update(cached_tokens=0, drafts=4, drafted=20, accepted=20 if line["block"] % 2 else 1)

    nothing = {"value": None, "ci_low": None, "ci_high": None}
    for part in cells_of(made(tmp_path / "silent", silent, hide=True))[MARS].turns:
        assert (part.tokens_per_forward, part.acceptance) == (None, None)
        hidden_ones = (part.acceptance_rate, part.ttft_s, part.tpot_s, part.cached_share)
        assert [dump(found) for found in hidden_ones] == [nothing] * 4
    for part in cells_of(made(tmp_path / "counted", counted, hide=True))[MARS].turns:
        assert part.acceptance is not None
        assert part.acceptance_rate.value == pytest.approx(part.acceptance.rate)
        assert (part.acceptance_rate.ci_high or 2) <= 1
        assert dump(part.cached_share) == nothing | {"value": 0.0}


@pytest.mark.parametrize("unit", ["second", "round"])
def test_servers_times_are_over_conversations_unless_arms_decode_apart(unit: Any) -> None:
    """The blocks of one second are one unit of the cell's time; each conversation is one of a turn's."""
    items = [Item(item=f"chat/{n}/0", prompt_ids=[1], stop=[], follows=n - 1 if n % 2 else None) for n in range(16)]
    blocks = [[n] for n in range(16)]

    def arm(name: str, speed: float) -> Any:
        lines = [generation_line(item=item.item, block=n) for n, item in enumerate(items)]
        timings = [timing_line(block=n, wall_s=(1 + n / 100) / speed, prompt_tokens=9, tokens=5) for n in range(16)]
        data = cell_data(lines, timings, arm=name, baselines=["ar"] if name == "mars" else [])
        data.unit_of, data.timed_unit_of = {n: n // 2 * 2 for n in range(16)}, dict.fromkeys(range(16), 0)
        data.unit = unit
        return data

    judged = partial(compare, synchronisation_s=0.0, max_loss=0.02)
    found = by_part({"ar": arm("ar", 1), "mars": arm("mars", 2)}, items, blocks, None, judged)["mars"]
    assert [part.part for part in found["turns"]] == ["1", "2"]
    for part in found["turns"]:
        assert part.speedup[0].value == pytest.approx(2)
        assert (part.speedup[0].ci_low is not None) == (unit == "second")


def test_a_block_has_one_context_for_all_arms(tmp_path: Path) -> None:
    """Prompts with an arm's own answers differ in length; each speedup is on the same blocks."""

    def lengthen(cell: str, line: Any) -> None:
        line["prompt_tokens"] = (400 if cell == AR else 700) * line["items"]

    cells = cells_of(made(tmp_path / "run", lengthen))
    assert [[part.part for part in cell.contexts] for cell in cells.values()] == [["513–1,024"]] * 2


def test_a_page_shows_each_arm_by_turn_and_by_context(run: RunDirectory) -> None:
    """A row for each arm and part under the arm's name, and one figure with the speedups of both panels in words."""
    page = (run.path / "report.md").read_text()
    turns, contexts = (page.split(f"### By {what}")[1].split("###")[0] for what in ("turn", "context"))
    rows = [line.split("|")[1].strip(" *") for line in turns.splitlines() if line.startswith("|")][2:]
    assert [row.partition(".")[0] for row in rows] == ["1", *PARTS, "2", *PARTS]
    assert "| 513–1,024 |" in contexts
    [figure] = [line for line in page.splitlines() if line.startswith("![Speedup by turn and by context")]
    assert " at 5–8" in figure
    assert " at 129–256" in figure
