"""User errors: one line with the wrong value, the allowed values and the next command."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it in one line and exits with 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without its full stop, cut at 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def unknown(kind: str, name: str, known: Iterable[str], see: str) -> UserError:
    """Return the error for a name that is not in `known`; it suggests the closest known name, if one is close.

    >>> print(unknown("method", "marz", ["ar", "mars"], "mtbench ls methods"))
    unknown method 'marz' (did you mean 'mars'?); known: ar, mars. See `mtbench ls methods`.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}. See `{see}`.")
