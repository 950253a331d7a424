"""The law of sampled texts: of every method that verifies sampled drafts, whole texts against the target's own law.

The target emits four tokens only, so every text of four tokens has a known probability: 256 cells of a chi-square.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from chi_square import Fit, exact_law, fit, numbers
from decoding_cases import decode_prompts, naive_logits
from method_cases import models
from small import VOCABULARY
from thinned import one_in
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import ModelRunners, TargetOutput
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import VerifiedMethod

TOKENS, LENGTH, PROMPT, TEMPERATURE = 4, 4, [5, 9, 1], 1.5
MANY = 24_000  # texts of a slow test
SHARPER = 8
METHODS_OF: dict[str, tuple[str, str, dict[str, Any]]] = {  # models, method, options
    "speculative": ("sometimes", "speculative", {}),
    "PARD": ("sometimes", "speculative", {"per_forward": "all"}),
    "EAGLE": ("specforge", "eagle", {}),
    "P-EAGLE": ("peagle", "eagle", {}),
    "MTP": ("mimo", "mtp", {}),
    "DFlash": ("z-lab", "dflash", {}),
    "DSpark": ("rnn", "dflash", {}),
}
Made = Callable[[str], ModelRunners]


class Sampled(NamedTuple):
    """What a method sampled, against the law."""

    texts: list[Generation]
    fit: Fit

    @property
    def commits(self) -> tuple[float, float]:
        """The mean of the tokens that the first forward commits, and its standard error."""
        counts = torch.tensor([g.commits[0] for g in self.texts if g.commits]).double()
        return float(counts.mean()), float(counts.std()) / math.sqrt(len(counts))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Models that may say the first tokens only."""

    @cache
    def make(name: str) -> ModelRunners:
        runners = models(name, tmp_path_factory.mktemp("models"))
        for runner in runners.values():
            runner.checkpoint = replace(runner.checkpoint, suppressed=torch.arange(TOKENS, VOCABULARY))
        if "eagle" in runners:  # its fitted head is nearly indifferent, and a wrong offer would not differ
            runners["eagle"].model.lm_head.weight.mul_(SHARPER)
        return runners

    return make


def sample(runners: ModelRunners, name: str, texts: int, seed: int = 0, **options: Any) -> Sampled:
    """Sample texts, with the seeds from `seed` on, in rows that are refilled."""
    how: dict[str, Any] = {"rows": 1000, "temperature": TEMPERATURE, "ignore_eos": True}
    method = METHODS[name](ahead=3, **options)
    got, _ = decode_prompts(method, runners, [PROMPT] * texts, LENGTH, seeds=range(seed, seed + texts), **how)
    logits = naive_logits(runners.target)
    law = exact_law(lambda text: (logits([*PROMPT, *text])[-1, :TOKENS] / TEMPERATURE).softmax(0), TOKENS, LENGTH)
    counts = numbers([g.token_ids for g in got], TOKENS).bincount(minlength=len(law)).double()
    assert {1, 2} <= {n for g in got for n in g.commits or []}
    return Sampled(got, fit(counts, texts * law))


def sample_method(made: Made, name: str, verify: str, texts: int) -> Sampled:
    runs_on, method, options = METHODS_OF[name]
    seed = MANY * (1 + list(METHODS_OF).index(name))  # no two methods share random numbers
    return sample(made(runs_on), method, texts, seed, verify=verify, **options)


def test_sampled_texts_have_the_law_of_the_target_at_once(made: Made) -> None:
    """A quick one: DSpark's drafts, whose logits change with each token drafted."""
    assert sample_method(made, "DSpark", "block", 2000).fit.p > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS_OF)
def test_sampled_texts_have_the_law_of_the_target(made: Made, name: str) -> None:
    """By both rules; and the rule for whole blocks accepts no fewer drafts, on average of the first forward."""
    token, block = (sample_method(made, name, verify, MANY) for verify in ("rejection", "block"))
    for verify, sampled in (("rejection", token), ("block", block)):
        print(f"{name} {verify} N={MANY} {sampled.fit} tokens in the first forward {sampled.commits}")
        assert sampled.fit.p > 1e-4
    (fewer, error), (more, other) = token.commits, block.commits
    assert more - fewer > -2.6 * math.hypot(error, other)


@pytest.mark.slow
def test_texts_of_mars_after_a_draft_have_the_law_of_the_target(made: Made) -> None:
    """It verifies by match only: one random number decides draft and target."""
    sampled = sample(made("sometimes"), "mars-speculative", MANY)
    print(f"mars-speculative match N={MANY} {sampled.fit} tokens in the first forward {sampled.commits}")
    assert sampled.fit.p > 1e-4


# Planted faults. Each is one change of what all methods share.


def other_temperature(patch: pytest.MonkeyPatch) -> None:
    """The offer is that of another temperature than the drafts were drawn at."""
    right = VerifiedMethod.keep_offer
    patch.setattr(VerifiedMethod, "keep_offer", lambda self, state, rows, q, *sure: right(self, state, rows, q / 2))


def shifted_offer(patch: pytest.MonkeyPatch) -> None:
    """The offer of each draft is that of the draft before."""
    right = VerifiedMethod.keep_offer
    patch.setattr(
        VerifiedMethod, "keep_offer", lambda self, state, rows, q, *sure: right(self, state, rows, q.roll(1, 1))
    )


def unnormalised_residual(patch: pytest.MonkeyPatch) -> None:
    """What the residual's mass lacks of 1 falls to the last token, as in a draw that forgets to normalise."""

    def planted(right: Any) -> Any:
        def rule(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            chance, residual = right(draft, q, p)
            residual[..., TOKENS - 1] += 1 - residual.sum(-1)
            return chance, residual

        return rule

    for name in ("token_rule", "block_rule"):
        patch.setattr(sampling, name, planted(getattr(sampling, name)))


FAULTS = [other_temperature, shifted_offer, unnormalised_residual]
PLANTED = [("DSpark", FAULTS[0]), *((name, fault) for name in METHODS_OF for fault in FAULTS)]


@pytest.mark.parametrize(("name", "plant"), one_in(len(PLANTED), PLANTED))
def test_a_wrong_offer_or_residual_is_seen(made: Made, name: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quarter of the texts or fewer, by both rules."""
    plant(monkeypatch)
    for verify in ("rejection", "block"):
        found = sample_method(made, name, verify, 2000 if name == "DSpark" else MANY // 4).fit
        print(f"{plant.__name__} {name} {verify} {found}")
        assert found.p < 1e-6


@pytest.mark.slow
def test_a_draft_accepted_without_a_match_is_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mars-speculative, whose drafts have no offer: the first one is always accepted."""
    agrees = TargetOutput.agrees
    first = torch.arange(3) == 0
    monkeypatch.setattr(TargetOutput, "agrees", lambda self, drafts: agrees(self, drafts) | first)
    found = sample(made("never"), "mars-speculative", MANY // 4).fit
    print(f"no match mars-speculative {found}")
    assert found.p < 1e-6
