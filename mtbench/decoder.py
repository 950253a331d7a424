"""A checkpoint's own weights, run as few large operations: what the engine `graph` executes.

transformers writes a layer as some forty small operations, each a kernel to launch on a GPU and a call to dispatch on
a CPU. Here projections that read the same input are one product, angles of the rotary embedding are looked up, and what
stands between two products is one function, which a GPU gets compiled (torch.compile) into a kernel or two. Functions
take a layer's weights as arguments, so that one compilation serves all layers.

It serves layers of the Llama shape (Llama, Mistral, Qwen2, Qwen3 and their kin), found by their parts and not by name,
and it is proven before it is used: its logits for some random tokens must be those of transformers' modules.

R = rows, W = positions fed, N = R·W, C = hidden size, H = query heads, K = key heads, d = head size.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from mtbench import kernels
from mtbench.lane import Feed, KeyValues

PROBE_TOKENS = 24
# Of the logits' norm. In half precision rounding alone makes percents of it, a part left out or added far more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
SHAPES = 64  # that one function may be compiled for: models, and rows times width 1, one other, any


class Layer(NamedTuple):
    """The weights of one layer."""

    attention_norm: Tensor  # (C,)
    qkv: Tensor  # ((H + 2K)·d, C)
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # (d,)
    key_norm: Tensor | None
    out: Tensor  # (C, H·d)
    out_bias: Tensor | None
    mlp_norm: Tensor  # (C,)
    gate_up: Tensor  # (2·F, C)
    down: Tensor  # (C, F)


class Form(NamedTuple):
    """What all layers share."""

    heads: int
    key_heads: int
    size: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor], Tensor]  # (N, I) and (O, I) -> (N, O)
    norm: Callable[[Tensor, Tensor, float], Tensor]


class Attention(NamedTuple):
    """What a layer tells the attention function."""

    scale: float | None
    sliding_window: int | None
    softcap: float | None


def enter(
    x: Tensor, layer: Layer, form: Form, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, index: Tensor
) -> Tensor:
    """From hidden states (N, C) to rotated queries (N, H, d); keys and values go to `index` of the cache.

    `sin` has the sign of the half-rotation in it: its first half is negated.
    """
    heads, both = form.heads, form.heads + form.key_heads
    qkv = form.product(form.norm(x, layer.attention_norm, form.eps), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    qkv = qkv.view(len(x), both + form.key_heads, form.size)
    turned = qkv[:, :both]
    if layer.query_norm is not None and layer.key_norm is not None:
        query = form.norm(turned[:, :heads], layer.query_norm, form.eps)
        turned = torch.cat((query, form.norm(turned[:, heads:], layer.key_norm, form.eps)), 1)
    turned = turned * cos + turned.roll(form.size // 2, -1) * sin
    keys.index_copy_(0, index, turned[:, heads:])
    values.index_copy_(0, index, qkv[:, both:])
    return turned[:, :heads]


def leave(attended: Tensor, x: Tensor, layer: Layer, form: Form) -> Tensor:
    """From what attention gave (N, H·d) through the rest of the layer, (N, C)."""
    attended = form.product(attended, layer.out)
    x = x + (attended if layer.out_bias is None else attended + layer.out_bias)
    gate, up = form.product(form.norm(x, layer.mlp_norm, form.eps), layer.gate_up).chunk(2, -1)
    return x + form.product(form.activation(gate) * up, layer.down)


def between(
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    following: Layer,
    form: Form,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
) -> tuple[Tensor, Tensor]:
    """Out of one layer's attention and into the next one's: hidden states (N, C) and queries (N, H, d)."""
    x = leave(attended, x, layer, form)
    return x, enter(x, following, form, cos, sin, keys, values, index)


def head(x: Tensor, weight: Tensor, lm_head: Tensor, form: Form) -> Tensor:
    """Logits (…, V) of hidden states (…, C)."""
    return form.product(form.norm(x, weight, form.eps), lm_head)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as torch.compile makes it, with kernels tuned for a memory-bound step."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(function, fullgraph=True, options={"coordinate_descent_tuning": True})


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Decoder(nn.Module):
    """A transformers decoder's weights under another forward. Shares them; holds no copy."""

    def __init__(self, model: PreTrainedModel, attention: list[Attention], *, invariant: bool, compile: bool) -> None:
        super().__init__()
        inner, config = model.get_decoder(), model.config
        first = inner.layers[0].self_attn
        size = first.head_dim
        self.form = Form(
            heads=first.q_proj.out_features // size,
            key_heads=first.k_proj.out_features // size,
            size=size,
            eps=config.rms_norm_eps,
            activation=inner.layers[0].mlp.act_fn,
            product=kernels.linear if invariant else linear,
            norm=kernels.norm if invariant else kernels.norm_plain,
        )
        self.layers = [_layer(module) for module in inner.layers]
        self.attention = attention
        self.invariant = invariant
        self.embedding = inner.embed_tokens.weight
        self.norm = inner.norm.weight
        self.lm_head = model.get_output_embeddings().weight
        self.rotary = [inner.rotary_emb]  # in a list: a part of the model, not of this module
        self.like = self.embedding.new_empty(1, self.form.key_heads, size)  # keys or values of one position
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

    def forward(self, ids: Tensor, feed: Feed, cache: KeyValues, judged: int) -> Tensor:
        """Logits of the last `judged` positions, (R, judged, V), for ids (R, W)."""
        rows, width = ids.shape
        x = embedding(ids.flatten(), self.embedding)
        places = feed.positions.flatten()
        turn = (self.cos[places], self.sin[places])
        stores = [cache.storage(i, self.like, self.like) for i in range(len(self.layers))]
        query = self.run(enter)(x, self.layers[0], self.form, *turn, *stores[0], cache.index)
        for i, layer in enumerate(self.layers):
            heads = query.view(rows, width, *query.shape[1:]).transpose(1, 2)
            scale, sliding_window, softcap = self.attention[i]
            attended = feed.attend(heads, *cache.view(i), scale, sliding_window, softcap, self.invariant)
            attended = attended.reshape(rows * width, -1)
            if i + 1 == len(self.layers):
                x = self.run(leave)(attended, x, layer, self.form)
            else:
                onward = (self.layers[i + 1], self.form, *turn, *stores[i + 1], cache.index)
                x, query = self.run(between)(attended, x, layer, *onward)
        x = x.view(rows, width, -1)[:, width - judged :]
        logits: Tensor = self.run(head)(x.reshape(rows * judged, -1), self.norm, self.lm_head, self.form)
        return logits.view(rows, judged, -1)


def build(model: PreTrainedModel, *, invariant: bool = False, compile: bool | None = None) -> Decoder | None:
    """The decoder of a model; None if its layers have another shape or compute something else.

    `invariant`: on a GPU nothing depends on neighbours. `compile`: by default on a GPU only, where it pays, and never
    what has to be invariant, for a compiler decides by the number of rows.
    """
    compile = model.device.type == "cuda" and not invariant if compile is None else compile
    try:
        attention = _listen(model)
        decoder = Decoder(model, attention, invariant=invariant, compile=compile)
    except AttributeError:  # a part is missing: another shape
        return None
    return decoder if _agrees(model, decoder) else None


class _Listening(Feed):
    """A feed that notes what each layer tells the attention function."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *told: Any) -> Tensor:
        self.noted.append(Attention(*told))  # type: ignore[attr-defined]
        return super().attend(query, key, value, *told)


def _probe(model: PreTrainedModel, kind: type[Feed] = Feed) -> tuple[Tensor, Feed, KeyValues]:
    device = model.device
    ids = torch.randint(model.config.vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    places = torch.arange(PROBE_TOKENS, device=device)[None]
    feed = kind(places, places, torch.tensor([PROBE_TOKENS], device=device), PROBE_TOKENS)
    values = KeyValues()
    values.shape(1, PROBE_TOKENS)
    values.aim(feed)
    return ids.to(device), feed, values


def _listen(model: PreTrainedModel) -> list[Attention]:
    ids, feed, values = _probe(model, _Listening)
    noted: list[Attention] = []
    object.__setattr__(feed, "noted", noted)
    _modules_logits(model, ids, feed, values)
    return noted


@torch.inference_mode()
def _modules_logits(model: PreTrainedModel, ids: Tensor, feed: Feed, values: KeyValues) -> Tensor:
    out = model(input_ids=ids, position_ids=feed.positions, past_key_values=values, use_cache=True, feed=feed)
    logits: Tensor = out.logits
    return logits


@torch.inference_mode()
def _agrees(model: PreTrainedModel, decoder: Decoder) -> bool:
    """Are the logits for some random tokens those of the modules, up to rounding?"""
    want = _modules_logits(model, *_probe(model)).double()
    ids, feed, values = _probe(model)
    decoder.reach(PROBE_TOKENS)
    got = decoder(ids, feed, values, PROBE_TOKENS).double()
    return bool((got - want).norm() <= TOLERANCE[model.dtype] * want.norm())


def _layer(module: Any) -> Layer:
    """The weights of one layer; raises AttributeError if it has other parts."""
    attention, mlp = module.self_attn, module.mlp
    if extra := {name for name, _ in module.named_children()} - _PARTS:
        raise AttributeError(f"parts of another shape: {', '.join(sorted(extra))}")
    qkv, qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        attention_norm=module.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=module.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=mlp.down_proj.weight,
    )


_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def _joined(*products: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Several products of one input as one: weight and bias."""
    weight = _whole([p.weight for p in products])
    if products[0].bias is None:
        _lend(products, "weight", weight)
        return weight, None
    bias = _whole([p.bias for p in products])
    _lend(products, "weight", weight)
    _lend(products, "bias", bias)
    return weight, bias


def _whole(parts: list[Tensor]) -> Tensor:
    """Tensors stacked along their first dimension; the one they are views of, if it has been made before."""
    one_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if one_storage and all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts)):
        return parts[0].detach().as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
    return torch.cat([part.detach() for part in parts])


def _lend(products: tuple[nn.Linear, ...], name: str, whole: Tensor) -> None:
    """The modules' own tensors become views of `whole`, so that nothing is held twice."""
    lengths = [product.out_features for product in products]
    for product, part in zip(products, whole.split(lengths), strict=True):
        setattr(product, name, nn.Parameter(part, requires_grad=False))
