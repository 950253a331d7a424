"""Check what a method returns to the loop. A faulty method is named in the error, and only its own cells fail.

Shapes and types are always checked; the host knows them on any device. Values are checked where the host waits anyway:
in the first steps on a CPU, and in the plain steps before a GPU's graph is captured.

R = rows, G = guesses, N = most tokens one forward commits.
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.draft_model import refuse_other_models
from mtbench.decoding.method import Claims, Commit, Method, Window
from mtbench.errors import UserError, first_line
from mtbench.models.loading import Inspected


class MethodContractError(RuntimeError):
    """A method broke its contract."""


def fault(method: Method, checkpoints: Mapping[str, Inspected]) -> str | None:
    """Return what is wrong with a method before it decodes anything, or None.

    Raises the UserError of a method that refuses its checkpoints or options.
    """
    try:
        for role in checkpoints if method.outside else ():
            refuse_other_models(checkpoints, role)  # external engines run whole models
        method.refuse(checkpoints)
        if method.claims not in get_args(Claims):
            raise MethodContractError(f"claims is {method.claims!r}, not one of {', '.join(get_args(Claims))}")
        for variant in () if method.outside else method.variants:
            if type(variant.block) is not int or variant.block < 1:
                raise MethodContractError(f"block is {variant.block!r}, not a whole number of at least 1")
            _check_window(variant.window())
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        if not isinstance(error, MethodContractError):
            reason = f"{type(error).__name__}: {reason}"
        return f"{method.name}: {reason}{whereabouts(error, type(method))}"
    return None


def refuse_too_wide(arm: str, method: Method) -> None:
    """Raise UserError if a forward of the method would feed too many guesses."""
    try:
        for variant in method.variants:
            trees.refuse_too_many(variant.window().guesses)
    except UserError as error:
        raise UserError(f"{arm!r} {error}") from None


def whereabouts(error: BaseException, kind: type[Method]) -> str:
    """Return where in the method's own file the error was raised: " (in accept, line 12 of NAME.py)", else ""."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        code = frame.tb_frame.f_code
        if frame.tb_frame.f_globals.get("__name__") == kind.__module__:
            found = f" (in {code.co_name}, line {frame.tb_lineno} of {code.co_filename.rpartition('/')[2]})"
        frame = frame.tb_next
    return found


def _check_window(window: Window) -> None:
    if not isinstance(window, Window):
        raise MethodContractError(f"window() returned {_kind(window)}, not a Window")
    for name, least in (("pending", 1), ("guesses", 0), ("commits", 1)):
        value = getattr(window, name)
        if (type(value) is not int or value < least) and not (name == "pending" and value is None):
            raise MethodContractError(f"window() has {name}={value!r}, not a whole number of at least {least}")
    for name, shape, dtype in (
        ("sees", (window.guesses, window.guesses), torch.bool),
        ("offset", (window.guesses,), torch.long),
    ):
        if getattr(window, name) is not None:
            _check(f"window().{name}", getattr(window, name), shape, dtype)


def check_proposal(
    proposed: Tensor | trees.Guesses, method: Method, window: Window, rows: int, vocabulary: int, *, values: bool
) -> None:
    """Raise MethodContractError unless propose() returned ids (R, G), or guesses in a tree; `values`: read them too."""
    count = window.guesses
    if isinstance(proposed, trees.Guesses):
        _check(f"{method.name}: propose().sees", proposed.sees, (rows, count, count), torch.bool)
        _check(f"{method.name}: propose().offset", proposed.offset, (rows, count), torch.long)
        if values:
            _check_values(method, "propose().offset", proposed.offset.flatten().tolist(), count - 1)
        proposed = proposed.ids
    _check(f"{method.name}: propose()", proposed, (rows, count), torch.long)
    if values:
        _check_values(method, "propose()", proposed.flatten().tolist(), vocabulary - 1)


def check_commit(commit: Commit, method: Method, window: Window, rows: int, vocabulary: int, *, values: bool) -> None:
    """Raise MethodContractError unless accept() returned a Commit that fits the window; `values`: read it too."""
    if not isinstance(commit, Commit):
        raise MethodContractError(f"{method.name}: accept() returned {_kind(commit)}, not a Commit")
    _check(f"{method.name}: accept().tokens", commit.tokens, (rows, window.commits), torch.long)
    depth = commit.path.shape[1] if isinstance(commit.path, Tensor) and commit.path.dim() == 2 else window.guesses
    for name, shape, most in (
        ("count", (rows,), window.commits),
        ("kept", (rows,), window.guesses),
        ("offered", (rows,), window.commits - 1),
        ("stopped", (rows,), 1),
        ("path", (rows, min(depth, window.guesses)), window.guesses - 1),
        ("columns", (rows, window.commits), window.guesses),
    ):
        value = getattr(commit, name)
        if value is not None or name in ("count", "kept"):
            _check(f"{method.name}: accept().{name}", value, shape, torch.long)
            if values:
                _check_values(method, f"accept().{name}", value.flatten().tolist(), most)
    if values and commit.offered is not None and bool((commit.count - 1 > commit.offered).any()):
        raise MethodContractError(f"{method.name}: accept() commits more than `offered` + 1 tokens")
    for tokens, count in zip(commit.tokens.tolist(), commit.count.tolist(), strict=True) if values else ():
        _check_values(method, "accept().tokens", tokens[:count], vocabulary - 1)  # tokens beyond the count are unused


def _check(what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise MethodContractError(f"{what} is {_kind(value)}, not a tensor of shape {shape}")
    if value.shape != shape or value.dtype != dtype:
        raise MethodContractError(f"{what} is of shape {tuple(value.shape)} and {value.dtype}, not {shape} and {dtype}")


def _check_values(method: Method, what: str, values: list[int], most: int) -> None:
    """Raise MethodContractError unless all are from 0 to `most`. (For few values a list is faster.)"""
    if values and not 0 <= min(values) <= max(values) <= most:
        wrong = next(value for value in values if not 0 <= value <= most)
        raise MethodContractError(f"{method.name}: {what} has {wrong}, which is not from 0 to {most}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
