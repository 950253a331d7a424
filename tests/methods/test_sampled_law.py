"""The law of sampled texts: of every method that verifies sampled drafts, whole texts against the target's own law.

The target emits four tokens only, so every text of four tokens has a known probability: 256 cells of a chi-square.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from chi_square import Fit, exact_law, filtered_law, fit, numbers
from decoding_cases import decode_prompts, naive_logits
from method_cases import models
from small import VOCABULARY

from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.sampling import Sampling

TOKENS, LENGTH, PROMPT = 4, 4, [5, 9, 1]
HOT, FILTERED = Sampling(1.5), Sampling(0.7, top_k=3, top_p=0.9)
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
    "DFlash 2": ("dflash2", "dflash", {}),  # its candidates are three of the four tokens
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


def sample(
    runners: ModelRunners, name: str, texts: int, seed: int = 0, settings: Sampling = HOT, **options: Any
) -> Sampled:
    """Sample texts, with the seeds from `seed` on, in rows that are refilled."""
    how: dict[str, Any] = {"rows": 1000, "ignore_eos": True} | asdict(settings)
    method = METHODS[name](ahead=3, **options)
    got, _ = decode_prompts(method, runners, [PROMPT] * texts, LENGTH, seeds=range(seed, seed + texts), **how)
    logits = naive_logits(runners.target)
    law = exact_law(lambda text: filtered_law(logits([*PROMPT, *text])[-1:, :TOKENS], settings)[0], TOKENS, LENGTH)
    counts = numbers([g.token_ids for g in got], TOKENS).bincount(minlength=len(law)).double()
    assert counts[law == 0].sum() == 0
    assert {1, 2} <= {n for g in got for n in g.commits or []}
    return Sampled(got, fit(counts, texts * law))


def sample_method(made: Made, name: str, verify: str, texts: int, **how: Any) -> Sampled:
    runs_on, method, options = METHODS_OF[name]
    seed = MANY * (1 + list(METHODS_OF).index(name))  # no two methods share random numbers
    return sample(made(runs_on), method, texts, seed, verify=verify, **options, **how)


def test_sampled_texts_have_the_law_of_the_target_at_once(made: Made) -> None:
    """A quick one: DSpark's drafts, whose logits change with each token drafted."""
    ways: list[dict[str, Any]] = [{}, {"settings": FILTERED, "filter_draft": True}]
    for how in ways:
        assert sample_method(made, "DSpark", "block", 2000, **how).fit.p > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS_OF)
def test_sampled_texts_have_the_law_of_the_target(made: Made, name: str) -> None:
    """By all rules; and the rule for whole blocks accepts no fewer drafts, on average of the first forward."""
    match, token, block = (sample_method(made, name, verify, MANY) for verify in ("match", "rejection", "block"))
    for verify, sampled in (("match", match), ("rejection", token), ("block", block)):
        print(f"{name} {verify} N={MANY} {sampled.fit} tokens in the first forward {sampled.commits}")
        assert sampled.fit.p > 1e-4
    (fewer, error), (more, other) = token.commits, block.commits
    assert more - fewer > -2.6 * math.hypot(error, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS_OF)
def test_filtered_texts_have_the_law_of_the_target(made: Made, name: str) -> None:
    """Whichever of the two distributions is filtered. (Each rule and filter: test_filtered_law.py.)"""
    for verify, filter_draft in (("rejection", True), ("rejection", False), ("block", True)):
        sampled = sample_method(made, name, verify, MANY, settings=FILTERED, filter_draft=filter_draft)
        print(f"LAW {name} {verify} q filtered: {filter_draft} N={MANY} {sampled.fit} {sampled.commits}")
        assert sampled.fit.p > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, method, _) in METHODS_OF.items() if method != "speculative"])
def test_texts_of_the_likeliest_prefixes_have_the_law_of_the_target(made: Made, name: str) -> None:
    """Trees are verified by match only; which prefixes are likeliest depends on the numbers that decide the target."""
    sampled = sample_method(made, name, "match", MANY, tree="best:6")
    print(f"{name} best:6 N={MANY} {sampled.fit} tokens in the first forward {sampled.commits}")
    assert sampled.fit.p > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("mars-speculative", {}), ("mars-selfspec", {"tree": "best:16"})])
def test_texts_of_masks_have_the_law_of_the_target(made: Made, name: str, options: dict[str, Any]) -> None:
    """They verify by match only: one random number decides draft and target."""
    sampled = sample(made("sometimes"), name, MANY, -MANY * len(options), **options)
    print(f"{name} {options} match N={MANY} {sampled.fit} tokens in the first forward {sampled.commits}")
    assert sampled.fit.p > 1e-4
