"""The attention mask of a packed batch: per pair of tokens, per tile, and in compiled layers."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from small import MASK, small_config
from thinned import one_in
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Gemma2Config

from mtbench.models.attention import ATTENTION
from mtbench.training.objectives import Ar, BlockDiffusion, Mars, Medusa, Objective, Special
from mtbench.training.packing import AttentionMask, Example, Packed, TrainingSequence, attend_blocks, pack

TILE = 128  # of FlexAttention
OBJECTIVES = (Ar(), Mars(), Mars(block_size=3, layout="anchored"), BlockDiffusion(), Medusa())


@pytest.fixture
def differentiable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let FlexAttention compute gradients on a CPU: it has no kernel for that, but its unfused definition works."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed(objective: Objective, seed: int = 0, *, rows: int = 2, length: int = 2 * TILE) -> Packed:
    """Random conversations, as many per row as fit; the last row is half empty."""
    rng = Random(seed)
    random = torch.Generator().manual_seed(seed)
    filled: list[list[TrainingSequence]] = [[] for _ in range(rows)]
    for row in filled:
        room = length if row is not filled[-1] else length // 2
        while True:
            tokens = rng.randrange(20, 60)
            ids = torch.tensor([rng.randrange(20) for _ in range(tokens)])
            sequence = objective.build(Example(ids, rng.randrange(1, tokens // 2)), Special(MASK, 1), random)
            room -= len(sequence.ids)
            if room < 0:
                break
            row.append(sequence)
    return pack(filled, length, len(objective.parts))


def tiles(seen: Tensor) -> Tensor:
    """(R, T, T) to (R, T / TILE, T / TILE, TILE²)."""
    rows, length, _ = seen.shape
    return seen.view(rows, length // TILE, TILE, length // TILE, TILE).transpose(2, 3).flatten(3)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_the_block_mask_has_the_tiles_with_an_allowed_pair(objective: Objective, window: int | None) -> None:
    """The rule is evaluated per pair only in tiles where some pairs are not allowed."""
    mask = AttentionMask(packed(objective, length=4 * TILE))
    dense, blocks = tiles(mask.dense(window)), mask.blocks(window)
    assert torch.equal(blocks.to_dense().squeeze(1).bool(), dense.any(-1))
    assert torch.equal(blocks.full_kv_num_blocks.squeeze(1), dense.all(-1).sum(-1))


@pytest.mark.parametrize(
    ("objective", "window", "softcap"), [(Mars(), None, None), *((each, 9, 2.0) for each in OBJECTIVES)], ids=str
)
@pytest.mark.usefixtures("differentiable")
def test_attention_by_tiles_equals_attention_by_pairs(
    objective: Objective, window: int | None, softcap: float | None
) -> None:
    """Outputs and gradients of query, key and value; two query heads share a key head."""
    batch = packed(objective)
    rows, length = batch.ids.shape
    torch.manual_seed(0)
    query, key, value = inputs = [torch.randn(rows, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    for tensor in inputs:
        tensor.requires_grad_()
    weight = torch.randn(rows, length, 4, 8, dtype=torch.float64)
    mask = AttentionMask(batch).prepare([window], 2, torch.float64)

    def with_gradients(out: Tensor) -> tuple[Tensor, ...]:
        return out, *torch.autograd.grad((out * weight).sum(), inputs)

    expected = with_gradients(mask.attend(query, key, value, 0.3, window, softcap))
    got = with_gradients(attend_blocks(query, key, value, mask.blocks(window), 0.3, softcap))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


class Tiled(AttentionMask):
    """The mask in blocks, as on a GPU, on a CPU."""

    def prepare(self, sliding_windows: Iterable[int | None], group: int, dtype: torch.dtype) -> "Tiled":
        self._masks = {window: self.blocks(window) for window in sliding_windows}
        return self


WINDOWED = small_config(Gemma2Config, num_hidden_layers=2, head_dim=8, sliding_window=9, attn_logit_softcapping=5.0)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("config", "graphs"), one_in(2, [(WINDOWED, 2), (small_config(num_hidden_layers=2), 1)]), ids=["gemma2", "qwen2"]
)
@pytest.mark.usefixtures("differentiable")
def test_compiled_layers_give_the_same_gradients_for_every_batch_of_a_shape(config: Any, graphs: int) -> None:
    """One graph per kind of layer, without graph breaks; another mask does not compile it again."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    batches = [packed(Mars(), seed) for seed in range(2)]

    def gradients(kind: type[AttentionMask], batch: Packed) -> list[Tensor]:
        model.zero_grad()
        attention_mask = kind(batch).prepare({None, getattr(config, "sliding_window", None)}, 2, model.dtype)
        out = model.base_model(
            input_ids=batch.ids, position_ids=batch.position, use_cache=False, metadata=attention_mask
        )
        out.last_hidden_state.flatten(0, 1)[batch.predictor].square().mean().backward()
        return [parameter.grad for parameter in model.base_model.parameters()]

    expected = [gradients(AttentionMask, batch) for batch in batches]
    for layer in model.base_model.layers:
        layer.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    counters.clear()
    got = [gradients(Tiled, batches[0])]
    assert counters["stats"]["unique_graphs"] == graphs
    with torch._dynamo.config.patch(error_on_recompile=True):
        got += [gradients(Tiled, batch) for batch in batches[1:]]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)
