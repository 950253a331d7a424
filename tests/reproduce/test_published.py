"""The published figures: digit for digit those of the tables, consistent with one another, in plans that can be run."""

import json
from collections.abc import Iterator
from hashlib import sha256

import pytest

from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import FAMILIES
from mtbench.results.publication import AVERAGE, EAGER, Published, names, published

ALL = names()
COMPARED = {  # hashes of the figures
    "dspark-table-1": "ff3eb2bd7f51b0ee",
    "mars-table-2": "7742e76598c6e5b9",
    "mars-table-3": "29b4c3b4333fcdfc",
    "mars-table-4": "2bce82a1584c0b9e",
    "mars-table-5": "e6cb114d802067cb",
    "mars-table-6": "f8654bc996664d43",
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
        assert {q for q in ("speedup", "accuracy_change") if q in row.figures} <= set(row.against)
        for by_benchmark in row.figures.values():
            assert set(by_benchmark) <= {*table.benchmarks, AVERAGE}
    for spec in {spec for family in table.families for spec in table.specs(family)}:
        [arm] = parse_arms([spec], [EAGER])
        assert "|" not in spec
        METHODS[arm.method](**arm.options)
    labels = [(row.row, row.family) for row in table.rows]
    assert len(set(labels)) == len(labels)
