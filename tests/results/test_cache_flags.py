"""A server that keeps prompts is flagged: by the cached tokens that it reports, or by times to the first token."""

from collections.abc import Sequence

import pytest
from made_records import cell_data, timing_line

from mtbench.options.engine_options import PREFIX_CACHE
from mtbench.plan.formats import TimingLine
from mtbench.results.flags import cache_flags
from mtbench.results.samples import CellData

SERVER = {"method": "openai", "engine": None}
TOKENS = 300


def timed(*rounds: Sequence[float], tokens: int = TOKENS) -> list[TimingLine]:
    """Blocks with these times to the first token, round by round."""
    return [
        timing_line(round=number, block=block, ttft_s=ttft_s, prompt_tokens=tokens)
        for number, of_round in enumerate(rounds, start=1)
        for block, ttft_s in enumerate(of_round)
    ]


def asked(timings: list[TimingLine], batch_size: int = 1) -> CellData:
    """A cell of a server that mtbench did not start."""
    return cell_data([], timings, batch_size=batch_size, **SERVER)


def flags(data: CellData, *others: CellData) -> list[str]:
    return cache_flags(data, [data, *others])


READ = [0.56, 0.55, 0.56, 0.56]


@pytest.mark.parametrize(
    ("rounds", "number"),
    [
        ([READ, [0.006] * 4, [0.007] * 4], 2),
        ([[0.1, 0.1, 0.11, 0.1], [0.011] * 4], 2),
        ([READ, READ, [0.06] * 4], 3),  # another program sent them meanwhile
        ([[0.56, 0.56, 0.006, 0.56], [0.006] * 4], 2),  # the warm-up had sent one of them
        ([[0.2, 0.3], [0.02, 0.02]], 2),
    ],
    ids=["92 times", "9 times", "from round 3 on", "but one", "two blocks"],
)
def test_first_tokens_many_times_faster_in_a_later_round_are_flagged(rounds: list[list[float]], number: int) -> None:
    """With both times and what to do; a server reads a prompt no faster because it is sent again."""
    [flag] = flags(asked(timed(*rounds)))
    assert f"in round {number}, and {rounds[0][0]:.2g} s in round 1 at batch size 1: the server seems to keep" in flag
    assert flag.endswith("start it without its prefix cache, or anew for one batch size and `--rounds 1`")


@pytest.mark.parametrize(
    "rounds",
    [
        [[0.13, 0.13, 0.14, 0.12], [0.1] * 4],
        [[0.012, 0.015, 0.01, 0.012], [0.002] * 4],
        [[2.0, 0.1, 0.1, 0.1], [0.1] * 4],  # it loaded or compiled something in the first block
        [[2.0, 0.1, 0.9, 0.1], [0.1, 0.02, 0.1, 0.02]],  # the times of a busy service
        [READ],
        [[0.56], [0.006]],
        [[], READ],
    ],
    ids=["1.3 times", "milliseconds", "one slow block", "busy", "one round", "one block", "no round 1"],
)
def test_an_honest_server_is_not_flagged(rounds: list[list[float]]) -> None:
    """Neither slow starts nor noise are a cache; one block shows nothing."""
    assert flags(asked(timed(*rounds))) == []


def test_long_prompts_are_not_compared_with_short_ones() -> None:
    """Which are read faster without any cache."""
    short = [timing_line(round=2, block=9 + n, ttft_s=0.05, prompt_tokens=TOKENS // 12) for n in range(4)]
    assert flags(asked(timed(READ) + short)) == []
    assert flags(asked(timed(READ, [0.5] * 4) + short)) == []


def test_a_batch_size_whose_prompts_the_server_knows_from_another_is_flagged() -> None:
    """In round 1 already: four prompts are not read faster than one. One is read faster than four."""
    one, four = asked(timed(READ)), asked(timed([0.012] * 3, [0.012] * 3, tokens=4 * TOKENS), batch_size=4)
    [flag] = flags(four, one)
    assert "0.012 s in round 1, and 0.56 s in round 1 at batch size 1" in flag
    assert flags(one, four) == []
    honest = asked(timed([2.2] * 3, tokens=4 * TOKENS), batch_size=4)
    assert flags(honest, one) == flags(one, honest) == []


def test_first_tokens_many_times_faster_than_of_prompts_that_it_cannot_know_are_flagged() -> None:
    """Also if it has known the others since an earlier run. A slow first call is none: it may have loaded something."""
    data = asked(timed([0.006] * 4))
    for first, again, found in ((0.6, 0.56, True), (0.6, 0.006, False), (0.012, 0.012, False)):
        unseen = [(TOKENS, ttft_s) for ttft_s in (first, again)]
        text = "0.006 s in round 1, and 0.56 s with prompts that it could not know"
        assert any(text in flag for flag in cache_flags(data, [data], unseen)) == found
    compiled = asked(timed(READ, [0.006] * 4))  # in round 1: a shape for each length
    assert cache_flags(compiled, [compiled], [(TOKENS, 0.006)] * 2) == []


def test_tokens_that_the_server_reports_as_cached_are_flagged() -> None:
    """Instead of times, with their number; what it does not report of a sample counts as none."""
    told = (None, 0, 299, 299)
    lines = [line.changed(cached_tokens=n) for line, n in zip(timed([1.0] * 2, [0.01] * 2), told, strict=True)]
    [flag] = flags(asked(lines))
    assert flag.startswith("the server had cached 598 tokens of prompts in 2 of 4 samples, by other prompts or sent")
    assert flag.endswith("--rounds 1`")
    assert flags(asked([line.changed(cached_tokens=0, ttft_s=1.0) for line in lines])) == []


def test_only_later_turns_in_a_prefix_cache_may_be_cached() -> None:
    """Block 1 has the second turns of block 0's conversations."""
    later = [timing_line(block=block, prompt_tokens=TOKENS, cached_tokens=block * 200) for block in (0, 1)]
    first = [line.changed(cached_tokens=200) for line in later]
    for lines, options, found in ((later, [PREFIX_CACHE], 0), (first, [PREFIX_CACHE], 1), (later, [], 1)):
        data = cell_data([], lines, engine="vllm", engine_options=options)
        data.unit_of = {0: 0, 1: 0}
        assert len(cache_flags(data, [data])) == found


@pytest.mark.parametrize("engine", ["graph", "eager", "vllm"])
def test_engines_that_mtbench_starts_are_not_judged_by_times(engine: str) -> None:
    """A slow first round of theirs is no cache: they keep no prompts, or report it."""
    data = cell_data([], timed(READ, [0.006] * 4), engine=engine)
    assert cache_flags(data, [data]) == []
