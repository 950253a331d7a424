"""Options: dataclass fields of a method (`mtbench ls methods`) or a training objective (`mtbench train --help`)."""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal

from mtbench.errors import UserError, unknown

AUTO: Any = "auto"  # the loop chooses the option's value from its `widths`


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    trained: bool = False,
    same_output: tuple[Any, ...] = (),
    role: bool = False,
    widths: tuple[int, ...] = (),
    engine: bool = False,
    per_request: bool = False,
) -> Any:
    """Return a dataclass field that is an option. `low` and `high` are inclusive.

    `trained`: the default is the checkpoint's training option of that name, from its training record, or else
    `default`; another value is flagged. `same_output`: values that must give the same tokens as the default; if both
    arms are in a run, their tokens are compared. `role`: the option names a checkpoint of the family by its role; None
    means no checkpoint. `widths`: the option may also be `auto`; the loop then chooses one of these values from recent
    acceptance. `engine`: the option affects how an external engine runs, not what it decodes. `per_request`: a number
    that each request of a server may set; the method reads it by `Rows.option`.
    """
    metadata = {"help": help, "low": low, "high": high, "trained": trained, "same_output": same_output}
    metadata |= {"role": role, "widths": widths, "engine": engine, "per_request": per_request}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option as the command line lists it."""

    name: str
    default: Any
    kind: str  # what is allowed, in words
    help: str
    same_output: tuple[Any, ...]
    trained: bool


def options_of(holder: type[Any]) -> list[Option]:
    """Return the options of a method or another dataclass, in declaration order."""
    kinds = typing.get_type_hints(holder)
    return [
        Option(
            name=f.name,
            default=f.default,
            kind=_allowed(kinds[f.name], f.metadata),
            help=f.metadata["help"],
            same_output=f.metadata["same_output"],
            trained=f.metadata["trained"],
        )
        for f in dataclasses.fields(holder)
    ]


def roles_of(method: type[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Return the roles that the method's options name, given the `chosen` values; other options have their defaults."""
    fields = dataclasses.fields(method)
    roles = [chosen.get(f.name, f.default) for f in fields if f.metadata["role"]]
    return [role for role in roles if role is not None]


def per_request(holder: Any) -> list[str]:
    """Return the options that each request of a server may set."""
    if not dataclasses.is_dataclass(holder):
        return []  # a method that holds another one
    return [f.name for f in dataclasses.fields(holder) if f.metadata.get("per_request")]


def decoding_options(method: type[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Return the options that differ from their defaults and affect decoding, given the `chosen` values."""
    fields = [f for f in dataclasses.fields(method) if not f.metadata["engine"]]
    return [f.name for f in fields if chosen.get(f.name, f.default) != f.default]


def arm_options(method: type[Any]) -> list[str]:
    """Return the options that every such method has: `on` (checkpoint) and, unless it is external, `engine`."""
    return ["on"] if method.outside else ["on", "engine"]


def parse_option(method: type[Any], name: str, text: str) -> Any:
    """Return the value of the option `name=text`. Raises UserError with what is allowed and the default."""
    names = [f.name for f in dataclasses.fields(method)]
    if name not in names:
        raise unknown(f"option of {method.name}", name, [*names, *arm_options(method)], "mtbench ls methods")
    try:
        return value_of(method, name, text)
    except ValueError as error:
        raise UserError(
            f"{method.name}: {name}={text!r} is not allowed; {name} is {error}. See `mtbench ls methods {method.name}`."
        ) from None


def value_of(holder: type[Any], name: str, text: str) -> Any:
    """Return the value of the option `name` given as `text`. Raises ValueError with what is allowed and the default."""
    kind = typing.get_type_hints(holder)[name]
    field = next(f for f in dataclasses.fields(holder) if f.name == name)
    if field.metadata["widths"] and text == AUTO:
        return AUTO
    try:
        value = _parse(kind, text)
        low, high = field.metadata["low"], field.metadata["high"]
        is_nan = value != value
        if isinstance(value, str):
            low = high = None  # bounds are those of numbers
        if is_nan or (low is not None and value < low) or (high is not None and value > high):
            raise ValueError
    except ValueError:
        raise ValueError(f"{_allowed(kind, field.metadata)}, default {show(field.default)}") from None
    return value


def check_value(holder: type[Any], name: str, value: Any) -> None:
    """Raise ValueError, with what is allowed and the default, unless `value` may be the value of the option `name`.

    For values that a file holds: JSON has no tuples, and a whole number may stand for a float.
    """
    kind = typing.get_type_hints(holder)[name]
    field = next(f for f in dataclasses.fields(holder) if f.name == name)
    if value is None and NoneType in typing.get_args(kind):
        return
    try:
        same = isinstance(value, str | int | float) and value_of(holder, name, show(value)) == value
    except OverflowError:  # a whole number beyond any float
        same = False
    if not same:
        raise ValueError(f"{_allowed(kind, field.metadata)}, default {show(field.default)}")


def build(method: type[Any], chosen: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the method with its options, and a flag for each option that differs from the `trained` one."""
    values, flags = dict(chosen), []
    for field in dataclasses.fields(method):
        if field.metadata["trained"] and field.name in trained:
            trained_value = trained[field.name]
            try:
                check_value(method, field.name, trained_value)
            except ValueError as error:
                raise UserError(
                    f"{method.name}: the checkpoint's training record has {field.name}={trained_value!r:.60}, which is "
                    f"not allowed; it is {error}. Correct the record."
                ) from None
            if values.setdefault(field.name, trained_value) != trained_value:
                flags.append(f"{field.name}={show(values[field.name])}, trained with {show(trained_value)}")
    return method(**values), flags


def show(value: Any) -> str:
    """Return a value as text, as on the command line."""
    text = str(value)
    if isinstance(value, bool | NoneType):
        return text.lower()
    return text.removesuffix(".0") if isinstance(value, float) else text


def _without_none(union: Any) -> list[Any]:
    """Return the types of a union but None: one, or a number and the words that may stand for it."""
    return [kind for kind in typing.get_args(union) if kind is not NoneType]


def _parse(kind: Any, text: str) -> Any:
    """Return `text` as a value of the type. Raises ValueError if it is none."""
    if typing.get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise ValueError
        return choices[text]
    if typing.get_origin(kind) in (typing.Union, UnionType):
        for each in _without_none(kind):
            with contextlib.suppress(ValueError):
                return _parse(each, text)
        raise ValueError
    if kind is bool:
        return _parse(Literal["true", "false"], text) == "true"
    return kind(text)


def _allowed(kind: Any, bounds: Mapping[str, Any]) -> str:
    """Return the allowed values in words."""
    if typing.get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return " or ".join(_allowed(each, bounds) for each in _without_none(kind))
    if kind is bool:
        return "true|false"
    low, high = bounds["low"], bounds["high"]
    word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
    if bounds["widths"]:
        word = f"{AUTO} or {word}"
    if low is not None and high is not None:
        return f"{word} from {show(low)} to {show(high)}"
    return word if low is None else f"{word} of at least {show(low)}"
