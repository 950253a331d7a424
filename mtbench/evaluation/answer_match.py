"""Metrics for answers to a user's own prompts: does the generated text match a reference?

- `exact`: the text is the reference, whatever the case, the white space and the punctuation around it. This is
  `exact_match` of lm-evaluation-harness with `ignore_case`. Its `ignore_punctuation` is not used: 3.5 would be 35.
- `contains`: the text has the reference in it as whole words, compared in the same way.
- `number`: the last number of the text equals that of the reference, as in the filter `flexible-extract` of lm-eval's
  GSM8K. Numbers are compared by value, so 1,000 and 1000.0 are equal.
"""

import re
import string
from collections.abc import Callable, Mapping
from decimal import Decimal

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
AROUND = string.whitespace + string.punctuation.replace("-", "").replace("+", "")  # a sign belongs to its number


def normalised(text: str) -> str:
    """Return the text in lower case, with single spaces, without white space and punctuation around it.

    >>> normalised(' "The  Answer" is\\n-4.5.')
    'the answer" is -4.5'
    """
    return " ".join(text.casefold().split()).strip(AROUND)


def exact(text: str, reference: str) -> bool:
    """Return whether the text is the reference.

    >>> exact("Paris.", "paris"), exact("3.5", "35")
    (True, False)
    """
    return normalised(text) == normalised(reference)


def contains(text: str, reference: str) -> bool:
    """Return whether the reference is in the text as whole words.

    >>> contains("It is Paris, of course.", "paris"), contains("Parisian", "Paris")
    (True, False)
    """
    return re.search(rf"(?<!\w){re.escape(normalised(reference))}(?!\w)", normalised(text)) is not None


def number(text: str, reference: str) -> bool:
    """Return whether the last numbers of both texts are equal; without a number in one of them they are not.

    >>> number("18 + 24 = 1,042.0 dollars", "#### 1042"), number("none", "3")
    (True, False)
    """
    found, expected = last_number(text), last_number(reference)
    return found is not None and found == expected


def last_number(text: str) -> Decimal | None:
    """Return the last number in the text; None: there is none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


METRICS: Mapping[str, Callable[[str, str], bool]] = {"exact": exact, "contains": contains, "number": number}
