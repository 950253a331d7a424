"""A draft model with a vocabulary of its own: which tokens both have, and a runner that reads and drafts the target's.

Timor et al.: "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
ICML 2025, arXiv 2502.05202, algorithm 4: token-level intersection (TLI). The draft chooses among the tokens that both
vocabularies have; its probabilities are normalised over them. Tokens are compared by the bytes that they add to a text,
so that byte-level BPE, sentencepiece and byte fallback meet. Special tokens match none.

The draft reads the text so far in its own tokens. A token that both have is one of the draft's; another one is spelled:
the longest tokens of the draft whose bytes add up to its own, at most LONGEST of them, the last ones. So the draft's
slots are not the target's: its text is as long as the spellings. vLLM 0.32.0 (`use_heterogeneous_vocab`) compares
strings, and reads an unknown token in place of each that is not shared. transformers (`UniversalSpeculativeDecoding`,
#35029) spells them, too, and tokenises the prompt anew; it decodes one row and leaves special tokens out.

The paper's string-level exact match (SLEM) is not here: the draft's text must be tokenised anew by the target's
tokenizer before each verification, which runs on the host, and a step of our loop never waits for the host.

R = rows, W = positions fed, S = slots of the target, P = pieces of a spelling, V = the target's vocabulary, D = the
draft's.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mtbench.models.attention import ALIGNED, AttentionMetadata
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.models.token_text import is_fallback, special_ids

LONGEST = 8  # pieces of a spelling: a step of fixed shape feeds as many
ROOM = 2  # a row of the draft has so many slots for each of the target's; a longer text is drafted from its begin
BYTES_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # of byte-level BPE


@lru_cache(maxsize=8)
def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes that each token adds to a text, by id; special tokens, which add nothing, are not in it."""
    decoders = list(_flat(_decoder(tokenizer)))
    kinds = {decoder["type"] for decoder in decoders}
    spaces = [d["pattern"].get("String") for d in decoders if d["type"] == "Replace" and d["content"] == " "]
    spaces += [d["replacement"] for d in decoders if d["type"] == "Metaspace"]

    def read(token: str) -> bytes:
        if "ByteLevel" in kinds and all(char in BYTES_OF for char in token):
            return bytes(BYTES_OF[char] for char in token)
        if "ByteFallback" in kinds and is_fallback(token):
            return bytes([int(token[3:5], 16)])
        for space in filter(None, spaces):
            token = token.replace(space, " ")
        return token.encode()

    added = tokenizer.added_tokens_decoder
    special = special_ids(tokenizer)
    texts = {
        i: added[i].content.encode() if i in added else read(token)
        for token, i in tokenizer.get_vocab().items()
        if i not in special
    }
    return {i: text for i, text in texts.items() if text}


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer's decoder from its file; None if it names none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return None if decoder is None else json.loads(decoder.__getstate__())


def _flat(decoder: Any) -> Iterator[dict[str, Any]]:
    for part in (decoder or {}).get("decoders", [decoder] if decoder else []):
        yield from _flat(part) if "decoders" in part else [part]


@lru_cache(maxsize=8)
def other_token(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bytes | None:
    """Return the bytes of a token of the target whose id is another token of the draft; None if ids agree."""
    if target.get_vocab() == draft.get_vocab() and _decoder(target) == _decoder(draft):
        return None
    theirs = token_bytes(draft)
    return next((text for i, text in token_bytes(target).items() if theirs.get(i, text) != text), None)


def differ(target: Any, draft: Any) -> bool:
    """Return whether the draft reads some of the target's token ids otherwise, or not at all; of two checkpoints."""
    largest = max((i for i in target.tokenizer.get_vocab().values() if i < target.vocabulary), default=0)
    return largest >= draft.vocabulary or other_token(target.tokenizer, draft.tokenizer) is not None


def shared_by(target: Any, draft: Any) -> dict[int, int]:
    """Return `shared` of two checkpoints."""
    return shared(target.tokenizer, target.vocabulary, draft.tokenizer, draft.vocabulary)


def vocabulary_flags(checkpoints: Mapping[str, Any], target: str) -> list[str]:
    """Return which share of the target's tokens each draft of another vocabulary can draft, by role."""
    rows = checkpoints[target].vocabulary
    shares = {role: shared_by(checkpoints[target], draft) for role, draft in checkpoints.items() if role != target}
    return [f"{role} drafts the {len(ids):,} of {rows:,} tokens that it shares" for role, ids in shares.items()]


@lru_cache(maxsize=8)
def shared(target: PreTrainedTokenizerBase, rows: int, draft: PreTrainedTokenizerBase, width: int) -> dict[int, int]:
    """Return the draft's id of each token of the target that both vocabularies have, one to one.

    `rows`, `width`: how many ids the target and the draft have.
    """
    ours, theirs = _by_bytes(target, rows), _by_bytes(draft, width)
    return {i: theirs[text] for text, i in ours.items() if text in theirs}


def _by_bytes(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[bytes, int]:
    """Return one id of each token's bytes; of two, one that is no byte fallback, then the lowest."""
    texts = {i: text for i, text in token_bytes(tokenizer).items() if i < rows}
    names = tokenizer.convert_ids_to_tokens(list(texts))
    order = sorted((is_fallback(name), i) for name, i in zip(names, texts, strict=True))
    return {texts[i]: i for _, i in reversed(order)}


def spellings(
    target: PreTrainedTokenizerBase, rows: int, draft: PreTrainedTokenizerBase, width: int
) -> list[list[int]]:
    """Return each target token in the draft's tokens, one at least; its unknown or end token replaces the rest.

    A special token is the draft's special token of the same name, BOS its BOS; else its name is spelled.
    """
    one_to_one, texts = shared(target, rows, draft, width), token_bytes(target)
    begin = {} if draft.bos_token_id is None else {target.bos_token: draft.bos_token_id}
    pieces, special = _by_bytes(draft, width), {**draft.get_vocab(), **begin}
    longest = max(map(len, pieces), default=0)
    spare = [i for i in (draft.unk_token_id, draft.eos_token_id, 0) if i is not None][:1]
    names = target.convert_ids_to_tokens(list(range(rows)))

    def spell(text: bytes) -> list[int]:
        ids, begin = [], 0
        while begin < len(text):
            sizes = range(min(longest, len(text) - begin), 0, -1)
            size = next((n for n in sizes if text[begin : begin + n] in pieces), 0)
            if not size:
                return spare
            ids.append(pieces[text[begin : begin + size]])
            begin += size
        return ids[-LONGEST:]

    def spelled(token: int) -> list[int]:
        name = names[token]
        if token in one_to_one:
            return [one_to_one[token]]
        if token in texts:
            return spell(texts[token])
        if name is None:
            return spare  # a row of the embedding that no token stands for
        return [special[name]] if special.get(name, width) < width else spell(name.encode())

    return [spelled(token) for token in range(rows)]


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """Tables from the target's tokens to the draft's."""

    pieces: Tensor  # (V, P) the draft's ids of each token of the target
    count: Tensor  # (V,) how many of them count
    drafted: Tensor  # (V,) the draft's id if both have the token, else D

    @classmethod
    def of(cls, target: Any, draft: Any) -> "Translation":
        """Return the tables for two checkpoints, on the draft's device."""
        both = target.tokenizer, target.vocabulary, draft.tokenizer, draft.vocabulary
        spelled, one_to_one, device = spellings(*both), shared(*both), draft.model.device
        width = max(map(len, spelled))
        return cls(
            torch.tensor([ids + [0] * (width - len(ids)) for ids in spelled], device=device),
            torch.tensor([len(ids) for ids in spelled], device=device),
            torch.tensor([one_to_one.get(i, draft.vocabulary) for i in range(target.vocabulary)], device=device),
        )


class TranslatedRunner(ModelRunner):
    """Runs a draft whose vocabulary is not the target's. It reads and drafts the target's tokens.

    Its cache holds the draft's tokens: a slot is a place in the spelled text.
    """

    feed_reads = True

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner.checkpoint, runner.decoder)
        self.translation = Translation.of(target.checkpoint, runner.checkpoint)
        self.vocabulary = target.checkpoint.vocabulary
        self.longest = self.translation.pieces.shape[1]

    def reserve(self, rows: int, slots: int, taps: Any = ()) -> None:
        most = self.checkpoint.max_positions // ALIGNED * ALIGNED
        super().reserve(rows, max(slots, min(ROOM * slots, most)), taps)

    def length(self, tokens: Tensor, known: Tensor, free: int = 0) -> Tensor:
        ends = self.translation.count[tokens].cumsum(1)
        length = torch.where(known > 0, ends.gather(1, (known - 1).clamp(min=0)[:, None])[:, 0], 0)
        return length.clamp(max=self.cache.slots - free)

    def text(self, tokens: Tensor, slots: Tensor) -> Tensor:
        count = self.translation.count[tokens]
        ends = count.cumsum(1)
        place = torch.searchsorted(ends, slots, right=True).clamp(max=tokens.shape[1] - 1)
        piece = slots - (ends - count).gather(1, place)
        return self.translation.pieces[tokens.gather(1, place), piece.clamp(0, self.longest - 1)]

    def own(self, tokens: Tensor) -> Tensor:
        return self.translation.pieces[tokens, 0]

    def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int) -> Forwarded:
        """Run the draft on its own ids (R, W); return logits over the target's ids, −∞ for what it cannot draft."""
        logits = super().forward(ids, metadata, judged).logits
        padded = torch.nn.functional.pad(logits, (0, 1), value=float("-inf"))
        return Forwarded(padded.index_select(-1, self.translation.drafted))

    def feed(self, tokens: Tensor, metadata: AttentionMetadata) -> None:
        """Cache the spelled text of slots (R, W) of the target, which are contiguous; a short row repeats its first."""
        ends = self.length(tokens, metadata.slots[:, -1] + 1)
        begins = torch.minimum(self.length(tokens, metadata.slots[:, 0]), ends - 1)
        width = int((ends - begins).max())
        slots = torch.maximum(ends[:, None] - width + torch.arange(width, device=ends.device), begins[:, None])
        view = -(-int(ends.max()) // ALIGNED) * ALIGNED
        fed = AttentionMetadata(slots, slots, ends, view, block=metadata.block, rows=metadata.rows)
        super().forward(self.text(tokens, slots), fed, judged=1)
