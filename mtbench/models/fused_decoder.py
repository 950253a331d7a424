"""A checkpoint's own weights, run as few large operations: what the engine `graph` executes.

transformers writes a layer as some forty small operations, each a kernel to launch on a GPU and a call to dispatch on
a CPU. Here projections that read the same input are one product, angles of the rotary embedding are looked up, and what
stands between two products is one function, which a GPU gets compiled (torch.compile) into a kernel or two; one
compilation serves all layers.

It serves layers of the Llama shape (Llama, Mistral, Qwen2, Qwen3 and their kin), found by their parts and not by name,
and the architecture is proven before it is used: a small random model of the same configuration must give the logits of
transformers' modules in float64.

R = rows, W = positions fed, N = R·W, C = hidden size, H = query heads, K = key heads, d = head size.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mtbench.errors import first_line
from mtbench.models import kernels
from mtbench.models.attention import ATTENTION, AttentionMetadata
from mtbench.models.kv_cache import KVCache

PROBE_TOKENS = 24
TOLERANCE = 1e-6  # of the logits' norm, in float64; norms are computed in float32
COMPILATIONS = 64  # that one function may have: a few per model and type


class UnsupportedArchitecture(Exception):
    """A model whose layers the decoder does not compute; says why."""


class Attention(NamedTuple):
    """What a layer tells the attention function."""

    scale: float | None
    sliding_window: int | None
    softcap: float | None


class Layer(nn.Module):
    """The weights of one layer, shared with transformers' module of it."""

    def __init__(self, module: Any, *, invariant: bool) -> None:
        """Raises AttributeError if the module has other parts."""
        super().__init__()
        attention, mlp = module.self_attn, module.mlp
        if extra := {name for name, _ in module.named_children()} - PARTS:
            raise AttributeError(f"a layer has other parts: {', '.join(sorted(extra))}")
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)  # ((H + 2K)·d, C)
        self.gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)  # (2·F, C)
        self.attention_norm: Tensor = module.input_layernorm.weight  # (C,)
        self.query_norm: Tensor | None = _weight(attention, "q_norm")  # (d,)
        self.key_norm: Tensor | None = _weight(attention, "k_norm")
        self.out: Tensor = attention.o_proj.weight  # (C, H·d)
        self.out_bias: Tensor | None = attention.o_proj.bias
        self.mlp_norm: Tensor = module.post_attention_layernorm.weight  # (C,)
        self.down: Tensor = mlp.down_proj.weight  # (C, F)
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.size: int = attention.head_dim
        self.heads: int = attention.q_proj.out_features // self.size
        self.key_heads: int = attention.k_proj.out_features // self.size
        self.eps: float = module.input_layernorm.variance_epsilon
        self.product: Callable[[Tensor, Tensor], Tensor] = kernels.linear if invariant else linear
        self.normed: Callable[[Tensor, Tensor, float], Tensor] = kernels.norm if invariant else kernels.norm_plain


PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def enter(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """From hidden states (N, C) to rotated queries (N, H, d); keys and values go to `index` of the cache.

    `sin` has the sign of the half-rotation in it: its first half is negated.
    """
    heads, both = layer.heads, layer.heads + layer.key_heads
    qkv = layer.product(layer.normed(x, layer.attention_norm, layer.eps), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    qkv = qkv.view(len(x), both + layer.key_heads, layer.size)
    turned = qkv[:, :both]
    if layer.query_norm is not None and layer.key_norm is not None:
        query = layer.normed(turned[:, :heads], layer.query_norm, layer.eps)
        turned = torch.cat((query, layer.normed(turned[:, heads:], layer.key_norm, layer.eps)), 1)
    turned = turned * cos + turned.roll(layer.size // 2, -1) * sin
    keys.index_copy_(0, index, turned[:, heads:])
    values.index_copy_(0, index, qkv[:, both:])
    return turned[:, :heads]


def leave(attended: Tensor, x: Tensor, layer: Layer) -> Tensor:
    """From what attention gave (N, H·d) through the rest of the layer, (N, C)."""
    attended = layer.product(attended, layer.out)
    x = x + (attended if layer.out_bias is None else attended + layer.out_bias)
    gate, up = layer.product(layer.normed(x, layer.mlp_norm, layer.eps), layer.gate_up).chunk(2, -1)
    return x + layer.product(layer.activation(gate) * up, layer.down)


def between(
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
    """Out of one layer's attention and into the next one's: hidden states (N, C) and queries (N, H, d)."""
    x = leave(attended, x, layer)
    return x, enter(x, following, cos, sin, keys, values, index)


def head(x: Tensor, layer: Layer, weight: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Of the last layer's hidden states (N, C): logits (N, V), and what they are read from, (N, C)."""
    read = layer.normed(x, weight, layer.eps)
    return layer.product(read, lm_head), read


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as torch.compile makes it, with kernels tuned by trial."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
    return torch.compile(function, fullgraph=True, options={"coordinate_descent_tuning": True})


def compilations() -> int:
    """How many there have been in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Decoder(nn.Module):
    """A transformers decoder's weights under another forward. Shares them; holds no copy."""

    def __init__(self, model: PreTrainedModel, attention: list[Attention], *, invariant: bool, compile: bool) -> None:
        """Raises AttributeError if the model has other parts."""
        super().__init__()
        inner = model.get_decoder()
        self.layers = nn.ModuleList(Layer(module, invariant=invariant) for module in inner.layers)
        self.attention, self.invariant = attention, invariant
        self.embedding: Tensor = inner.embed_tokens.weight
        self.norm: Tensor = inner.norm.weight
        self.lm_head: Tensor = model.get_output_embeddings().weight
        self.rotary = [inner.rotary_emb]  # in a list: a part of the model, not of this module
        self.like = self.embedding.new_empty(1, self.layers[0].key_heads, self.layers[0].size)  # a position's keys
        self.epoch = 0
        self.cos = self.sin = self.embedding.new_empty(0)
        self.run = compiled if compile else _as_written

    def reach(self, positions: int) -> None:
        """Have the angles of at least so many positions at hand."""
        if positions > len(self.cos):
            places = torch.arange(max(positions, 2 * len(self.cos)), device=self.embedding.device)
            cos, sin = self.rotary[0](self.embedding, places[None])
            sign = torch.ones_like(sin[0])
            sign[:, : sin.shape[-1] // 2] = -1
            self.cos, self.sin = cos[0][:, None], (sin[0] * sign)[:, None]
            self.epoch += 1

    def forward(
        self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (R, judged, V) of the last positions of ids (R, W); if `hidden`, also what they are read from."""
        rows, width = ids.shape
        layers, run = list(self.layers), self.run
        x = embedding(ids.flatten(), self.embedding)
        places = metadata.positions.flatten()
        turn = (self.cos[places], self.sin[places])
        stores = [cache.storage(i, self.like, self.like) for i in range(len(layers))]
        if run is compiled:
            _of_any_length(x, *turn, cache.index, *(tensor for pair in stores for tensor in pair))
        query = run(enter)(x, layers[0], *turn, *stores[0], cache.index)
        for i, layer in enumerate(layers):
            heads = query.view(rows, width, *query.shape[1:]).transpose(1, 2)
            scale, sliding_window, softcap = self.attention[i]
            attended = metadata.attend(heads, *cache.view(i), scale, sliding_window, softcap, self.invariant)
            attended = attended.reshape(rows * width, -1)
            if run is compiled:
                _of_any_length(attended, x)
            if i + 1 == len(layers):
                x = run(leave)(attended, x, layer)
            else:
                x, query = run(between)(attended, x, layer, layers[i + 1], *turn, *stores[i + 1], cache.index)
        x = x.view(rows, width, -1)[:, width - judged :].clone().view(rows * judged, -1)
        if run is compiled:
            _of_any_length(x)
        logits, read = run(head)(x, layers[-1], self.norm, self.lm_head)
        return logits.view(rows, judged, -1), read.view(rows, judged, -1) if hidden else None


def _of_any_length(*tensors: Tensor) -> None:
    """Tell the compiler that their first dimension varies, before it has seen it do so; but one alone is a case."""
    for tensor in tensors:
        if len(tensor) > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def build(model: PreTrainedModel, *, invariant: bool = False, compile: bool | None = None) -> Decoder:
    """The decoder of a model; raises Unserved if its layers have another shape or compute something else.

    `invariant`: on a GPU nothing depends on neighbours. `compile`: by default on a GPU only, where it pays, and never
    what has to be invariant, for a compiler decides by the number of rows.
    """
    compile = model.device.type == "cuda" and not invariant if compile is None else compile
    kind: Any = type(model.config)
    if reason := _disproof(kind, model.config.to_json_string(use_diff=False)):
        raise UnsupportedArchitecture(reason)
    try:
        return Decoder(model, _listen(model), invariant=invariant, compile=compile)
    except AttributeError as error:
        raise UnsupportedArchitecture(first_line(error)) from None


@cache
def _disproof(kind: type[PretrainedConfig], configuration: str) -> str | None:
    """Why an architecture is not served, or None: a small model of it, in float64, gave the logits of its modules.

    As many layers as it has, so that what differs from layer to layer is there; narrow, with few words, and with
    random norms and biases too, which fresh models have at one and zero.
    """
    settings = json.loads(configuration)
    heads = settings.get("num_attention_heads", 1)
    narrow = {"hidden_size": 8 * heads, "intermediate_size": 24, "vocab_size": 64, "head_dim": 8}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        config = kind.from_dict(settings | narrow | ends | {"dtype": "float64"})
        with torch.random.fork_rng([]), torch.inference_mode():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
        model.set_attn_implementation(ATTENTION)
        want = _modules_logits(model, *_probe(model))
        decoder = Decoder(model, _listen(model), invariant=False, compile=False)
        decoder.reach(PROBE_TOKENS)
        with torch.inference_mode():
            got, _ = decoder(*_probe(model), PROBE_TOKENS)
    except Exception as error:  # whatever another architecture is missing or cannot do
        return first_line(error)
    apart = float((got - want).norm() / want.norm())
    return None if apart <= TOLERANCE else f"its layers compute something else: logits are {apart:.2g} apart"


class _Listening(AttentionMetadata):
    """A feed that notes what each layer tells the attention function."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *told: Any) -> Tensor:
        self.noted.append(Attention(*told))  # type: ignore[attr-defined]
        return super().attend(query, key, value, *told)


def _probe(
    model: PreTrainedModel, kind: type[AttentionMetadata] = AttentionMetadata
) -> tuple[Tensor, AttentionMetadata, KVCache]:
    """Some random tokens, all in one row, and a cache for them."""
    device = model.device
    ids = torch.randint(model.config.vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    places = torch.arange(PROBE_TOKENS, device=device)[None]
    metadata = kind(places, places, torch.tensor([PROBE_TOKENS], device=device), PROBE_TOKENS)
    values = KVCache()
    values.shape(1, PROBE_TOKENS)
    values.set_batch(metadata)
    return ids.to(device), metadata, values


def _listen(model: PreTrainedModel) -> list[Attention]:
    """What each layer tells the attention function, in order."""
    ids, metadata, values = _probe(model, _Listening)
    noted: list[Attention] = []
    object.__setattr__(metadata, "noted", noted)
    _modules_logits(model, ids, metadata, values)
    return noted


@torch.inference_mode()
def _modules_logits(model: PreTrainedModel, ids: Tensor, metadata: AttentionMetadata, values: KVCache) -> Tensor:
    out = model(
        input_ids=ids, position_ids=metadata.positions, past_key_values=values, use_cache=True, metadata=metadata
    )
    logits: Tensor = out.logits
    return logits


def _weight(module: Any, name: str) -> Tensor | None:
    part = getattr(module, name, None)
    return None if part is None else part.weight


def _joined(*products: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Several products of one input as one: weight and bias, of which the modules' own become views."""
    joined: list[nn.Parameter | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(product, name) for product in products]
        if any(part is None for part in parts):
            joined.append(None)
            continue
        whole = nn.Parameter(_whole(parts), requires_grad=False)
        for product, part in zip(products, whole.split([len(part) for part in parts]), strict=True):
            setattr(product, name, nn.Parameter(part, requires_grad=False))
        joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias


def _whole(parts: list[Tensor]) -> Tensor:
    """Tensors stacked along their first dimension; the one they are views of, if it has been made before."""
    one_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if one_storage and all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts)):
        return parts[0].detach().as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    return torch.cat([part.detach() for part in parts])
