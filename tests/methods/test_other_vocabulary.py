"""A draft with a vocabulary of its own: it reads the text in its tokens and drafts those that both have, no others."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from decoding_cases import MANY, PROMPTS, decode_prompts, naive_logits
from other_vocabulary import OTHER_END, OTHER_MASK, SHARED, other_tokenizer, spelled, translated
from small import END, VOCABULARY, small_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.families import TINY
from mtbench.models.loading import inspect
from mtbench.models.vocabularies import TranslatedRunner, differ, shared_by
from mtbench.plan.plan import Plan, RunRequest

BUDGET, AHEAD = 14, 4
TEXTS = [*PROMPTS, *MANY[:5], [26, 27, 26, 28, 35], [35] * 12]  # words that the draft must spell


@pytest.fixture(scope="module")
def pair() -> ModelRunners:
    return translated()


def drafting(pair: ModelRunners, text: list[int], masks: int = 0) -> Tensor:
    """Return the draft's logits (masks + 1, V) of the target's tokens, its whole text spelled and computed anew."""
    ids = [piece for token in text for piece in spelled(token)] + [OTHER_MASK] * masks
    logits = naive_logits(pair["draft"])(ids)[-masks - 1 :]
    over_target = torch.full((masks + 1, VOCABULARY), float("-inf"), dtype=torch.double)
    for token, other in SHARED.items():
        over_target[:, token] = logits[:, other]
    return over_target


def recomputed(pair: ModelRunners, prompt: list[int], each: int) -> tuple[list[int], list[int]]:
    """Return tokens and commits of drafts that are made `each` a forward."""
    target, draft = naive_logits(pair.target), partial(drafting, pair)
    return naive.speculative(target, draft, prompt, ahead=AHEAD, each=each, budget=BUDGET, end=END)


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_it_drafts_from_the_spelled_text_as_everything_computed_anew(pair: ModelRunners, each: int) -> None:
    """Alone, in refilled rows of different lengths, in 16 rows, in the shapes of a GPU: the same tokens and commits."""
    method = METHODS["speculative"](ahead=AHEAD, per_forward=each, vocabulary="intersection")
    want = [recomputed(pair, prompt, each) for prompt in TEXTS]
    assert len({n for _, commits in want for n in commits}) > 2
    assert any(token not in SHARED for tokens, _ in want for token in tokens)
    for rows, tight in ((1, True), (3, False), (16, False)):
        got, timing = decode_prompts(method, pair, TEXTS, BUDGET, rows=rows, make=partial(Batch, tight=tight))
        assert [(g.token_ids, g.commits) for g in got] == want
        assert timing.miscounted == 0


def test_rejection_sees_the_drafts_distribution_over_what_both_have(pair: ModelRunners) -> None:
    """Renormalised at the temperature, zero elsewhere; in float64 against everything computed anew."""
    method = METHODS["speculative"](ahead=1, vocabulary="intersection", verify="rejection")
    batch: list[Batch] = []

    def make(*arguments: Any) -> Batch:
        batch.append(Batch(*arguments))
        return batch[0]

    decode_prompts(method, pair, TEXTS, 1, temperature=0.7, make=make)
    for offered, prompt in zip(batch[0].state["offered"][:, 0], TEXTS, strict=True):
        want = (drafting(pair, prompt)[0] / 0.7).softmax(0)
        torch.testing.assert_close(offered, want, rtol=1e-5, atol=1e-7)  # norms are float32


def test_a_text_that_outgrows_the_drafts_slots_is_still_decoded_as_by_ar(pair: ModelRunners) -> None:
    """The draft's slots are bounded; its drafts are then of another text, and nothing else changes."""
    draft = pair["draft"]
    assert isinstance(draft, TranslatedRunner)
    long = [[35] * 40, [3, 4, 5]]
    method = METHODS["speculative"](ahead=3, vocabulary="intersection")
    want, _ = decode_prompts(METHODS["ar"](), pair, long, 12, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtbench.models.vocabularies.ROOM", 1)
        for tight in (True, False):
            got, _ = decode_prompts(method, pair, long, 12, ignore_eos=True, make=partial(Batch, tight=tight))
            assert [g.token_ids for g in got] == [g.token_ids for g in want]


def permuted(source: Path, folder: Path) -> Path:
    """Save a byte-level checkpoint under other token ids: each ordinary token has its neighbour's."""
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    words, special = stored["model"]["vocab"], {token["content"] for token in stored["added_tokens"]}
    ordinary = [word for word in words if word not in special]
    ids = [words[word] for word in ordinary]
    moved = [*ids[1:], ids[0]]
    words.update(zip(ordinary, moved, strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[moved] = weight[ids].clone()
    model.save_pretrained(folder)
    return folder


def plan(draft: Path, spec: str) -> Plan:
    roles = {"ar": str(TINY / "ar"), "draft": str(draft)}
    return make_plan(RunRequest(checkpoint=roles, method=["ar", spec], limit=4, max_new_tokens=24, device="cpu"))


def test_a_model_under_other_ids_needs_the_option(tmp_path: Path) -> None:
    """Without it the draft is refused; the plan says how many tokens it shares."""
    other = permuted(TINY / "draft", tmp_path / "draft")
    with pytest.raises(UserError, match=r"other token ids than .*vocabulary=intersection"):
        plan(other, "speculative")
    with pytest.raises(UserError, match=r"has the token ids of .*leave `vocabulary=intersection` out"):
        plan(TINY / "draft", "speculative:vocabulary=intersection")
    for spec in ("mars-speculative:on=ar", "speculative:on=ar,draft=ar,vocabulary=intersection"):
        with pytest.raises(UserError):
            plan(other, spec)
    planned = plan(other, "speculative:vocabulary=intersection")
    assert planned.cells[1].flags == [
        f"draft drafts the 498 of {inspect(str(TINY / 'ar')).vocabulary} tokens that it shares"
    ]


def test_in_vllm_it_has_vllms_name_and_others_have_none() -> None:
    drafts = {"draft": "other/draft"}
    method = METHODS["speculative"](vocabulary="intersection")
    setting = SERVING_ENGINES["vllm"]().setting(method, drafts)
    assert not isinstance(setting, str)
    assert json.loads(setting.words[1])["use_heterogeneous_vocab"] is True
    assert "an unknown token in place of each" in setting.differs
    rejecting = METHODS["speculative"](vocabulary="intersection", verify="rejection")
    assert "verify=match" in str(SERVING_ENGINES["vllm"]().setting(rejecting, drafts))
    for name in ("sglang", "llamacpp", "openvino"):
        assert "leave vocabulary out" in str(SERVING_ENGINES[name]().setting(method, drafts))


def test_special_tokens_are_no_words(pair: ModelRunners) -> None:
    """`<|mask|>` has one name in both vocabularies, and is in no intersection; what has no letters reads as the end."""
    target, draft = pair.target.checkpoint, pair["draft"].checkpoint
    assert differ(target, draft)
    assert not differ(target, target)
    assert shared_by(target, draft) == SHARED
    assert small_tokenizer().convert_tokens_to_ids("<|mask|>") not in SHARED
    assert other_tokenizer().convert_tokens_to_ids("</s>") == OTHER_END
