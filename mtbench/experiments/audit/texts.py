"""Sides of an audit that are files of texts: their tokens are made by the judge's tokenizer.

Where a text begins like the other side's answer, it gets that answer's tokens as far as the texts agree, so that the
first difference of tokens is where the texts differ.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mtbench.document.formatting import counted
from mtbench.errors import UserError, first_line
from mtbench.experiments.audit.sides import Named, Pair, Side, SideAnswer
from mtbench.models.chat_template import Clock, render, tokenise
from mtbench.models.token_text import ids_behind, shown_text, special_ids
from mtbench.results.answers import read_answers


def of_file(path: Path, ran_in: str) -> Named:
    """Return the side of a file of answers. `ran_in`: the number type of its answers."""
    read, name = read_answers(path), str(path)
    if all(one.failed for one in read):
        raise UserError(f"{path} has no answer to its {counted(len(read), 'request')}: they failed.")
    answers = {
        str(number): SideAnswer(
            prompt=one.prompt_ids,
            tokens=one.token_ids or [],
            text=one.output or "",
            finish=one.finish_reason,
            raw_prompt=one.prompt,
            lacks="failed" if one.failed else None,
        )
        for number, one in enumerate(read)
    }
    texts = all(one.token_ids is None for one in read)
    side = Side(name, name, None, "file", answers, dtype=ran_in, texts=texts)
    return Named([side], [side], chosen=True)


def with_prompts(named: Named, tokenizer: Any, date: str | None = None) -> Named:
    """Return the sides with the tokens of a file's prompts, and the texts of its tokens.

    `date`: that the chat template reads. Raises UserError for messages that the chat template refuses.
    """
    side = named.meant[0]
    if side.suite is not None:
        return named
    made = replace(
        side,
        answers={i: _completed(of, tokenizer, f"{side.name}: {i:.60}", Clock(date)) for i, of in side.answers.items()},
    )
    return named._replace(all=[made], meant=[made])


def _completed(answer: SideAnswer, tokenizer: Any, where: str, clock: Clock) -> SideAnswer:
    asked = answer.raw_prompt
    if answer.tokens and not answer.text:
        answer = replace(answer, text=shown_text(tokenizer, answer.tokens, answer.prompt or []))
    if not asked or answer.prompt:
        return answer
    try:
        text = asked if isinstance(asked, str) else render(tokenizer, asked, answer_follows=True, clock=clock)
    except TemplateError as error:
        raise UserError(f"{where}: the chat template refuses the prompt: {first_line(error)}") from None
    plain = isinstance(asked, str) and not text.startswith(tokenizer.bos_token or "\0")  # else a template wrote it
    return replace(answer, prompt=tokenise(tokenizer, [text], plain=plain)[0])


def left_out(letter: str, side: Side) -> list[str]:
    """Return a sentence for each reason why requests have no answer, or no whole one."""
    counts = Counter(answer.lacks for answer in side.answers.values() if side.suite is None and answer.lacks)
    are = "are", "is"
    return [f"{counted(n, 'request')} of {letter} {why} and {are[n == 1]} left out." for why, n in counts.items()]


def with_tokens(pair: Pair, tokenizer: Any) -> Pair:
    """Return a pair in which a file's answers have prompts, and texts have the other side's tokens while they agree."""
    if pair.a.suite is not None and pair.b.suite is not None:
        return pair
    a, b = dict(pair.a.answers), dict(pair.b.answers)
    for item in pair.items:
        if pair.a.texts:
            a[item] = _with_tokens(a[item], b[item], tokenizer, known=not pair.b.texts)
        if pair.b.texts:
            b[item] = _with_tokens(b[item], a[item], tokenizer, known=True)
        prompt = a[item].prompt or b[item].prompt
        a[item], b[item] = (replace(one, prompt=one.prompt or prompt) for one in (a[item], b[item]))
    return pair._replace(a=replace(pair.a, answers=a), b=replace(pair.b, answers=b))


def _with_tokens(answer: SideAnswer, other: SideAnswer, tokenizer: Any, *, known: bool) -> SideAnswer:
    """Return an answer with tokens, and whether it is whole. `known`: the other one has some."""
    prompt, same = answer.prompt or other.prompt, answer.text == other.text
    if known and same:
        return replace(answer, prompt=prompt, tokens=other.tokens, finish=other.finish)
    before = prompt or []
    shared = _shared(other.tokens, answer.text, tokenizer, before) if known else []
    rest = answer.text[len(shown_text(tokenizer, shared, before)) :]
    own = ids_behind(tokenizer, rest, [*before, *shared]) if rest else []
    cut = other.text.endswith(answer.text) and not other.text.startswith(answer.text)
    return replace(answer, prompt=prompt, tokens=[*shared, *own], whole=same or not cut)


def _shared(tokens: Sequence[int], text: str, tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """Return the tokens whose text begins `text`, without special ones at their end."""
    low, high = 0, len(tokens)
    while low < high:  # the longest prefix: texts of prefixes are prefixes of one another
        middle = (low + high + 1) // 2
        begins = text.startswith(shown_text(tokenizer, tokens[:middle], prompt))
        low, high = (middle, high) if begins else (low, middle - 1)
    while low and tokens[low - 1] in special_ids(tokenizer):
        low -= 1
    return list(tokens[:low])
