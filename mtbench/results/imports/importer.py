"""What an importer is, and the helpers that all of them use. An untrusted file is checked before it is believed.

An importer recognises its format by content and turns a file into results. The files may be of any size, depth and
type: what is wrong becomes one UserError, which names the file and the field.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from mtbench.errors import UserError, printable
from mtbench.results.imports.format import ImportedFigure

LONGEST_TEXT = 200  # characters of an untrusted text that are kept
LARGEST_NUMBER = 1e30
MOST_FIGURES = 5000  # of a result


class Meaning(NamedTuple):
    """What a figure is. Two tools share a `key` only if their formulas are the same."""

    key: str
    unit: str
    definition: str
    ours: str | None = None  # field of a cell of results.json with the same figure
    scale: float = 1.0  # our unit times this is `unit`


# Definitions that two tools share, or that equal a figure of ours. Each was read in its owner's code;
# mtbench/results/acceptance.py holds our side. Our answers are cut at the end token; a tool that counts tokens accepted
# after it (vllm issue 56101) gets a larger figure by the same formula.
POOLED_LENGTH = Meaning(  # vLLM: vllm/benchmarks/serve.py; aiperf: metrics/types/spec_decode_metrics.py
    "acceptance length, pooled",
    "tokens",
    "1 + accepted draft tokens / verified drafts, over all requests: the target's own token counts, that of prefill "
    "does not.",
    "acceptance.derived.vllm",
)
POOLED_RATE = Meaning(
    "acceptance rate, pooled",
    "percent",
    "Accepted draft tokens / proposed draft tokens, over all requests, in percent; the target's own token counts "
    "nowhere.",
    "acceptance.rate",
    100.0,
)
LENGTH_OF_REQUESTS = Meaning(
    "acceptance length, mean of requests",
    "tokens",
    "1 + accepted draft tokens / verification steps of each request, averaged over requests with equal weight; the "
    "target's own token counts, that of prefill does not.",
    "acceptance.derived.aiperf",
)
OURS = {meaning.key: meaning for meaning in (POOLED_LENGTH, POOLED_RATE, LENGTH_OF_REQUESTS)}


@dataclass(frozen=True)
class Found:
    """One result in a file: what its importer knows of an ImportedResult."""

    figures: list[ImportedFigure]
    version: str | None = None
    model: str | None = None
    part: str | None = None
    settings: dict[str, str] = field(default_factory=dict)


class Importer(NamedTuple):
    """How one format is recognised and read: a file holds one JSON value, or one on each line."""

    format: str
    tool: str
    recognises: Callable[[Sequence[Any]], bool]
    read: Callable[[str, Sequence[Any]], list[Found]]  # of the file's name and its JSON values


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


def settings(document: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the settings that a file records, as texts."""
    if not isinstance(document, dict):
        return {}
    return {name: text(document[name]) for name in names if document.get(name) is not None}


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
