"""What tokens add to a text, by whatever tokenizer, and which tokens of two vocabularies are the same."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtbench.models.families import TINY
from mtbench.models.vocabularies import other_token, shared, spellings, token_bytes


def sentencepiece(words: list[str], special: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2's is stored: `▁` for a space, bytes as `<0x0A>`, no pre-tokenizer."""
    vocabulary = {word: i for i, word in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token=special[0]))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=special[0], eos_token=special[1])


def byte_level(words: list[str], special: list[str], added: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer as Qwen's is stored: one character for each byte, `Ġ` for a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *words])}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], extra_special_tokens=special[1:])


OURS = byte_level(["Ġthe", "Ġhous", "é".encode().decode("latin-1"), "ab"], ["<eos>", "<|im_start|>"], ["<Ġ>", "</s>"])
THEIRS = sentencepiece(["▁the", "▁", "ho", "us", "é", "\n", "abc", "the"], ["<unk>", "</s>", "<|im_start|>"])


def ours(text: str) -> int:
    return int(OURS.convert_tokens_to_ids(text))


def theirs(text: str) -> int:
    return int(THEIRS.convert_tokens_to_ids(text))


def test_the_bytes_of_a_token_are_what_it_adds_to_a_text() -> None:
    """Also where they are no whole character, and of an added word, which is stored as it is read."""
    known = token_bytes(OURS)
    assert known[ours("Ġthe")] == b" the"
    assert known[ours("Ċ")] == b"\n"
    assert known[ours("<Ġ>")] == "<Ġ>".encode()
    assert ours("<eos>") not in known
    known = token_bytes(THEIRS)
    assert known[theirs("▁the")] == b" the"
    assert known[theirs("<0xC3>")] == b"\xc3"
    assert {theirs(name) for name in ("<unk>", "</s>")} & set(known) == set()


@pytest.mark.parametrize("name", ["ar", "draft_mars"])
def test_they_are_those_of_the_tokenizers_own_decoder(name: str) -> None:
    """Of every token of the embedded checkpoints; half a character is a replacement character."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / name)
    for token, text in token_bytes(tokenizer).items():
        assert tokenizer.decode([token]) == text.decode(errors="replace")


def test_tokens_of_two_kinds_of_tokenizer_meet_by_bytes() -> None:
    """A space is `Ġ` or `▁`, a byte a character or `<0x0A>`; a word goes before the byte fallback of its one byte.

    Special tokens match none, whatever their names: `</s>` ends a text there and is a word here.
    """
    both = shared(OURS, len(OURS), THEIRS, len(THEIRS))
    assert both[ours("Ġthe")] == theirs("▁the")
    assert both[ours("Ċ")] == theirs("\n")
    assert both[ours("Ã")] == theirs("<0xC3>")
    assert both[ours("Ġ")] == theirs("▁")
    assert set(both).isdisjoint({ours(name) for name in ("Ġhous", "<eos>", "<|im_start|>", "</s>")})
    assert set(both.values()).isdisjoint({theirs(name) for name in ("</s>", "<|im_start|>", "abc", "<0x0A>")})
    assert len(set(both.values())) == len(both)
    back = shared(THEIRS, len(THEIRS), OURS, len(OURS))
    assert back == {draft: token for token, draft in both.items()}


def test_a_token_that_only_one_has_is_spelled_by_the_longest_of_the_others_tokens() -> None:
    """Byte for byte. A special token is the special token of its name, else its name is spelled."""
    spelled = spellings(OURS, len(OURS) + 2, THEIRS, len(THEIRS))
    names = {"Ġhous": ["▁", "ho", "us"], "ab": ["<0x61>", "<0x62>"], "Ġthe": ["▁the"], "<|im_start|>": ["<|im_start|>"]}
    for name, pieces in names.items():
        assert spelled[ours(name)] == [theirs(piece) for piece in pieces]
    assert spelled[ours("<eos>")] == [theirs(f"<0x{byte:02X}>") for byte in b"<eos>"]
    assert b"".join(token_bytes(THEIRS)[piece] for piece in spelled[ours("</s>")]) == b"</s>"  # a word here
    assert spelled[-2:] == [[theirs("<unk>")]] * 2  # rows of the embedding that no token stands for


def test_the_beginning_of_a_text_is_the_drafts_own() -> None:
    """Whatever it is called; a draft that has none reads its name."""
    target, draft = (byte_level(["Ġthe"], ["<eos>", name], []) for name in ("<bos>", "<s>"))
    target.bos_token = "<bos>"
    begin, sizes = target.bos_token_id, (len(target), draft, len(draft))
    assert len(spellings(target, *sizes)[begin]) == len("<bos>")
    draft.bos_token = "<s>"
    assert spellings(target, *sizes)[begin] == [draft.bos_token_id]


def test_a_vocabulary_with_more_words_is_no_other_one() -> None:
    """Nor is one with other special tokens; one id of another word makes it another."""
    words = ["Ġthe", "Ġhous"]
    less, more = byte_level(words, ["<eos>"], []), byte_level([*words, "ab"], ["<other>"], [])
    swapped = byte_level(words[::-1], ["<eos>"], [])
    assert other_token(less, more) is None
    assert other_token(less, swapped) in (b" the", b" hous")
