"""DFlash, DSpark, Domino and JetSpec: drafts that predict a block of tokens in one forward.

Chen, Liang, Liu: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark: arXiv 2607.05147;
Domino: Huang et al., arXiv 2605.29707; JetSpec: Hu et al., arXiv 2606.18394.

A context entry is made of the target's hidden states at one position, by one product and one norm. Every layer projects
the same entries to keys and values; entries do not attend, and no layer changes them. A block is the last decided token
and masks. Its positions attend to the entries of all positions before it and to the whole block, not causally. Its keys
and values are of no use afterwards; the next step overwrites them.

Two formats have this architecture. Both number a tap by the layer whose output it is, so that layer 0's is
`hidden_states[1]`; −1 is the embedding.

- z-lab (github.com/z-lab/dflash): `dflash_config` in config.json. The first position of a block predicts nothing: the
  position of a mask predicts the token at that position. So B positions predict B − 1 tokens. Domino and JetSpec name
  what differs there: `projector_type` with `shift_label`, by which each position predicts the token after it, and
  `causal_head`, by which a position attends to the block's earlier positions only.
- DeepSpec (github.com/deepseek-ai/DeepSpec): `Qwen3DSparkModel`, of which DFlash is the case without heads. Each
  position predicts the token after it, the last decided token's position too. So B positions predict B tokens.

The hidden states of a block are computed together, so none of them knows which tokens the block has. DSpark's Markov
head adds that: the tokens are chosen one after the other, and each changes the logits of the next. Domino's head reads
all tokens before, by a GRU over their embeddings, and leaves the first predictions as they are. DSpark's confidence
head estimates the chance that a draft is accepted, given those before.

R = rows, P = context entries, B = positions of a block, N = drafts, D = rank of the Markov head, V = vocabulary,
H = query heads, K = key heads, d = head size, C = hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from mtbench.models.attention import AttentionMetadata
from mtbench.models.feature_draft import LAYER, DraftConfig, FeatureDraft, layers_of
from mtbench.models.kv_cache import KVCache

DEEPSPEC, ITS_GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
NESTED = "dflash_config"
READ = {"target_layer_ids", "mask_token_id", "block_size"}  # the entries that are read
DOMINO_FIRST = "pure_draft_prefix_len"  # predictions before the first with a term
DOMINO = {"shift_label", DOMINO_FIRST, "gru_hidden_dim", "emb_dim"}  # and with this projector_type
CAUSAL = ("causal_head", "causal")  # JetSpec's own name and vLLM's
NEEDED = (*LAYER[:6], "max_position_embeddings", "rms_norm_eps")


class MarkovHead(nn.Module):
    """The term of the logits by the token before: an embedding of rank D, and a product to the vocabulary."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """Return the state before the first draft, (R, D), for hidden states (R, N, C)."""
        return hidden.new_zeros(len(hidden), self.markov_w1.embedding_dim)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the term (…, V) and the next state, by the token before (…,), the hidden state (…, C), the state."""
        term: Tensor = self.markov_w2(self.markov_w1(before))
        return term, state


class GatedMarkovHead(MarkovHead):
    """The hidden state gates the embedding of the token before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(before)
        gate = self.gate_proj(torch.cat((hidden, embedded), -1)).sigmoid()
        return self.markov_w2(gate * embedded), state


class RecurrentMarkovHead(MarkovHead):
    """A recurrent state carries all tokens of the block before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.cat((state, self.markov_w1(before), hidden), -1)
        gate, candidate, output = self.joint_proj(read).chunk(3, -1)
        gate = gate.sigmoid()
        return self.markov_w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


class DominoHead(nn.Module):
    """Domino's term: a GRU reads the embeddings of the tokens before, and two products its state and the hidden state.

    It is called as a `MarkovHead`. `embedding` returns the embedding that the draft reads.
    """

    def __init__(
        self, embedding: Callable[[], nn.Embedding], vocabulary: int, rank: int, width: int, state: int
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.prefix_gru = nn.GRUCell(width, state, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocabulary, bias=False)
        )

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.prefix_gru.hidden_size)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.prefix_gru(self.embedding()(before).flatten(0, -2), state.flatten(0, -2)).view_as(state)
        term: Tensor = self.embed_proj(torch.cat((hidden, state), -1))
        return term, state


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


@dataclass(frozen=True, kw_only=True)
class BlockDraftConfig(DraftConfig):
    """The configuration of a draft that predicts a block."""

    sequential: ClassVar[bool] = False

    mask_id: int
    layers: Qwen3Config
    block: int  # B: positions of a block, as trained
    from_anchor: bool  # the last decided token's position predicts, too
    markov: str | None = None  # kind of its Markov head
    rank: int = 0
    confidence: bool = False  # whether it has a confidence head
    confidence_reads_token: bool = False
    uncorrected: int = 0  # leading predictions without the term of the token before
    state: int = 0  # size of a Domino head's recurrent state
    causal: bool = False  # a position of the block attends to its earlier positions only

    @property
    def served(self) -> bool:
        return self.markov != "domino" and not self.causal

    def rename(self, name: str) -> str | None:
        """Return the name of a stored tensor in the module, where Domino's head takes the place of the Markov head."""
        own = name.startswith(("prefix_gru.", "embed_proj."))
        return f"markov_head.{name.removesuffix('_l0')}" if own else name

    @property
    def predicts(self) -> int:
        """Tokens that a block predicts."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def heads(self) -> bool:
        """Whether it has a head beside the LM head."""
        return self.markov is not None or self.confidence

    @property
    def room(self) -> int:
        return self.block + 1  # a block may end behind the target's guesses; a slot after it is for nothing

    def build(self, target: Any) -> "BlockDraft":
        like = target.get_output_embeddings().weight
        with torch.device("meta"):
            draft = BlockDraft(self, target).to(like.dtype)
        draft.to_empty(device=like.device)
        with like.device:
            draft.rotary_emb = Qwen3RotaryEmbedding(self.layers)  # its frequencies are computed, in float32
        return draft


class BlockDraft(FeatureDraft):
    """A draft that predicts a block. `judged` are the first of its predictions."""

    format: BlockDraftConfig

    def __init__(self, format: BlockDraftConfig, target: Any) -> None:
        config = format.layers
        super().__init__(format, config, target)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(format.taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head: Any
        if format.markov == "domino":
            embedding = self.get_input_embeddings
            self.markov_head = DominoHead(embedding, config.vocab_size, format.rank, width, format.state)
        elif format.markov is not None:
            self.markov_head = MARKOV_HEADS[format.markov](config.vocab_size, format.rank, width)
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
        own: bool,
    ) -> tuple[Tensor, Tensor]:
        """Cache the entries of the features; then read the block `ids` (R, B), or (R, 0)."""
        assert not own, "a block draft makes no features"
        first = 0 if self.format.from_anchor else 1
        hidden = self.norm(self.read_block(ids, features, metadata, cache)[:, first : first + judged])
        return self.get_output_embeddings()(hidden), hidden

    def read_block(self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        """Cache the entries of the features; return the last layer's output at the block `ids`, (R, B, C)."""
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary_emb(context, metadata.positions)
        hidden: Tensor = self.get_input_embeddings()(ids)
        alone = metadata.last(ids.shape[1])
        for layer in self.layers:
            hidden = layer(context, hidden, rotary, alone, cache)
        return hidden

    def chances(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return each draft's chance of acceptance (R, N) in float32, by hidden states (R, N, C) and tokens before."""
        if self.format.confidence_reads_token:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(before)), -1)
        chance: Tensor = self.confidence_head["proj"](hidden)[..., 0].float().sigmoid()
        return chance


class BlockLayer(nn.Module):
    """A layer of Qwen3 whose attention also reads the context."""

    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        context: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        """Cache the context (R, P, C), return the block (R, B, C); `rotary` is of both, `metadata` of the block."""
        attended = self.self_attn(context, self.input_layernorm(hidden), rotary, metadata, cache)
        if not hidden.shape[1]:
            return hidden
        hidden = hidden + attended
        mixed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class BlockAttention(Qwen3Attention):  # type: ignore[misc]
    """Attention of a block to the context and to itself."""

    def forward(
        self,
        context: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> Tensor:
        fed = torch.cat((context, hidden), 1)
        key = self.k_norm(self._heads(self.k_proj(fed))).transpose(1, 2)
        value = self._heads(self.v_proj(fed)).transpose(1, 2)
        keys, values = cache.update(rotated(key, rotary), value, self.layer_idx)
        count = hidden.shape[1]
        if not count:
            return hidden
        query = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        cos, sin = rotary
        query = rotated(query, (cos[:, -count:], sin[:, -count:]))
        attended: Tensor = self.o_proj(metadata.attend(query, keys, values, self.scaling).flatten(2))
        return attended

    def _heads(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads


def rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys (R, heads, n, d) rotated by their positions; `rotary`: cosines and sines (R, n, d)."""
    cos, sin = rotary
    turned: Tensor = rotate_half(states)
    return states * cos[:, None] + turned * sin[:, None]


def recognise(raw: Mapping[str, Any], part: str) -> BlockDraftConfig | None:
    """Return the configuration of a draft of either format. Raises ValueError for one that cannot be run."""
    architectures = raw.get("architectures") or []
    if part:
        return None
    if ITS_GEMMA in architectures:
        raise ValueError(f"drafts for Gemma 4 ({ITS_GEMMA}) are not supported")
    if DEEPSPEC in architectures:
        return _deepspec(raw)
    return _z_lab(raw) if NESTED in raw else None


def _deepspec(raw: Mapping[str, Any]) -> BlockDraftConfig:
    rank, kind = _whole(raw, "markov_rank", least=0), raw.get("markov_head_type")
    if rank and kind not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type is {kind!r:.60}; supported: {', '.join(MARKOV_HEADS)}")
    confidence = raw.get("enable_confidence_head") is True
    reads_token = confidence and raw.get("confidence_head_with_markov") is True
    if reads_token and not rank:
        raise ValueError("its confidence head reads the Markov head, and markov_rank is 0")
    config = _config(
        "DSpark of DeepSpec" if rank or confidence else "DFlash of DeepSpec",
        raw,
        raw,
        from_anchor=True,
        markov=kind if rank else None,
        rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
    )
    if raw.get("num_target_layers") in config.taps:
        # Its training reads the last layer's output before the last norm, its decoding after it.
        raise ValueError("target_layer_ids has the target's last layer, which is not supported")
    return config


def _z_lab(raw: Mapping[str, Any]) -> BlockDraftConfig:
    nested = raw[NESTED]
    if not isinstance(nested, Mapping):
        raise ValueError(f"{NESTED} is {nested!r:.60}, not an object")
    kind, known = dict[str, Any](), READ | {*CAUSAL}
    if nested.get("projector_type") == "domino":
        known |= DOMINO | {"projector_type"}
        kind = {"markov": "domino", "uncorrected": _whole({DOMINO_FIRST: 0, **nested}, DOMINO_FIRST, least=0)}
        kind |= {"rank": _whole(nested, "emb_dim", least=1), "state": _whole(nested, "gru_hidden_dim", least=1)}
    if other := sorted(name for name, value in nested.items() if value and name not in known):
        raise ValueError(f"{NESTED} has {other[0]!r:.60}, which is not supported")
    settings = {name: raw[name] for name in READ if name in raw} | dict(nested)
    settings.setdefault("target_layer_ids", _spread(raw))
    causal = any(nested.get(name) is True for name in CAUSAL)
    name = "Domino" if kind else "JetSpec" if causal else "DFlash of z-lab"
    return _config(name, raw, settings, from_anchor=nested.get("shift_label") is True, causal=causal, **kind)


def _config(name: str, raw: Mapping[str, Any], settings: Mapping[str, Any], **kind: Any) -> BlockDraftConfig:
    """Return the configuration; `settings` holds what is in READ."""
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"its layers are of {raw['model_type']!r:.60}; supported: qwen3")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ValueError("it has layers of sliding attention, which are not supported: is a block causal in them?")
    for needed in NEEDED:
        if raw.get(needed) is None:
            raise ValueError(f"config.json has no {needed}")
    layers = layers_of(Qwen3Config, raw)
    taps = settings.get("target_layer_ids")
    if not isinstance(taps, list | tuple) or not taps or any(type(tap) is not int or tap < -1 for tap in taps):
        raise ValueError(f"target_layer_ids is {taps!r:.60}, not a list of layers")
    return BlockDraftConfig(
        name=name,
        raw=raw,
        taps=tuple(tap + 1 for tap in taps),
        width=layers.hidden_size,
        vocabulary=layers.vocab_size,
        max_position_embeddings=layers.max_position_embeddings,
        mask_id=_whole(settings, "mask_token_id", least=0, most=layers.vocab_size - 1),
        layers=layers,
        block=_whole(settings, "block_size", least=1 if kind["from_anchor"] else 2, most=256),
        **kind,
    )


def _spread(raw: Mapping[str, Any]) -> list[int]:
    """Return z-lab's layers where none are named: evenly from the second to the third last."""
    target, own = (_whole(raw, name, least=1) for name in ("num_target_layers", "num_hidden_layers"))
    if own == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (own - 1)) for i in range(own)]


def _whole(settings: Mapping[str, Any], name: str, *, least: int, most: int = 1 << 30) -> int:
    value = settings.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}, not a whole number from {least} to {most:,}")
    return value
