"""The published figures: digit for digit those of the tables, consistent with one another, in plans that can be run."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import FAMILIES
from mtbench.reproduce.agreement import half_unit, number
from mtbench.reproduce.published import AVERAGE, EAGER, Published, arm_of, names, not_released, published, specs_of

ALL = names()
SIX = ("ifeval", "bbh", "mmlu-pro", "gpqa", "gsm8k", "humaneval")
COLUMNS = (*SIX, AVERAGE)
NOTES = Path(os.environ["MTBENCH_DATA_DIR"]).parent / "mars.md" if "MTBENCH_DATA_DIR" in os.environ else None
noted = pytest.mark.skipif(
    NOTES is None or not NOTES.is_file(), reason="no mars.md beside MTBENCH_DATA_DIR to read the tables from"
)


def figures(table: Published) -> Iterator[tuple[str, str, str, str]]:
    """(row, quantity, benchmark, figure) of all that is published there."""
    for row in table.rows:
        for quantity, by_benchmark in row.figures.items():
            for benchmark, printed in by_benchmark.items():
                yield row.row, quantity, benchmark, printed


def section(head: str, until: str) -> str:
    assert NOTES is not None
    text = NOTES.read_text()
    return text[text.index(head) : text.index(until, text.index(head))]


def cells(text: str) -> list[list[str]]:
    """The rows of the Markdown tables in a text, emphasis left out."""
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in row[1:].rstrip("|").replace("*", "").split("|")] for row in rows]


def accuracies(table: str, head: str, until: str) -> set[tuple[str, str, str, str]]:
    """A table of accuracies alone."""
    return {
        (row[0], "accuracy", benchmark, printed)
        for row in cells(section(head, until))
        for benchmark, printed in zip(COLUMNS, row[1:], strict=True)
    }


def pairs() -> Iterator[tuple[str, str, str, str]]:
    """Table 4: accuracy and its change on one line, tokens per forward on the next."""
    lines = cells(section("### 5.3", "### 5.4"))
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        for benchmark, both, per_forward in zip(COLUMNS, first[1:], second[1:], strict=True):
            accuracy, change = re.fullmatch(r"(\S+) \((\S+)\)", both).groups()  # type: ignore[union-attr]
            yield first[0], "accuracy", benchmark, accuracy
            yield first[0], "accuracy_change", benchmark, change
            yield first[0], "tokens_per_forward", benchmark, per_forward


def times() -> Iterator[tuple[str, str, str, str]]:
    """Table 5: three batch sizes, each tokens/s, seconds and speedup."""
    for row in cells(section("### 4.1", "- Speedup ="))[1:]:
        name = "AR, KV cache" if row[0].startswith("AR") else row[0] if "no" in row[0] else f"MARS cache, C={row[1]}"
        for size, three in zip((4, 8, 16), row[2:], strict=True):
            for quantity, printed in zip(("tokens_per_s", "wall_s", "speedup"), three.split(" / "), strict=True):
                yield f"7B {name}, batch size {size}", quantity, "gsm8k", printed


def speculation() -> Iterator[tuple[str, str, str, str]]:
    """Table 6, and the draft forwards of the text below it, of its first and its last row."""
    text = section("### 5.5", "### 5.6")
    quantities = ("accuracy_change", "tokens_per_s", "wall_s", "speedup", "tokens_per_forward")
    rows = cells(text)[1:]
    for row in rows:
        for quantity, printed in zip(quantities, row[2:], strict=True):
            yield f"7B draft {row[0]}, target {row[1]}", quantity, "gsm8k", printed
    first, last = (f"7B draft {row[0]}, target {row[1]}" for row in (rows[0], rows[-1]))
    found = re.search(r"Draft forwards (\S+) -> (\S+) \((-\d+)%\)", text)
    assert found is not None
    yield first, "draft_forwards", "gsm8k", found[1]
    yield last, "draft_forwards", "gsm8k", found[2]
    yield last, "draft_forwards_change", "gsm8k", found[3]


def thresholds() -> Iterator[tuple[str, str, str, str]]:
    """Table 8: two benchmarks, nine models, seven thresholds, accuracy/tokens per forward; and AR below it."""
    text = section("### 5.4", "### 5.5")
    models = [f"0.5B {kind}B={b}" for kind in ("", "w/o SFT ") for b in (4, 8, 16)] + [f"7B B={b}" for b in (4, 8, 16)]
    for benchmark, part in zip(("gsm8k", "humaneval"), text.split("HumanEval pass@1"), strict=True):
        for row in cells(part)[1:]:
            for model, both in zip(models, row[1:], strict=True):
                accuracy, per_forward = both.split("/")
                tau = row[0] if row[0] == "1.0" else f"0{row[0]}"
                yield f"{model} τ={tau}", "accuracy", benchmark, accuracy
                yield f"{model} τ={tau}", "tokens_per_forward", benchmark, per_forward
    found = re.search(r"AR SFT: GSM8K (\S+) / (\S+); HumanEval (\S+) / ([\d.]+)\.\)", text)
    assert found is not None
    for place, (benchmark, size) in enumerate(itertools.product(("gsm8k", "humaneval"), ("0.5B", "7B")), start=1):
        yield f"{size} AR SFT", "accuracy", benchmark, found[place]


def jacobi() -> Iterator[tuple[str, str, str, str]]:
    """Table 9, a sentence."""
    found = re.search(
        r"model: ([\d., ]+) \| ([\d.]+), ([\d.]+) tok/fwd \(.*: ([\d.]+), ([\d.]+)\)", section("### 5.6", "### 5.7")
    )
    assert found is not None
    own, other = "0.5B Jacobi on AR SFT", "0.5B MARS B=4, τ=0.95"
    for benchmark, printed in zip(SIX, found[1].split(", "), strict=True):
        yield own, "accuracy", benchmark, printed
    yield own, "accuracy", AVERAGE, found[2]
    yield own, "tokens_per_forward", AVERAGE, found[3]
    yield other, "accuracy", AVERAGE, found[4]
    yield other, "tokens_per_forward", AVERAGE, found[5]


@noted
@pytest.mark.parametrize("name", ALL)
def test_figures_are_the_papers_digit_for_digit(name: str) -> None:
    """As our notes of the paper have them: none missing, none more, none rounded anew."""
    read = {
        "mars-table-2": lambda: accuracies(name, "### 5.1", "### 5.2"),
        "mars-table-3": lambda: accuracies(name, "### 5.2", "(7B B=16"),
        "mars-table-4": pairs,
        "mars-table-5": times,
        "mars-table-6": speculation,
        "mars-table-8": thresholds,
        "mars-table-9": jacobi,
    }[name]
    found, noted = list(figures(published(name))), list(read())
    assert set(map(relabelled, found)) == set(map(relabelled, noted))
    assert len(found) == len(noted) == len(set(found))


def relabelled(figure: tuple[str, ...]) -> tuple[str, ...]:
    """Table 3 says `with SFT`, and what it is with is all other tables' plain case."""
    return (figure[0].replace("with SFT ", ""), *figure[1:])


@noted
@pytest.mark.parametrize("name", ALL)
def test_figures_beside_the_table_are_noted(name: str) -> None:
    """Each is in our notes as it is written."""
    assert NOTES is not None
    text = NOTES.read_text()
    assert all(one["value"] in text for one in published(name).also)


@pytest.mark.parametrize("name", ALL)
def test_a_published_table_is_as_the_schema_says(name: str) -> None:
    """One schema for all, and no key that it does not know."""
    schema = json.loads((files("mtbench") / "schemas" / "published.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    stored: dict[str, Any] = json.loads((files("mtbench.reproduce") / "published" / f"{name}.json").read_text())
    Draft202012Validator(schema).validate(stored)
    assert stored["name"] == name


@pytest.mark.parametrize("name", ALL)
def test_what_a_table_names_is_there(name: str) -> None:
    """Its arms can be entered, its suites opened, its quantities have what they are over."""
    table = published(name)
    assert {b["suite"] for b in table.benchmarks.values()} <= set(SUITES)
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
def test_every_role_can_be_had_but_those_that_are_told(name: str) -> None:
    """The released checkpoints cover the tables, except the baseline of ten epochs."""
    table = published(name)
    assert not_released(table) == (["ar_long"] if name == "mars-table-2" else [])
    for family, given in table.families.items():
        used = {
            role
            for spec in specs_of([r for r in table.rows if r.family == family])
            for role in arm_of(spec, EAGER).roles
        }
        assert set(given) <= used, "a checkpoint that nothing uses"
        assert not set(given) & set(FAMILIES[family].roles), "the family has it"


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
