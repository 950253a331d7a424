"""The text of an answer is what follows the text of its prompt, for every kind of tokenizer, whole and streamed."""

import random

import pytest
from tokenizer_kinds import KINDS, tokenizer

from mtbench.decoding.output import finish
from mtbench.models.token_text import INCOMPLETE, exact_text, ids_behind, is_byte, shown_text, special_ids
from mtbench.serving.completions import TextStream

SEQUENCES = pytest.mark.parametrize("sequences", [100, pytest.param(2000, marks=pytest.mark.slow)])  # of each kind


def drawn(kind: str, number: int) -> tuple[list[int], list[int], random.Random]:
    """Return ids of a prompt and of an answer: of any tokens, some often repeated, so that bytes make characters."""
    chance, known = random.Random(f"{kind} {number}"), sorted(set(tokenizer(kind).get_vocab().values()))
    written = tokenizer(kind)("the é 日本 🧀 return  x + 1\n", add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    for _ in range(chance.randint(1, 6)):
        ids += chance.choice([chance.choices(known, k=3), chance.sample(known, 1) * 2, written, written[:3]])
    cut = chance.randint(0, len(ids))
    return ids[:cut], ids[cut:], chance


@SEQUENCES
@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_prompt_and_answer_make_up_the_text_of_all_tokens(kind: str, sequences: int) -> None:
    """Exact texts, and those without special tokens; a character that the prompt begins belongs to the answer."""
    own = tokenizer(kind)
    for number in range(sequences):
        prompt, answer, _ = drawn(kind, number)
        for text_of, skipped in ((exact_text, False), (shown_text, True)):
            whole = own.decode(prompt + answer, skip_special_tokens=skipped)
            before = own.decode(prompt, skip_special_tokens=skipped)
            text = text_of(own, answer, prompt)
            assert whole.endswith(text)
            head = whole[: len(whole) - len(text)]
            assert before.startswith(head)
            left = [token for token in prompt if not skipped or token not in special_ids(own)]
            assert head == before or before.endswith(INCOMPLETE) or is_byte(own, left[-1])


@SEQUENCES
@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_answer_is_the_whole_one(kind: str, sequences: int) -> None:
    """What is sent before the end is its beginning, so the rest completes it; also with stop strings."""
    own = tokenizer(kind)
    for number in range(sequences):
        prompt, answer, chance = drawn(kind, number)
        if not answer:
            continue
        stop = chance.choice([(), ("x",), ("</s>",), (" +", "the 1"), ("[/THINK]", "\n")])
        whole, left, sent = finish(own, answer, (), stop, prompt), list(answer), ""
        stream = TextStream(own, stop, prompt)
        while left:
            size = chance.randint(1, 3)
            sent += stream.add(left[:size])
            left = left[size:]
        assert whole.text.startswith(sent)
        assert stop or len(whole.text) - len(sent) < 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_special_tokens_of_an_answer_stand_where_they_were(kind: str) -> None:
    own = tokenizer(kind)
    mark = own.convert_tokens_to_ids("[/THINK]")
    words = own("the x 1" if kind != "words" else "a bc 1", add_special_tokens=False)["input_ids"]
    answer = finish(own, [*words, mark, *words], (), ())
    assert answer.special == [(len(shown_text(own, words)), "[/THINK]")]
    assert mark in special_ids(own)
    assert answer.text == own.decode([*words, *words])


def test_a_continuation_keeps_its_indent() -> None:
    """Llama 2's decoder drops a space at the beginning of a text, and an answer is none."""
    own = tokenizer("SentencePiece, dummy prefix")
    indented = own.convert_tokens_to_ids(["▁▁▁▁", "x", "</s>"])
    newline = own.convert_tokens_to_ids(["x", "\n"])
    assert finish(own, indented, indented[-1:], (), newline).text == "    x"
    assert finish(own, indented, indented[-1:], ("\nclass",), newline).text == "    x"
    assert shown_text(own, indented) == "   x"  # the beginning of a text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("WordPiece", "words")])
def test_a_text_becomes_tokens_that_make_it_again_behind_a_prompt(kind: str) -> None:
    """As for a server that returns texts only."""
    own = tokenizer(kind)
    prompt = own("the x\n", add_special_tokens=False)["input_ids"]
    for text in ("    return x", " x", "x", "é 1", "\n\nthe"):
        assert exact_text(own, ids_behind(own, text, prompt), prompt) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["</s>", "[/THINK]", "x</s>"])
def test_a_stop_string_with_a_special_token_is_found(kind: str, stop: str) -> None:
    """Also where an accepted draft goes on behind it. The text shown ends before it."""
    own = tokenizer(kind)
    word, space = {"words": ("bc", " "), "WordPiece": ("x", " ")}.get(kind, ("x", ""))
    ids = own.convert_tokens_to_ids(["1", word, "</s>", "[/THINK]", "1"])
    answer = finish(own, ids, (), (stop.replace("x", word + space),))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == ids[: 4 if stop == "[/THINK]" else 3]
    assert answer.text.strip() == own.decode(ids[: 1 if "x" in stop else 2])
