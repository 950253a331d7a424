"""What a user did wrong, in one line: the value, the choices, the next command."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend. The command line prints it in one line and exits with 2."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of bounded length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def unknown(kind: str, name: str, known: Iterable[str], see: str) -> UserError:
    """The error for a name that is not among `known`, with the nearest one if any is near.

    >>> print(unknown("method", "marz", ["ar", "mars"], "mtbench ls methods"))
    unknown method 'marz' (did you mean 'mars'?); known: ar, mars. See `mtbench ls methods`.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}. See `{see}`.")
