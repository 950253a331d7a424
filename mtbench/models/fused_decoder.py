"""The fused decoder: a checkpoint's weights, run as few large operations. The engine `graph` executes it.

transformers computes a layer in about forty small operations, each a kernel launch on a GPU and a dispatched call on a
CPU. Here projections of the same input are one matrix product, rotary angles are read from a table, and the operations
between two attentions are one function, which torch.compile turns into a few kernels on a GPU; one compilation serves
all layers. Up to 128 positions a GPU runs our own kernels instead, seven to nine for a layer (`kernels.Operations`).

It supports layers of the Llama architecture (Llama, Mistral, Qwen2, Qwen3 and others). It recognises them by their
submodules, not by name, and checks each architecture before use: a small random model of the same configuration must
give the logits of transformers' modules in float64.

R = rows, W = positions fed, N = R·W, C = hidden size, H = query heads, K = key heads, d = head size.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mtbench import kernels
from mtbench.errors import first_line
from mtbench.kernels import Norm, NormInput
from mtbench.models import packed_weights
from mtbench.models.attention import ATTENTION, KERNEL_POSITIONS, AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.models.self_check import Check, modules_logits

CHECK_TOKENS = 24
TOLERANCE = 1e-6  # of the logits' norm, in float64; RMS norms are computed in float32
FEW = 128  # positions: `Operations` read weights once for so many; beyond, arithmetic takes longer than reading
PADDED = (16, 32, 64, FEW)  # to which `Operations` pad positions; each has its own kernels
MAX_COMPILATIONS = 64  # of one function: a few per model and type

# Options of torch.compile. benchmarks/codegen.py shows what each does to the generated code.
COMPILE: dict[str, Any] = {
    # A kernel is set up while the one before it ends (Hopper and later).
    "triton.enable_pdl": kernels.dependent_launch_off() is None,
    # Activations are rounded after every operation, as PyTorch does, so that a token gets the same values whether one
    # position is fed or several. Without patterns, products and additions stay apart: a product that adds rounds once.
    "emulate_precision_casts": True,
    "pattern_matcher": False,
    # A value of more operations is stored, not computed again by each reader. A product of one position would compute
    # SwiGLU or a norm for each of its outputs.
    "realize_opcount_threshold": 9,
}
TUNED = COMPILE | {"coordinate_descent_tuning": True}  # block sizes by measurement; products of one position in Triton


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
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)  # ((H + 2K)·d, C)
        self.gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)  # (2·F, C)
        self.attention_norm: Tensor = module.input_layernorm.weight  # (C,)
        self.query_norm: Tensor | None = getattr(getattr(attention, "q_norm", None), "weight", None)  # (d,)
        self.key_norm: Tensor | None = getattr(getattr(attention, "k_norm", None), "weight", None)
        self.out: Tensor = attention.o_proj.weight  # (C, H·d)
        self.out_bias: Tensor | None = attention.o_proj.bias
        self.mlp_norm: Tensor = module.post_attention_layernorm.weight  # (C,)
        self.down: Tensor = mlp.down_proj.weight  # (C, F)
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.size: int = attention.head_dim
        self.heads: int = attention.q_proj.out_features // self.size
        self.key_heads: int = attention.k_proj.out_features // self.size
        self.eps: float = module.input_layernorm.variance_epsilon
        self.linear: Callable[[Tensor, Tensor], Tensor] = kernels.linear if invariant else linear
        self.rms_norm: Callable[[Tensor, Tensor, float], Tensor] = kernels.norm if invariant else kernels.norm_plain


SUBMODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def before_attention(
    x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, index: Tensor
) -> Tensor:
    """Return the rotated queries (N, H, d) of hidden states (N, C); write keys and values at `index` of the cache.

    The first half of `sin` is negated, which gives the rotation its sign.
    """
    heads, both = layer.heads, layer.heads + layer.key_heads
    qkv = layer.linear(layer.rms_norm(x, layer.attention_norm, layer.eps), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    qkv = qkv.view(len(x), both + layer.key_heads, layer.size)
    rotated = qkv[:, :both]
    if layer.query_norm is not None and layer.key_norm is not None:
        query = layer.rms_norm(rotated[:, :heads], layer.query_norm, layer.eps)
        rotated = torch.cat((query, layer.rms_norm(rotated[:, heads:], layer.key_norm, layer.eps)), 1)
    rotated = rotated * cos + rotated.roll(layer.size // 2, -1) * sin
    keys.index_copy_(0, index, rotated[:, heads:])
    values.index_copy_(0, index, qkv[:, both:])
    return rotated[:, :heads]


def after_attention(attended: Tensor, x: Tensor, layer: Layer) -> Tensor:
    """Return the layer's output (N, C), given its attention's result (N, H·d) and its input `x` (N, C)."""
    attended = layer.linear(attended, layer.out)
    x = x + (attended if layer.out_bias is None else attended + layer.out_bias)
    gate, up = layer.linear(layer.rms_norm(x, layer.mlp_norm, layer.eps), layer.gate_up).chunk(2, -1)
    return x + layer.linear(layer.activation(gate) * up, layer.down)


def between_attentions(
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    following: Layer,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a layer's output (N, C) and the following layer's queries (N, H, d). One function, so that it fuses."""
    x = after_attention(attended, x, layer)
    return x, before_attention(x, following, cos, sin, keys, values, index)


def head(x: Tensor, layer: Layer, weight: Tensor, lm_head: Tensor) -> Tensor:
    """Return the logits (N, V) of the last layer's output (N, C)."""
    return layer.linear(layer.rms_norm(x, weight, layer.eps), lm_head)


@cache
def compiled(function: Callable[..., Any], *, prefill: bool = False) -> Callable[..., Any]:
    """Return `function` compiled by torch.compile, for decode steps with kernels tuned by measurement.

    The first call tunes for all sizes, and a decoder's first call is a prefill. So prefills have their own code; their
    options differ, or torch would take it from its caches for the decode steps.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    return torch.compile(function, fullgraph=True, options=COMPILE if prefill else TUNED)


def compilations() -> int:
    """Return the number of compilations in this process so far, by torch.compile and of our Triton kernels."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) + kernels.compilations()


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Decoder(nn.Module):
    """Another forward pass over the weights of a transformers decoder. It shares them and holds no copy."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: list[Attention],
        *,
        invariant: bool = False,
        compile: bool = False,
        operations: kernels.Operations | None = None,
    ) -> None:
        """Take the weights of `model`. Raises AttributeError if its modules differ from the Llama architecture's.

        `operations` run passes of few positions and, as they are batch-invariant, all passes with `invariant`. They are
        not used if a layer's activation is not SiLU.
        """
        super().__init__()
        inner = model.get_decoder()
        self.layers = nn.ModuleList(Layer(module, invariant=invariant) for module in inner.layers)
        self.attention, self.invariant = attention, invariant
        self.embedding: Tensor = inner.embed_tokens.weight
        self.norm: Tensor = inner.norm.weight
        self.lm_head: Tensor = model.get_output_embeddings().weight
        self.rotary = [inner.rotary_emb]  # in a list, so that it does not become a submodule
        self.like = self.embedding.new_empty(1, self.layers[0].key_heads, self.layers[0].size)  # one position's keys
        self.epoch = 0  # reallocations of the rotary tables
        self.cos = self.sin = self.embedding.new_empty(0)
        self.run = compiled if compile else _uncompiled
        self.run_prefill = partial(compiled, prefill=True) if compile else _uncompiled
        self.operations: kernels.Operations | None = None
        self.norms: list[Norm] = []  # of attention and MLP, layer by layer, then that of the LM head
        layers: list[Any] = list(self.layers)
        if operations is not None and all(_is_silu(layer.activation) for layer in layers):
            self.operations = operations
            weights = [weight for layer in layers for weight in (layer.attention_norm, layer.mlp_norm)]
            self.norms = [Norm.make(weight, layers[0].eps) for weight in (*weights, self.norm)]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels of `operations` by a pass of each padded width, so that no timed pass compiles them."""
        for width in PADDED:
            slots, cache = torch.arange(width, device=self.embedding.device)[None], KVCache()
            metadata = AttentionMetadata(slots, slots, slots[:, 0], width)
            cache.shape(1, width)
            cache.set_batch(metadata)
            self.reserve(width)
            self(torch.zeros_like(slots), metadata, cache, judged=width)

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
        """Return logits (R, judged, V) of the last positions of ids (R, W)."""
        if self.operations is not None and (self.invariant or ids.numel() <= FEW):
            return self._forward_few(self.operations, ids, metadata, cache, judged)
        rows, width = ids.shape
        layers: list[Any] = list(self.layers)
        compiles = self.run is compiled
        run = self.run if width <= KERNEL_POSITIONS else self.run_prefill
        x = embedding(ids.flatten(), self.embedding)
        positions = metadata.positions.flatten()
        angles = (self.cos[positions], self.sin[positions])
        stores = [cache.storage(i, self.like, self.like) for i in range(len(layers))]
        if compiles:
            _mark_dynamic(x, *angles, cache.index, *(tensor for pair in stores for tensor in pair))
        query = run(before_attention)(x, layers[0], *angles, *stores[0], cache.index)
        for i, layer in enumerate(layers):
            cache.keep_feature(i, x)
            heads = query.view(rows, width, *query.shape[1:]).transpose(1, 2)
            scale, sliding_window, softcap = self.attention[i]
            attended = metadata.attend(heads, *cache.view(i), scale, sliding_window, softcap, self.invariant)
            attended = attended.reshape(rows * width, -1)
            if compiles:
                _mark_dynamic(attended, x)
            if i + 1 == len(layers):
                x = run(after_attention)(attended, x, layer)
            else:
                following = (layers[i + 1], *angles, *stores[i + 1], cache.index)
                x, query = run(between_attentions)(attended, x, layer, *following)
        if len(layers) in cache.taps:
            cache.keep_feature(len(layers), layers[-1].rms_norm(x, self.norm, layers[-1].eps))
        x = x.view(rows, width, -1)[:, width - judged :].clone().view(rows * judged, -1)
        if compiles:
            _mark_dynamic(x)
        logits: Tensor = run(head)(x, layers[-1], self.norm, self.lm_head)
        return logits.view(rows, judged, -1)

    def _forward_few(
        self,
        run: kernels.Operations,
        ids: Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        judged: int,
    ) -> Tensor:
        """Return the same as `forward`. The residual `x` is updated in place; `entering` is the next norm's input."""
        rows, width = ids.shape
        positions = metadata.positions.flatten()
        x, entering = run.embed(ids.flatten(), self.embedding, self.norms[0])
        layers: list[Any] = list(self.layers)
        for i, layer in enumerate(layers):
            cache.keep_feature(i, x)
            attention_norm, mlp_norm, next_norm = self.norms[2 * i : 2 * i + 3]
            keys, values = cache.storage(i, self.like, self.like)
            qkv = run.norm_product(entering, attention_norm, layer.qkv, layer.qkv_bias)
            tables = (positions, self.cos, self.sin)
            query = run.rotate(qkv, *tables, keys, values, cache.index, layer.query_norm, layer.key_norm, layer.eps)
            scale, sliding_window, softcap = self.attention[i]
            attended = run.attend(
                query.view(rows, width, *query.shape[1:]).transpose(1, 2),
                *cache.view(i),
                metadata.mask(sliding_window),
                metadata.length,
                layer.size**-0.5 if scale is None else scale,
                softcap,
            )
            entering = run.add_product(x, attended.view(len(x), -1), layer.out, layer.out_bias, mlp_norm)
            activated = run.norm_swiglu(entering, mlp_norm, layer.gate_up)
            entering = run.add_product(x, activated, layer.down, None, next_norm)
        last = NormInput(
            entering.weighted.view(rows, width, -1)[:, width - judged :].flatten(0, 1),
            entering.squares.view(-1, rows, width)[:, :, width - judged :].flatten(1),
        )
        if len(layers) in cache.taps:
            cache.keep_feature(len(layers), kernels.norm(x, *self.norms[-1][:2]))
        return run.norm_product(last, self.norms[-1], self.lm_head).view(rows, judged, -1)


def _mark_dynamic(*tensors: Tensor) -> None:
    """Mark first dimensions as dynamic before the first compilation, except those of 1, which get their own code."""
    for tensor in tensors:
        if len(tensor) > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def build(model: PreTrainedModel, *, invariant: bool = False, compile: bool | None = None) -> Decoder:
    """Return the decoder of a model. Raises UnsupportedArchitecture if its layers compute anything else.

    Our kernels run if they pass the check of mtbench/models/self_check.py on this device. If not, they are switched off
    for the process, and PyTorch's must pass it.

    `invariant`: on a GPU, use batch-invariant operations in all passes, not only in those of few positions. `compile`:
    by default on a GPU only, where it is faster, and not with `invariant`, because compiled code depends on the number
    of rows.
    """
    if compile is None:
        compile = model.device.type == "cuda" and not invariant
    config_class: Any = type(model.config)
    if reason := _mismatch(config_class, model.config.to_json_string(use_diff=False)):
        raise UnsupportedArchitecture(reason)
    try:
        size = model.get_decoder().layers[0].self_attn.head_dim
        operations = kernels.operations(model.get_decoder().embed_tokens.weight, size)
        attention = _attention_arguments(model)
        make = partial(Decoder, model, attention, invariant=invariant, compile=compile)
        decoder = make(operations=operations)
    except AttributeError as error:
        raise UnsupportedArchitecture(first_line(error)) from None
    if decoder.operations is None:
        if not invariant and not compile:
            packed_weights.pack(decoder)
        return decoder
    check = Check(model)
    fault = check.fault(decoder.all_logits, decoder.warm_up)
    if fault is None and kernels.at_rest():
        return decoder
    kernels.switch_off(fault or "counters of a product are not zero after it")
    decoder = make()
    if fault := check.fault(decoder.all_logits):
        raise UnsupportedArchitecture(f"without mtbench's kernels too, {fault}")
    return decoder


@cache
def _mismatch(config_class: type[PretrainedConfig], configuration: str) -> str | None:
    """Return why the decoder cannot compute an architecture, or None if it can.

    Compares the logits of decoder and transformers' modules on a small random model in float64, without and with the
    operations for few positions. The model is narrow and has a small vocabulary, but all layers, since layers may
    differ. Norms and biases are random too; a newly initialised model has ones and zeros, which would hide errors. The
    weights keep the size of what passes them: larger ones let thirty layers amplify the rounding of norms to 1e-2.
    """
    settings = json.loads(configuration)
    heads = settings.get("num_attention_heads", 1)
    narrow = {"hidden_size": 8 * heads, "intermediate_size": 24, "vocab_size": 64, "head_dim": 8}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        config = config_class.from_dict(settings | narrow | ends | {"dtype": "float64"})
        with torch.random.fork_rng([]), torch.inference_mode():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
            for parameter in model.parameters():
                vector = parameter.ndim == 1  # a norm or a bias
                parameter.copy_(torch.randn_like(parameter) * (0.3 if vector else parameter.shape[-1] ** -0.5) + vector)
        model.set_attn_implementation(ATTENTION)
        expected = modules_logits(model, *_check_inputs(model))
        logits = torch.stack([_decoder_logits(model, operations) for operations in (None, kernels.PLAIN)])
    except Exception as error:  # other architectures fail in many ways
        return first_line(error)
    apart = float((logits - expected).norm() / expected.norm())
    return None if apart <= TOLERANCE else f"its layers compute something else: logits differ by {apart:.2g} (relative)"


@torch.inference_mode()
def _decoder_logits(model: PreTrainedModel, operations: kernels.Operations | None) -> Tensor:
    """Return the logits of the decoder."""
    return Decoder(model, _attention_arguments(model), operations=operations).all_logits(*_check_inputs(model))


class _RecordingMetadata(AttentionMetadata):
    """Metadata that records each layer's arguments of the attention function in `recorded`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
        self.recorded.append(Attention(*arguments))  # type: ignore[attr-defined]
        return super().attend(query, key, value, *arguments)


def _check_inputs(
    model: PreTrainedModel, metadata_class: type[AttentionMetadata] = AttentionMetadata
) -> tuple[Tensor, AttentionMetadata, KVCache]:
    """Return one row of random tokens, its metadata and a KV cache for it."""
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
    modules_logits(model, ids, metadata, cache)
    return recorded


def _is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function is SiLU; transformers has several classes of it."""
    x = torch.linspace(-8, 8, 65)
    return torch.allclose(activation(x), silu(x))


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
