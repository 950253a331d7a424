"""A field as an option: its type, bounds and help, the way from text to its value and back, and the allowed values.

The fields are those of a record (the options of a command) or of a dataclass (those of a method, of an objective, of a
training; mtbench/options/classes.py). `mtbench/cli/parameters.py` makes the command's parameters of them,
`read_options` makes a record or an object of the arguments of a command or a library call. The JSON Schemas have the
same texts.
"""

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mtbench.errors import UserError, unknown
from mtbench.options import texts
from mtbench.records import field_path

AUTO: Any = "auto"  # the loop chooses the option's value from its `widths`
LONGEST_CHOICES = 24  # characters of the choices that stand for an option's value in `--help`
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field is an option. Its help is the field's description.

    `parse` makes the value of one text, `parse_all` of the texts of a repeatable option. Both raise ValueError with
    the allowed values. `show` is the way back. `resumable`: `--resume` may change it.
    """

    panel: str = ""
    flags: tuple[str, ...] = ()  # empty: made of the field's name
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    parse_all: Callable[[Sequence[str]], Any] | None = None
    show: Callable[[Any], str | list[str]] | None = None
    argument: bool = False  # it stands on the command line without a flag
    hidden: bool = False  # `--help` leaves it out
    negatable: bool = False  # a switch that `--no-NAME` turns off
    resumable: bool = False
    permission: bool = False  # only the command that runs can give it; a stored one counts for nothing
    # Of methods and objectives; mtbench/options/classes.py defines them.
    trained: bool = False
    same_output: tuple[Any, ...] = ()
    role: bool = False
    widths: tuple[int, ...] = ()
    engine: bool = False
    per_request: bool = False


def option(help: str, panel: str = "", **more: Any) -> Any:
    """Return the mark of a type that is an option: its help, the panel of `--help`, fields of `Option`, and bounds.

    Bounds are those of pydantic's `Field`: `ge`, `gt`, `le`, `lt`, `min_length`.
    """
    own = {name: more.pop(name) for name in Option.__dataclass_fields__.keys() & more.keys()}
    field: Any = Field(description=help, **more)
    field.metadata.append(Option(panel=panel, **own))
    return field


def option_of(field: FieldInfo) -> Any:
    """Return how a field is an option; None if it is none."""
    return next((entry for entry in field.metadata if isinstance(entry, Option)), None)


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the fields of a record or a dataclass that are options, in their order."""
    fields = kind.model_fields if issubclass(kind, BaseModel) else _fields_of_class(kind)
    return {name: field for name, field in fields.items() if option_of(field) is not None}


@cache
def _fields_of_class(kind: Any) -> dict[str, FieldInfo]:
    """Return the fields of a dataclass. The bounds of an option are those of the numbers that it may be."""
    hints = typing.get_type_hints(kind)
    fields = {}
    for declared in dataclasses.fields(kind):
        mark: FieldInfo = declared.metadata["option"]
        bounds = [entry for entry in mark.metadata if not isinstance(entry, Option)]
        whole = Literal["auto"] | hints[declared.name] if option_of(mark).widths else hints[declared.name]
        members = get_args(whole) if get_origin(whole) in (Union, UnionType) else (whole,)
        bounded: Any = [Annotated[part, *bounds] if bounds and part in (int, float) else part for part in members]
        plain: Any = Field(description=mark.description)
        plain.metadata.append(option_of(mark))
        annotated: Any = Annotated[Union[tuple(bounded)], plain]  # noqa: UP007
        fields[declared.name] = FieldInfo.from_annotated_attribute(annotated, declared.default)
    return fields


def flag_of(name: str, field: FieldInfo) -> str:
    """Return an option as it stands on the command line, such as --max-new-tokens."""
    flags = option_of(field).flags
    return flags[-1] if flags else f"--{name.replace('_', '-')}"


def no(flag: str) -> str:
    """Return the flag that turns a switch off."""
    return f"--no-{flag.removeprefix('--')}"


def argument_of(name: str, field: FieldInfo) -> str:
    """Return an option as the argument of a library function: its flag with underscores."""
    return flag_of(name, field).removeprefix("--").replace("-", "_")


def read_options(given: Mapping[str, Any], kind: type[T], see: str) -> T:
    """Return the record or object with the given options: values, or texts as the command line has them.

    `see`: the command that explains them. Raises UserError in one line for a value that is not allowed.
    """
    fields = fields_of(kind)
    values = {name: _value(name, fields[name], value) for name, value in given.items()}
    name = ""
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate(values)
        for name in values:
            values[name] = adapter(fields[name]).validate_python(values[name])
        return kind(**values)
    except ValidationError as error:
        raise _refusal(fields, name, error.errors(include_url=False)[0], see) from None


def as_words(given: Mapping[str, Any], kind: type[Any]) -> list[str]:
    """Return options as they stand on a command line.

    >>> from mtbench.options.common import BatchSizes, Methods, Offline
    >>> class Request(BaseModel):
    ...     batch_size: BatchSizes = (1,)
    ...     method: Methods = ()
    ...     offline: Offline = False
    >>> as_words({"batch_size": (1, 8), "method": ["a", "b"], "offline": True}, Request)
    ['--batch-size', '1,8', '--method', 'a', '--method', 'b', '--offline']
    """
    words: list[str] = []
    fields = fields_of(kind)
    for name, value in given.items():
        if value is None or name not in fields:
            continue
        flag = flag_of(name, fields[name])
        if isinstance(value, bool):
            words += [flag] if value else [no(flag)] * option_of(fields[name]).negatable
        else:
            words += [word for text in as_texts(value, fields[name]) for word in (flag, text)]
    return words


def as_texts(value: Any, field: FieldInfo) -> list[str]:
    """Return a value as the texts of the command line that make it; one for an option that is not repeatable."""
    show = option_of(field).show
    made = value if show is None or isinstance(value, str) else show(value)
    several = made if isinstance(made, Collection) and not isinstance(made, str) else [made]
    return [texts.shown(part) for part in several]


def adapter(field: FieldInfo) -> TypeAdapter[Any]:
    """Return the validator of the field's values."""
    marks = [entry for entry in field.metadata if not isinstance(entry, Option)]
    kind: Any = Annotated[field.annotation, *marks, None]
    return TypeAdapter(kind, config=STRICT)


def from_text(kind: Any, text: str) -> Any:
    """Return the value of the type that a text stands for; a text that stands for none as it is.

    The bounds of a field of that type are not checked.
    """
    try:
        return TypeAdapter(kind, config=STRICT).validate_strings(text)
    except ValidationError:
        return text


def _value(name: str, field: FieldInfo, value: Any) -> Any:
    """Return the record's value for a value or a text. Raises UserError for text that cannot be read."""
    option, several = option_of(field), [*value] if isinstance(value, list | tuple) else [value]
    given = [str(part) for part in several if isinstance(part, str | Path)]
    item = item_of(field)
    if "" in given:
        raise UserError(f"{flag_of(name, field)} '' is not allowed: it is empty; leave it out, or give a value.")
    if len(given) != len(several):
        return (value,) if item and isinstance(value, int | float) else value
    try:
        if option.parse_all is not None:
            return option.parse_all(given)
        if option.parse is not None and len(given) == 1:
            return option.parse(given[0])
    except ValueError as error:
        text = ",".join(given)
        raise UserError(f"{flag_of(name, field)} {text!r} is not allowed; {error}.") from None
    if item:
        return [from_text(item, text) for text in given]
    return value if isinstance(value, list | tuple) else from_text(field.annotation, given[0])


def _refusal(fields: Mapping[str, FieldInfo], name: str, error: ErrorDetails, see: str) -> UserError:
    """Return the first finding of a validation in one line: the option, its value and the allowed values."""
    if isinstance(raised := error.get("ctx", {}).get("error"), UserError):
        return raised
    place, value = (name, *error["loc"]) if name else error["loc"], error["input"]
    field = fields[str(place[0])]
    flag, option = flag_of(str(place[0]), field), option_of(field)
    if error["type"] == "literal_error":
        return unknown(flag.removeprefix("--"), str(value), choices(field), see)
    if isinstance(value, float) and number_of(field) is float:
        value = texts.shown_seconds(value) if option.parse is texts.seconds else texts.shown_number(value)
    elif isinstance(value, str) and not isinstance(from_text(float, value), float):
        value = repr(value)
    where = field_path((flag, *place[1:])) if isinstance(value, dict | list) else flag
    may_be, finding = allowed(field), error["msg"].removeprefix("Value error, ")
    reason = f"it is {may_be}" if may_be else finding[:1].lower() + finding[1:]
    return UserError(f"{where} {value} is not allowed; {reason}.")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the choices of a field; none if it takes others."""
    return tuple(word for kind in parts(field.annotation) if get_origin(kind) is Literal for word in get_args(kind))


def parts(kind: Any) -> Iterable[Any]:
    """Yield a type and the types that it is made of, such as list[int] and int; of a mapping not those inside."""
    yield kind
    if get_origin(kind) not in (Literal, Mapping):
        for part in get_args(kind):
            yield from parts(part)


def item_of(field: FieldInfo) -> Any:
    """Return the type of the items of a field that is a sequence; None for other fields."""
    return next((get_args(kind)[0] for kind in parts(field.annotation) if get_origin(kind) is Sequence), None)


def number_of(field: FieldInfo) -> type | None:
    """Return the type of the numbers that a field takes: bool, int or float; None if it takes none."""
    kinds = [*parts(field.annotation)]
    return next((kind for kind in (bool, int, float) if kind in kinds), None)


def bounds(field: FieldInfo) -> tuple[Ge | Gt | None, Le | Lt | None]:
    """Return the least and the largest number that a field allows; None if there is none."""
    marks = [*field.metadata]
    marks += [mark for kind in parts(field.annotation) for mark in getattr(kind, "__metadata__", ())]
    marks += [mark for info in marks if isinstance(info, FieldInfo) for mark in info.metadata]
    low = next((mark for mark in marks if isinstance(mark, Ge | Gt)), None)
    return low, next((mark for mark in marks if isinstance(mark, Le | Lt)), None)


def allowed(field: FieldInfo) -> str:
    """Return the description of a field's values; empty if any text may be one.

    >>> from mtbench.options.common import Device, Engine, MaxLoss, Rounds
    >>> class Request(BaseModel):
    ...     rounds: Rounds = 3
    ...     max_loss: MaxLoss = 1.0
    ...     engine: Engine = "graph"
    ...     device: Device = "auto"
    >>> [allowed(field) for field in Request.model_fields.values()]
    ['a whole number from 1 to 1,000', 'a number above 0 and below 100', 'graph|eager|invariant', '']
    """
    words = ["|".join(choices(field))] if choices(field) else []
    number, option = number_of(field), option_of(field)
    if number is bool:
        words.append("true|false")
    elif number is not None:
        time = option.parse is texts.seconds
        noun = "a time" if time else "a number" if number is float else "a whole number"
        words.append(noun + _bounds_in_words(*bounds(field), texts.shown_seconds if time else texts.shown_number))
    return " or ".join(words)


def _bounds_in_words(low: Ge | Gt | None, high: Le | Lt | None, as_text: Callable[[Any], str]) -> str:
    if isinstance(low, Ge) and isinstance(high, Le):
        return f" from {as_text(low.ge)} to {as_text(high.le)}"
    ends = []
    if low is not None:
        ends.append(f" of at least {as_text(low.ge)}" if isinstance(low, Ge) else f" above {as_text(low.gt)}")
    if high is not None:
        ends.append(f" of at most {as_text(high.le)}" if isinstance(high, Le) else f" below {as_text(high.lt)}")
    return " and".join(ends)


def metavar(field: FieldInfo) -> str | None:
    """Return the placeholder of an option's value in `--help`; None for any text.

    >>> from mtbench.options.common import MaxLoss, Rounds
    >>> class Request(BaseModel):
    ...     rounds: Rounds = 3
    ...     max_loss: MaxLoss = 1.0
    >>> [metavar(field) for field in Request.model_fields.values()]
    ['INTEGER [1<=x<=1000]', 'NUMBER [0<x<100]']
    """
    option, number, words = option_of(field), number_of(field), choices(field)
    if option.metavar is not None or option.parse is not None or item_of(field):
        own: str | None = option.metavar
        return own
    if number is None:
        listed = "PATH" if Path in parts(field.annotation) else "|".join(words)
        return listed if 0 < len(listed) <= LONGEST_CHOICES else None
    low, high = bounds(field)
    left = "" if low is None else f"{texts.shown(low.ge)}<=" if isinstance(low, Ge) else f"{texts.shown(low.gt)}<"
    right = "" if high is None else f"<={texts.shown(high.le)}" if isinstance(high, Le) else f"<{texts.shown(high.lt)}"
    noun = "|".join([*words, "NUMBER" if number is float else "INTEGER"])
    return f"{noun} [{left}x{right}]" if left or right else noun
