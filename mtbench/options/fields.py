"""A field of a record as an option: its help, bounds, panel, and the way from text to its value and back.

A request lists its options as fields with defaults. `mtbench/cli/parameters.py` makes the command's parameters of them,
`read` makes a request of what a command line or a library call gives. The JSON Schemas have the same texts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mtbench.errors import UserError, unknown
from mtbench.options import texts
from mtbench.records import field_path

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field is an option of a command. Its help is the field's description.

    `parse` makes the value of one text, `parse_all` of the texts of a repeatable option. Both raise ValueError that
    says what is allowed. `show` is the way back. `resumable`: `--resume` may change it.
    """

    panel: str
    flags: tuple[str, ...] = ()  # empty: made of the field's name
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    parse_all: Callable[[Sequence[str]], Any] | None = None
    show: Callable[[Any], str | list[str]] | None = None
    argument: bool = False  # it stands on the command line without a flag
    resumable: bool = False
    permission: bool = False  # only the command that runs can give it; a stored one counts for nothing


def option(help: str, panel: str, **more: Any) -> Any:
    """Return the mark of a type that is an option: its help, the panel of `--help`, fields of `Option`, and bounds.

    Bounds are those of pydantic's `Field`: `ge`, `gt`, `le`, `lt`, `min_length`.
    """
    own = {name: more.pop(name) for name in Option.__dataclass_fields__.keys() & more.keys()}
    field: Any = Field(description=help, **more)
    field.metadata.append(Option(panel=panel, **own))
    return field


def option_of(field: FieldInfo) -> Option | None:
    """Return how a field is an option; None if it is none."""
    return next((entry for entry in field.metadata if isinstance(entry, Option)), None)


def options_of(kind: type[BaseModel]) -> dict[str, Option]:
    """Return the options of a request by the names of their fields."""
    found = {name: option_of(field) for name, field in kind.model_fields.items()}
    return {name: option for name, option in found.items() if option is not None}


def flag_of(name: str, option: Option | None) -> str:
    """Return an option as it stands on the command line.

    >>> flag_of("max_new_tokens", None)
    '--max-new-tokens'
    """
    return option.flags[-1] if option is not None and option.flags else f"--{name.replace('_', '-')}"


def argument_of(name: str, option: Option | None) -> str:
    """Return an option as the argument of a library function: its flag with underscores."""
    return flag_of(name, option).removeprefix("--").replace("-", "_")


def read_options(given: Mapping[str, Any], kind: type[M], see: str) -> M:
    """Return the request with the given options: values, or texts as the command line has them.

    `see`: the command that explains them. Raises UserError in one line for a value that is not allowed.
    """
    fields = kind.model_fields
    values = {name: _value(name, fields[name], value) for name, value in given.items()}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0], see) from None


def as_words(given: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return options as they stand on a command line.

    >>> class Request(BaseModel):
    ...     batch_size: BatchSizes = (1,)
    ...     method: Methods = ()
    ...     offline: Offline = False
    >>> as_words({"batch_size": (1, 8), "method": ["a", "b"], "offline": True}, Request)
    ['--batch-size', '1,8', '--method', 'a', '--method', 'b', '--offline']
    """
    said: list[str] = []
    for name, value in given.items():
        option = option_of(kind.model_fields[name])
        if value is None or value is False or option is None:
            continue
        flag, texts = flag_of(name, option), as_texts(value, option)
        said += [flag] if value is True else [word for text in texts for word in (flag, text)]
    return said


def as_texts(value: Any, option: Option) -> list[str]:
    """Return a value as the texts of the command line that make it; one for an option that is not repeatable."""
    made = value if option.show is None or isinstance(value, str) else option.show(value)
    several = made if isinstance(made, Collection) and not isinstance(made, str) else [made]
    return [f"{part:g}" if isinstance(part, float) else str(part) for part in several]


def _value(name: str, field: FieldInfo, value: Any) -> Any:
    """Return what the record takes for a value or a text. Raises UserError for text that cannot be read."""
    option, kinds = option_of(field), [*parts(field.annotation)]
    several = [*value] if isinstance(value, list | tuple) else [value]
    given = [str(part) for part in several if isinstance(part, str | Path)]
    if option is None or len(given) != len(several):
        lone = isinstance(value, int | float) and Sequence in {get_origin(kind) for kind in kinds}
        return (value,) if lone else value
    try:
        if option.parse_all is not None:
            return option.parse_all(given)
        if option.parse is not None and len(given) == 1:
            return option.parse(given[0])
    except ValueError as error:
        text = ",".join(given)
        raise UserError(f"{flag_of(name, option)} {text!r} is not allowed; {error}.") from None
    if Sequence in {get_origin(kind) for kind in kinds}:
        return given
    return given[0] if isinstance(value, Path) else value


def _refusal(kind: type[BaseModel], error: ErrorDetails, see: str) -> UserError:
    """Return the first finding of a validation in one line: the option, its value and what is allowed."""
    if isinstance(raised := error.get("ctx", {}).get("error"), UserError):
        return raised
    name, value = str(error["loc"][0]), error["input"]
    field = kind.model_fields[name]
    flag = flag_of(name, option_of(field))
    if error["type"] == "literal_error":
        return unknown(flag.removeprefix("--"), str(value), choices(field), see)
    option = option_of(field)
    if isinstance(value, float) and option is not None and option.parse is texts.seconds:
        value = texts.shown_seconds(value)
    elif isinstance(value, float):
        value = texts.shown_number(value)
    elif isinstance(value, str):
        value = repr(value)
    place = field_path((flag, *error["loc"][1:])) if isinstance(value, dict | list) else flag
    said = error["msg"].removeprefix("Value error, ")
    return UserError(f"{place} {value} is not allowed; {allowed(field) or said[:1].lower() + said[1:]}.")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field allows; none if it takes others."""
    return tuple(str(choice) for kind in parts(field.annotation) for choice in _literals(kind))


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def parts(kind: Any) -> Iterable[Any]:
    """Yield a type and the types that it is made of, such as list[int] and int."""
    yield kind
    if get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from parts(part)


def allowed(field: FieldInfo) -> str:
    """Return the numbers that a field allows, in words; empty if it has no bounds.

    >>> class Request(BaseModel):
    ...     rounds: Rounds = 3
    ...     max_loss: MaxLoss = 1.0
    >>> allowed(Request.model_fields["rounds"])
    'it is a whole number from 1 to 1,000'
    >>> allowed(Request.model_fields["max_loss"])
    'it is a number above 0 and below 100'
    """
    kinds = [*parts(field.annotation)]
    marks = [*field.metadata, *(mark for kind in kinds for mark in getattr(kind, "__metadata__", ()))]
    marks += [mark for info in marks if isinstance(info, FieldInfo) for mark in info.metadata]
    low = next((mark for mark in marks if isinstance(mark, Ge | Gt)), None)
    high = next((mark for mark in marks if isinstance(mark, Le | Lt)), None)
    if low is None and high is None:
        return ""
    option = option_of(field)
    time = option is not None and option.parse is texts.seconds
    noun = "a time" if time else "a number" if float in kinds else "a whole number"
    as_text: Callable[[Any], str] = texts.shown_seconds if time else texts.shown_number
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"it is {noun} from {as_text(low.ge)} to {as_text(high.le)}"
    said = []
    if low is not None:
        said.append(f"of at least {as_text(low.ge)}" if isinstance(low, Ge) else f"above {as_text(low.gt)}")
    if high is not None:
        said.append(f"of at most {as_text(high.le)}" if isinstance(high, Le) else f"below {as_text(high.lt)}")
    return f"it is {noun} {' and '.join(said)}"
