"""The published figures: digit for digit those of the tables, consistent with one another, in plans that can be run."""

import json
from collections.abc import Iterator
from hashlib import sha256

import pytest

from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.experiments.reproduce.agreement import half_unit, number
from mtbench.experiments.reproduce.format import AVERAGE, Published
from mtbench.experiments.reproduce.rerun import EAGER, arm_of, names, published, specs_of
from mtbench.models.families import FAMILIES

ALL = names()
COMPARED = {  # hashes of the figures
    "dspark-table-1": "ff3eb2bd7f51b0ee",
    "mars-table-2": "7742e76598c6e5b9",
    "mars-table-3": "29b4c3b4333fcdfc",
    "mars-table-4": "2bce82a1584c0b9e",
    "mars-table-5": "e6cb114d802067cb",
    "mars-table-6": "63b82bc47b734caf",
    "mars-table-8": "127f14963115a307",
    "mars-table-9": "23fcdfb0a75ba3ab",
}
SIX = ("ifeval", "bbh", "mmlu-pro", "gpqa", "gsm8k", "humaneval")
COLUMNS = (*SIX, AVERAGE)


def figures(table: Published) -> Iterator[tuple[str, str, str, str]]:
    """(row, quantity, benchmark, figure) of all that is published there."""
    for row in table.rows:
        for quantity, by_benchmark in row.figures.items():
            for benchmark, printed in by_benchmark.items():
                yield row.row, quantity, benchmark, printed


@pytest.mark.parametrize("name", ALL)
def test_figures_stay_those_of_the_paper(name: str) -> None:
    """They were compared with the paper digit by digit; a change of one changes the hash."""
    table = published(name)
    text = json.dumps([sorted(figures(table)), [(aside.what, aside.value) for aside in table.also]], ensure_ascii=False)
    assert sha256(text.encode()).hexdigest()[:16] == COMPARED[name]


@pytest.mark.parametrize("name", ALL)
def test_what_a_table_names_is_there(name: str) -> None:
    """Its arms can be entered, its suites opened, its quantities have what they are over."""
    table = published(name)
    assert table.name == name
    assert AVERAGE not in table.benchmarks
    assert {b.suite for b in table.benchmarks.values()} <= set(SUITES)
    for row in table.rows:
        assert row.family in table.families
        assert row.family in FAMILIES
        assert set(row.against) <= set(row.figures)
        assert {q for q in ("speedup", "accuracy_change", "draft_forwards_change") if q in row.figures} <= set(
            row.against
        )
        for by_benchmark in row.figures.values():
            assert set(by_benchmark) <= {*table.benchmarks, AVERAGE}
    for spec in specs_of(table.rows):
        arm = arm_of(spec, EAGER)
        assert "|" not in spec
        METHODS[arm.method](**arm.options)
    labels = [(row.row, row.family) for row in table.rows]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("name", ALL)
def test_averages_are_means(name: str) -> None:
    """Of the six benchmarks, to rounding: half a unit of the mean's, and half of theirs."""
    for row in published(name).rows:
        for by_benchmark in row.figures.values():
            if AVERAGE in by_benchmark and set(SIX) < set(by_benchmark):
                mean = sum(number(by_benchmark[b]) for b in SIX) / len(SIX)
                slack = half_unit(by_benchmark[AVERAGE]) + half_unit(by_benchmark[SIX[0]])
                assert abs(mean - number(by_benchmark[AVERAGE])) <= slack + 1e-9, row.row


def test_times_speedups_and_rates_agree() -> None:
    """Table 5: seconds give the speedups; tokens/s times seconds is as many tokens in all rows of a kind."""
    rows = published("mars-table-5").rows
    by_size = {size: [row for row in rows if row.batch_size == size] for size in (4, 8, 16)}
    for of_size in by_size.values():
        base = number(of_size[0].figures["wall_s"]["gsm8k"])
        for row in of_size:
            wall, speedup = (row.figures[q]["gsm8k"] for q in ("wall_s", "speedup"))
            low, high = (base - 0.05) / (number(wall) + 0.05), (base + 0.05) / (number(wall) - 0.05)
            assert low - 0.005 <= number(speedup) <= high + 0.005, row.row
            tokens = number(row.figures["tokens_per_s"]["gsm8k"]) * number(wall)
            low, high = (39_550, 40_050) if row is of_size[0] else (38_750, 39_250)
            assert low < tokens < high, row.row


def test_speculation_agrees_with_itself() -> None:
    """Table 6: seconds give the speedups, and draft forwards their change."""
    rows = published("mars-table-6").rows
    seconds = [number(row.figures["wall_s"]["gsm8k"]) for row in rows]
    speedups = [number(row.figures["speedup"]["gsm8k"]) for row in rows]
    assert [round(seconds[0] / s, 2) for s in seconds] == speedups
    before, after = (number(rows[i].figures["draft_forwards"]["gsm8k"]) for i in (0, -1))
    assert round(100 * (after / before - 1)) == number(rows[-1].figures["draft_forwards_change"]["gsm8k"])


def test_drafts_agree_with_the_papers_means() -> None:
    """DSpark, table 1: the means over benchmarks give the percentages and means of the paper's text."""
    table = published("dspark-table-1")
    lengths = {
        row.row: [number(printed) for printed in row.figures["acceptance_length"].values()] for row in table.rows
    }
    mean = {row: sum(values) / len(values) for row, values in lengths.items()}
    gains, over_dflash, domains = (aside.value.split(", ") for aside in table.also)
    for size, over_eagle, over_block in zip(("4B", "8B", "14B"), gains, over_dflash, strict=True):
        best = mean[f"Qwen3-{size} DSpark"]
        assert f"{100 * (best / mean[f'Qwen3-{size} EAGLE-3'] - 1):.1f}" == over_eagle
        assert f"{100 * (best / mean[f'Qwen3-{size} DFlash'] - 1):.1f}" == over_block
    small = lengths["Qwen3-4B DSpark"]
    assert [f"{sum(small[i : i + 3]) / 3:.2f}" for i in (0, 3, 6)] == domains


def test_changes_are_from_one_token_per_forward() -> None:
    """Table 4's changes are its accuracies less table 3's, as they are printed."""
    plain = {(row.family, row.arm): row.figures for row in published("mars-table-3").rows}
    for row in published("mars-table-4").rows:
        before = plain[row.family, row.against["accuracy_change"]]["accuracy"]
        for benchmark, printed in row.figures["accuracy_change"].items():
            change = number(row.figures["accuracy"][benchmark]) - number(before[benchmark])
            assert abs(change - number(printed)) < 0.01, (row.row, benchmark)


def test_tables_repeat_one_another() -> None:
    """What two tables say of an arm, a benchmark and a quantity is the same."""
    said: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for name in ("mars-table-2", "mars-table-3", "mars-table-4", "mars-table-8", "mars-table-9"):
        for row in published(name).rows:
            for quantity, by_benchmark in row.figures.items():
                for benchmark, printed in by_benchmark.items():
                    said.setdefault((row.family, row.arm, quantity, benchmark), {})[name] = printed
    assert not {place: told for place, told in said.items() if len(set(told.values())) > 1}
    assert sum(len(told) > 1 for told in said.values()) > 60
