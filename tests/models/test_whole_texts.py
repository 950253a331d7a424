"""The judge of engines: whole texts, several in a forward, of models that mtbench's loop decodes and of others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small import save_small, small_tokenizer

from mtbench.errors import UserError
from mtbench.measure.reading import Answer, Reading
from mtbench.models import whole_texts
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import WholeTexts, tree_logits

TEXTS = [[3, 4, 5, 6, 7, 8, 9], [5, 9, 1], [30, 31, 2, 7, 1, 12, 13, 14, 15, 2, 3, 4], [8, 8]]
JUDGED = [4, 2, 6, 0]
BEFORE = [len(text) - n for text, n in zip(TEXTS, JUDGED, strict=True)]
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
RECURRENT = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "shared_intermediate_size": 32,
    "num_local_experts": 0,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FEW_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridConfig": RECURRENT | {"layer_types": ["mamba", "attention"]},
    "Qwen3NextConfig": LINEAR
    | FEW_EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "GptOssConfig": FEW_EXPERTS | {"sliding_window": 4},
    "Gemma3TextConfig": {"sliding_window": 4},
    "Phi3Config": {"rope_parameters": LONG, "original_max_position_embeddings": 8},
}


def judge(folder: Path, name: str, **changes: Any) -> WholeTexts:
    """The judge in float64 of a small model of this configuration, with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SHAPE | MODELS.get(name, {}) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    read = WholeTexts(str(folder), "float64", "cpu", offline=True)
    read.model.set_experts_implementation("eager")  # torch's grouped products are not for float64
    return read


@pytest.mark.parametrize("name", MODELS)
def test_texts_beside_each_other_have_the_logits_of_each_alone(name: str, tmp_path: Path) -> None:
    """Padding changes none, also not that of a text whose neighbour is so long that rope has other angles for it."""
    read = judge(tmp_path, name)
    found: dict[int, torch.Tensor] = {}
    for group in read.groups(BEFORE, JUDGED):
        found |= dict(zip(group, read.logits([TEXTS[i] for i in group], [JUDGED[i] for i in group]), strict=True))
    assert (len(read.groups(BEFORE, JUDGED)) > 1) == (name == "Phi3Config")
    with torch.inference_mode():
        for i, (text, judged) in enumerate(zip(TEXTS, JUDGED, strict=True)):
            alone = read.model(input_ids=torch.tensor([text])).logits[0, len(text) - judged - 1 : -1]
            torch.testing.assert_close(found[i], alone, rtol=1e-9, atol=1e-9)


def test_it_judges_as_the_modules_over_a_cache_do(tmp_path: Path) -> None:
    """With a logit of every row, also of the one that stands for no token."""
    save_small(tmp_path, 1)
    read = WholeTexts(str(tmp_path), "float32", "cpu", offline=True)
    [logits] = read.logits([[3, 4, 5, 6, 7]], [3])
    assert logits.isfinite().all()
    answer = Answer([3, 4], [5, 6, 7])
    [(emitted, _)] = Reading("", ModelRunner(load(str(tmp_path)))).forced_logits([answer])
    torch.testing.assert_close(logits.gather(1, torch.tensor([[5], [6], [7]]))[:, 0], emitted)


@pytest.mark.parametrize("width", [3, 1024])
@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma3TextConfig"])
def test_texts_that_begin_alike_have_the_logits_of_each_alone(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a tree that several forwards feed; one text is the beginning of another, one has no judged token."""
    monkeypatch.setattr(whole_texts, "MASKED_AT_ONCE", 100)
    texts, judged = [[3, 4, 5, 6, 7], [3, 4, 5, 9], [3, 4, 5, 6], [8, 4, 5, 6, 7, 2, 3], [3, 4, 9, 9]], [2, 2, 3, 5, 0]
    expected = judge(tmp_path, name).logits(texts, judged)
    runner = ModelRunner(load(str(tmp_path), dtype=torch.float64))
    found = [torch.full(of.shape, torch.nan, dtype=of.dtype) for of in expected]
    for n, first, logits in tree_logits(runner, texts, judged, width):
        found[n][first : first + len(logits)] = logits
    for one, other in zip(found, expected, strict=True):
        known = other.index_fill(1, runner.checkpoint.suppressed, -torch.inf)
        torch.testing.assert_close(one, known, rtol=1e-9, atol=1e-9)


def test_a_forward_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the tokens that it reads and in the logits that it computes; a longer text is alone."""
    save_small(tmp_path, 1)
    read = WholeTexts(str(tmp_path), "float32", "cpu", offline=True)
    assert read.groups(BEFORE, JUDGED) == [[3, 1, 0, 2]]
    monkeypatch.setattr(whole_texts, "FED_AT_ONCE", 10)
    assert read.groups(BEFORE, JUDGED) == [[3, 1], [0], [2]]
    monkeypatch.setattr(whole_texts, "FED_AT_ONCE", 100)
    monkeypatch.setattr(whole_texts, "LOGITS_AT_ONCE", 1)
    assert read.groups(BEFORE, JUDGED) == [[3], [1], [0], [2]]


def test_what_it_cannot_judge_is_said(tmp_path: Path) -> None:
    """Ids that the model does not have, and a model whose logits are no numbers."""
    read = judge(tmp_path, "LlamaConfig")
    with pytest.raises(UserError, match="the answers have id 40, and the model has 40 ids"):
        read.logits([[1, 40]], [1])
    read.model.get_output_embeddings().weight.data[3, 3] = float("nan")
    with pytest.raises(UserError, match=r"the judge's logits are not numbers .* in float64"):
        read.logits([[1, 2]], [1])
