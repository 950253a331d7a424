"""Helpers for the JSON of other tools, which is checked before it is believed."""

from typing import Any, TypeGuard

from mtbench.errors import printable

LARGEST_FILE = 1 << 27  # bytes: a report with every request of a long benchmark
LONGEST_TEXT = 200  # characters of an untrusted text that are kept


def has(value: Any, *names: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a JSON value is an object with these keys."""
    return isinstance(value, dict) and all(name in value for name in names)


def within(value: Any, *path: str) -> Any:
    """Return what lies in nested objects; None where one of them is missing or no object."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def shown(value: Any) -> str:
    """Return a refused value for an error: of an object or an array only its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    cut = printable(text[:LONGEST_TEXT]) + ("…" if len(text) > LONGEST_TEXT else "")
    return repr(cut) if isinstance(value, str) else cut
