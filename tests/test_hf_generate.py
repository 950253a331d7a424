"""transformers' own `generate` as an arm: the same tokens as `ar`, on the same weights, leaving our model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
from small import END, WORDS, small_config
from test_decoding import CONFIGS

from mtbench.decoding import decode
from mtbench.engine import ENGINES
from mtbench.generation import Generation
from mtbench.lane import Lane
from mtbench.method import Lanes
from mtbench.outside import Outside, run_outside, stock, until_end
from mtbench.registry import METHODS

PROMPTS = [[3], [5, 9, 1, 7, 2], list(range(20)), [30, 31]]
BUDGET = 24
CACHES = ("dynamic", "static")


def generate(lane: Lane, cache: str = "dynamic", budget: Any = BUDGET, **options: Any) -> list[Generation]:
    method: Outside = METHODS["hf-generate"](cache=cache)
    return run_outside(method, lane.checkpoint, PROMPTS, budget, **options)[0]


def ours(lane: Lane, budget: Any = BUDGET, **options: Any) -> list[Generation]:
    return decode(METHODS["ar"](), Lanes("ar", {"ar": lane}), PROMPTS, budget, **options)[0]


def answers(generations: list[Generation]) -> list[tuple[list[int], str, str]]:
    return [(g.token_ids, g.text, g.finish_reason) for g in generations]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_its_tokens_are_those_of_ar(name: str, cache: str, make_lane: Callable[..., Lane]) -> None:
    """In float64, ragged prompts in one batch, on every architecture: tokens, texts and why they ended."""
    lane = make_lane(CONFIGS[name])
    if name == "gemma2":  # padding is NaN to transformers' own attention for it, in float64
        with pytest.raises(NotImplementedError, match="float32"):
            generate(lane, cache)
        lane.model.float()
    assert answers(generate(lane, cache)) == answers(ours(lane))


@pytest.mark.parametrize("cache", CACHES)
def test_the_model_of_the_other_arms_is_left_alone(cache: str, make_lane: Callable[..., Lane]) -> None:
    """Every weight is the one in use already; ours still runs our attention, counts its own forwards, says the same."""
    lane = make_lane()
    before = answers(ours(lane))
    seen = lane.checkpoint.calls.n
    generate(lane, cache)
    assert lane.checkpoint.calls.n == seen
    twin = stock(lane.checkpoint)
    assert twin is stock(lane.checkpoint)
    pairs = zip(twin.parameters(), lane.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert (twin.config._attn_implementation, lane.model.config._attn_implementation) == ("sdpa", "mtbench")
    assert answers(ours(lane)) == before


def test_weights_that_an_engine_laid_out_anew_are_still_shared(make_lane: Callable[..., Lane]) -> None:
    """`graph` joins matrices; whichever of the two comes first, there is one copy of the weights."""
    for first in (stock, ENGINES["graph"]().lane):
        lane = make_lane()
        first(lane.checkpoint)
        fast = ENGINES["graph"]().lane(lane.checkpoint)
        assert answers(generate(lane)) == answers(ours(fast))
        pairs = zip(stock(lane.checkpoint).parameters(), lane.model.parameters(), strict=True)
        assert all(a is b for a, b in pairs)


def test_a_checkpoints_sampling_defaults_do_not_apply(make_lane: Callable[..., Lane]) -> None:
    """A repetition penalty, a temperature or a shorter budget of the checkpoint's own changes nothing."""
    lane = make_lane(small_config(initializer_range=0.2), seed=3)
    want = answers(ours(lane))
    settings = lane.model.generation_config
    settings.repetition_penalty, settings.do_sample, settings.temperature, settings.max_length = 5.0, True, 9.0, 3
    assert answers(generate(lane)) == want


@pytest.mark.parametrize("cache", CACHES)
def test_at_fixed_length_an_end_token_is_a_token(cache: str, make_lane: Callable[..., Lane]) -> None:
    """Every row spends its own budget, end tokens included, as with `ar`."""
    lane = make_lane(seed=1)
    want = answers(ours(lane, 60, fixed_length=True))
    assert any(END in ids[:-1] for ids, _, _ in want), "the model must say its end token for this to mean anything"
    assert answers(generate(lane, cache, 60, fixed_length=True)) == want
    budgets = [3, 60, 17, 1]
    got = generate(lane, cache, budgets, fixed_length=True)
    assert [g.token_ids for g in got] == [ids[:n] for (ids, _, _), n in zip(want, budgets, strict=True)]


def test_a_row_ends_with_its_own_stop_string(lane: Lane) -> None:
    """Each row at its own string, cut at the same token and the same letter as in our loop; a row without goes on."""
    plain = ours(lane)
    stop = [[], [plain[1].text[5:8]], [plain[2].text[-3:]], [WORDS[0] * 40]]
    got = generate(lane, stop=stop)
    assert answers(got) == answers(ours(lane, stop=stop))
    assert [g.finish_reason for g in got][1:3] == ["stop", "stop"]


def test_what_it_hides_is_none(lane: Lane) -> None:
    """No forward, no part of its time is made up; what is known is counted."""
    generations, timing = run_outside(METHODS["hf-generate"](), lane.checkpoint, PROMPTS, BUDGET)
    hidden = ("row_forwards", "batch_forwards", "prefill_s", "decode_s", "device_s", "ttft_s", "step_s", "kv_bytes")
    assert [getattr(timing, name) for name in hidden] == [None] * len(hidden)
    assert {(g.forwards, g.commits, g.positions_fed, g.draft_forwards) for g in generations} == {(None,) * 4}
    assert (timing.rows, timing.items, timing.prompt_tokens) == (4, 4, 28)
    assert timing.tokens == sum(len(g.token_ids) for g in generations)
    assert timing.wall_s > 0


def test_an_answer_ends_with_its_first_end_token() -> None:
    """What an engine says behind it, or beyond the budget, is no part of the answer."""
    assert until_end([5, 9, 2, 7, 2], 4, (2, 3)) == [5, 9, 2]
    assert until_end([5, 9, 7], 2, (2,)) == [5, 9]
    assert until_end([2, 2], 2, ()) == [2, 2]
