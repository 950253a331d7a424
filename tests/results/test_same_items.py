"""Accuracies at several batch sizes: a smaller size has fewer items, so it is compared on the same items."""

from collections.abc import Mapping

import pytest
from made_records import cell_data, generation_line, made_results, result_cell
from rich.console import Console

from mtbench.report.phrases import fewer_items
from mtbench.report.terminal import results_tables
from mtbench.results.comparisons import same_items
from mtbench.results.figure_formats import Accuracy, SameItems
from mtbench.results.format import ResultCell
from mtbench.results.samples import CellData
from mtbench.statistics import wilson


def cell(batch_size: int, scores: Mapping[int, float], **given: str) -> CellData:
    lines = [generation_line(item=f"a/{n}/0") for n in scores]
    data = cell_data(lines, [], batch_size=batch_size, **given)
    data.scores = {f"a/{n}/0": score for n, score in scores.items()}
    return data


def test_the_larger_batch_size_is_read_on_the_items_of_the_smaller() -> None:
    """2 of 3 here; there 3 of 3 of the same items, and 3 of 6 of all."""
    small = cell(1, {0: 1.0, 1: 0.0, 2: 1.0})
    all_items = {n: float(n < 3) for n in range(6)}
    large, middle = cell(8, all_items), cell(4, all_items | {0: 0.0})
    expected = SameItems(batch_size=8, batching="static", items=6, n=3, here=2 / 3, there=1.0)
    assert same_items(small, [small, middle, large]) == expected
    assert same_items(large, [small, middle, large]) is None


def test_refilled_batches_are_compared_with_their_like() -> None:
    """Where the larger size has both ways of batching."""
    small = cell(2, {0: 1.0}, batching="refill")
    others = [cell(8, {0: 0.0, 1: 0.0}, batching=batching) for batching in ("refill", "static")]
    for cells in ([*others, small], [small, *reversed(others)]):
        found = same_items(small, cells)
        assert found is not None
        assert found.batching == "refill"


@pytest.mark.parametrize("scores", [{}, {0: 1.0}, {1: 1.0, 2: 1.0}], ids=["none", "the same", "others"])
def test_without_more_items_there_is_nothing_to_say(scores: Mapping[int, float]) -> None:
    """Nor without scores, nor without a common item. A smaller batch size does not count."""
    small = cell(2, {0: 1.0})
    assert same_items(small, [small, cell(8, scores), cell(1, {0: 1.0, 1: 1.0})]) is None


def scored(arm: str, here: float, there: float | None) -> ResultCell:
    same = None
    if there is not None:
        same = SameItems(batch_size=8, batching="static", items=400, n=24, here=here, there=there)
    accuracy = Accuracy(metric="exact_match", **wilson(round(24 * here), 24)._asdict())
    return result_cell(arm=arm, accuracy=accuracy, accuracy_same_items=same)


BEGINNING = "accuracy is over 24 of 400 items; on the same items, batch size 8 has"


@pytest.mark.parametrize(
    ("accuracies", "ending"),
    [
        ([(0.75, 0.75), (0.5, 0.5)], "the same accuracies"),
        ([(0.75, 0.81)], "81.0% in arm0 (here 75.0%)"),
        ([(0.75, 0.81), (0.5, 0.5)], "81.0% in arm0 (here 75.0%)"),
        ([(0.5, 0.5), (0.75, 0.81), (0.5, 0.5)], "81.0% in arm1 (here 75.0%)"),
        ([(0.75, 0.81), (0.5, 0.4)], "81.0% in arm0 (here 75.0%), 40.0% in arm1 (here 50.0%)"),
    ],
)
def test_the_sentence_names_only_what_differs(accuracies: list[tuple[float, float]], ending: str) -> None:
    cells = [scored(f"arm{n}", here, there) for n, (here, there) in enumerate(accuracies)]
    assert fewer_items(cells) == [f"{BEGINNING} {ending}"]


def test_all_items_need_no_sentence() -> None:
    assert fewer_items([scored("arm", 0.75, None), result_cell()]) == []


def test_the_terminal_says_it() -> None:
    """Below the table of the batch size with fewer items."""
    cells = [scored("arm", 0.75, 0.75)]
    results = made_results(cells)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(*results_tables(results, 200))
    assert f"{BEGINNING} the same accuracies" in " ".join(shown.get().split())
