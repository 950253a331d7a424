"""DFlash, DFlash 2, DSpark, Domino and JetSpec: drafts that predict a block of tokens in one forward.

Chen, Liang, Liu: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark: arXiv 2607.05147;
Domino: Huang et al., arXiv 2605.29707; JetSpec: Hu et al., arXiv 2606.18394. DFlash 2: the owners' package `dflash`
0.1.0, model.py, `DFlash2DraftModel`.

A context entry is made of the target's hidden states at one position, by one product and one norm. Every layer projects
the same entries to keys and values; entries do not attend, and no layer changes them. A block is the last decided token
and masks. Its positions attend to the entries of all positions before it and to the whole block, not causally (in
layers of sliding attention, causally). Its keys and values are of no use afterwards; the next step overwrites them.

Its formats: block_formats.py. The hidden states of a block are computed together, so none of them knows which tokens
the block has. A head adds that (block_heads.py): the tokens are chosen one after the other, and each changes the logits
of the next. Domino's head leaves the first predictions as they are. DSpark's confidence head estimates the chance that
a draft is accepted, given those before. DFlash 2 has a convolution along the block around each attention and each MLP.

R = rows, P = context entries, B = positions of a block, N = drafts, V = vocabulary, H = query heads, K = key heads,
d = head size, C = hidden size, t = taps of a convolution, g = its groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4TextConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from mtbench.models.attention import AttentionMetadata
from mtbench.models.drafts.block_heads import MARKOV_HEADS, CandidateSelector, DominoHead
from mtbench.models.feature_draft import DraftConfig, FeatureDraft
from mtbench.models.kv_cache import KVCache

SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class BlockDraftConfig(DraftConfig):
    """The configuration of a draft that predicts a block."""

    sequential: ClassVar[bool] = False

    mask_id: int
    layers: Any  # Qwen3Config or Gemma4TextConfig
    block: int  # B: positions of a block, as trained
    from_anchor: bool  # the last decided token's position predicts, too
    markov: str | None = None  # kind of its Markov head
    rank: int = 0
    confidence: bool = False  # whether it has a confidence head
    confidence_reads_token: bool = False
    uncorrected: int = 0  # leading predictions without the term of the token before
    state: int = 0  # size of a Domino head's recurrent state
    candidates: int = 0  # k: tokens that its selector chooses among; 0: it has none
    kernel: int = 0  # t: positions that a convolution reads; 0: it has none
    group: int = 0  # channels with the same dynamic term of a convolution
    causal: bool | None = None  # a block's position attends to its earlier ones only; None: in sliding layers
    embedding_scale: float = 1.0  # of the embedding's rows
    multiplier: float = 1.0  # of the logits, before the soft cap
    softcap: float = 0.0  # of the logits; 0: none

    @property
    def served(self) -> bool:
        return self.markov != "domino" and not self.causal

    def rename(self, name: str) -> str | None:
        """Return the name of a stored tensor in the module, where Domino's head takes the place of the Markov head.

        Codebooks of a selector are stored as parameters or as embeddings.
        """
        if name.startswith(("prefix_gru.", "embed_proj.")):
            return f"markov_head.{name.removesuffix('_l0')}"
        return f"{name}.weight" if name.endswith("_codebook") else name

    @property
    def predicts(self) -> int:
        """Tokens that a block predicts."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def heads(self) -> bool:
        """Whether it has a head beside the LM head."""
        return self.markov is not None or self.candidates > 0 or self.confidence

    @property
    def room(self) -> int:
        return self.block + 1  # a block may end behind the target's guesses; a slot after it is for nothing

    def build(self, target: Any) -> "BlockDraft":
        like = target.get_output_embeddings().weight
        with torch.device("meta"):
            draft = BlockDraft(self, target).to(like.dtype)
        draft.to_empty(device=like.device)
        with like.device:
            draft.rotary_emb = parts_of(self.layers)[2](self.layers)  # its frequencies are computed, in float32
        return draft


class BlockDraft(FeatureDraft):
    """A draft that predicts a block. `judged` are the first of its predictions."""

    format: BlockDraftConfig

    def __init__(self, format: BlockDraftConfig, target: Any) -> None:
        config = format.layers
        super().__init__(format, config, target)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(format.taps) * width, width, bias=False)
        layer, norm, rotary = parts_of(config)
        self.hidden_norm, self.norm = norm(width, eps), norm(width, eps)
        self.layers = nn.ModuleList(layer(format, index) for index in range(config.num_hidden_layers))
        self.rotary_emb = rotary(config)
        self.markov_head: Any
        if format.markov == "domino":
            embedding = self.get_input_embeddings
            self.markov_head = DominoHead(embedding, config.vocab_size, format.rank, width, format.state)
        elif format.markov is not None:
            self.markov_head = MARKOV_HEADS[format.markov](config.vocab_size, format.rank, width)
        if format.candidates:
            self.candidate_selector = CandidateSelector(config.vocab_size, format.rank, width, format.candidates)
        if format.confidence:
            reads = width + format.rank if format.confidence_reads_token else width
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(reads, 1)})

    def forward(
        self,
        ids: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        judged: int,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """Cache the entries of the features; then read the block `ids` (R, B), or (R, 0)."""
        assert not depth, "a block draft makes no features"
        first = 0 if self.format.from_anchor else 1
        hidden = self.norm(self.read_block(ids, features, metadata, cache)[:, first : first + judged])
        return self.logits(hidden), hidden

    @property
    def choosing_head(self) -> Any:
        """The head that reads the token before (block_heads.py), if it has one."""
        return getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)

    def logits(self, read: Tensor) -> Tensor:
        logits, cap = super().logits(read), self.format.softcap
        if self.format.multiplier != 1:
            logits = logits * self.format.multiplier
        return (logits / cap).tanh() * cap if cap > 0 else logits

    def read_block(self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        """Cache the entries of the features; return the last layer's output at the block `ids`, (R, B, C)."""
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary_emb(context, metadata.positions)
        # The rows as they are: an embedding of Gemma scales them when it is called.
        hidden = functional.embedding(ids, self.get_input_embeddings().weight) * self.format.embedding_scale
        layers: Any = self.layers
        alone = {kind: metadata.of_block(ids.shape[1], *kind) for kind in {layer.self_attn.sees for layer in layers}}
        for layer in layers:
            hidden = layer(context, hidden, rotary, alone[layer.self_attn.sees], cache)
        return hidden

    def chances(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return each draft's chance of acceptance (R, N) in float32, by hidden states (R, N, C) and tokens before."""
        if self.format.confidence_reads_token:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(before)), -1)
        chance: Tensor = self.confidence_head["proj"](hidden)[..., 0].float().sigmoid()
        return chance


class BlockLayer(nn.Module):
    """A layer of Qwen3 whose attention also reads the context; with convolutions around attention and MLP."""

    def __init__(self, format: BlockDraftConfig, index: int) -> None:
        super().__init__()
        config = format.layers
        self.self_attn = QwenAttention(format, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = BlockConvolution(format) if format.kernel else None
        self.mlp_conv = BlockConvolution(format) if format.kernel else None

    def forward(
        self,
        context: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        """Cache the context (R, P, C), return the block (R, B, C); `rotary` is of both, `metadata` of the block."""

        def attend(normed: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(context, normed, rotary, metadata, cache)
            return attended

        if not hidden.shape[1]:
            return attend(hidden)
        hidden = hidden + _between(self.attention_conv, attend, self.input_layernorm(hidden))
        return hidden + _between(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))


def _between(convolution: "BlockConvolution | None", inner: Callable[[Tensor], Tensor], normed: Tensor) -> Tensor:
    return inner(normed) if convolution is None else convolution(normed, inner)


class BlockConvolution(nn.Module):
    """DFlash 2's pair of causal convolutions along a block, before and after what it is wrapped around.

    A weight has a part for each channel, and a dynamic part for each group of channels, projected from the input of the
    first convolution. Zeros lie before a block's first position. Tap i reads the position i places before.
    """

    def __init__(self, format: BlockDraftConfig) -> None:
        super().__init__()
        width = format.layers.hidden_size
        self.group, self.block = format.group, format.block
        self.base_kernel = nn.Parameter(torch.empty(2, format.kernel, width))
        self.kernel_projection = nn.Linear(width, 2 * format.kernel * (width // format.group), bias=False)

    def forward(self, hidden: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """Return hidden states (R, n·B, C) of whole blocks: convolved, through `inner`, and convolved again."""
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        before, after = (self.base_kernel + dynamic.repeat_interleave(self.group, -1)).unbind(2)
        return self._convolved(inner(self._convolved(hidden, before)), after)

    def _convolved(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Return hidden states (R, n·B, C) convolved by weights (R, n·B, t, C)."""
        blocks = hidden.unflatten(1, (-1, self.block))
        padded = functional.pad(blocks, (0, 0, weights.shape[2] - 1, 0))
        earlier = padded.unfold(2, weights.shape[2], 1).flip(-1).flatten(1, 2)  # (R, n·B, C, t)
        return (earlier.mT * weights).sum(2)


class BlockAttention:
    """Attention of a block to the context and to itself. `sees`: whether it is causal, and its sliding window."""

    def __init__(self: Any, format: BlockDraftConfig, index: int) -> None:
        super().__init__(format.layers, index)  # type: ignore[call-arg]  # an attention of transformers
        sliding = format.layers.layer_types[index] == SLIDING
        self.sees = (sliding if format.causal is None else format.causal, self.sliding_window)

    def forward(
        self: Any,
        context: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        fed = torch.cat((context, hidden), 1)
        key = self._heads(self.k_proj(fed))
        value = key if self.v_proj is None else self._heads(self.v_proj(fed))  # as in Gemma 4, which norms values
        key, value = self.k_norm(key).transpose(1, 2), getattr(self, "v_norm", nn.Identity())(value).transpose(1, 2)
        keys, values = cache.update(rotated(key, rotary), value, self.layer_idx)
        count = hidden.shape[1]
        if not count:
            return hidden
        query = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        cos, sin = rotary
        query = rotated(query, (cos[:, -count:], sin[:, -count:]))
        read = metadata.attend(query, keys, values, self.scaling, self.sliding_window)
        attended: Tensor = self.o_proj(read.flatten(2))
        return attended

    def _heads(self: Any, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads


class QwenAttention(BlockAttention, Qwen3Attention):  # type: ignore[misc]
    pass


Parts = tuple[Any, Any, Any]  # layer, norm, rotary embedding


def parts_of(layers: Any) -> Parts:
    """Return the parts of a draft with layers of this configuration."""
    gemma = isinstance(layers, Gemma4TextConfig)
    return _gemma_parts() if gemma else (BlockLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding)


@cache
def _gemma_parts() -> Parts:
    """Return the parts for Gemma 4, whose module imports transformers' readers of images and videos."""
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    class GemmaAttention(BlockAttention, gemma4.Gemma4TextAttention):  # type: ignore[misc]
        pass

    class GemmaLayer(nn.Module):
        """A layer of Gemma 4 whose attention also reads the context. It is called as a `BlockLayer`."""

        def __init__(self, format: BlockDraftConfig, index: int) -> None:
            super().__init__()
            config = format.layers
            self.self_attn, self.mlp = GemmaAttention(format, index), gemma4.Gemma4TextMLP(config, index)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                setattr(self, f"{name}_layernorm", gemma4.Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps))
            self.register_buffer("layer_scalar", torch.ones(1))

        def forward(self: Any, context: Tensor, hidden: Tensor, *how: Any) -> Any:
            attended = self.self_attn(context, self.input_layernorm(hidden), *how)
            if not hidden.shape[1]:
                return hidden
            hidden = hidden + self.post_attention_layernorm(attended)
            mixed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
            return (hidden + mixed) * self.layer_scalar

    class GemmaRotary(gemma4.Gemma4TextRotaryEmbedding):  # type: ignore[misc]
        def forward(self, like: Tensor, positions: Tensor) -> Any:
            return super().forward(like, positions, "full_attention")

    return GemmaLayer, gemma4.Gemma4RMSNorm, GemmaRotary


def rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys (R, heads, n, d) rotated by their positions; `rotary`: cosines and sines (R, n, d)."""
    cos, sin = rotary
    turned: Tensor = rotate_half(states)
    return states * cos[:, None] + turned * sin[:, None]
