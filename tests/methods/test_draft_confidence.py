"""Drafts that end where the draft is unsure: which are offered, that sampled tokens are unbiased, and what is saved."""

from functools import cache
from typing import Any

import naive
import pytest
import torch
from decoding_cases import BUDGET, MANY, READ_LAG, ar, decode_prompts, naive_logits, run
from exact_chains import Rule, along, chains, distance, random_models, target_law, verified
from method_cases import drafted
from small import MASK
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.method import Method, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import VerifiedMethod
from mtbench.errors import UserError

runners = cache(drafted)


def speculative(**options: Any) -> Method:
    made: Method = METHODS["speculative"](**options)
    return made


# Which drafts are offered.


def offered_drafts(draft: naive.Logits, text: list[int], ahead: int, least: float, per_forward: int) -> list[int]:
    """The draft's likeliest tokens up to the first unlikely one; with `per_forward` masks predict those behind it."""
    drafts: list[int] = []
    if per_forward == ahead:
        likely = draft([*text, *[MASK] * (ahead - 1)])[-ahead:].softmax(1)
        return likely.argmax(1)[: int(sampling.prefix_length(likely.amax(1)[None] >= least))].tolist()
    while len(drafts) < ahead:
        likely = draft([*text, *drafts])[-1].softmax(0)
        if likely.max() < least:
            break
        drafts.append(int(likely.argmax()))
    return drafts


@pytest.mark.parametrize("per_forward", [1, 3])
def test_drafts_behind_the_first_unsure_one_are_missing(per_forward: int) -> None:
    """Offers and commits of every forward are those of the draft's own probabilities; tokens stay `ar`'s."""
    ahead, least, on = 3, 0.2, runners("sometimes")
    made = speculative(ahead=ahead, confidence=least, per_forward=per_forward)
    draft, target, offers = naive_logits(on["draft"]), naive_logits(on.target), list[int]()
    got, _ = decode_prompts(made, on, MANY[:5], BUDGET, rows=3, make=READ_LAG)
    assert [g.token_ids for g in got] == [g.token_ids for g in run(ar(), on.target, MANY[:5])]
    for prompt, g in zip(MANY, got, strict=False):
        answer, offered = list[int](), 0
        for count in g.commits or []:
            drafts = offered_drafts(draft, [*prompt, *answer], ahead, least, per_forward)
            own = target([*prompt, *answer, *drafts])[-len(drafts) - 1 :].argmax(1).tolist()
            kept = next((i for i, (a, b) in enumerate(zip(drafts, own, strict=False)) if a != b), len(drafts))
            assert count == min(kept + 1, len(g.token_ids) - len(answer))
            answer += g.token_ids[len(answer) :][:count]
            offers.append(len(drafts))
            offered += len(drafts)
        assert g.drafted == offered
    assert set(offers) == {0, 1, 2, 3}


# Sampled tokens: the end may depend on what was drawn before, and not on the token that is dropped.

LEAST = 0.5


def by_distribution(tokens: Tensor, q: Tensor) -> Tensor:
    """Ours, as `VerifiedMethod.keep_offer` counts: (N, K) and (N, K, V) to (N,)."""
    state = {"sure": torch.zeros(len(tokens), dtype=torch.long)}
    made = speculative(ahead=tokens.shape[1], confidence=LEAST)
    assert isinstance(made, VerifiedMethod)
    made.keep_offer(state, None, q.log())  # type: ignore[arg-type]  # by match, it reads no rows
    return state["sure"]


@pytest.mark.parametrize("rule", [sampling.token_rule, sampling.block_rule])
def test_an_end_by_the_distribution_keeps_the_targets_law(rule: Rule) -> None:
    """Every outcome enumerated. (If a token ended the drafts by its own probability, the law would be another.)"""
    for seed in range(4):
        models = random_models(seed, 4, 3)
        tokens = chains(models)
        ends = by_distribution(tokens, along(models.draft, tokens))
        assert len(set(ends.tolist())) > 1
        assert distance(verified(models, rule, ends)[0], target_law(models)) < 1e-12


# What is saved: `ahead=auto` narrows the steps.


def test_an_end_counts_as_a_rejected_draft() -> None:
    """A row that offers one draft of eight, always accepted, is best served by a narrow window."""
    chosen = []
    for stopped in (0, 1):
        widths = Widths([Window(1, n, n + 1) for n in (1, 4, 8)], None, 1, torch.device("cpu"))
        widths.begin(torch.tensor([0]))
        widths.cost.copy_(torch.tensor([1.0, 1.3, 1.7]))
        for _ in range(12):
            widths.update(torch.tensor([2]), torch.tensor([1]) + stopped)
        chosen += widths.best().tolist()
    assert chosen == [2, 0]


# What is refused.


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("eagle", {"tree": "2x2", "confidence": 0.4}, "confidence=0.4 needs a chain, and tree=2x2 is none"),
        ("eagle", {"tree": "2x2", "verify": "block"}, "verify=block needs a chain, and tree=2x2 is none"),
        ("hf-generate", {"ahead": 3}, "ahead=3 needs a draft"),
    ],
)
def test_what_has_no_chain_of_drafts_refuses_it(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        METHODS[name](**options)
