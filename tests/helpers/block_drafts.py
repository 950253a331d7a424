"""Block drafts in each published format, with random weights, and what they draft by plain torch without a cache."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small import MASK, VOCABULARY
from torch import Tensor
from torch.nn.functional import gelu, linear, one_hot, silu

from mtbench.models.runner import ModelRunner

WIDTH, HEADS, GROUPS, SIZE, INNER, RANK, BLOCK = 32, 4, 2, 16, 24, 6, 5
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,  # angles differ much between neighbours
    "rope_scaling": None,
    "attention_bias": False,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "num_target_layers": 3,
    "block_size": BLOCK,
}
DEEPSPEC = {**SHAPE, "architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "num_anchors": 512}
DSPARK = {
    **DEEPSPEC,
    "target_layer_ids": [-1, 1],
    "markov_rank": RANK,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "z-lab": {
        **SHAPE,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK},
    },
    "dflash": {**DEEPSPEC, "target_layer_ids": [0, 1], "markov_rank": 0, "enable_confidence_head": False},
    "vanilla": {**DSPARK, "markov_head_type": "vanilla"},
    "gated": {**DSPARK, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {**DSPARK, "markov_head_type": "rnn"},
    "domino": {
        **SHAPE,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "projector_type": "domino",
            "mask_token_id": MASK,
            "shift_label": True,
            "target_layer_ids": [0, 2],
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": RANK,
            "emb_dim": 7,
        },
    },
    "jetspec": {
        **SHAPE,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"causal_head": True, "target_layer_ids": [0, 2], "mask_token_id": MASK},
    },
}
SECOND: dict[str, Any] = {
    "conv_kernel_size": 3,
    "conv_group_size": 8,
    "selector_rank": RANK,
    "selector_top_k": 3,
    "input_embedding_scale": 1.5,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 4.0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 3}
ZLAB = {"target_layer_ids": [0, 2], "mask_token_id": MASK}
CONFIGS |= {
    "dflash2": {
        **SHAPE,
        **SLIDING,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**SECOND, **ZLAB},
        "selector_rank": 99,  # the nested entry has precedence
    },
    "dflash2 flat": {
        **SHAPE,
        **SLIDING,
        **SECOND,
        **ZLAB,
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "conv_kernel_size": BLOCK + 1,
    },
}
GEMMA: dict[str, Any] = {
    **{name: value for name, value in DSPARK.items() if not name.startswith("rope")},
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_unified_text",
    "markov_head_type": "vanilla",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
    },
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 4.0,
    "hidden_size_per_layer_input": 0,
}
CONFIGS |= {"gemma": GEMMA, "gemma values": {**GEMMA, "attention_k_eq_v": False, "target_layer_ids": [0, 1]}}
CODEBOOKS = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a format; nested ones have precedence."""
    return {**config, **config.get("dflash_config", {})}


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a draft by the names of its format, without embedding and LM head."""
    torch.manual_seed(0)
    settings = settings_of(config)
    taps = len(settings["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, taps * WIDTH), "hidden_norm.weight": (WIDTH,)}
    shapes["norm.weight"] = (WIDTH,)
    for layer in range(config["num_hidden_layers"]):
        inner = {
            "self_attn.q_proj": (HEADS * SIZE, WIDTH),
            "self_attn.k_proj": (GROUPS * SIZE, WIDTH),
            "self_attn.v_proj": (GROUPS * SIZE, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * SIZE),
            "self_attn.q_norm": (SIZE,),
            "self_attn.k_norm": (SIZE,),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
        }
        if config["architectures"] == GEMMA["architectures"]:
            inner |= gemma_shapes(config)
            shapes[f"layers.{layer}.layer_scalar"] = (1,)
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items() if shape}
    if config.get("markov_rank"):
        shapes |= {
            "markov_head.markov_w1.weight": (VOCABULARY, RANK),
            "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        }
        wide = {"gated": ("gate_proj", RANK, WIDTH + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + WIDTH)}
        if config["markov_head_type"] in wide:
            name, out, read = wide[config["markov_head_type"]]
            shapes |= {f"markov_head.{name}.weight": (out, read), f"markov_head.{name}.bias": (out,)}
    if size := config.get("dflash_config", {}).get("gru_hidden_dim"):
        inner = config["dflash_config"]["emb_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * size, WIDTH), "prefix_gru.weight_hh_l0": (3 * size, size)}
        shapes |= {"embed_proj.0.weight": (inner, WIDTH + size), "embed_proj.2.weight": (VOCABULARY, inner)}
    if taps_of_block := settings.get("conv_kernel_size"):
        groups = WIDTH // settings["conv_group_size"]
        for name in [f"layers.{layer}.{part}" for layer in range(2) for part in ("attention_conv", "mlp_conv")]:
            shapes[f"{name}.base_kernel"] = (2, taps_of_block, WIDTH)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps_of_block * groups, WIDTH)
        stored = ".weight" if "dflash_config" in config else ""
        shapes |= {f"{name}{stored}": (VOCABULARY, RANK) for name in CODEBOOKS}
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, WIDTH)
    if config.get("enable_confidence_head"):
        read = WIDTH + RANK * config["confidence_head_with_markov"]
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return {
        name: torch.randn(shape).double() * (0.3 if len(shape) > 1 else 0.2) + ("norm" in name or "scalar" in name)
        for name, shape in shapes.items()
    }


def gemma_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What differs in a layer of Gemma 4."""
    size, own = config["global_head_dim"], not config["attention_k_eq_v"]
    keys = size * (GROUPS if own else config["num_global_key_value_heads"])
    return {
        "self_attn.q_proj": (HEADS * size, WIDTH),
        "self_attn.k_proj": (keys, WIDTH),
        "self_attn.v_proj": (keys, WIDTH) if own else (),
        "self_attn.o_proj": (WIDTH, HEADS * size),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (size,)),
        **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (WIDTH,)),
    }


def save_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A draft on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class Reference:
    """What a draft says after a text: everything recomputed for every text, position by position, in float64."""

    def __init__(self, folder: Path, target: ModelRunner) -> None:
        self.take(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), target)

    def take(self, config: dict[str, Any], tensors: dict[str, Tensor], target: ModelRunner) -> None:
        """Be this draft."""
        self.config, self.tensors, self.target = config, tensors, target
        self.settings = settings = settings_of(self.config)
        self.layer_ids, self.mask = settings["target_layer_ids"], settings["mask_token_id"]
        self.gemma = self.config["architectures"] == GEMMA["architectures"]
        z_lab = not self.gemma and self.config["architectures"] != DEEPSPEC["architectures"]
        self.first = int(z_lab and not settings.get("shift_label"))  # z-lab's block predicts its own masks
        self.features = cache(self._features)
        self.hidden = cache(self._hidden)
        self.greedy = cache(self.draft)

    @torch.no_grad()
    def _features(self, text: tuple[int, ...]) -> Tensor:
        """The outputs of the layers named, at every position, side by side."""
        model = self.target.model
        model.set_attn_implementation("eager")
        states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        model.set_attn_implementation("mtbench")
        return torch.cat([states[layer + 1][0] for layer in self.layer_ids], -1)

    @torch.no_grad()
    def _hidden(self, text: tuple[int, ...]) -> Tensor:
        """The hidden states of the block behind a text, (B, C)."""
        t, eps, before = self.tensors, self.config["rms_norm_eps"], len(text) - 1
        context = torch.zeros(0, WIDTH).double()
        if before:
            context = norm(linear(self.features(text[:-1]), t["fc.weight"]), t["hidden_norm.weight"], eps)
        table = t.get("embed_tokens.weight", self.target.model.get_input_embeddings().weight)
        block = table[[text[-1], *[self.mask] * (self.config["block_size"] - 1)]]
        block = block * self.settings.get("input_embedding_scale", WIDTH**0.5 if self.gemma else 1)
        for layer in range(self.config["num_hidden_layers"]):
            w = {
                name.removeprefix(f"layers.{layer}."): x for name, x in t.items() if name.startswith(f"layers.{layer}.")
            }
            if self.gemma:
                block = self.gemma_layer(block, context, w)
                continue
            normed = norm(block, w["input_layernorm.weight"], eps)
            normed, convolve = self.convolved(normed, w, "attention_conv")
            q = norm(
                linear(normed, w["self_attn.q_proj.weight"]).view(-1, HEADS, SIZE), w["self_attn.q_norm.weight"], eps
            )
            both = torch.cat((context, normed))
            k = norm(
                linear(both, w["self_attn.k_proj.weight"]).view(-1, GROUPS, SIZE), w["self_attn.k_norm.weight"], eps
            )
            v = linear(both, w["self_attn.v_proj.weight"]).view(-1, GROUPS, SIZE)
            q, k = turned(q, before, self.config["rope_theta"]), turned(k, 0, self.config["rope_theta"])
            k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k).div(SIZE**0.5)
            weights = scores.masked_fill(self.hidden_keys(layer, before, len(q)), float("-inf")).softmax(-1)
            heads = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            block = block + convolve(linear(heads, w["self_attn.o_proj.weight"]))
            normed = norm(block, w["post_attention_layernorm.weight"], eps)
            normed, convolve = self.convolved(normed, w, "mlp_conv")
            gate, up = (linear(normed, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            block = block + convolve(linear(silu(gate) * up, w["mlp.down_proj.weight"]))
        return norm(block, t["norm.weight"], eps)[self.first :]

    def gemma_layer(self, block: Tensor, context: Tensor, w: dict[str, Tensor]) -> Tensor:
        """A layer of Gemma 4: scores are not scaled, values are normed, half of the pairs turn."""
        eps, size, rope = self.config["rms_norm_eps"], self.config["global_head_dim"], GEMMA["rope_parameters"]
        theta, share = (rope["full_attention"][name] for name in ("rope_theta", "partial_rotary_factor"))
        normed = norm(block, w["input_layernorm.weight"], eps)
        both = torch.cat((context, normed))
        q, k = (
            linear(x, w[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, size))
            for x, n in ((normed, "q"), (both, "k"))
        )
        v = k if self.config["attention_k_eq_v"] else linear(both, w["self_attn.v_proj.weight"]).view_as(k)
        q, k = (norm(x, w[f"self_attn.{n}_norm.weight"], eps) for x, n in ((q, "q"), (k, "k")))
        v = norm(v, torch.ones(size), eps)
        q, k = turned(q, len(context), theta, share), turned(k, 0, theta, share)
        k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        heads = torch.einsum("hqk,khd->qhd", torch.einsum("qhd,khd->hqk", q, k).softmax(-1), v).flatten(1)
        out = linear(heads, w["self_attn.o_proj.weight"])
        block = block + norm(out, w["post_attention_layernorm.weight"], eps)
        normed = norm(block, w["pre_feedforward_layernorm.weight"], eps)
        gate, up = (linear(normed, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        out = linear(gelu(gate, approximate="tanh") * up, w["mlp.down_proj.weight"])
        return (block + norm(out, w["post_feedforward_layernorm.weight"], eps)) * w["layer_scalar"]

    def hidden_keys(self, layer: int, before: int, size: int) -> Tensor:
        """Which keys a layer does not see from each position of the block, (B, keys)."""
        sliding = self.config.get("layer_types", {layer: ""})[layer] == "sliding_attention"
        causal = self.config.get("is_causal", "causal_head" in self.settings or sliding)
        back = torch.arange(before, before + size)[:, None] - torch.arange(before + size)
        hidden = back < 0 if causal else torch.zeros_like(back, dtype=torch.bool)
        return hidden | (back.abs() >= self.config["sliding_window"]) if sliding else hidden

    def convolved(self, x: Tensor, w: dict[str, Tensor], name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The block (B, C) convolved, and the convolution of what comes of it; their weights depend on the block."""
        if f"{name}.base_kernel" not in w:
            return x, lambda y: y
        group = self.settings["conv_group_size"]
        base, dynamic = w[f"{name}.base_kernel"], linear(x, w[f"{name}.kernel_projection.weight"])
        dynamic = dynamic.view(len(x), *base.shape[:2], WIDTH // group)

        def convolve(y: Tensor, which: int) -> Tensor:
            out = torch.zeros_like(y)
            for place in range(len(y)):
                for back in range(min(place + 1, base.shape[1])):
                    weight = base[which, back] + dynamic[place, which, back].repeat_interleave(group)
                    out[place] += weight * y[place - back]
            return out

        return convolve(x, 0), lambda y: convolve(y, 1)

    def selected(self, logits: Tensor, before: int, hidden: Tensor) -> Tensor:
        """The selector's scores of the tokens with the largest logits; −∞ for the others."""
        if "candidate_selector.hidden_projection.weight" not in self.tensors:
            return logits
        codes: list[Any] = [self.tensors.get(f"{name}.weight", self.tensors.get(name)) for name in CODEBOOKS]
        code = codes[0][before] * (self.tensors["candidate_selector.hidden_projection.weight"] @ hidden)
        scores = torch.full_like(logits, float("-inf"))
        for token in sorted(range(VOCABULARY), key=lambda token: -logits[token].item())[
            : self.settings["selector_top_k"]
        ]:
            scores[token] = logits[token] + code @ codes[1][token]
        return scores

    @torch.no_grad()
    def draft(self, text: Sequence[int], count: int, forced: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """The greedy drafts and the logits of each, (K, V). `forced`: what follows instead."""
        head = self.tensors.get("lm_head.weight", self.target.model.get_output_embeddings().weight)
        hidden, tokens, judged = self.hidden(tuple(text))[:count], [text[-1]], []
        state = torch.zeros(RANK).double()
        for k, h in enumerate(hidden):
            term, state = self.term(tokens[-1], h, state)
            logits = (head @ h) * self.settings.get("output_multiplier", 1)
            if cap := self.settings.get("final_logit_softcapping"):
                logits = cap * torch.tanh(logits / cap)
            logits = (logits + term).index_fill(0, self.target.checkpoint.suppressed, float("-inf"))
            logits = self.selected(logits, tokens[-1], h)
            judged.append(logits)
            tokens.append(int(logits.argmax()) if forced is None else forced[k])
        return tokens[1:], torch.stack(judged)

    def term(self, before: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The Markov head: its term of the logits and its next state."""
        if "prefix_gru.weight_ih_l0" in self.tensors:
            return self.domino(before, hidden, state)
        t = {name.removeprefix("markov_head."): x for name, x in self.tensors.items()}
        if "markov_w1.weight" not in t:
            return torch.zeros(VOCABULARY).double(), state
        e = t["markov_w1.weight"][before]
        if "gate_proj.weight" in t:
            e = e * torch.sigmoid(t["gate_proj.weight"] @ torch.cat((hidden, e)) + t["gate_proj.bias"])
        if "joint_proj.weight" in t:
            z = t["joint_proj.weight"] @ torch.cat((state, e, hidden)) + t["joint_proj.bias"]
            g, c, e = torch.sigmoid(z[:RANK]), torch.tanh(z[RANK : 2 * RANK]), torch.tanh(z[2 * RANK :])
            state = g * state + (1 - g) * c
        return t["markov_w2.weight"] @ e, state

    def domino(self, before: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Domino's head: no term for the first prediction. The state has one number more once it has read a token."""
        t, first, state = self.tensors, len(state) == RANK, state[:RANK]
        table = t.get("embed_tokens.weight", self.target.model.get_input_embeddings().weight)
        read, kept = t["prefix_gru.weight_ih_l0"] @ table[before], t["prefix_gru.weight_hh_l0"] @ state
        (r, z, n), (r_kept, z_kept, n_kept) = read.chunk(3), kept.chunk(3)
        update = torch.sigmoid(z + z_kept)
        state = (1 - update) * torch.tanh(n + torch.sigmoid(r + r_kept) * n_kept) + update * state
        inner = silu(t["embed_proj.0.weight"] @ torch.cat((hidden, state)))
        return t["embed_proj.2.weight"] @ inner * (not first), torch.cat((state, state[:1]))

    @torch.no_grad()
    def chances(self, text: Sequence[int], drafts: Sequence[int]) -> list[float]:
        """The chance of each draft."""
        weight, bias = self.tensors["confidence_head.proj.weight"][0], self.tensors["confidence_head.proj.bias"][0]
        found = []
        for h, before in zip(self.hidden(tuple(text)), [text[-1], *drafts[:-1]], strict=False):
            if self.config["confidence_head_with_markov"]:
                h = torch.cat((h, self.tensors["markov_head.markov_w1.weight"][before]))
            found.append(float(torch.sigmoid(weight @ h + bias)))
        return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, first: int, theta: float, share: float = 1.0) -> Tensor:
    """Rotary positions `first`, `first` + 1 … of (n, heads, d), of a share of the pairs."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half).double() / half) * (torch.arange(half) < share * half)
    angle = torch.arange(first, first + len(x)).double()[:, None] * speed
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def fitted(folder: Path, kind: str, target: ModelRunner, texts: Sequence[tuple[list[int], int]]) -> Path:
    """A draft that is often right: its LM head is fitted by least squares to texts, each from some position on."""
    tensors = random_tensors(CONFIGS[kind])
    reference = Reference(save_draft(folder, CONFIGS[kind], tensors), target)
    hidden, wanted = [], []
    for text, begin in texts:
        for end in range(begin, len(text)):
            behind, state, before = text[end:], torch.zeros(RANK).double(), text[end - 1]
            for h, token in zip(reference.hidden(tuple(text[:end])), behind, strict=False):
                term, state = reference.term(before, h, state)
                hidden.append(h)
                wanted.append(8 * one_hot(torch.tensor(token), VOCABULARY).double() - term)
                before = token
    solved = torch.linalg.lstsq(torch.stack(hidden), torch.stack(wanted), driver="gelsd").solution.T
    return save_draft(folder, CONFIGS[kind], {**tensors, "lm_head.weight": solved})
