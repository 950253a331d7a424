"""Small tokenizers of the kinds that differ in how ids become text, each with special and other added tokens."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["▁", "▁the", "▁The", "the", "▁return", "▁x", "x", "▁+", "▁1", "1", ".", "\n", "é", "▁▁", "▁▁▁▁", "日本"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
METASPACE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _made(inner: Tokenizer) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "[/THINK]")])
    inner.add_tokens([AddedToken("<think>"), AddedToken("</think>", lstrip=True), AddedToken("<tool>", rstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def _byte_level(normalizer: Any = None) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen: some merged tokens, and each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ã", "©"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("ð", "Ł")]
    vocabulary = [*letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return _made(inner)


def _sentence_piece(decoder: Sequence[Any], *, prepend: Any = None) -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral, by a normaliser and a sequence of decoders."""
    vocabulary = ["<unk>", *BYTES, *WORDS]
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([*([prepend] if prepend else []), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([*decoder])
    return _made(inner)


def _metaspace(scheme: str) -> PreTrainedTokenizerFast:
    """As T5, Gemma and newer exports of Llama."""
    vocabulary = [(token, -float(i)) for i, token in enumerate(["<unk>", *BYTES, *WORDS])]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    return _made(inner)


def _word_piece() -> PreTrainedTokenizerFast:
    vocabulary = ["[UNK]", "the", "##se", "return", "x", "##1", "1", "don", "'", "t", ".", "é", "##é", "日"]
    inner = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return _made(inner)


def _words() -> PreTrainedTokenizerFast:
    """Without a decoder: tokens are joined by spaces."""
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["[UNK]", "a", "bc", "日", "1", "+"])}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return _made(inner)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": _byte_level,
    "byte-level, normalised": lambda: _byte_level(normalizers.NFC()),
    "SentencePiece, dummy prefix": lambda: _sentence_piece(
        [*METASPACE, decoders.Strip(" ", 1, 0)], prepend=normalizers.Prepend("▁")
    ),
    "SentencePiece, no dummy prefix": lambda: _sentence_piece(METASPACE),
    "SentencePiece, without Fuse": lambda: _sentence_piece(METASPACE[:2]),
    "Metaspace, first": lambda: _metaspace("first"),
    "Metaspace, always": lambda: _metaspace("always"),
    "Metaspace, never": lambda: _metaspace("never"),
    "WordPiece": _word_piece,
    "words": _words,
}


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()
