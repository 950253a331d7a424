"""User errors: one line with the wrong value, the allowed values and the next command.

Messages repeat untrusted text: names, paths, a server's answer. `printable` makes such text harmless.
"""

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence

# Exit codes; mtbench/cli/main.py says what they mean.
FAILED, MISTAKE, INCOMPLETE, INTERRUPTED = 1, 2, 3, 130
NEVER_PRINTED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode: controls, formats, surrogates, separators

LOST_DEVICE = re.compile(  # texts of CUDA's errors
    "CUDA.*(illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    "|invalid program counter|hardware stack error|global/shared address space|launch timed out|uncorrectable"
    "|context is destroyed)",
    re.DOTALL,
)


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with every character that could control a terminal or reorder a line as a Python escape.

    `keep`: characters that stay as they are.

    >>> print(printable("a\x1b[2Jb\u202ec"))
    a\x1b[2Jb\u202ec
    """
    if text.isascii() and text.isprintable():
        return text
    never = {c for c in text if c not in keep and unicodedata.category(c) in NEVER_PRINTED}
    return "".join(c.encode("unicode_escape").decode("ascii") if c in never else c for c in text)


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it in one line and exits with 2.

    add: options with which the same command runs; the command line prints it with them.
    """

    def __init__(self, message: str, add: Sequence[str] = ()) -> None:
        super().__init__(printable(message))
        self.add = add


class NotNumbersError(UserError):
    """Logits, of which `what` says which, are NaN or +∞ in a number type, so that no token can be chosen by them."""

    def __init__(self, what: str, dtype: object) -> None:
        cause = "overflow? try `--dtype bfloat16` or float32" if "16" in str(dtype) else "is the checkpoint damaged?"
        super().__init__(f"{what} are not numbers (NaN or +inf) in {str(dtype).removeprefix('torch.')}: {cause}")


class UnreadableCheckpoint(UserError):
    """A checkpoint or a part of it that mtbench's own loop cannot read; a serving engine may read it."""


class MissingWeights(UserError):
    """A checkpoint has no weights: it can be planned, and not decoded."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, printable, without its full stop, cut at 200 characters.

    Where it ends with a colon, the next line follows.
    """
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    line = f"{first} {others[0].strip()}" if others and first.endswith(":") else first
    return printable(line).rstrip(".")[:200]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: Python, torch and other libraries each have an error of their own."""
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    return named or "allocate memory" in str(error)


def loses_device(error: BaseException) -> bool:
    """Return whether a CUDA error leaves the process without its GPU: every later call fails.

    CUDA Runtime API, section "Data types used by CUDA Runtime": errors that leave the process in an inconsistent state.
    """
    return LOST_DEVICE.search(str(error)) is not None


def unknown(kind: str, name: str, known: Iterable[str], see: str) -> UserError:
    """Return the error for a name that is not in `known`; it suggests the closest known name, if one is close.

    If the name is a file, it suggests `prompts:FILE`.

    >>> print(unknown("method", "marz", ["ar", "mars"], "mtbench ls methods"))
    unknown method 'marz' (did you mean 'mars'?); known: ar, mars. See `mtbench ls methods`.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else f" (a file is NAME:{name})" if os.path.isfile(name) else ""
    return UserError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}. See `{see}`.")
