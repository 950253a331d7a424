"""The loop against references that recompute everything, in float64; and its accounting, on any acceptance pattern."""

from collections.abc import Callable, Sequence
from typing import Any

import naive
import pytest
import torch
from small import END, MASK, small_config
from torch import Tensor
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from mtbench.decoding import Generation, decode
from mtbench.lane import Lane
from mtbench.method import Lanes, Method
from mtbench.registry import METHODS

PROMPTS = [[3], [5, 9, 1, 7, 2], list(range(20)), [30, 31]]
BUDGET = 24


def run(
    method: Method, lane: Lane, prompts: Sequence[Sequence[int]] = PROMPTS, budget: int = BUDGET
) -> list[Generation]:
    return decode(method, Lanes("any", {"any": lane}), prompts, budget)[0]


def mars(**options: Any) -> Method:
    method: Method = METHODS["mars"](**options)
    return method


def ar() -> Method:
    method: Method = METHODS["ar"]()
    return method


def naive_logits(lane: Lane) -> naive.Logits:
    """The model's own eager attention over the whole sequence."""
    model = lane.model

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        model.set_attn_implementation("eager")
        out: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        model.set_attn_implementation("mtbench")
        return out.index_fill(-1, lane.checkpoint.suppressed, float("-inf"))

    return logits


CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": small_config(),
    "qwen2 sliding, tied": small_config(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": small_config(Qwen3Config, head_dim=16),
    "llama": small_config(LlamaConfig),
    "mistral sliding": small_config(MistralConfig, sliding_window=6),
    "gemma2": small_config(Gemma2Config, head_dim=16, sliding_window=6),
    "gemma3": small_config(Gemma3TextConfig, head_dim=16, sliding_window=6),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_equals_its_own_eager_attention(name: str, make_lane: Callable[..., Lane]) -> None:
    """`ar` and `mars` on ragged rows emit what a recomputation through the model's own attention emits."""
    lane = make_lane(CONFIGS[name])
    logits = naive_logits(lane)
    plain = [naive.autoregressive(logits, p, BUDGET, END) for p in PROMPTS]
    masked = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=4, tau=0.3, metric="probability") for p in PROMPTS]
    assert [(g.token_ids, g.commits) for g in run(ar(), lane)] == plain
    assert [(g.token_ids, g.commits) for g in run(mars(tau=0.3), lane)] == masked


@pytest.mark.parametrize("cache", ["cursor", "none"])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("metric", "tau"), [("probability", 0.15), ("probability", 0.4), ("entropy", 0.9), ("margin", 0.1), ("margin", 1)]
)
def test_mars_equals_a_recomputation(lane: Lane, cache: str, size: int, metric: str, tau: float) -> None:
    """Tokens, commits and forwards of `cursor` and `none` are the naive ones for every metric, τ and B."""
    logits = naive_logits(lane)
    want = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=size, tau=tau, metric=metric) for p in PROMPTS]
    got = run(mars(tau=tau, block_size=size, confidence=metric, cache=cache), lane)
    assert [(g.token_ids, g.commits) for g in got] == want


def test_extra_takes_the_last_masks_prediction_too(lane: Lane) -> None:
    """`extra` is the naive window with one prediction more."""
    logits = naive_logits(lane)
    want = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=5, tau=0.2, metric="probability") for p in PROMPTS]
    assert [(g.token_ids, g.commits) for g in run(mars(tau=0.2, extra=True), lane)] == want


@pytest.mark.parametrize("tau", [0.1, 0.3, 1])
@pytest.mark.parametrize("block", [1, 3, 8, 40])
def test_block_cache_equals_its_own_naive_reference(lane: Lane, tau: float, block: int) -> None:
    """Windows end with the block, rows wait for the slowest, a fill forward per block: tokens and commits agree."""
    answers, commits = naive.mars_block(naive_logits(lane), PROMPTS, BUDGET, END, mask=MASK, block=block, tau=tau)
    got = run(mars(tau=tau, cache="block", cache_block=block), lane)
    assert [g.token_ids for g in got] == answers
    for generation, naively in zip(got, commits, strict=True):
        assert generation.commits == naively
