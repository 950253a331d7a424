"""Sides of an audit that are files of texts: their tokens are made by the judge's tokenizer.

A text that begins as the other side's answer does gets that answer's tokens as far as the texts agree, so that the
first difference of tokens is where the texts differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mtbench.decoding.output import text_of
from mtbench.errors import UserError, first_line
from mtbench.experiments.audit.sides import Named, Pair, Said, Side
from mtbench.models.chat_template import render, tokenise
from mtbench.results.imports.answers import read_answers


def of_file(path: Path, ran_in: str) -> Named:
    """Return the side that a file of answers is, without tokens. `ran_in`: the number type of its answers."""
    read = read_answers(path)
    answers = {
        one.item: Said(prompt=None, tokens=[], text=one.text, finish=None, score=one.score, asked=one.prompt)
        for one in read.answers
    }
    side = Side(
        name=str(path),
        source=str(path),
        suite=read.suite,
        arm=read.tool,
        answers=answers,
        dtype=ran_in,
        task=read.settings,
        texts=True,
    )
    return Named(str(path), [side], [side], chosen=True)


def with_prompts(named: Named, tokenizer: Any) -> Named:
    """Return the sides with the tokens of the prompts that a file has as texts, or as messages.

    Raises UserError for messages that the chat template refuses.
    """

    def made(side: Side) -> Side:
        if not side.texts:
            return side
        asked = {item: said.asked for item, said in side.answers.items() if said.asked}
        told = {i: a if isinstance(a, str) else _conversation(tokenizer, a, side, i) for i, a in asked.items()}
        begin = tokenizer.bos_token or "\0"  # a text that has it was written by a chat template
        plain = {i: isinstance(asked[i], str) and not text.startswith(begin) for i, text in told.items()}
        ids = {i: tokenise(tokenizer, [text], plain=plain[i])[0] for i, text in told.items()}
        return replace(side, answers={i: replace(said, prompt=ids.get(i)) for i, said in side.answers.items()})

    sides = {side.name: made(side) for side in named.all}
    return named._replace(all=[*sides.values()], meant=[sides[side.name] for side in named.meant])


def _conversation(tokenizer: Any, messages: Sequence[Any], side: Side, item: str) -> str:
    """Return messages as the judge's chat template writes them. Raises UserError."""
    try:
        return render(tokenizer, messages, answer_follows=True)
    except TemplateError as error:
        raise UserError(f"{side.name}: the chat template refuses {item!r:.60}: {first_line(error)}") from None


def same_items(ours: Named, theirs: Named) -> Named:
    """Return a file's side with the names of the other's items, found by their prompts where no name is shared."""
    by_prompt = {tuple(said.prompt): item for s in theirs.meant for item, said in s.answers.items() if said.prompt}
    named = {item for side in theirs.meant for item in side.answers}

    def renamed(side: Side) -> Side:
        if not side.texts or not named.isdisjoint(side.answers):
            return side
        found = {by_prompt.get(tuple(said.prompt or ()), item): said for item, said in side.answers.items()}
        return replace(side, answers=found)

    sides = [renamed(side) for side in ours.meant]
    return ours._replace(all=sides, meant=sides) if any(side.texts for side in ours.meant) else ours


def with_tokens(pair: Pair, tokenizer: Any) -> Pair:
    """Return a pair in which texts have tokens: those of the other side as far as the texts agree."""
    if not pair.a.texts and not pair.b.texts:
        return pair
    a, b = dict(pair.a.answers), dict(pair.b.answers)
    for item in pair.items:
        if pair.a.texts:
            a[item] = _told(a[item], b[item], tokenizer, known=not pair.b.texts)
        if pair.b.texts:
            b[item] = _told(b[item], a[item], tokenizer, known=True)
    return pair._replace(a=replace(pair.a, answers=a), b=replace(pair.b, answers=b))


def _told(said: Said, other: Said, tokenizer: Any, *, known: bool) -> Said:
    """Return an answer with tokens. `known`: the other one has some."""
    prompt = said.prompt or other.prompt
    if known and said.text == other.text:
        return replace(said, prompt=prompt, tokens=other.tokens, finish=other.finish)
    shared = _shared(other.tokens, said.text, tokenizer) if known else []
    rest = said.text[len(text_of(tokenizer, shared)) :]
    own: list[int] = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    return replace(said, prompt=prompt, tokens=[*shared, *own])


def _shared(tokens: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """Return the tokens whose text begins `text`, without special ones at their end."""
    low, high = 0, len(tokens)
    while low < high:  # the longest prefix: texts of prefixes are prefixes of one another
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.startswith(text_of(tokenizer, tokens[:middle])) else (low, middle - 1)
    special = set(tokenizer.all_special_ids)
    while low and tokens[low - 1] in special:
        low -= 1
    return list(tokens[:low])
