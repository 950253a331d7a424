"""EAGLE-3 drafts in every published format, for a small target, and what they say by plain Python, without a cache.

The reference is written from the papers and shares no code with `mtbench.models.drafts` or the decode loop.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import naive
import torch
from decoding_cases import BUDGET, PROMPTS, ar, run
from safetensors.torch import load_file, save_file
from small import END, MASK, VOCABULARY, save_small
from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.models.drafts.loading import load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

WIDTH, HEADS, KEY_HEADS, HEAD, INNER = 32, 4, 2, 8, 48
CUT = [i for i in range(VOCABULARY) if i % 3 != 1 and i != VOCABULARY - 1]  # the ids of a cut vocabulary; MASK is one
assert MASK in CUT
LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "hidden_act": "silu",
}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **LAYER}
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Format:
    """A draft as it is stored, and what that means."""

    config: dict[str, Any]
    taps: tuple[int, ...]  # numbers of transformers' `hidden_states`, for a target of three layers
    prefix: str = "midlayer"
    cut: bool = True
    embeds: bool = False  # stores its own embedding
    heads: bool = True  # stores its own LM head
    head_norms: bool = False  # of queries and keys
    flags: frozenset[str] = field(default_factory=frozenset)  # fc_norm, norm_before_fc, norm_before_residual …
    layers: int = 1
    mask: int | None = None  # the token of its masks, if it drafts in parallel


FORMATS = {
    "specforge": Format({**SPECFORGE, "draft_vocab_size": len(CUT)}, (2, 1, 0)),
    "specforge 3.1": Format(
        {
            **SPECFORGE,
            "draft_vocab_size": len(CUT),
            "fc_norm": True,
            "norm_output": True,
            "eagle_config": {IDS: [0, 1], "use_aux_hidden_state": True},
        },
        (1, 2),
        embeds=True,
        flags=frozenset({"fc_norm", "norm_output"}),
    ),
    "speculators": Format(
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": {"model_type": "llama", **LAYER},
            "draft_vocab_size": len(CUT),
            "norm_before_residual": True,
            "norm_before_fc": True,
            IDS: [0, 1, 2],
        },
        (0, 1, 2),
        prefix="layers.0",
        flags=frozenset({"norm_before_fc", "norm_before_residual"}),
    ),
    "deepspec": Format(
        {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            **LAYER,
            "target_layer_ids": [0, 1],
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            "layer_types": ["full_attention"],
        },
        (1, 2),
        prefix="layers.0",
        cut=False,
        embeds=True,
        head_norms=True,
    ),
}


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).double().div(columns**0.5)


def norm(size: int) -> Tensor:
    return torch.randn(size).double()


def made_layer(width: int, norms: Sequence[str], *, head_norms: bool) -> dict[str, Tensor]:
    """A decoder layer whose attention reads vectors of a width."""
    layer = {
        **{f"self_attn.{x}_proj.weight": matrix(n * HEAD, width) for x, n in (("q", HEADS), ("k", KEY_HEADS))},
        "self_attn.v_proj.weight": 2 * matrix(KEY_HEADS * HEAD, width),
        "self_attn.o_proj.weight": 2 * matrix(WIDTH, HEADS * HEAD),
        **{f"mlp.{x}_proj.weight": matrix(INNER, WIDTH) for x in ("gate", "up")},
        "mlp.down_proj.weight": matrix(WIDTH, INNER),
        **{f"{x}.weight": norm(WIDTH) for x in norms},
    }
    if head_norms:
        layer |= {f"self_attn.{x}_norm.weight": norm(HEAD) for x in ("q", "k")}
    return layer


def write_draft(folder: Path, form: Format) -> Path:
    """Store a draft of random weights, by the names of its format."""
    torch.manual_seed(1)
    later = ("input_layernorm", "post_attention_layernorm")
    first = made_layer(2 * WIDTH, ("hidden_norm", *later), head_norms=form.head_norms)
    tensors = {f"{form.prefix}.{name}": tensor for name, tensor in first.items()}
    for index in range(1, form.layers):
        layer = made_layer(WIDTH, later, head_norms=form.head_norms)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    if form.mask is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, len(form.taps) * WIDTH).double()
    tensors |= {"fc.weight": matrix(WIDTH, len(form.taps) * WIDTH), "norm.weight": norm(WIDTH)}
    if "fc_norm" in form.flags:
        tensors |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(len(form.taps))}
    if "norm_before_fc" in form.flags:
        tensors["input_norm.weight"] = norm(len(form.taps) * WIDTH)
    if form.embeds:
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH).double()
    if form.heads:
        tensors["lm_head.weight"] = matrix(len(CUT) if form.cut else VOCABULARY, WIDTH)
    if form.cut:
        tensors["d2t"] = torch.tensor(CUT) - torch.arange(len(CUT))
        tensors["t2d"] = torch.tensor([i in CUT for i in range(VOCABULARY)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(form.config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Entry:
    """What the draft reads at a place."""

    feature: Tensor  # (WIDTH,)
    token: int
    position: int


class Reference:
    """A draft written out, in float64: everything is recomputed for every token."""

    def __init__(self, form: Format, tensors: dict[str, Tensor], target: ModelRunner) -> None:
        self.form, self.t, self.target = form, tensors, target
        self.read = cache(self._read)

    def _read(self, text: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's logits at the last token, and its hidden states, by its own eager attention."""
        model = self.target.model
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        model.set_attn_implementation("mtbench")
        return self.allowed(out.logits[0, -1]), tuple(states[0] for states in out.hidden_states)

    def allowed(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, self.target.checkpoint.suppressed, float("-inf"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.t[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"{self.form.prefix}.{name}_proj.weight"].T

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions of vectors (n, heads, HEAD)."""
        angle = positions[:, None] * 100.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def fused(self, states: Tensor) -> Tensor:
        """The first feature, of hidden states (…, taps·WIDTH)."""
        if "fc_norm" in self.form.flags:
            parts = states.chunk(len(self.form.taps), -1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        if "norm_before_fc" in self.form.flags:
            states = self.norm(states, "input_norm")
        return states @ self.t["fc.weight"].T

    def entries(self, text: Sequence[int]) -> list[Entry]:
        """The final entries of a text: of each position but the last, with the token after it."""
        states = torch.cat([self.read(tuple(text))[1][tap] for tap in self.form.taps], -1)
        features = self.fused(states[:-1])
        return [Entry(feature, text[i + 1], i) for i, feature in enumerate(features)]

    def keys_values(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (n, heads, HEAD)."""
        embedding = self.t.get("embed_tokens.weight", self.target.model.get_input_embeddings().weight)
        layer = self.form.prefix
        x = torch.cat(
            (
                self.norm(embedding[[e.token for e in entries]], f"{layer}.input_layernorm"),
                self.norm(torch.stack([e.feature for e in entries]), f"{layer}.hidden_norm"),
            ),
            -1,
        )
        query, key, value = (self.project(x, f"self_attn.{n}").unflatten(-1, (-1, HEAD)) for n in "qkv")
        if self.form.head_norms:
            query, key = self.norm(query, f"{layer}.self_attn.q_norm"), self.norm(key, f"{layer}.self_attn.k_norm")
        positions = torch.tensor([e.position for e in entries]).double()
        return self.turned(query, positions), self.turned(key, positions), value

    def layers(self, entries: Sequence[Entry]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last layer's output at each entry, (n, WIDTH), and each layer's keys and values, (n, KEY_HEADS, HEAD)."""
        hidden, kept = torch.stack([entry.feature for entry in entries]), []
        positions = torch.tensor([entry.position for entry in entries]).double()
        later = torch.ones(len(entries), len(entries), dtype=torch.bool).triu(1)
        for index in range(self.form.layers):
            name = f"layers.{index}" if index else self.form.prefix
            if index == 0:
                query, key, value = self.keys_values(entries)
                normed = "norm_before_residual" in self.form.flags
                hidden = self.norm(hidden, f"{name}.hidden_norm") if normed else hidden
            else:
                read = self.norm(hidden, f"{name}.input_layernorm")
                query, key, value = (
                    (read @ self.t[f"{name}.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, HEAD)) for n in "qkv"
                )
                if self.form.head_norms:
                    query, key = (self.norm(x, f"{name}.self_attn.{n}_norm") for x, n in ((query, "q"), (key, "k")))
                query, key = self.turned(query, positions), self.turned(key, positions)
            kept.append((key, value))
            group = HEADS // KEY_HEADS
            scores = torch.einsum("qhd,nhd->hqn", query, key.repeat_interleave(group, 1)) / HEAD**0.5
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqn,nhd->qhd", weights, value.repeat_interleave(group, 1)).flatten(1)
            hidden = hidden + mixed @ self.t[f"{name}.self_attn.o_proj.weight"].T
            read = self.norm(hidden, f"{name}.post_attention_layernorm")
            gate, up = (read @ self.t[f"{name}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self.t[f"{name}.mlp.down_proj.weight"].T
        return hidden, kept

    def output(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
        """The last layer's output at the last entry before and after the last norm."""
        hidden = self.layers(entries)[0][-1]
        return hidden, self.norm(hidden, "norm")

    def predict(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
        """Logits (VOCABULARY,) after the last entry, and the feature that is fed back."""
        before, after = self.output(entries)
        logits = after @ self.t.get("lm_head.weight", self.target.model.get_output_embeddings().weight).T
        if self.form.cut:
            whole = torch.full((VOCABULARY,), float("-inf"), dtype=torch.double)
            whole[CUT] = logits
            logits = whole
        return self.allowed(logits), after if "norm_output" in self.form.flags else before

    def after(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """The logits of the draft after a text and tokens that it drafted, (VOCABULARY,)."""
        final = self.entries(text) if len(text) > 1 else []
        logits, feature = self.predict(
            final or [Entry(self.fused(torch.zeros(len(self.form.taps) * WIDTH).double()), 0, 0)]
        )
        own: list[Entry] = []
        for depth, token in enumerate(path):
            own.append(Entry(feature, token, len(text) - 1 + depth))
            logits, feature = self.predict(final + own)
        return logits

    def decode(self, prompt: list[int], branches: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and commits: greedy tokens while each is among the draft's choices after the ones before."""
        answer: list[int] = []
        commits: list[int] = []
        while True:
            text, new = prompt + answer, list[int]()
            for choices in [*branches, 0]:
                new.append(int(self.read((*text, *new))[0].argmax()))
                if not choices or new[-1] not in self.after(text, new[:-1]).topk(choices).indices.tolist():
                    break
            if naive.finish(answer, commits, new, END, BUDGET):
                return answer, commits


def fitted(reference: Reference, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Tensor:
    """An LM head that is often right: by least squares to these texts, over up to three steps of its own."""
    inputs: list[Tensor] = []
    wanted: list[int] = []
    for text, prompt in zip(texts, prompts, strict=True):
        final = reference.entries(text)
        for known in range(max(2, len(prompt)), len(text) - 2):
            own: list[Entry] = []
            for step in range(2):
                before, after = reference.output(final[: known - 1] + own)
                inputs.append(after)
                wanted.append(text[known + step])
                feature = after if "norm_output" in reference.form.flags else before
                own.append(Entry(feature, text[known + step], known - 1 + step))
    likely = torch.eye(VOCABULARY).double()[wanted]
    head: Tensor = torch.linalg.lstsq(torch.stack(inputs), likely, driver="gelsd").solution.T
    head[MASK] = 2 * head.sum(0)  # an id no arm may say, which the draft likes best
    return (head[CUT] if reference.form.cut else head).contiguous()


@dataclass(frozen=True)
class Pair:
    """A target, a draft in some format that is often right, and the draft written out."""

    target: ModelRunner
    folder: Path
    reference: Reference

    def runners(self) -> ModelRunners:
        """New runners: a cache of their own."""
        target = ModelRunner(self.target.checkpoint)
        draft = DraftRunner(load_draft(str(self.folder), target.checkpoint), target)
        return ModelRunners("any", {"any": target, "eagle": draft})


def make_pair(folder: Path, form: Format) -> Pair:
    """Write target and draft to a folder."""
    target = ModelRunner(load(str(save_small(folder / "target")), dtype=torch.float64))
    draft = write_draft(folder / "draft", form)
    tensors = stored(draft)
    reference = Reference(form, tensors, target)
    if form.heads:
        tensors["lm_head.weight"] = fitted(reference, texts_of(target), PROMPTS)
        save_file(tensors, draft / "model.safetensors")
    return Pair(target, draft, reference)


def texts_of(target: ModelRunner) -> list[list[int]]:
    """Prompts with what the target says after them."""
    says = run(ar(), target, ignore_eos=True)
    return [p + g.token_ids for p, g in zip(PROMPTS, says, strict=True)]


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their stored names."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def eagle(**options: Any) -> Method:
    method: Method = METHODS["eagle"](**options)
    return method
