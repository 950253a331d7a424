"""Values of options as text, and the way back. A parser raises ValueError with the allowed values."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

ALL = "all"  # of `--limit`
PlainValue = bool | int | float | str
FINITE = ConfigDict(allow_inf_nan=False)


def seconds(text: str) -> float:
    """Return the seconds in text such as 500ms, 90s, 30m or 2h. A plain number is in seconds.

    Raises ValueError for other text.

    >>> seconds("500ms"), seconds("30m"), seconds("90")
    (0.5, 1800.0, 90.0)
    """
    written = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smh]?)", text)
    if not written:
        raise ValueError("write 500ms, 90s, 30m or 2h")
    return float(written[1]) * {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600}[written[2]]


def shown(value: Any) -> str:
    """Return a value as text, as on the command line.

    >>> shown(True), shown(None), shown(5.0), shown("a")
    ('true', 'none', '5', 'a')
    """
    text = str(value)
    if isinstance(value, bool | NoneType):
        return text.lower()
    return text.removesuffix(".0") if isinstance(value, float) else text


def shown_seconds(time_s: float) -> str:
    """Return seconds as text.

    >>> shown_seconds(90.0), shown_seconds(0.5)
    ('90s', '0.5s')
    """
    return f"{time_s:g}s"


def shown_number(value: Any) -> str:
    """Return a number as text.

    >>> shown_number(1e6), shown_number(0.5), shown_number(4096)
    ('1,000,000', '0.5', '4,096')
    """
    return f"{value:,.0f}" if value == value // 1 else f"{value:g}"


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """Return the parser of numbers in text such as 1,8. It raises ValueError for other text.

    >>> numbers(int)("1,8")
    [1, 8]
    """

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            noun = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"give {noun}, such as 1,8") from None

    return parse


def joined(values: Collection[Any]) -> str:
    """Return values in text such as 1,8."""
    return ",".join(map(shown, values))


def item_limit(text: str) -> int | None:
    """Return a `--limit`; None for all items. Raises ValueError for other text."""
    if text == ALL:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"give a whole number of items, or {ALL}") from None


def checkpoints(texts: Sequence[str]) -> dict[str, str]:
    """Return role -> path or hub id of every ROLE=PATH_OR_ID. Raises ValueError for other text."""
    paths = {}
    for text in texts:
        role, _, path = text.partition("=")
        if not role or not path:
            raise ValueError("give ROLE=PATH_OR_ID, such as `--checkpoint mars=./my-mars`")
        paths[role] = path
    return paths


def pairs(values: Mapping[str, Any]) -> list[str]:
    """Return a mapping as texts NAME=VALUE."""
    return [f"{name}={shown(value)}" for name, value in values.items()]


def template_variables(texts: Sequence[str]) -> dict[str, PlainValue]:
    """Return name -> value of every NAME=VALUE or JSON object: true, false or a number if it is one, else text.

    Raises ValueError for other text.

    >>> template_variables(["enable_thinking=false", "budget=512", "effort=low"])
    {'enable_thinking': False, 'budget': 512, 'effort': 'low'}
    """
    variables: dict[str, PlainValue] = {}
    for text in texts:
        if text.startswith("{"):
            variables |= _object(text)
            continue
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError("give NAME=VALUE, such as `--chat-template-kwargs enable_thinking=false`")
        variables[name] = _plain_value(value)
    return variables


def time(text: str) -> str:
    """Return a date, or a date and a time, by ISO 8601. Midnight is left out. Raises ValueError for other text."""
    try:
        return datetime.fromisoformat(text).isoformat().removesuffix("T00:00:00")
    except ValueError:
        raise ValueError("give a date, such as 2026-11-28, or a date and a time, such as 2026-11-28T09:30") from None


def _object(text: str) -> dict[str, PlainValue]:
    """Return the variables of a JSON object. Raises ValueError unless all values are plain."""
    try:
        return TypeAdapter(dict[str, PlainValue], config=FINITE).validate_json(text, strict=True)
    except ValidationError:
        raise ValueError(
            "give a JSON object of texts, numbers and truth values, such as '{\"enable_thinking\": false}'"
        ) from None


def _plain_value(text: str) -> PlainValue:
    """Return a value as JSON has it; other text as it is. The text "False" would be true in a template."""
    try:
        return TypeAdapter(bool | int | float).validate_json(text.lower(), strict=True)
    except ValidationError:
        return text


def latency_limits(names: Collection[str]) -> Callable[[str], dict[str, float]]:
    """Return the parser of limits in text such as `ttft=500ms,itl=50ms`: by name, in seconds.

    It raises ValueError for a name that is not in `names`, for one that is given twice, and for another value.

    >>> latency_limits(["ttft", "itl"])("ttft=500ms,itl=0.05s")
    {'ttft': 0.5, 'itl': 0.05}
    """

    def parse(text: str) -> dict[str, float]:
        limits_s: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in names:
                raise ValueError(f"{name!r} is not known; limits: {', '.join(names)}, such as ttft=500ms")
            if name in limits_s:
                raise ValueError(f"{name} is given twice")
            limits_s[name] = seconds(value)
            if not 0 < limits_s[name] < math.inf:
                raise ValueError(f"{value!r} is no limit; write 500ms or 2s")
        return limits_s

    return parse


def shown_limits(limits_s: Mapping[str, float]) -> str:
    """Return limits as text."""
    return ",".join(f"{name}={limit_s:g}s" for name, limit_s in limits_s.items())


def absolute(text: str) -> str:
    """Return the absolute path of a folder, as files store it."""
    return str(Path(text).resolve())
