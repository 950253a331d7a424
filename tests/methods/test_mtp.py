"""Multi-token prediction against plain torch: what is drafted from which text."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from decoding_cases import (
    BUDGETS,
    MANY,
    REFILLED,
    decode_prompts,
)
from mtp_checkpoints import FAMILIES, LAYERS, Headed, save_headed
from thinned import one_in
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mtbench.decoding import feature_drafting
from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.decoding.registry import METHODS

WAYS: list[dict[str, Any]] = [{}, *REFILLED]
Made = Callable[..., Headed]
Seen = list[tuple[list[int], Tensor, Tensor]]  # of a row in a step: its text, what is drafted, and by which logits


def method(ahead: int = 1, **options: Any) -> Method:
    made: Method = METHODS["mtp"](ahead=ahead, **options)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of a family with so many layers, made once."""
    known: dict[tuple[str, int], Headed] = {}

    def headed(family: str, count: int = 1) -> Headed:
        if (family, count) not in known:
            known[family, count] = save_headed(tmp_path_factory.mktemp(family), family, count)
        return known[family, count]

    return headed


def drafted(headed: Headed, ahead: int, monkeypatch: pytest.MonkeyPatch, runners: Any = None, **how: Any) -> Seen:
    """Everything that is drafted for rows that still decode, while many prompts are decoded."""
    seen: Seen = []

    def draft_tree(runners: ModelRunners, role: str, rows: Rows, *rest: Any) -> feature_drafting.DraftedTree:
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


@pytest.mark.parametrize(("family", "ahead", "how"), one_in(5, product(FAMILIES, (3, 1), range(len(WAYS)))))
def test_drafts_are_those_of_plain_torch(
    made: Made, family: str, ahead: int, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prefills, verifications of several lengths and refills, in ragged batches: logits and tokens."""
    assert agrees(made(family), drafted(made(family), ahead, monkeypatch, **WAYS[how]))


# --- One layer a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "count", "ahead", "how"),
    [
        *one_in(9, product(FAMILIES, (2,), (3,), (2,))),
        ("deepseek", 3, 2, 1),
        *one_in(3, product(["mimo"], (3,), (3, 7), (1, 0))),
    ],
)
def test_each_of_several_layers_drafts_a_token(
    made: Made, family: str, count: int, ahead: int, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens than layers, as many, and more: then the layers go on with what they said themselves."""
    assert agrees(made(family, count), drafted(made(family, count), ahead, monkeypatch, **WAYS[how]))


# --- transformers' own --------------------------------------------------------------------------------------------


@pytest.fixture
def layers_of_small_models_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds the layers by their number in published checkpoints."""
    for model in (Glm4MoeForCausalLM, DeepseekV3ForCausalLM):
        monkeypatch.setattr(
            model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS + index}.*" for index in range(3)]
        )


@pytest.mark.usefixtures("layers_of_small_models_are_known")
@pytest.mark.parametrize(("family", "count"), [("glm", 1), ("deepseek", 1), ("glm", 3), ("deepseek", 2)])
def test_transformers_reads_the_layers_so_but_for_the_first_embedding(made: Made, family: str, count: int) -> None:
    headed, text = made(family, count), [5, 9, 1, 7, 2, 30]
    model = headed.plain()
    model.config.num_nextn_predict_layers = count
    with torch.no_grad():
        _, logits, _ = MtpModel.from_pretrained(model)(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=headed.features(text)[None, :-1],
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    none = torch.zeros(0, dtype=torch.long)
    unblanked = replace(headed.published, blank_start=False)
    want = replace(headed, published=unblanked).drafts(text, count, none)
    assert torch.allclose(logits[0], want, atol=1e-5)
    assert not torch.allclose(logits[0], headed.drafts(text, count, none), atol=1e-5)
