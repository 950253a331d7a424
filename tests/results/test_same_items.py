"""Accuracies at several batch sizes: a smaller size has fewer items, so it is compared on the same items."""

from collections.abc import Mapping

import pytest
from made_records import cell_data, generation_line

from mtbench.results.comparisons import same_items
from mtbench.results.figure_formats import SameItems
from mtbench.results.samples import CellData


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
