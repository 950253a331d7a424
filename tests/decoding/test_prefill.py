"""How prompts are cut into chunks that are fed at once."""

from hypothesis import given
from hypothesis import strategies as st

from mtbench.decoding.prefill import PREFILL_POSITIONS, PREFILL_WIDTH, chunks


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.sampled_from([1, 3, 32]))
def test_every_token_is_fed_once_and_short_prompts_are_hardly_padded(blocks: list[int], block: int) -> None:
    """Rows of different lengths end together. A row that has not begun is not fed."""
    lengths = [block * count for count in blocks]
    length = max(lengths)
    starts = [length - own for own in lengths]
    ranges = list(chunks(starts, length, block))
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges)][: len(ranges)]
    assert not ranges or ranges[-1][1] == length
    assert all((end - begin) % block == 0 for begin, end in ranges)
    for start in starts:
        padding = sum(max(0, min(start, end) - begin) for begin, end in ranges if start < end)
        assert padding < PREFILL_WIDTH
    for begin, end in ranges:
        rows = sum(start < end for start in starts)
        assert rows * (end - begin) <= max(PREFILL_POSITIONS, rows * PREFILL_WIDTH) + rows * block
