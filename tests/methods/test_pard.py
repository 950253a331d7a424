"""A PARD draft: a causal model whose config.json names its mask token, and which predicts K tokens in a forward."""

import copy
import json
from functools import partial
from pathlib import Path

import naive
import pytest
import torch
from decoding_cases import MANY, PROMPTS, decode_prompts, naive_logits
from small import END, small_checkpoint, small_tokenizer
from torch import Tensor

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.plan.plan import RunRequest

PARD = 39  # a row of the embedding that no token stands for, as in PARD's Qwen2.5; the tokenizer's own mask is another
BUDGET, AHEAD = 14, 4


def save_pard(folder: Path, noise: float = 0.02, pard_token: int | None = PARD) -> Path:
    """Save a model much like `small_checkpoint()`, as PARD's training does: in its config.json is the mask token."""
    model = copy.deepcopy(small_checkpoint().model).float()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.config.pard_token, model.config.spd_type = pard_token, "pard"
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelRunners:
    """A target, and a PARD draft that was read from its folder."""
    draft = load(str(save_pard(tmp_path_factory.mktemp("pard"))), dtype=torch.float64)
    assert draft.mask_id == PARD
    return ModelRunners("ar", {"ar": ModelRunner(small_checkpoint()), "draft": ModelRunner(draft)})


def recomputed(pair: ModelRunners, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return tokens and commits: one forward over text and K-1 masks a step, everything computed anew."""
    draft, target = naive_logits(pair["draft"]), naive_logits(pair.target)

    def drafted(text: list[int], masks: int) -> Tensor:
        return draft(text + [PARD] * masks)[-masks - 1 :]

    return naive.speculative(target, drafted, prompt, ahead=AHEAD, each=AHEAD, budget=BUDGET, end=END)


def test_it_drafts_all_at_once_as_everything_computed_anew(pair: ModelRunners) -> None:
    """Alone, in refilled rows of different lengths, in 16 rows, in the shapes of a GPU: the same."""
    method, prompts = METHODS["speculative"](ahead=AHEAD, per_forward="all"), [*PROMPTS, *MANY]
    want = [recomputed(pair, prompt) for prompt in prompts]
    assert len({n for _, commits in want for n in commits}) > 2
    for rows, tight in ((1, True), (3, False), (16, False)):
        got, timing = decode_prompts(method, pair, prompts, BUDGET, rows=rows, make=partial(Batch, tight=tight))
        assert [(g.token_ids, g.commits) for g in got] == want
        assert timing.miscounted == 0
        assert all(g.draft_forwards == g.forwards for g in got)


def test_all_is_for_drafts_that_say_they_know_masks(tmp_path: Path) -> None:
    """A model with a spare row might know none: it would draft noise. PARD writes -1 for a model without masks."""
    target = str(save_pard(tmp_path / "ar", pard_token=None))

    def plan(draft: Path, spec: str) -> None:
        checkpoints = {"ar": target, "draft": str(draft)}
        make_plan(RunRequest(checkpoint=checkpoints, method=[spec], limit=1, max_new_tokens=4, device="cpu"))

    plan(save_pard(tmp_path / "pard"), "speculative:per_forward=all")
    for token in (None, -1):
        draft = save_pard(tmp_path / f"no {token}", pard_token=token)
        plan(draft, "speculative:per_forward=2")
        with pytest.raises(UserError, match=r"per_forward=all needs mask tokens, and .* does not say that it was"):
            plan(draft, "speculative:per_forward=all")
    with pytest.raises(UserError, match="pard_token is 40, and the embedding has 40 rows"):
        plan(save_pard(tmp_path / "wrong", pard_token=40), "speculative")


def test_in_vllm_it_drafts_all_at_once() -> None:
    """Its configuration has no number of drafts a forward; fewer than all are refused."""
    engine, drafts = SERVING_ENGINES["vllm"](), {"draft": "amd/PARD-Llama-3.2-1B"}
    setting = engine.setting(METHODS["speculative"](ahead=8, per_forward="all"), drafts)
    assert not isinstance(setting, str)
    assert json.loads(setting.words[1]) == {
        "method": "draft_model",
        "model": "amd/PARD-Llama-3.2-1B",
        "num_speculative_tokens": 8,
        "parallel_drafting": True,
    }
    assert "per_forward=all" in str(engine.setting(METHODS["speculative"](ahead=8, per_forward=4), drafts))
    assert "per_forward=1" in str(
        SERVING_ENGINES["sglang"]().setting(METHODS["speculative"](per_forward="all"), drafts)
    )
