"""What a method owes the loop, checked where it hands something over: a broken one is named, and costs its own cells.

Shapes and types are known to the host at once, on any device. Values are read where the host waits anyway: between the
steps of a CPU, and in the plain ones with which a GPU's shapes begin.

R = rows, G = guesses, N = most tokens one forward commits.
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from mtbench.decoding.method import Claims, Commit, Method, Window
from mtbench.errors import UserError, first_line
from mtbench.models.loading import Inspected


class MethodContractError(RuntimeError):
    """A method broke its contract."""


def fault(method: Method, checkpoints: Mapping[str, Inspected]) -> str | None:
    """What is wrong with a method before it decodes anything; None if nothing is.

    A UserError is the method's own word on the checkpoints (or options) it is given, and is passed on.
    """
    try:
        method.refuse(checkpoints)
        if method.claims not in get_args(Claims):
            raise MethodContractError(f"claims is {method.claims!r}, not one of {', '.join(get_args(Claims))}")
        if not method.outside:
            for variant in method.variants:
                if type(variant.block) is not int or variant.block < 1:
                    raise MethodContractError(f"block is {variant.block!r}, not a whole number of at least 1")
                _check_window(variant.window())
    except UserError:
        raise
    except Exception as error:
        said = (
            first_line(error)
            if isinstance(error, MethodContractError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        return f"{method.name}: {said}{whereabouts(error, type(method))}"
    return None


def whereabouts(error: BaseException, kind: type[Method]) -> str:
    """Where in a method's own file it was raised, " (in accept, line 12 of NAME.py)"; nothing if it was not there."""
    at, found = error.__traceback__, ""
    while at is not None:
        code = at.tb_frame.f_code
        if at.tb_frame.f_globals.get("__name__") == kind.__module__:
            found = f" (in {code.co_name}, line {at.tb_lineno} of {code.co_filename.rpartition('/')[2]})"
        at = at.tb_next
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


def check_proposal(guess: Tensor, method: Method, window: Window, rows: int, vocabulary: int, *, look: bool) -> None:
    """Raise Faulty unless `propose` is (R, G) token ids; `look`: read them too."""
    _check(f"{method.name}: propose()", guess, (rows, window.guesses), torch.long)
    if look:
        _check_values(method, "propose()", guess.flatten().tolist(), vocabulary - 1)


def check_commit(commit: Commit, method: Method, window: Window, rows: int, vocabulary: int, *, look: bool) -> None:
    """Raise Faulty unless accept() returned what a Commit of this window is; `look`: read it too."""
    if not isinstance(commit, Commit):
        raise MethodContractError(f"{method.name}: accept() returned {_kind(commit)}, not a Commit")
    _check(f"{method.name}: accept().tokens", commit.tokens, (rows, window.commits), torch.long)
    parts = {"count": window.commits, "kept": window.guesses}
    parts |= {} if commit.offered is None else {"offered": window.commits - 1}
    for name in parts:
        _check(f"{method.name}: accept().{name}", getattr(commit, name), (rows,), torch.long)
    if commit.path is not None:
        deep = commit.path.shape[1] if isinstance(commit.path, Tensor) and commit.path.dim() == 2 else window.guesses
        _check(f"{method.name}: accept().path", commit.path, (rows, min(deep, window.guesses)), torch.long)
        parts["path"] = window.guesses - 1
    if look:
        for name, most in parts.items():
            _check_values(method, f"accept().{name}", getattr(commit, name).flatten().tolist(), most)
        if commit.offered is not None and bool((commit.count - 1 > commit.offered).any()):
            raise MethodContractError(
                f"{method.name}: accept() commits more than one token beyond those it says it offered"
            )
        for tokens, count in zip(commit.tokens.tolist(), commit.count.tolist(), strict=True):
            _check_values(method, "accept().tokens", tokens[:count], vocabulary - 1)  # those behind are nobody's


def _check(what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise MethodContractError(f"{what} is {_kind(value)}, not a tensor of shape {shape}")
    if value.shape != shape or value.dtype != dtype:
        raise MethodContractError(f"{what} is of shape {tuple(value.shape)} and {value.dtype}, not {shape} and {dtype}")


def _check_values(method: Method, what: str, values: list[int], most: int) -> None:
    """(So few that a look at a list is quicker than a reduction of a tensor.)"""
    if values and not 0 <= min(values) <= max(values) <= most:
        wrong = next(value for value in values if not 0 <= value <= most)
        raise MethodContractError(f"{method.name}: {what} has {wrong}, which is not from 0 to {most}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
