"""A planted fault in float32 is noticed, and honest answers are not called a fault.

Answers are decoded again by mtbench's loop with a fault, and judged as an audit does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import decoded_again, honest_run
from planted_faults import (
    Fault,
    coarse_cache,
    coarse_logits,
    coarse_weights,
    endless,
    other_layer,
    other_prompts,
    penalised,
    sampled,
    shifted_rope,
    short_budget,
    stale_after_rejection,
    suppressed,
    swapped_caches,
    unverified,
    windowed,
    without_layers,
)

from mtbench.experiments.audit.classes import UNEXPLAINED
from mtbench.experiments.audit.findings import arms_of, audit, to_judge
from mtbench.experiments.audit.format import Audit, NoiseLine
from mtbench.experiments.audit.judge import Judge, answer_of, coarse
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Pair, Side, of_run

DRAFTING = {"method": ("speculative:ahead=4",)}
FAULTS: dict[str, tuple[str, Fault, dict[str, Any]]] = {  # class, fault, options of the run
    "a layer left out": (UNEXPLAINED, without_layers(2), {}),
    "weights in 5 bits": (UNEXPLAINED, coarse_weights(5), {}),
    "rope one off": (UNEXPLAINED, shifted_rope(-1), {}),
    "rope one off from a length on": (UNEXPLAINED, shifted_rope(1, start=100), {}),
    "a window": (UNEXPLAINED, windowed(48), {}),
    "another layer's cache": (UNEXPLAINED, other_layer(2, 1), {}),
    "a cache of 4 bits": (UNEXPLAINED, coarse_cache(4), {}),
    "caches of two rows exchanged": (UNEXPLAINED, swapped_caches(6), {}),
    "a cache not cropped": (UNEXPLAINED, stale_after_rejection(), DRAFTING),
    "drafts not verified": ("acceptance fault", unverified(0.1), DRAFTING),
    "another prompt than is stored": (UNEXPLAINED, other_prompts(lambda ids: ids[8:]), {}),
    "drawn tokens": (UNEXPLAINED, sampled(0.8), {}),
    "a penalty": (UNEXPLAINED, penalised(1.2), {}),
    "an id never chosen": (UNEXPLAINED, suppressed(17), {}),
    "bfloat16 logits": (UNEXPLAINED, coarse_logits(torch.bfloat16), {}),
    "end tokens ignored": ("stop/budget", endless(), {}),
    "a short budget": ("stop/budget", short_budget(40), {}),
}
HONEST: dict[str, dict[str, Any]] = {
    "drafts": DRAFTING,
    "a tree": {"method": ("eagle:tree=3x2",)},
    "copies": {"method": ("prompt-lookup",)},
    "another batch size": {"batch_size": (1,)},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked: dict[str, Any] = {"method": ("ar",), "batch_size": (4,), "limit": 4, "dtype": "float32"}
    return honest_run(tmp_path_factory.mktemp("noticed") / "run", **asked)


@pytest.fixture(scope="module")
def plain(run: Path) -> Side:
    return of_run(run)[0]


@pytest.fixture(scope="module")
def judge(plain: Side) -> Judge:
    assert plain.model is not None
    return Judge(plain.model, AuditRequest(a="a", b="b", device="cpu"))


def audited(judge: Judge, a: Side, b: Side) -> Audit:
    pair, noises = Pair(a, b), dict[str, NoiseLine]()
    lines = {(0, item): judge.judge(0, pair, item) for item in pair.items if to_judge(pair, item)}
    if (dtype := coarse(b)) is not None:
        noises[dtype] = judge.noise(dtype, [answer_of(a, answer, 192) for answer in a.answers.values()])
    return audit(judge.request, judge.source, arms_of([pair], lines, noises, judge.checkpoint), [])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, run: Path, plain: Side, judge: Judge) -> None:
    expected, wrong, options = FAULTS[fault]
    found = audited(judge, plain, decoded_again(plain, run, wrong, **options))
    assert not found.explained
    assert {finding.name for finding in found.findings if finding.fault} == {expected}, found.sentence


@pytest.mark.parametrize("options", HONEST)
def test_honest_answers_are_no_fault(options: str, run: Path, plain: Side, judge: Judge) -> None:
    found = audited(judge, plain, decoded_again(plain, run, **HONEST[options]))
    assert found.explained, [finding.evidence for finding in found.findings if finding.fault]
