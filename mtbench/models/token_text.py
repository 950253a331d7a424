"""The text of tokens, as it follows the tokens before them.

Some tokenizers write a token differently at the beginning of a text: SentencePiece and Metaspace drop its space. Others
split a character over tokens. So tokens are decoded together with those before them, whose text is cut off, as in vLLM.

There are two texts: what is *shown* and scored has no special tokens; the *exact* text has all, and stop strings are
searched there.
"""

import re
from collections.abc import Collection, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # tokens before, at least: a character has at most four
INCOMPLETE = "\ufffd"  # a decoder's replacement for an incomplete character
BYTE = re.compile("<0x[0-9A-F]{2}>")  # byte fallback: a run of these is one character or more, or none is

_special: WeakKeyDictionary[PreTrainedTokenizerBase, frozenset[int]] = WeakKeyDictionary()


def shown_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """Return the text of `ids` behind the tokens `before`, without special tokens."""
    special = special_ids(tokenizer)
    return _following(tokenizer, [token for token in ids if token not in special], context(tokenizer, before, special))


def exact_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int] = ()) -> str:
    """Return the text of `ids` behind the tokens `before`, with all tokens."""
    return _following(tokenizer, list(ids), context(tokenizer, before))


def context(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], without: Collection[int] = frozenset()
) -> list[int]:
    """Return the last of some tokens, those that the text of the next ones depends on."""
    others = (token for token in reversed(before) if token not in without)
    last = list(islice(others, CONTEXT))
    while last and is_byte(tokenizer, last[-1]) and (more := list(islice(others, 1))):
        last += more
    return last[::-1]


def is_byte(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is one of byte fallback."""
    return BYTE.fullmatch(tokenizer.convert_ids_to_tokens(token) or "") is not None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    if tokenizer not in _special:
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        _special[tokenizer] = frozenset(added.union(tokenizer.all_special_ids))
    return _special[tokenizer]


def ids_behind(tokenizer: PreTrainedTokenizerBase, text: str, before: Sequence[int]) -> list[int]:
    """Return the tokens of a text, if possible such that exactly this text is made of them behind the tokens `before`.

    For an answer that a server returns as text.
    """
    head = exact_text(tokenizer, context(tokenizer, before))
    texts = text, head, head + text
    alone, first, whole = (list[int](tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts)
    behind = whole[len(first) :] if whole[: len(first)] == first else alone
    return behind if exact_text(tokenizer, alone, before) != text else alone


def _following(tokenizer: PreTrainedTokenizerBase, ids: list[int], before: list[int]) -> str:
    head, whole = _decode(tokenizer, before), _decode(tokenizer, before + ids)
    pairs = enumerate(zip(head, whole, strict=False))
    return whole[next((n for n, (a, b) in pairs if a != b), len(head)) :]  # `ids` may complete a character of `before`


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
