"""What an importer is, and the helpers that all of them use. An untrusted file is checked before it is believed.

An importer recognises its format by content and turns a file into results. The files may be of any size, depth and
type: what is wrong becomes one UserError, which names the file and the field.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from mtbench.errors import UserError, printable
from mtbench.imports.format import ImportedFigure

LONGEST_TEXT = 200  # characters of an untrusted text that are kept
LARGEST_NUMBER = 1e30
MOST_FIGURES = 5000  # of a result
STATISTICS = {"mean": "Mean", "median": "Median", "std": "Standard deviation", "max": "Maximum"}


class Meaning(NamedTuple):
    """What a figure is. Two tools share a `key` only if their formulas are the same."""

    key: str
    unit: str
    definition: str
    ours: str | None = None  # field of a cell of results.json with the same figure
    scale: float = 1.0  # our unit times this is `unit`


class Content(NamedTuple):
    """A file: the JSON values in it, one for the whole file or one for each line."""

    where: str
    documents: Sequence[Any]


ItemKey = tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """One result in a file. samples: of lm-eval's items, metric -> item -> value."""

    figures: Sequence[ImportedFigure]
    version: str | None = None
    model: str | None = None
    part: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Mapping[ItemKey, float]] = field(default_factory=dict)


class Importer(NamedTuple):
    """How one format is recognised and read. `reads` says which versions."""

    format: str
    tool: str
    recognises: Callable[[Sequence[Any]], bool]
    read: Callable[[Content], list[Found]]


def each_benchmark(content: Content, read: Callable[[Mapping[str, Any], str, str | None], Found]) -> list[Found]:
    """Return a result for each object of a file that holds one benchmark, or one in each line."""
    several = len(content.documents) > 1
    found = []
    for line, document in enumerate(content.documents, start=1):
        where = f"{content.where}, line {line}" if several else content.where
        if not isinstance(document, dict):
            raise UserError(f"{where}: it is {shown(document)}; it must be an object.")
        found.append(read(document, where, f"line {line}" if several else None))
    return found


def has(value: Any, *names: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a JSON value is an object with these keys."""
    return isinstance(value, dict) and all(name in value for name in names)


def within(value: Any, *path: str) -> Any:
    """Return what lies in nested objects; None where one of them is missing or no object."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def member(value: Any, name: str, kind: type[dict[Any, Any] | list[Any] | str], where: str) -> Any:
    """Return a member of an object. Raises UserError if it is missing or of another type."""
    names: dict[type[Any], str] = {dict: "an object", list: "an array", str: "a text"}
    found = value.get(name) if isinstance(value, dict) else None
    if found is None:
        raise UserError(f"{where}: {text(name)} is missing, so this is no layout that mtbench reads.")
    if not isinstance(found, kind):
        raise UserError(f"{where}: {text(name)} is {shown(found)}; it must be {names[kind]}.")
    return found


def number(value: Any, name: str, where: str) -> float:
    """Return a finite number. Raises UserError for anything else, texts and truth values included."""
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or (isinstance(value, float) and not math.isfinite(value)) or abs(value) > LARGEST_NUMBER:
        raise UserError(f"{where}: {text(name)} is {shown(value)}; it must be a finite number.")
    return float(value)


def numbers(values: Any, name: str, where: str) -> list[float]:
    """Return an array of finite numbers."""
    if not isinstance(values, list):
        raise UserError(f"{where}: {text(name)} is {shown(values)}; it must be an array of numbers.")
    return [number(value, f"{name}[{place}]", where) for place, value in enumerate(values)]


def figure(meaning: Meaning, name: str, value: Any, where: str) -> ImportedFigure:
    """Return a figure of a file. Raises UserError if its value is not a number."""
    return ImportedFigure(
        name=text(name),
        value=number(value, name, where),
        unit=meaning.unit,
        meaning=meaning.key,
        definition=meaning.definition,
        ours=meaning.ours,
    )


def taken(document: Mapping[str, Any], meanings: Mapping[str, Meaning], where: str) -> list[ImportedFigure]:
    """Return the figures that a file has of those that are known. null is not measured."""
    return [
        figure(meaning, name, document[name], where)
        for name, meaning in meanings.items()
        if document.get(name) is not None
    ]


def latencies(document: Mapping[str, Any], tool: str, meanings: Mapping[str, str], where: str) -> list[ImportedFigure]:
    """Return the statistics of latencies that a file has, named as in `p99_ttft_ms`: so do vLLM and SGLang.

    `meanings`: what is measured, by the name of the latency.
    """
    known = re.compile(rf"(mean|median|std|max|p\d{{1,2}}(?:\.\d{{1,4}})?)_({'|'.join(meanings)})_ms")
    found = []
    for name, value in document.items():
        matched = known.fullmatch(name)
        if matched and value is not None:
            statistic, what = matched.groups()
            of_what = STATISTICS.get(statistic, f"{statistic[1:]}th percentile")
            found.append(
                figure(Meaning(f"{tool}: {name}", "ms", f"{of_what} of: {meanings[what]}."), name, value, where)
            )
    return found


def settings(document: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the settings that a file records, as texts."""
    if not isinstance(document, dict):
        return {}
    return {name: text(document[name]) for name in names if document.get(name) is not None}


def lowered(sentence: str) -> str:
    """Return a sentence with a small first letter."""
    return sentence[:1].lower() + sentence[1:]


def text(value: Any) -> str:
    """Return an untrusted value as printable text of bounded length; of an object or array only its kind."""
    if isinstance(value, dict | list):
        return shown(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return "a huge number"
    written = str(value)
    cut = printable(written[:LONGEST_TEXT])
    return f"{cut}…" if len(written) > LONGEST_TEXT else cut


def optional_text(value: Any) -> str | None:
    """Return a text of a file; None if it is none."""
    return text(value) if isinstance(value, str) and value else None


def shown(value: Any) -> str:
    """Return a refused value for an error: of an object or an array only its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(text(value)) if isinstance(value, str) else text(value)


def other_version(where: str, what: str, found: Any, known: str) -> UserError:
    """Return the error for a file of another version."""
    version = "unrecorded" if found is None else shown(found)
    return UserError(f"{where}: {what} is {version}; mtbench imports {known}.")
