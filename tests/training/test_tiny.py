"""The embedded family is what its recipe makes, and (slow) its models are accurate."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import decode_prompts
from whole import plan_of

from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.families import EMBEDDED, RECORD, TINY, family
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.runs.prompts import open_suite
from mtbench.statistics import Difference, paired_difference
from mtbench.training.recipes import RECIPES
from mtbench.training.train import TrainingRequest, train

UNSHIPPED = {"init", "sums", "draft_init"}  # only intermediate
LIMIT_BYTES = 30_000_000


def test_the_family_is_what_the_recipe_makes() -> None:
    """Every stage's checkpoint is embedded; its record has the objective, settings and data of today's recipe."""
    stages = {stage.name: stage for stage in RECIPES["tiny"] if stage.name not in UNSHIPPED}
    assert {source.removeprefix(EMBEDDED) for source in family("tiny").roles.values()} == set(stages)
    for name, stage in stages.items():
        record = json.loads((TINY / name / RECORD).read_text())
        assert stage.objective is not None
        assert record["objective"] == stage.objective.name, name
        for part, entry in ((stage.objective, "options"), (stage.settings, "settings")):
            given = {option: value for option, value in asdict(part).items() if value is not None}
            assert given.items() <= record[entry].items(), name
        assert record["data"]["examples"] == stage.to_read(), name
        for source, sha256 in ((stage.base, "base_sha256"), (stage.teacher, "teacher_sha256")):
            if source in stages:
                assert record[sha256] == weights_sha256(TINY / source), name
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_mars", "medusa", "mars_anchored"])
def test_the_recipe_makes_the_embedded_checkpoint_again(tmp_path: Path, name: str) -> None:
    """From the embedded base, on this machine: the same held-out loss within 2 %."""
    torch.set_num_threads(1)
    stage = next(stage for stage in RECIPES["tiny"] if stage.name == name)
    assert stage.objective is not None
    request = TrainingRequest(
        objective=stage.objective,
        base=f"embedded:tiny/{stage.base}",
        data=stage.data,
        examples=stage.examples,
        settings=stage.settings,
        out=tmp_path / name,
    )
    out = train(request)
    made, shipped = (json.loads((folder / RECORD).read_text())["evaluation"]["loss"] for folder in (out, TINY / name))
    print(f"{name}: {made}, embedded {shipped}")
    assert made == pytest.approx(shipped, rel=0.02)


ITEMS = 4096
TAUS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.fixture(scope="module")
def profile() -> dict[str, tuple[list[Generation], dict[str, float]]]:
    """arm -> generations and scores on held-out problems, in batches of similar length."""
    torch.set_num_threads(1)
    plan = plan_of(ITEMS)
    suite, items = open_suite("arithmetic", plan.request), plan.suites[0].items
    order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids))
    runners = {role: ModelRunner(load(family("tiny").checkpoint(role))) for role in ("ar", "mars")}
    arms: dict[str, Any] = {"ar": ("ar", METHODS["ar"]())}
    arms |= {f"mars {tau}": ("mars", METHODS["mars"](tau=tau)) for tau in (1.0, *TAUS)}
    found = {}
    for name, (role, method) in arms.items():
        answers: dict[int, Generation] = {}
        for begin in range(0, len(order), 64):
            batch = order[begin : begin + 64]
            prompts = [items[i].prompt_ids for i in batch]
            generations, _ = decode_prompts(
                method, ModelRunners(role, {role: runners[role]}), prompts, plan.suites[0].max_new_tokens
            )
            answers |= dict(zip(batch, generations, strict=True))
        texts = {items[i].item: g.text for i, g in answers.items()}
        found[name] = ([answers[i] for i in range(len(items))], suite.score(texts))
    return found


def accuracy(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def difference(scores: dict[str, float], baseline: dict[str, float], level: float) -> Difference:
    gained = sum(scores[i] > baseline[i] for i in scores)
    lost = sum(scores[i] < baseline[i] for i in scores)
    return paired_difference(gained, lost, len(scores), level=level)


def per_forward(generations: list[Generation]) -> float:
    return sum(len(g.token_ids) for g in generations) / sum(g.forwards or 0 for g in generations)


@pytest.mark.slow
def test_the_embedded_family_behaves_like_a_real_one(profile: Any) -> None:
    """AR is neither poor nor perfect; MARS is as accurate at τ=1 and 0.95, faster at 0.95, and worse as τ falls."""
    for name, (generations, scores) in profile.items():
        print(f"{name:9s} accuracy {accuracy(scores):.2%}, tokens per forward {per_forward(generations):.3f}")
    assert 0.70 <= accuracy(profile["ar"][1]) <= 0.98
    at_one = difference(profile["mars 1.0"][1], profile["ar"][1], 0.90).ci_low
    at_95 = difference(profile["mars 0.95"][1], profile["mars 1.0"][1], 0.90).ci_low
    assert at_one is not None
    assert at_one > -0.02
    assert at_95 is not None
    assert at_95 > -0.02
    assert 1.4 <= per_forward(profile["mars 0.95"][0]) <= 2.2
    swept = [profile[f"mars {tau}"] for tau in TAUS[1:]]
    accuracies, rates = [accuracy(s) for _, s in swept], [per_forward(g) for g, _ in swept]
    assert rates == sorted(rates)
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] - accuracies[-1] >= 0.05
