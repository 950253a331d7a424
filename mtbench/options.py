"""Options are the fields of a dataclass: a method's (`mtbench ls methods`), an objective's (`mtbench train --help`)."""

import dataclasses
import typing
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal

from mtbench.errors import UserError, unknown

AUTO: Any = "auto"  # an option whose value the loop chooses, among the widths it declares


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
) -> Any:
    """A field that is an option. `low` and `high` are inclusive.

    `trained`: the default is what the checkpoint was trained with (the entry of that name in its training record,
    `default` if it has none); another value is flagged. `same_output`: values that must give the default's tokens;
    where both arms are in a run, one is held to the other. `role`: it names a checkpoint of the family by its role, or
    is None for none. `widths`: it may also be `auto`, which is whichever of these recent commits call for. `engine`: it
    says how an outside engine runs, not how it decodes.
    """
    metadata = {"help": help, "low": low, "high": high, "trained": trained, "same_output": same_output}
    metadata |= {"role": role, "widths": widths, "engine": engine}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option as a user sees it."""

    name: str
    default: Any
    kind: str  # what is allowed, in words
    help: str
    same_output: tuple[Any, ...]
    trained: bool


def options_of(holder: type[Any]) -> list[Option]:
    """The options of a method, or of another class with such fields, in declaration order."""
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
    """The roles of the checkpoints that options name, of those chosen and the others at their defaults."""
    fields = dataclasses.fields(method)
    roles = [chosen.get(f.name, f.default) for f in fields if f.metadata["role"]]
    return [role for role in roles if role is not None]


def decoding_options(method: type[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Those of the chosen options that differ from their defaults and say how it decodes."""
    fields = dataclasses.fields(method)
    return [f.name for f in fields if not f.metadata["engine"] and chosen.get(f.name, f.default) != f.default]


def common(method: type[Any]) -> list[str]:
    """The options that are not a method's own: which checkpoint, and which of our engines if the loop is ours."""
    return ["on"] if method.outside else ["on", "engine"]


def parse_option(method: type[Any], name: str, text: str) -> Any:
    """The value of `name=text`; raises UserError that says what is allowed and the default."""
    names = [f.name for f in dataclasses.fields(method)]
    if name not in names:
        raise unknown(f"option of {method.name}", name, [*names, *common(method)], "mtbench ls methods")
    try:
        return value_of(method, name, text)
    except ValueError as error:
        raise UserError(
            f"{method.name}: {name}={text!r} is not allowed; {name} is {error}. See `mtbench ls methods`."
        ) from None


def value_of(holder: type[Any], name: str, text: str) -> Any:
    """The value of the option `name`, written as `text`; raises ValueError with what is allowed and the default."""
    kind = typing.get_type_hints(holder)[name]
    field = next(f for f in dataclasses.fields(holder) if f.name == name)
    if field.metadata["widths"] and text == AUTO:
        return AUTO
    try:
        value = _parse(kind, text)
        low, high = field.metadata["low"], field.metadata["high"]
        if (low is not None and value < low) or (high is not None and value > high) or value != value:
            raise ValueError
    except ValueError:
        raise ValueError(f"{_allowed(kind, field.metadata)}, default {show(field.default)}") from None
    return value


def build(method: type[Any], chosen: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The method with its options resolved for a checkpoint, and a flag per option that differs from training."""
    values, flags = dict(chosen), []
    for field in dataclasses.fields(method):
        if field.metadata["trained"] and field.name in trained:
            learned = trained[field.name]
            if values.setdefault(field.name, learned) != learned:
                flags.append(f"{field.name}={show(values[field.name])}, trained with {show(learned)}")
    return method(**values), flags


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    text = str(value)
    if isinstance(value, bool | NoneType):
        return text.lower()
    return text.removesuffix(".0") if isinstance(value, float) else text


def _parse(kind: Any, text: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise ValueError
        return choices[text]
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return _parse(next(k for k in typing.get_args(kind) if k is not NoneType), text)
    if kind is bool:
        return _parse(Literal["true", "false"], text) == "true"
    return kind(text)


def _allowed(kind: Any, bounds: Mapping[str, Any]) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return _allowed(next(k for k in typing.get_args(kind) if k is not NoneType), bounds)
    if kind is bool:
        return "true|false"
    low, high = bounds["low"], bounds["high"]
    word = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
    if bounds["widths"]:
        word = f"{AUTO} or {word}"
    if low is not None and high is not None:
        return f"{word} from {show(low)} to {show(high)}"
    return word if low is None else f"{word} of at least {show(low)}"
