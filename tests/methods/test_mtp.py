"""Multi-token prediction against plain torch: what is drafted from which text, and every misreading of a format."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_cases import (
    BUDGET,
    BUDGETS,
    MANY,
    PROMPTS,
    REFILLED,
    ar,
    check_step_never_waits,
    decode_prompts,
    naive_logits,
    outcomes,
    run,
)
from mtp_checkpoints import SERVED, Headed, save_headed
from torch import Tensor

from mtbench.decoding import feature_drafting
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.draft_model import Drafted
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.decoding.registry import METHODS
from mtbench.models import runner
from mtbench.models.drafts import mtp
from mtbench.models.feature_draft import DraftRunner

WAYS: list[dict[str, Any]] = [{}, *REFILLED]
Seen = list[tuple[list[int], Tensor, Tensor]]  # of a row in a step: its text, what is drafted, and by which logits


def method(ahead: int = 1, **options: Any) -> Method:
    made: Method = METHODS["mtp"](ahead=ahead, **options)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Headed]:
    """A checkpoint of a family, made once."""
    known: dict[str, Headed] = {}

    def headed(family: str) -> Headed:
        if family not in known:
            known[family] = save_headed(tmp_path_factory.mktemp(family), family)
        return known[family]

    return headed


def drafted(headed: Headed, ahead: int, monkeypatch: pytest.MonkeyPatch, runners: Any = None, **how: Any) -> Seen:
    """Everything that is drafted for rows that still decode, while many prompts are decoded."""
    seen: Seen = []

    def draft_tree(runners: ModelRunners, role: str, rows: Rows, *rest: Any) -> Drafted:
        out = feature_drafting.draft_tree(runners, role, rows, *rest)
        for row in range(len(rows.known)):
            if not rows.done[row] and rows.known[row] > 1:  # a prompt of one token has no feature
                text = rows.tokens[row, : rows.known[row]].tolist()
                seen.append((text, out.tokens[row].clone(), out.logits[row].clone()))
        return out

    monkeypatch.setattr(sys.modules[METHODS["mtp"].__module__], "draft_tree", draft_tree)
    with torch.inference_mode():
        decode_prompts(method(ahead), runners or headed.runners(), MANY[:5], BUDGETS, **how)
    return seen


def agrees(headed: Headed, seen: Seen) -> bool:
    """Whether all of it is what plain torch says. (Routers compute in float32.)"""
    suppressed = headed.target().suppressed
    return bool(seen) and all(
        torch.allclose(headed.drafts(text, len(tokens), suppressed, tokens.tolist()), logits, atol=1e-5)
        and tokens.tolist() == logits.argmax(1).tolist()
        for text, tokens, logits in seen
    )


@pytest.mark.parametrize("how", range(len(WAYS)))
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("family", SERVED)
def test_drafts_are_those_of_plain_torch(
    made: Callable[[str], Headed], family: str, ahead: int, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prefills, verifications of several lengths and refills, in ragged batches: logits and tokens."""
    assert agrees(made(family), drafted(made(family), ahead, monkeypatch, **WAYS[how]))


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_drafts_change_nothing_but_the_pace(made: Callable[[str], Headed], family: str, ahead: int) -> None:
    """`ar`'s tokens and reasons; commits of several lengths, each row's own whatever its neighbours are."""
    headed = made(family)
    on = headed.runners()
    want = run(ar(), on.target, MANY[:5], BUDGETS)
    alone = [decode_prompts(method(ahead), on, [p], n)[0][0] for p, n in zip(MANY, BUDGETS, strict=False)]
    for how in WAYS:
        got, timing = decode_prompts(method(ahead), on, MANY[:5], BUDGETS, **how)
        assert [(g.token_ids, g.finish_reason) for g in got] == [(g.token_ids, g.finish_reason) for g in want]
        assert outcomes(got) == outcomes(alone)
        assert timing.miscounted == 0
        for g in got:
            assert g.drafted == ahead * (g.forwards or 0)
    assert {1, ahead + 1} <= {n for g in alone for n in g.commits or []}
