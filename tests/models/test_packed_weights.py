"""Weights packed for a CPU: the logits are those of the stored weights, and small models keep theirs."""

from typing import Any

import pytest
import torch
from small import small_config
from transformers import AutoModelForCausalLM

from mtbench.models import fused_decoder, packed_weights
from mtbench.models.attention import ATTENTION
from mtbench.models.self_check import modules_logits


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(), dtype=torch.float32).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def is_packed(decoder: fused_decoder.Decoder) -> bool:
    return decoder.lm_head.is_mkldnn


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_logits(model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers' modules, which keep their own weights."""
    model = model.to(dtype)
    monkeypatch.setattr(packed_weights, "FROM_BYTES", 0)
    decoder = fused_decoder.build(model)
    assert is_packed(decoder)
    inputs = fused_decoder._check_inputs(model)
    ours, theirs = decoder.all_logits(*inputs).float(), modules_logits(model, *inputs).float()
    assert float((ours - theirs).norm() / theirs.norm()) < {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]


def test_what_is_not_packed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights, which caches hold; an invariant decoder; a machine whose PyTorch has no oneDNN."""
    assert not is_packed(fused_decoder.build(model))
    monkeypatch.setattr(packed_weights, "FROM_BYTES", 0)
    assert not is_packed(fused_decoder.build(model, invariant=True))

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("_reorder_linear_weight")

    monkeypatch.setattr(packed_weights, "packed_matrix", missing)
    assert not is_packed(fused_decoder.build(model))
