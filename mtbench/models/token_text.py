"""The text of tokens, as it follows the tokens before them.

Some tokenizers write a token differently at the beginning of a text: SentencePiece and Metaspace drop its space. Others
split a character over tokens. So tokens are decoded together with those before them, whose text is cut off, as in vLLM.
The text that is *shown* and scored has no special tokens. The *exact* text has all; stop strings are searched there.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import islice

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # tokens before, at least: a character has at most four
INCOMPLETE = "\ufffd"  # a decoder's replacement for an incomplete character


def shown_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """Return the text of `ids` behind the tokens `before`, without special tokens."""
    special = special_ids(tokenizer)
    return exact_text(tokenizer, [token for token in ids if token not in special], before, special)


def exact_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int] = (), without: Collection[int] = ()
) -> str:
    """Return the text of `ids`, with all tokens, behind the tokens `before` but for those in `without`."""
    others = (token for token in reversed(before) if token not in without)
    last = list(islice(others, CONTEXT))
    while last and is_byte(tokenizer, last[-1]) and (more := list(islice(others, 1))):
        last += more  # a run of bytes is one character or more, or none is
    head, whole = _decode(tokenizer, last[::-1]), _decode(tokenizer, [*last[::-1], *ids])
    pairs = enumerate(zip(head, whole, strict=False))
    return whole[next((n for n, (a, b) in pairs if a != b), len(head)) :]  # `ids` may complete a character of `before`


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""


def is_byte(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is one of byte fallback."""
    return is_fallback(tokenizer.convert_ids_to_tokens(token) or "")


def is_fallback(token: str) -> bool:
    """Return whether a token of sentencepiece stands for one byte, as in `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


@lru_cache(maxsize=8)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def ids_behind(tokenizer: PreTrainedTokenizerBase, text: str, before: Sequence[int]) -> list[int]:
    """Return the tokens of a text, if possible such that exactly this text is made of them behind those `before`."""
    head = exact_text(tokenizer, before[-CONTEXT:])
    texts = text, head, head + text
    alone, first, whole = (list[int](tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts)
    behind = whole[len(first) :] if whole[: len(first)] == first else alone
    return behind if exact_text(tokenizer, alone, before) != text else alone
