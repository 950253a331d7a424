"""Acceptance: some commits, and every figure of them computed by hand."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import cell_data, generation_line, result_cell, timing_line

from mtbench import records, statistics
from mtbench.models.thinking import Thinking
from mtbench.plan.formats import GenerationLine, TimingLine
from mtbench.records import dump
from mtbench.report import figures
from mtbench.report.phrases import falling_acceptance
from mtbench.results import acceptance
from mtbench.results.figure_formats import AcceptanceFigures
from mtbench.results.samples import CellData

# Three answers of 11, 4 and 1 tokens; the second waited once. 9 forwards, of which 8 committed: 4 3 1 3, 2 1 1, 1.
COMMITS = [[4, 3, 1, 3], [2, 0, 1, 1], [1]]
OFFERED = 8 * 3  # three guesses in every forward that committed
SURPLUS = [2, 0, 1]  # tokens that the last forwards accepted after the end
TOTALS = "the engine's totals, over all its clients"


def test_our_own_figures() -> None:
    """Length and rate leave out the forward that committed nothing; the histogram has it."""
    assert acceptance.length(COMMITS) == 2
    assert acceptance.rate(COMMITS, OFFERED) == pytest.approx(8 / 24)
    assert acceptance.per_position(COMMITS) == [4 / 8, 3 / 8, 1 / 8]
    assert acceptance.histogram(COMMITS) == {"0": 1, "1": 4, "2": 1, "3": 2, "4": 1}


def test_where_nothing_is_offered_there_is_no_rate() -> None:
    """One token per forward has a length, but no figure that counts drafts. Unknown offers have no rate."""
    plain = [[1, 1], [1]]
    assert acceptance.rate(plain, 0) is None
    assert (acceptance.length(plain), acceptance.per_position(plain)) == (1, [])
    found = acceptance.of_cell(cell_data(answers(*plain, drafted=0), []))
    assert found is not None
    assert found.vllm is None
    assert acceptance.rate(COMMITS, None) is None


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=5))
def test_no_commits_break_a_figure(commits: list[list[int]]) -> None:
    """A number or None, also for empty answers and rows that only waited. Positions add up to the length."""
    steps = [step for answer in commits for step in answer if step]
    if steps:
        assert 1 + sum(acceptance.per_position(commits)) == pytest.approx(acceptance.length(commits))
        assert acceptance.per_position(commits) == sorted(acceptance.per_position(commits), reverse=True)
    else:
        assert (acceptance.length(commits), acceptance.per_position(commits)) == (None, [])


def answers(*commits: list[int] | None, **given: Any) -> list[GenerationLine]:
    """A line per answer, all in block 0 unless `given` says otherwise."""
    lines = []
    for number, of_answer in enumerate(commits):
        counts: dict[str, Any] = {"commits": of_answer}
        if of_answer is not None:
            counts |= {"forwards": len(of_answer), "token_ids": [1] * sum(of_answer)}
        lines.append(generation_line(item=f"a/{number}/0", **counts | given))
    return lines


def test_a_cell_has_the_figures_of_its_lines() -> None:
    """Offered tokens of all answers. vLLM counts what the last forwards accepted after the end, too."""
    lines = [
        line.changed(drafted=drafted, surplus=surplus)
        for line, drafted, surplus in zip(answers(*COMMITS), (OFFERED - 3, 0, 3), SURPLUS, strict=True)
    ]
    assert acceptance.of_cell(cell_data(lines, [])) == AcceptanceFigures(
        length=2, rate=8 / 24, per_position=[0.5, 0.375, 0.125], offered=24, vllm=1 + (8 + 3) / 8
    )


def test_without_the_number_of_offered_tokens_there_is_no_rate() -> None:
    """Neither a rate nor a guess at one."""
    found = acceptance.of_cell(cell_data(answers([2, 1]), []))
    assert found is not None
    assert (found.length, found.rate, found.offered) == (1.5, None, None)


def test_the_acceptance_that_an_engine_reports_is_used() -> None:
    """Its totals of round 1."""
    timings = [
        timing_line(round=1, block=0, accepted=30, drafted=80, drafts=20),
        timing_line(round=1, block=1, accepted=6, drafted=16, drafts=4),
        timing_line(round=2, block=0, accepted=99, drafted=99, drafts=9),
    ]
    found = acceptance.of_cell(cell_data(answers(None), timings))
    assert found is not None
    assert (found.length, found.rate, found.offered) == (1 + 36 / 24, 36 / 96, 96)
    assert found.per_position is None
    assert found.reported_by == TOTALS
    assert found.vllm == found.length


def test_the_share_of_each_position_follows_from_a_histogram() -> None:
    """Entry n counts the drafts of which exactly n tokens were accepted. One block without one is enough for null."""
    told = [
        timing_line(round=1, block=0, accepted=4, drafted=9, drafts=3, histogram=[1, 0, 2], reported_by="a server"),
        timing_line(round=1, block=1, accepted=1, drafted=3, drafts=1, histogram=[0, 1], reported_by="a server"),
    ]
    found = acceptance.reported(told)
    assert found is not None
    assert (found.per_position, found.reported_by) == ([3 / 4, 2 / 4], "a server")
    assert found.length == 1 + sum(found.per_position or ())
    hidden = acceptance.reported([told[0], told[1].changed(histogram=None)])
    assert hidden is not None
    assert hidden.per_position is None


def test_an_engine_that_counts_no_drafts_has_drafted_in_every_forward_but_the_prefills() -> None:
    """As in our loop, a forward without a draft has no accepted token. llama.cpp says only how much it drafted."""
    told = timing_line(items=2, row_forwards=10, accepted=6, drafted=16)
    found = acceptance.of_cell(cell_data(answers(None), [told]))
    assert found is not None
    assert (found.length, found.vllm, found.offered) == (1 + 6 / 8, 1 + 6 / 8, 16)
    plain = acceptance.reported([told.changed(accepted=0, drafted=0)])
    assert plain is not None
    assert (plain.length, plain.offered) == (None, 0)


def test_runs_of_november_2026_are_read() -> None:
    """There the field was called `told_by`."""
    line = dump(timing_line(accepted=3, drafted=8, drafts=2, reported_by="a server"))
    line["told_by"] = line.pop("reported_by")
    assert records.validate(line, TimingLine, "a line").reported_by == "a server"


def test_an_engine_that_hides_its_acceptance_has_none() -> None:
    """Null, not 0 and not a part of it: one block without counts is enough."""
    reported = timing_line(accepted=3, drafted=8, drafts=2)
    assert acceptance.of_cell(cell_data(answers(None), [timing_line()])) is None
    assert acceptance.of_cell(cell_data(answers(None), [reported, timing_line(block=1)])) is None
    assert acceptance.of_cell(cell_data([], [])) is None
    short = acceptance.reported([reported.changed(drafted=None)])  # only how long the drafts were is hidden
    assert short is not None
    assert (short.length, short.rate, short.offered) == (2.5, None, None)
    assert acceptance.reported([reported.changed(accepted=0, drafted=0, drafts=0)]) == AcceptanceFigures(
        length=None,
        rate=None,
        per_position=None,
        offered=0,
        reported_by=TOTALS,
        vllm=None,
    )


ALL = {"method": "prompt-lookup", "options": {}, "arm": "prompt-lookup@ar/graph"}


def cliff(block: int, prompt: int, tokens: int, trained: int = 256, task: str = "a") -> GenerationLine:
    """An answer whose draft has 3 tokens accepted a forward up to `trained` positions, and 1 behind them."""
    commits: list[int] = []
    while (left := tokens - sum(commits)) > 0:
        commits.append(min(left, 3 if prompt + sum(commits) <= trained else 1))
    ids = [1] * (tokens // 2) + [9] + [1] * (tokens - tokens // 2 - 1)
    return generation_line(
        item=f"{task}/{block}/0",
        block=block,
        prompt_tokens=prompt,
        token_ids=ids,
        commits=commits,
        forwards=len(commits),
        drafted=2 * len(commits),
    )


def test_a_draft_shows_where_its_training_ends() -> None:
    """Three tokens a forward up to 256 positions, one behind them, each with its interval."""
    data = cell_data([cliff(n, 100 + n, 900 + n, task="chat" if n < 2 else "code") for n in range(8)], [], **ALL)
    parts = acceptance.divided(data, Thinking(opening=[8], closing=[9], opened=True))
    found = {part.part: part for part in parts["context"]}
    assert list(found) == ["≤ 128", "129–256", "257–512", "513–1,024"]
    assert {part.answers for part in found.values()} == {8}
    for name, length in (("≤ 128", 3), ("129–256", 3), ("513–1,024", 1)):
        assert found[name].value == pytest.approx(length, abs=0.01)
    assert found["257–512"].ci_low == pytest.approx(1, abs=0.01)
    cell = result_cell(acceptance_by=parts)
    assert falling_acceptance(cell) == ["acceptance falls from 3.00 at ≤ 128 to 1.00 at 513–1,024 tokens of context"]
    [drawn] = [f for f in figures.draw(figures.Scene([cell], {cell.arm: 1}, {})) if f.name == "acceptance"]
    assert "ar@ar/graph: 3.00 [3.00, 3.00] at ≤ 128, 3.00" in drawn.alt
    assert "1.00 [1.00, 1.00] at 513–1,024. ar@ar/graph: 1.13 at chat, 1.13 [1.13, 1.13] at code. " in drawn.alt
    assert "1.30 [1.29, 1.30] at thinking, 1.00 [1.00, 1.00] at answer." in drawn.alt


def naive(data: CellData, contexts: range) -> list[float]:
    """Σ tokens / Σ forwards of the forwards with such a context, over blocks that have one, written out."""
    x, y = Counter[int](), Counter[int]()
    for line in data.lines.values():
        for n, size in enumerate(line.commits or ()):
            if size and line.prompt_tokens + sum((line.commits or [])[:n]) in contexts:
                x[line.block] += size
                y[line.block] += 1
    above, below = (np.array([of[block] for block in y], float) for of in (x, y))
    value, units = above.sum() / below.sum(), len(above)
    error = np.sqrt(units / (units - 1) * ((above / above.sum() - below / below.sum()) ** 2).sum())
    reach = np.exp(scipy.stats.t.ppf(0.975, units - 1) * error)
    return [value, value / reach, value * reach]


@given(st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=40)
def test_parts_sum_to_the_cell(seed: int, opened: bool) -> None:
    """Every forward that committed is in one part of each division, and no total changes. Some answers only wait."""
    draws, marks = np.random.default_rng(seed), Thinking(opening=[8], closing=[9], opened=opened)
    lines, steps = list[GenerationLine](), list[int]()
    for n in range(int(draws.integers(5, 13))):
        commits = draws.integers(0, 5 * (n % 5 > 0), int(draws.integers(1, 150)), endpoint=True).tolist()
        ids = draws.choice([1, 1, 1, 1, 8, 9], sum(commits)).tolist()
        counts: dict[str, Any] = {"commits": commits, "forwards": len(commits), "token_ids": ids, "drafted": 1}
        prompt = int(draws.integers(60, 300))
        lines.append(generation_line(item=f"{n % 2}/{n}/0", block=n % 8, prompt_tokens=prompt, **counts))
        steps += [size for size in commits if size]
    data = cell_data(lines, [], **ALL)
    whole = acceptance.of_cell(data)
    assert whole is not None
    for parts in acceptance.divided(data, marks).values():
        assert sum(part.forwards for part in parts) == len(steps)
        assert sum(part.forwards * (part.value or 0) for part in parts) == pytest.approx(sum(steps))
        for part in parts:
            assert part.value is not None
    ranges = {
        "≤ 128": range(129),
        "129–256": range(129, 257),
        "257–512": range(257, 513),
        "513–1,024": range(513, 1025),
    }
    for part in acceptance.divided(data, marks).get("context", ()):
        if part.ci_low is not None:
            ours = np.array([part.value, part.ci_low, part.ci_high], float)
            np.testing.assert_allclose(ours, naive(data, ranges[part.part]), rtol=1e-9)
    if whole.length_ci is not None:
        np.testing.assert_allclose(
            np.array([whole.length, *whole.length_ci], float), naive(data, range(9999)), rtol=1e-9
        )


def test_a_forward_thinks_if_its_first_token_does() -> None:
    """Up to the closing token; tokens behind it in the same forward are of this forward."""
    marks = Thinking(opening=[8], closing=[9], opened=False)
    ids = [8, 0, 0, 0, 9, 0, 0, 0, 0]
    lines = [generation_line(item=f"{n}/0/0", token_ids=ids, commits=[1, 2, 3, 0, 1, 2], forwards=6) for n in range(2)]
    parts = acceptance.divided(cell_data(lines, [], **ALL), marks)
    assert {part.part: (part.value, part.forwards) for part in parts["thinking"]} == {
        "thinking": (2, 6),
        "answer": (1.5, 4),
    }
    assert [(part.part, part.answers, part.value) for part in parts["category"]] == [("0", 1, 1.8), ("1", 1, 1.8)]


def test_of_an_engine_that_counts_forwards_only_a_request_is_in_the_part_of_its_prompt() -> None:
    """Without the token of its prefill; plain decoding, and what hides forwards or drafts nothing, has no parts."""
    lines = [
        generation_line(item=f"a/{n}/0", prompt_tokens=100 * (n + 1), token_ids=[1] * 41, forwards=11 + 10 * n)
        for n in range(2)
    ]
    served = {**ALL, "engine": "llamacpp"}
    parts = acceptance.divided(cell_data(lines, [], **served), Thinking(opening=[8], closing=[9], opened=True))
    assert {part.part: (part.value, part.forwards) for part in parts["context"]} == {
        "≤ 128": (4, 10),
        "129–256": (2, 20),
    }
    assert list(parts) == ["context"]
    assert acceptance.divided(cell_data(lines, []), None) == {}
    assert acceptance.divided(cell_data([line.changed(forwards=None) for line in lines], [], **served), None) == {}
    assert acceptance.divided(cell_data([line.changed(drafted=0) for line in lines], [], **served), None) == {}


def test_an_engines_own_count_has_an_interval_over_blocks() -> None:
    """Tokens per draft of each block, as for commits."""
    timings = [timing_line(block=n, accepted=30 + n, drafted=80, drafts=20) for n in range(7)]
    found = acceptance.of_cell(cell_data(answers(None), timings))
    assert found is not None
    ratio = statistics.ratio_of_totals([[50 + n for n in range(7)]], [[20] * 7])
    assert found.length_ci == [ratio.ci_low, ratio.ci_high]
