"""Read the result of an answer by its value, in whatever notation: a number, or the letter of a choice.

The result is what an answer states last: the content of its last box, or what follows its last `####` or "the answer
is". Where it states nothing, it is its last number, or the choice in its last line. A model may run on into another
question, which is not read. Answers may be hostile: the time that a pattern takes grows linearly with the text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
LONGEST = 500  # characters of a result
MOST = 100  # statements of an answer that are looked at
RUN_ON = re.compile(r"^[ \t#*>]*(?:question|problem|q|human|user)\b[ \t#*\d]*(?::|$)", re.IGNORECASE | re.MULTILINE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
IS = r"(?: (?:to|for) [^.\n]{0,60}?)?[\s*_]*(?::|=|\b(?:is|are|(?:sh|w)ould be)\b)[\s*_:]*"
STATED = re.compile(rf"{BOX.pattern}|####[\s*_:]*|\banswers?{IS}", re.IGNORECASE)
CHOSEN = re.compile(rf"{STATED.pattern}|\b(?:choice|option){IS}", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|[.!?][\"')*_\]]*(?:\s|$)|\s(?:because|since|as|for|where|when)\b")
DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
INVISIBLE = dict.fromkeys([0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF])
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:! ]|[\u00a0\u2007\u2009\u202f'’])(?=\d{3}(?!\d))")
LATEX = re.compile(r"\\[a-zA-Z]+|\\[,;:!%()\[\]]|[{}]")
MINUS = re.compile(r"(?<!\d )\b(?:minus|negative) (?=[$€£]?\d)", re.IGNORECASE)
SIGN = r"(?:(?<![\w)\]}])-[$€£]?)?"  # "10-3" subtracts, so its numbers have no sign
NUMBER = rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{SIGN}(?<![.\d])\.\d+"
EQUATION = re.compile(r"^(?=\W*(?:\d|\w+ *=)).*=")  # it begins with a number or a name, not with a sentence
# A number behind at most one word; not the beginning of a sum.
VALUE = re.compile(rf"\W*?(?:[^\W\d_]+\W*?)?({NUMBER})(?![.,]?\d|\s+\d|\s*[-+*/×·÷^=]\s*[\d(])")
LETTER = "[A-Ra-r]"  # of a choice
BRACKETED = re.compile(rf"(?<!\w)[(\[]\s*({LETTER})\s*[)\]]")
ALONE = re.compile(rf"^\W*({LETTER})(?:\W*$|[).:]\W)")
WORD = re.compile(r"(?<![\w'’])([A-R])(?![\w'’])(?!(?<=[AI])\s+(?!and|or|with)[a-z])")  # not "A mix" nor "I do"
NOT = re.compile(rf"\b(?i:not)\W+{LETTER}\b")
OTHER = re.compile(rf"\W*\b(?:or|and)\W+{LETTER}\b")


class Case(NamedTuple):
    """An answer, what it is compared with, and what lm-eval makes of it."""

    question: Mapping[str, Any]  # the row of the data
    reference: str
    text: str
    found: Any = None  # by the filter
    score: float | None = None  # None: the filter or the metric raised an error


def first(text: str, read: Callable[[str], T | None]) -> T | None:
    """Return what `read` finds in the answer; if nothing, what it finds in the first further question."""
    return next((value for part in RUN_ON.split(text) if (value := read(part)) is not None), None)


def statements(text: str, stated: re.Pattern[str] = STATED) -> Iterator[str]:
    r"""Yield what an answer states as its result, the last statement first. None precedes a box without an end.

    >>> list(statements(r"The answer is 6. No: \boxed{} \boxed {7}"))
    ['7', '6. No: \\boxed{} \\boxed {7}']
    """
    for mark in reversed([*stated.finditer(text)][-MOST:]):
        rest = text[mark.end() : mark.end() + LONGEST]
        result = _closed(rest) if mark[0].endswith("{") else rest
        if result is None:
            return
        if result.strip():
            yield result.strip()


def _closed(text: str) -> str | None:
    """Return the text before the brace that closes what is open at its beginning; None: there is none."""
    depth = 1
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[: token.start()]
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the last box, which may have no braces in a formula: `$\boxed 7$`; None: no box."""
    braceless = re.findall(r"\\boxed\s+([^{}$\s][^{}$]{0,500})\$", text)
    return next(statements(text, BOX), braceless[-1] if braceless else None)


def sentence(text: str) -> str:
    """Return the first sentence of a text, without its full stop and without a clause of its reason."""
    return SENTENCE_END.split(text, maxsplit=1)[0]


def last_line(text: str) -> str:
    return text.rstrip()[-LONGEST:].rpartition("\n")[2]


def plain(text: str) -> str:
    """Return the text with ASCII's minus sign and commas between thousands, and without invisible characters."""
    return THOUSANDS.sub(",", text.translate(DASHES | INVISIBLE))


def number(text: str) -> Decimal | None:
    r"""Return the number that an answer gives as its result; None: it has no number.

    >>> number(r"So it is \boxed{\$1{,}450.00}. It took 3 steps.")
    Decimal('1450.00')
    """

    def read(part: str) -> Decimal | None:
        said = (VALUE.match(EQUATION.sub("", sentence(_without_latex(stated)))) for stated in statements(part))
        return next((last_number(value[1]) for value in said if value), last_number(part))

    return first(text, read)


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text; None: it has none.

    >>> last_number("It is \u22123 degrees...")
    Decimal('-3')
    """
    numbers = re.findall(NUMBER, _without_latex(text))
    return Decimal(re.sub(r"[^\d.-]", "", numbers[-1])) if numbers else None


def same_numbers(cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether the answer's number is the last one of the reference."""
    return [number(case.text) == last_number(case.reference) for case in cases]


def _without_latex(text: str) -> str:
    return MINUS.sub("-", LATEX.sub(" ", plain(text).replace("\\$", "$")))


def letter(text: str) -> str | None:
    """Return the letter of the choice that an answer states; None: it states none.

    >>> letter("The answer is A mix, I think. So the answer is **b**."), letter("The answer is Boron.")
    ('B', None)
    """
    return first(text, _letter)


def same_letters(cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether the answer's letter is the reference."""
    return [letter(case.text) == case.reference.strip("()") for case in cases]


def _letter(text: str) -> str | None:
    for stated in statements(text, CHOSEN):
        plain = NOT.sub(" ", LATEX.sub(" ", sentence(stated)))
        if letter := BRACKETED.search(plain) or ALONE.search(plain) or WORD.search(plain):
            return None if OTHER.match(plain, letter.end()) else letter[1].upper()
    last = BRACKETED.findall(last_line(text)) or ALONE.findall(last_line(text))
    return last[-1].upper() if last else None
