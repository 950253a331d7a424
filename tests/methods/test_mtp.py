"""Multi-token prediction against plain torch: what is drafted from which text."""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
    decode_prompts,
    on,
    run_external,
)
from mtp_checkpoints import FAMILIES, LAYERS, Headed, save_headed
from thinned import one_in
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from mtbench.decoding import feature_drafting
from mtbench.decoding.draft_model import Drafted
from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.plan.plan import RunRequest

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


def test_behind_the_cursor_each_layer_has_cached_decided_tokens_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After verifications, whatever was drafted: what a prefill of the text makes."""
    headed, fresh, checked = made("mimo", 3), made("mimo", 3).runners(), 0
    cached: list[tuple[list[int], int, list[Tensor]]] = []
    propose = feature_drafting.draft_in_turn

    def spy(runner: Any, runners: ModelRunners, rows: Rows, cursor: Tensor, count: int) -> Drafted:
        out = propose(runner, runners, rows, cursor, count)
        for row, final in enumerate(cursor.tolist()):
            text = rows.tokens[row, : rows.known[row]].tolist()
            stores = [store for pair in runner.cache.layers.values() for store in pair]
            start = row * runner.cache.slots
            cached.append((text, final, [store[start : start + final].clone() for store in stores]))
        return out

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(feature_drafting, "draft_in_turn", spy)
        decode_prompts(method(3), headed.runners(), MANY[:5], BUDGETS, rows=2)
    for text, final, stores in [entry for entry in cached if entry[1]][::5]:
        assert final == max(0, len(text) - 3)
        decode_prompts(method(3), fresh, [text], [1])
        again = [store for pair in fresh["#mtp"].cache.layers.values() for store in pair]
        assert len(again) == len(stores) == 6
        assert all(torch.allclose(a[:final], b) for a, b in zip(again, stores, strict=True))
        checked += final
    assert checked > 20


@pytest.mark.parametrize(("family", "count"), [("mimo", 3), ("glm", 2)])
def test_several_layers_change_no_tokens(made: Made, family: str, count: int) -> None:
    runners = made(family, count).runners()
    want, _ = decode_prompts(ar(), runners, MANY[:5], BUDGETS)
    for ahead in (1, 2, 3, 4):
        got, timing = decode_prompts(method(ahead), runners, MANY[:5], BUDGETS, rows=2)
        assert [g.token_ids for g in got] == [g.token_ids for g in want]
        assert timing.miscounted == 0
        assert max(max(g.commits or [0]) for g in got) == ahead + 1


Step = Callable[..., Forwarded]


def repeated(step: Step, *rest: Any, depth: int, **how: Any) -> Forwarded:
    return step(*rest, depth=min(depth, 1), **how)


def reordered(step: Step, *rest: Any, depth: int, **how: Any) -> Forwarded:
    return step(*rest, depth=2 - depth % 3, **how)


def unshifted(step: Step, ids: Tensor, *rest: Any, depth: int, kept: list[Tensor], **how: Any) -> Forwarded:
    kept[:] = [ids] if depth == 0 else kept
    return step(kept[0], *rest, depth=depth, **how)


def of_the_target(
    step: Step, ids: Tensor, features: Tensor, *rest: Any, depth: int, kept: list[Tensor], **how: Any
) -> Forwarded:
    """As SGLang feeds MiMo-V2's layers."""
    kept[:] = [features] if depth == 0 else kept
    return step(ids, kept[0], *rest, depth=depth, **how)


@pytest.mark.parametrize("fault", [repeated, reordered, unshifted, of_the_target, None])
def test_a_fault_in_the_turns_is_seen(made: Made, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also entries of drafts that are kept, as in SGLang: None."""
    step, entries, kept = DraftRunner.step, feature_drafting.new_entries, list[Tensor]()

    def faulty(runner: Any, *rest: Any, depth: int = 0, **how: Any) -> Forwarded:
        given = {"kept": kept} if fault in (unshifted, of_the_target) else {}
        out: Forwarded = fault(functools.partial(step, runner), *rest, depth=depth, **given, **how)
        return out

    def stale(runner: Any, runners: Any, rows: Rows, cached: Tensor) -> Any:
        found = entries(runner, runners, rows, cached)
        cached.copy_(rows.known - 1)
        return found

    headed = made("mimo", 3)
    if fault is None:
        monkeypatch.setattr(feature_drafting, "new_entries", stale)
    else:
        monkeypatch.setattr(DraftRunner, "step", faulty)
    assert not agrees(headed, drafted(headed, 3, monkeypatch))


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


@pytest.mark.usefixtures("layers_of_small_models_are_known")
@pytest.mark.parametrize("family", ["glm", "deepseek"])
@pytest.mark.parametrize("stop", [None, [["zz"], ["b"], ["c"], []]])
def test_transformers_drafts_with_the_layers_too(
    made: Made, family: str, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf-generate:mtp=true`: `ar`'s answers in fewer forwards of the target."""
    checkpoint, forwards = made(family).target(), 0
    want, _ = decode_prompts(ar(), on(ModelRunner(checkpoint)), PROMPTS, BUDGET, stop=stop)
    candidates = MTPCandidateGenerator.get_candidates

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return candidates(*arguments, **named)

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", counted)
    got, _ = run_external(METHODS["hf-generate"](mtp=True), {"ar": checkpoint}, PROMPTS, BUDGET, stop=stop)
    assert [(g.token_ids, g.text, g.finish_reason) for g in got] == [
        (g.token_ids, g.text, g.finish_reason) for g in want
    ]
    assert forwards > 0
    assert stop or forwards < sum(len(g.token_ids) for g in want)  # stop strings are looked for now and then


def test_transformers_knows_no_layers_of_some_targets(made: Made) -> None:
    for method, said in (
        ("hf-generate:mtp=true", r"hf-generate: transformers knows no MTP layers of .*; use method `mtp`"),
        ("hf-generate:mtp=true,prompt_lookup=2", r"draft, prompt_lookup or mtp; give one"),
        ("hf-generate:mtp=true,cache=static", r"drafting needs cache=dynamic"),
    ):
        with pytest.raises(UserError, match=said):
            make_plan(
                RunRequest(
                    method=["ar", method], model=str(made("mimo").folder), suite=["synthetic"], limit=2, device="cpu"
                )
            )
