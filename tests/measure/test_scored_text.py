"""What is scored of an answer: the text behind its reasoning, up to a string that cuts it; and what is unread."""

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizer_kinds import tokenizer

from mtbench.decoding.output import finish
from mtbench.evaluation.suite import Prompt, Reading, Source, Suite, Template
from mtbench.measure.score import CUT, INSIDE, STOPPED, answer_of, before, readings_of
from mtbench.models.thinking import reasoning_in
from mtbench.plan.formats import GenerationLine
from mtbench.plan.plan import Item, SuitePlan

THOUGHT = "<think>\nFrance, so Lyon? No.\n</think>"


class Capital(Suite):
    """Every text passes that names Paris; an answer without a capital letter is unread."""

    name = "capital"

    def __init__(self, variant: str = "", source: Source = Source()) -> None: ...  # noqa: B008

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [Prompt(item="capital/0/0", text="?")]

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        return {
            item: Reading(1.0, None, 1.0) if "Paris" in text and "Lyon" not in text
            else Reading(0.0, None if any(map(str.isupper, text)) else "no name", 0.0)
            for item, text in answers.items()
        }  # fmt: skip


def line(text: str, **fields: Any) -> GenerationLine:
    hidden = ("forwards", "commits", "positions_fed", "draft_forwards", "drafted", "surplus")
    given: dict[str, Any] = {**dict.fromkeys(hidden), "finish_reason": "end", **fields}
    return GenerationLine(
        item="capital/0/0", prompt_ids=[1], prompt_tokens=1, token_ids=[1], text=text, block=0,
        **given,
    )  # fmt: skip


def planned(*cut: str) -> SuitePlan:
    item = Item(item="capital/0/0", prompt_ids=[1], stop=[], cut=list(cut))
    return SuitePlan(
        suite="capital", family="tiny", task={}, metric="exact_match", max_new_tokens=8, flags=[], items=[item]
    )


def read(answer: GenerationLine, *cut: str) -> Reading:
    return readings_of(Capital(), planned(*cut), [answer])["capital/0/0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris", Reading(1.0, None, 1.0)),
        (f"{THOUGHT}\n\nParis", Reading(1.0, None, 1.0)),
        ("France, so Lyon? No.\n</think>\n\nParis", Reading(1.0, None, 1.0)),  # the template opened it
        (f"{THOUGHT}\nLyon?\n</think>Paris", Reading(1.0, None, 1.0)),  # the last closing mark counts
        ("<seed:think>Lyon</seed:think>Paris", Reading(1.0, None, 1.0)),
        ("<think>\nFrance, so Paris", Reading(0.0, INSIDE, 0.0)),
        (f"{THOUGHT}\nParis?<think>", Reading(1.0, None, 1.0)),  # marks inside of a text begin nothing
        ("in a tag <think> one writes Paris", Reading(1.0, None, 1.0)),
        ("nothing", Reading(0.0, "no name", 0.0)),
    ],
)
def test_the_text_behind_the_reasoning_is_scored(text: str, expected: Reading) -> None:
    """By the marks of the text, where the tokenizer has none and in runs of an earlier mtbench."""
    assert read(line(text)) == expected
    assert read(line(text, reasoning=reasoning_in(text))) == expected


def test_the_stored_length_of_the_reasoning_decides() -> None:
    """It comes from token ids, so a mark that the answer quotes is a part of it."""
    assert read(line("< and </think> of Paris", reasoning=0)).score == 1
    assert answer_of(line("< and </think> of Paris", reasoning=0)).text == "< and </think> of Paris"
    assert answer_of(line("    indented", reasoning=0)).text == "    indented"


@pytest.mark.parametrize(
    ("fields", "cut", "unread"),
    [
        ({"finish_reason": "end"}, (), "no name"),
        ({"finish_reason": "stop"}, (), STOPPED),
        ({"finish_reason": "length"}, (), CUT),
        ({"finish_reason": "length"}, ("Paris",), STOPPED),
        ({"finish_reason": "length", "reasoning": 18}, (), INSIDE),
    ],
)
def test_an_answer_without_a_result_is_unread_by_its_cause(fields: Any, cut: tuple[str, ...], unread: str) -> None:
    text = "so it must be, Paris" if cut else "so it must be that"
    assert read(line(text, **fields), *cut) == Reading(0.0, unread, 0.0)


def test_a_string_that_cuts_the_score_may_be_a_special_token() -> None:
    """By the paper's protocol decoding goes on behind a stop; the special tokens are not in the text."""
    special = [(6, "<|im_end|>"), (6, "<|im_start|>")]
    assert before("Paris.user: Lyon", ["<|im_end|>"], special) == "Paris."
    assert before("Paris.user: Lyon", ["<|im_start|>user"], special) == "Paris."
    assert read(line("Paris.user: Lyon", special=special), "<|im_end|>").score == 1
    assert read(line("Paris.user: Lyon", special=special)).score == 0


def test_the_marks_are_token_ids_where_the_tokenizer_has_them() -> None:
    """Also if the prompt opened the reasoning. Letters that look like a mark are an answer's text then."""
    own = tokenizer("byte-level")
    opens, closes, end = own.convert_tokens_to_ids(["<think>", "</think>", "</s>"])
    quoted = [own.convert_tokens_to_ids(letter) for letter in "</think>"]
    words, prompt = own("the x", add_special_tokens=False)["input_ids"], own("1", add_special_tokens=False)["input_ids"]

    def scored(ids: list[int], prompt: list[int] = prompt, stop: tuple[str, ...] = ()) -> tuple[str, bool]:
        answer = finish(own, ids, (end,), stop, prompt)
        stored = line(answer.text, reasoning=answer.reasoning, finish_reason=answer.finish_reason)
        return answer_of(stored).text, answer_of(stored).cause == INSIDE

    assert scored([opens, *words, closes, *words, end]) == ("the x", False)
    assert scored([*words, closes, *words, end], [*prompt, opens]) == ("the x", False)
    assert scored([*words, *words], [*prompt, opens]) == ("", True)
    assert scored([opens, *words, closes, *words, opens, *words]) == ("", True)
    assert scored([*words, *quoted, *words, end]) == ("the x</think>the x", False)
    assert scored([*quoted, *words, closes, *words, end], [*prompt, opens]) == ("the x", False)
    assert scored([opens, *words, closes, *words, *words, *words], stop=("xt",)) == ("the ", False)


def test_the_marks_of_a_tokenizer_without_them_are_texts() -> None:
    own = tokenizer("byte-level, normalised")
    prompt = [own.convert_tokens_to_ids(letter) for letter in "1<seed:think>Ċ"]
    words = own("the x", add_special_tokens=False)["input_ids"]
    assert finish(tokenizer("words"), [1, 2], (), (), [3]).reasoning == 0
    bare = [own.convert_tokens_to_ids(letter) for letter in "<seed:think>"]
    assert finish(own, [*bare, *words], (), ()).reasoning == 0  # this tokenizer has other marks
    assert finish(own, words, (), (), prompt).reasoning == 0
    assert reasoning_in("the x", "1<seed:think>\n") == 5
