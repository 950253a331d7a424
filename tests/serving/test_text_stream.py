"""The pieces of a growing text make up the text, without broken characters and without what a stop string begins."""

import random

import pytest
from tokenizer_kinds import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtbench.decoding.output import finish
from mtbench.models.token_text import INCOMPLETE, shown_text
from mtbench.serving.completions import TextStream

TEXT = "Zeit für Käse 🧀🧀, 日本語 — naïve\n\n  x = 3 "


def byte_level() -> PreTrainedTokenizerFast:
    """A token per byte, as the ends of every byte-level vocabulary are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Words with a sign for the space before them, bytes for what is no word, and no space before a text."""
    words = ["<unk>", "▁Zeit", "▁für", "▁K", "se", "▁", "x", "=", "3", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TOKENIZERS = {"bytes": byte_level(), "sentencepiece": sentence_piece()}


def cuts(ids: list[int], seed: int) -> list[list[int]]:
    """The ids in commits of one to five tokens."""
    chance, parts = random.Random(seed), []
    while ids:
        size = chance.randint(1, 5)
        parts.append(ids[:size])
        ids = ids[size:]
    return parts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_make_up_the_text(name: str, seed: int) -> None:
    own = TOKENIZERS[name]
    ids = own(TEXT, add_special_tokens=False)["input_ids"]
    stream = TextStream(own, ())
    pieces = [stream.add(part) for part in cuts(ids, seed)]
    assert "".join(pieces) == shown_text(own, ids)
    assert not any(INCOMPLETE in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > len(ids) / 15  # it waits for the end of a run of bytes only


@pytest.mark.parametrize("seed", range(5))
def test_a_client_may_ask_for_special_tokens(seed: int) -> None:
    """`"skip_special_tokens": false`: whole and streamed, up to a stop string that is one."""
    own = tokenizer("byte-level")
    ids = own("the [/THINK]1 é<s>x</s>1")["input_ids"]
    answer, stream = finish(own, ids, (), ("</s>",)), TextStream(own, ("</s>",), exact=True)
    assert (answer.exact, answer.text) == ("the [/THINK]1 é<s>x", "the 1 éx")
    assert answer.exact.startswith("".join(stream.add(part) for part in cuts(ids, seed)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stop", [["🧀,"], ["\n\n"], ["日本人", "語 —"], ["x = 4", " x"], ["nothing"]])
def test_nothing_of_a_stop_string_is_released(stop: list[str], seed: int) -> None:
    """The pieces are the beginning of the text before the stop string; one that only begins is released later."""
    own = TOKENIZERS["bytes"]
    ids = own(TEXT, add_special_tokens=False)["input_ids"]
    answer = finish(own, ids, (), stop)
    text, found = answer.text, answer.finish_reason == "stop"
    stream = TextStream(own, stop)
    told = "".join(stream.add(part) for part in cuts(ids, seed))
    assert stream.stopped == found
    assert text.startswith(told)
    assert found or len(text) - len(told) < max(map(len, stop))
