"""The fused decoder: a checkpoint's weights, run as few large operations. The engine `graph` executes it.

transformers computes a layer in about forty small operations, each a kernel launch on a GPU and a dispatched call on a
CPU. Here projections of the same input are one matrix product by the library, rotary angles are read from a table, and
the work between products is one operation (`mtbench.kernels`), which on a GPU is one kernel.

It supports layers of the Llama architecture (Llama, Mistral, Qwen2, Qwen3 and others). It recognises them by their
submodules, not by name, and checks each architecture before use: a small random model of the same configuration must
give the logits of transformers' modules in float64.

R = rows, W = positions fed, N = R·W, C = hidden size, H = query heads, K = key heads, d = head size.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PretrainedConfig, PreTrainedModel

from mtbench import kernels
from mtbench.errors import first_line
from mtbench.kernels import Norm
from mtbench.models import packed_weights
from mtbench.models.architectures import attention_of, small_copy
from mtbench.models.attention import ATTENTION, AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.models.self_check import Check, modules_logits, plain_logits

CHECK_TOKENS = 24
TOLERANCE = 1e-6  # of the logits' norm, in float64; RMS norms are computed in float32
SUBMODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class UnsupportedArchitecture(Exception):
    """The decoder cannot compute this model; the message says why."""


class Attention(NamedTuple):
    """A layer's arguments of the attention function."""

    scale: float | None
    sliding_window: int | None
    softcap: float | None


class Layer(nn.Module):
    """The weights of one layer, shared with its transformers module."""

    def __init__(self, module: Any, *, invariant: bool) -> None:
        """Take the weights of `module`. Raises AttributeError if its submodules differ from the Llama layer's."""
        super().__init__()
        attention, mlp = module.self_attn, module.mlp
        if extra := {name for name, _ in module.named_children()} - SUBMODULES:
            raise AttributeError(f"a layer has other parts: {', '.join(sorted(extra))}")
        eps: float = module.input_layernorm.variance_epsilon
        self.attention_norm = Norm(module.input_layernorm.weight, eps)
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)  # ((H + 2K)·d, C)
        self.norms: tuple[Norm, Norm] | None = None  # of each head of queries and of keys
        if hasattr(attention, "q_norm"):
            self.norms = Norm(attention.q_norm.weight, eps), Norm(attention.k_norm.weight, eps)
        self.out: Tensor = attention.o_proj.weight  # (C, H·d)
        self.out_bias: Tensor | None = attention.o_proj.bias
        self.mlp_norm = Norm(module.post_attention_layernorm.weight, eps)
        self.gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)  # (2·F, C)
        self.activate = kernels.swiglu if _is_silu(mlp.act_fn) else _gated(mlp.act_fn)
        self.down: Tensor = mlp.down_proj.weight  # (C, F)
        self.size: int = attention.head_dim
        self.key_heads: int = attention.k_proj.out_features // self.size
        self.linear: Callable[..., Tensor] = kernels.linear if invariant else linear


class Decoder(nn.Module):
    """Another forward pass over the weights of a transformers decoder. It shares them and holds no copy."""

    def __init__(self, model: PreTrainedModel, attention: list[Attention], *, invariant: bool = False) -> None:
        """Take the weights of `model`. Raises AttributeError if its modules differ from the Llama architecture's.

        `invariant`: every product and, on a GPU, all attention by the batch-invariant kernels.
        """
        super().__init__()
        inner = model.get_decoder()
        self.layers = nn.ModuleList(Layer(module, invariant=invariant) for module in inner.layers)
        self.attention, self.invariant = attention, invariant
        self.embedding: Tensor = inner.embed_tokens.weight
        first: Any = self.layers[0]
        self.norm = Norm(inner.norm.weight, first.attention_norm.eps)
        self.lm_head: Tensor = model.get_output_embeddings().weight
        self.rotary = [inner.rotary_emb]  # in a list, so that it does not become a submodule
        self.like = self.embedding.new_empty(1, first.key_heads, first.size)  # one position's keys
        self.epoch = 0  # reallocations of the rotary tables
        self.cos = self.sin = self.embedding.new_empty(0)

    def all_logits(self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        """Return the logits (R, W, V) of all positions of ids (R, W)."""
        self.reserve(metadata.view)
        logits: Tensor = self(ids, metadata, cache, ids.shape[1])
        return logits

    def reserve(self, positions: int) -> None:
        """Make the rotary tables cover at least this many positions."""
        if positions > len(self.cos):
            table = torch.arange(max(positions, 2 * len(self.cos)), device=self.embedding.device)
            cos, sin = self.rotary[0](self.embedding, table[None])
            sign = torch.ones_like(sin[0])
            sign[:, : sin.shape[-1] // 2] = -1
            self.cos, self.sin = cos[0][:, None], (sin[0] * sign)[:, None]
            self.epoch += 1

    def forward(self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int) -> Tensor:
        """Return logits (R, judged, V) of the last positions of ids (R, W). `x` (N, C) is the residual, in place."""
        rows, width = ids.shape
        layers: list[Any] = list(self.layers)
        positions = metadata.positions.flatten()
        angles = self.cos[positions], self.sin[positions]
        x, entering = kernels.embed(self.embedding, ids.flatten(), layers[0].attention_norm)
        for i, layer in enumerate(layers):
            following = layers[i + 1].attention_norm if i + 1 < len(layers) else self.norm
            cache.keep_feature(i, x)
            qkv = layer.linear(entering, layer.qkv, layer.qkv_bias)
            stores = cache.storage(i, self.like, self.like)
            query = kernels.rotate(qkv, angles, stores, cache.index, layer.norms)
            heads = query.view(rows, width, *query.shape[1:]).transpose(1, 2)
            attended = metadata.attend(heads, *cache.view(i), **self.attention[i]._asdict(), invariant=self.invariant)
            added = layer.linear(attended.reshape(len(x), -1), layer.out, layer.out_bias)
            entering = kernels.add_norm(x, added, layer.mlp_norm)
            activated = layer.activate(layer.linear(entering, layer.gate_up))
            entering = kernels.add_norm(x, layer.linear(activated, layer.down), following)
        if len(layers) in cache.taps:
            cache.keep_feature(len(layers), entering)
        last = entering.view(rows, width, -1)[:, width - judged :].flatten(0, 1)
        logits: Tensor = layers[-1].linear(last, self.lm_head)
        return logits.view(rows, judged, -1)


def build(model: PreTrainedModel, *, invariant: bool = False) -> Decoder:
    """Return the decoder of a model. Raises UnsupportedArchitecture if its layers compute anything else.

    Our kernels run if they pass the check of mtbench/models/self_check.py on this device. If not, they are switched off
    for the process, and PyTorch's operations must pass it. `invariant`: use batch-invariant kernels in all passes.
    """
    config_class: Any = type(model.config)
    if reason := attention_of(model.config)[1] or _mismatch(config_class, model.config.to_json_string(use_diff=False)):
        raise UnsupportedArchitecture(reason)
    try:
        decoder = Decoder(model, _attention_arguments(model), invariant=invariant)
    except AttributeError as error:
        raise UnsupportedArchitecture(first_line(error)) from None
    if not kernels.ours(decoder.embedding):
        if not invariant:
            packed_weights.pack(decoder)
        return decoder
    check = Check(model)
    if fault := check.fault(decoder.all_logits):
        kernels.switch_off(fault)
        if fault := check.fault(decoder.all_logits):
            raise UnsupportedArchitecture(f"without mtbench's kernels too, {fault}")
    return decoder


@cache
def _mismatch(config_class: type[PretrainedConfig], configuration: str) -> str | None:
    """Return why the decoder cannot compute an architecture, or None if it can.

    Compares the logits of decoder and transformers' modules on a small random copy in float64.
    """
    try:
        model = small_copy(config_class, configuration, torch.float64)
        model.set_attn_implementation(ATTENTION)
        with torch.inference_mode():
            expected = modules_logits(model, *_check_inputs(model))
            logits = Decoder(model, _attention_arguments(model)).all_logits(*_check_inputs(model))
    except Exception as error:  # other architectures fail in many ways
        return first_line(error)
    apart = float((logits - expected).norm() / expected.norm())
    return None if apart <= TOLERANCE else f"its layers compute something else: logits differ by {apart:.2g} (relative)"


class _RecordingMetadata(AttentionMetadata):
    """Metadata that records each layer's arguments of the attention function in `recorded`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
        self.recorded.append(Attention(*arguments))  # type: ignore[attr-defined]
        return super().attend(query, key, value, *arguments)


def _check_inputs(
    model: PreTrainedModel, metadata_class: type[AttentionMetadata] = AttentionMetadata
) -> tuple[Tensor, AttentionMetadata, KVCache]:
    device = model.device
    ids = torch.randint(model.config.vocab_size, (1, CHECK_TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(CHECK_TOKENS, device=device)[None]
    metadata = metadata_class(positions, positions, torch.tensor([CHECK_TOKENS], device=device), CHECK_TOKENS)
    cache = KVCache()
    cache.shape(1, CHECK_TOKENS)
    cache.set_batch(metadata)
    return ids.to(device), metadata, cache


def _attention_arguments(model: PreTrainedModel) -> list[Attention]:
    """Return each layer's arguments of the attention function, recorded in one forward pass of its modules."""
    ids, metadata, cache = _check_inputs(model, _RecordingMetadata)
    recorded: list[Attention] = []
    object.__setattr__(metadata, "recorded", recorded)  # the dataclass is frozen
    plain_logits(model, ids, metadata, cache)  # none of our kernels runs before its check
    return recorded


def _is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function is SiLU; transformers has several classes of it."""
    x = torch.linspace(-8, 8, 65)
    return torch.allclose(activation(x), silu(x))


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return activation(gate)·up as a function of gate and up concatenated."""

    def activate(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return activation(gate) * up

    return activate


def _joined(*linears: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Stack the weights and biases of linear layers of one input; the layers' own parameters become views of them."""
    joined: list[nn.Parameter | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in linears]
        if any(part is None for part in parts):
            joined.append(None)
            continue
        stacked = nn.Parameter(_stacked(parts), requires_grad=False)
        for module, part in zip(linears, stacked.split([len(part) for part in parts]), strict=True):
            setattr(module, name, nn.Parameter(part, requires_grad=False))
        joined.append(stacked)
    weight, bias = joined
    assert weight is not None
    return weight, bias


def _stacked(parts: list[Tensor]) -> Tensor:
    """Return the tensors stacked along their first dimension, without a copy if an earlier call stacked them."""
    one_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if one_storage and all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts)):
        return parts[0].detach().as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    return torch.cat([part.detach() for part in parts])
