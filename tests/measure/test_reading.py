"""How far a drawn token falls short of its logits' choice, where filters decide by logits, too."""

import pytest
import torch

from mtbench import sampling
from mtbench.measure.reading import Answer, judged
from mtbench.sampling import Filters, Sampling

TOKENS, SEED, PROMPT = 240, 3, [1, 2]
SETTINGS = [
    Sampling(0.7, top_p=0.9),
    Sampling(1.0, top_k=5),
    Sampling(0.6, top_k=20, top_p=0.95),
    Sampling(1.0, min_p=0.05),
    Sampling(0.8, top_k=20, top_p=0.9, min_p=0.1),
    Sampling(1.0, top_k=400, top_p=0.99),
    Sampling(0.05, top_k=1),
]


def kept(logits: torch.Tensor, of: Sampling) -> torch.Tensor:
    filters = Filters(*(torch.tensor([value]) for value in (of.top_k, of.top_p, of.min_p)))
    filters = filters._replace(top_p=torch.tensor([of.top_p]).double(), min_p=torch.tensor([of.min_p]).double())
    return sampling.filtered(logits[None], torch.tensor([of.temperature]).double(), filters)


def drawn(logits: torch.Tensor, of: Sampling) -> list[int]:
    """The tokens that logits (n, V) draw."""
    positions = len(PROMPT) + torch.arange(len(logits))[None]
    chosen = sampling.sampled(kept(logits, of), of.temperature, torch.tensor([SEED]), positions)[0].argmax(1)
    return [int(token) for token in chosen]


@pytest.mark.parametrize("of", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_that_differ_by_rounding_differ_no_more_in_their_tokens(of: Sampling, dtype: torch.dtype) -> None:
    """Each logit changes by δ at most, so distances of two by 2 δ. Rounded rows have many ties, and −∞ is there."""
    random = torch.Generator().manual_seed(5)
    for delta in (1e-6, 1e-3, 0.05):
        logits = torch.randn(TOKENS, 300, generator=random, dtype=torch.double) * 2.5
        logits[::2] = (logits[::2] * 4).round() / 4
        logits[:, 7] = float("-inf")
        changed = (logits + (2 * torch.rand(logits.shape, generator=random) - 1) * delta).to(dtype)
        answer = Answer(PROMPT, drawn(changed, of), SEED, of)
        assert judged(changed, answer, 0).short.max() == 0, "by its own logits each is the choice"
        found = judged(logits.to(dtype), answer, 0)
        assert found.short.max() <= 2 * delta + 1e-5 * (dtype == torch.float32)
        assert (found.outside <= found.short).all()


@pytest.mark.parametrize("of", SETTINGS, ids=str)
def test_a_token_that_the_filters_remove_is_outside_by_its_distance(of: Sampling) -> None:
    """By any random numbers. One that they keep is not outside, even where it is not the choice."""
    logits = torch.randn(TOKENS, 300, generator=torch.Generator().manual_seed(6)) * 2.5
    tokens = torch.arange(TOKENS)
    found = judged(logits, Answer(PROMPT, tokens.tolist(), SEED, of), 0)
    removed = kept(logits, of)[0].gather(1, tokens[:, None])[:, 0] == float("-inf")
    assert 0 < removed.sum() <= TOKENS
    assert ((found.outside > 0) == removed).all()
    assert found.outside[removed].median() > 0.5


def test_a_limit_of_top_p_is_near_by_its_probability_not_by_the_next_logit() -> None:
    """The two likeliest have 0.9 − 1e-6 together, so p = 0.9 keeps the third, and a p that is 2e-6 less does not."""
    chances = torch.tensor([[0.45, 0.45 - 1e-6, 0.0125, 0.0125, 0.075 + 1e-6]]).double()
    of, answer = Sampling(1.0, top_p=0.9), Answer(PROMPT, [4], SEED, Sampling(1.0, top_p=0.9 - 2e-6))
    assert judged(chances.log(), answer._replace(sampling=of), 0).outside == 0
    assert 0 < judged(chances.log(), answer, 0).outside < 2e-5
