"""Block verification: the paper's rule, the target's distribution, and no fewer drafts than token by token.

A small vocabulary lets every outcome be enumerated (tests/helpers/exact_chains.py). The loop: test_sampled_law.py.
"""

from typing import Any

import naive
import pytest
import torch
from chi_square import markov_pair
from decoding_cases import READ_LAG, decode_prompts, outcomes
from exact_chains import Models, along, chains, distance, random_models, target_law, verified
from hypothesis import given, settings, strategies
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS

EXACT = 1e-12  # of sums of float64 probabilities
many = given(strategies.integers(0, 10**6), strategies.sampled_from([(2, 1), (2, 3), (3, 2), (2, 5), (4, 2), (3, 3)]))


def method(name: str = "speculative", **options: Any) -> Method:
    made: Method = METHODS[name](**options)
    return made


def some_ends(models: Models, seed: int) -> Tensor:
    """How many drafts of each chain are offered, (N,), if each prefix decides by itself whether the next one is."""
    noise = torch.Generator().manual_seed(seed)
    goes_on = [torch.rand(len(rows), 1, generator=noise) < 0.7 for rows in models.draft]
    return sampling.prefix_length(along(goes_on, chains(models))[..., 0])


@many
@settings(max_examples=40, deadline=None)
def test_the_rule_is_the_papers_line_by_line(seed: int, size: tuple[int, int]) -> None:
    """Accepted drafts and the distribution of the next token, for the same uniform numbers, fewer drafts included."""
    models = random_models(seed, *size)
    tokens = chains(models)
    q, p = along(models.draft, tokens), along(models.target, tokens)
    drawn = (q.gather(2, tokens[..., None]) > 0).all(1)[:, 0]
    tokens, q, p = tokens[drawn], q[drawn], p[drawn]
    rows, drafts = tokens.shape
    offered = torch.randint(drafts + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    seeds, position = torch.arange(rows) + seed, torch.arange(7, 8 + drafts).expand(rows, -1)
    got, accepted = sampling.rejection_sample(tokens, q, p, seeds, position, offered, block=True)
    numbers = sampling.uniform(seeds[:, None], position, torch.tensor(sampling._ACCEPTANCE_KEY)).tolist()
    _, residual = sampling.block_rule(
        tokens, q.masked_fill((torch.arange(drafts) >= offered[:, None])[..., None], 0), p
    )
    for row in range(rows):
        most = int(offered[row])
        texts = tokens[row, :most].tolist(), q[row, :most].tolist(), p[row, : most + 1].tolist()
        count, weights = naive.block_verification(*texts, numbers[row])
        assert int(accepted[row]) == count
        assert got[row, :count].tolist() == texts[0][:count]
        assert weights[int(got[row, count])] > 0
        assert (residual[row, count] / residual[row, count].sum()).tolist() == pytest.approx(weights, abs=EXACT)


@many
@settings(max_examples=40, deadline=None)
def test_what_is_decided_has_the_targets_distribution(seed: int, size: tuple[int, int]) -> None:
    """Of whole texts, every outcome enumerated; also where a prefix decides that drafts end."""
    models = random_models(seed, *size)
    for rule in (sampling.block_rule, sampling.token_rule):
        for offered in (None, some_ends(models, seed)):
            assert distance(verified(models, rule, offered)[0], target_law(models)) < EXACT


@many
@settings(max_examples=40, deadline=None)
def test_no_fewer_drafts_are_accepted_than_token_by_token(seed: int, size: tuple[int, int]) -> None:
    """On average over the draft's chains, exactly."""
    models = random_models(seed, *size)
    for offered in (None, some_ends(models, seed)):
        block, token = (verified(models, rule, offered)[1] for rule in (sampling.block_rule, sampling.token_rule))
        assert block >= token - EXACT


def test_the_papers_example() -> None:
    """Section 1: a target of 1/3 and 2/3, a draft of 2/3 and 1/3, two drafts: 11/9 accepted, 10/9 token by token."""
    likely = torch.tensor([2.0, 1.0]).double() / 3
    models = Models([likely.expand(n, 2) for n in (1, 2)], [likely.flip(0).expand(n, 2) for n in (1, 2, 4)])
    assert verified(models, sampling.block_rule)[1] == pytest.approx(11 / 9)
    assert verified(models, sampling.token_rule)[1] == pytest.approx(10 / 9)


# In the loop.


@pytest.mark.parametrize("confidence", [0.0, 0.3])
def test_a_request_says_the_same_in_any_company(confidence: float) -> None:
    """Sampled: alone, in batches up to 16, in refilled rows, in the fixed shapes of a GPU; prompts of any length."""
    made, (_, on) = method(verify="block", confidence=confidence), markov_pair(2, 12)
    prompts = [[i % 12] * (1 + 5 * i % 11) for i in range(16)]
    how: dict[str, Any] = {"temperature": 1.0}
    alone = [decode_prompts(made, on, [p], 12, seeds=[i], **how)[0][0] for i, p in enumerate(prompts)]
    for company in ({}, {"rows": 3}, {"rows": 4, "make": READ_LAG}):
        together, _ = decode_prompts(made, on, prompts, 12, **how, **company)
        assert outcomes(together) == outcomes(alone)
        assert [g.drafted for g in together] == [g.drafted for g in alone]
    assert len({n for g in together for n in g.commits or []}) > 2
