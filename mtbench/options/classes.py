"""The options of methods and training objectives, which are the fields of a dataclass.

A method's are listed by `mtbench ls methods`, an objective's by `mtbench train OBJECTIVE --help`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mtbench.errors import UserError, unknown
from mtbench.options import fields
from mtbench.options.fields import adapter, allowed, fields_of, from_text, option_of
from mtbench.options.texts import shown


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
    mark = fields.option(
        help,
        negatable=isinstance(default, bool),
        ge=low,
        le=high,
        trained=trained,
        same_output=same_output,
        role=role,
        widths=widths,
        engine=engine,
        per_request=per_request,
    )
    return dataclasses.field(default=default, metadata={"option": mark})


def roles_of(method: type[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Return the roles that the method's options name, given the `chosen` values; other options have their defaults."""
    named = [chosen.get(name, field.default) for name, field in fields_of(method).items() if option_of(field).role]
    return [role for role in named if role is not None]


def per_request(holder: Any) -> list[str]:
    """Return the options that each request of a server may set."""
    kind = holder if isinstance(holder, type) else type(holder)
    if not dataclasses.is_dataclass(kind):
        return []  # a method that holds another one
    return [name for name, field in fields_of(kind).items() if option_of(field).per_request]


def decoding_options(method: type[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Return the options that differ from their defaults and affect decoding, given the `chosen` values."""
    decoding = {name: field.default for name, field in fields_of(method).items() if not option_of(field).engine}
    return [name for name, default in decoding.items() if chosen.get(name, default) != default]


def arm_options(method: type[Any]) -> list[str]:
    """Return the options that every such method has: `on` (checkpoint) and, unless it is external, `engine`."""
    return ["on"] if method.outside else ["on", "engine"]


def parse_option(method: type[Any], name: str, text: str) -> Any:
    """Return the value of the option `name=text`. Raises UserError with the allowed values and the default."""
    known = fields_of(method)
    if name not in known:
        raise unknown(f"option of {method.name}", name, [*known, *arm_options(method)], "mtbench ls methods")
    value = from_text(known[name].annotation, text)
    try:
        check_value(method, name, value)
    except ValueError as error:
        raise UserError(
            f"{method.name}: {name}={text!r} is not allowed; {name} is {error}. See `mtbench ls methods {method.name}`."
        ) from None
    return value


def check_value(holder: type[Any], name: str, value: Any) -> None:
    """Raise ValueError, with the allowed values and the default, unless the option `name` may have this value."""
    field = fields_of(holder)[name]
    try:
        adapter(field).validate_python(value)
    except ValidationError:
        raise ValueError(f"{allowed(field)}, default {shown(field.default)}") from None


def build(method: type[Any], chosen: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the method with its options, and a flag for each option that differs from the `trained` one."""
    values, flags = dict(chosen), []
    for name, field in fields_of(method).items():
        if option_of(field).trained and name in trained:
            trained_value = trained[name]
            try:
                check_value(method, name, trained_value)
            except ValueError as error:
                raise UserError(
                    f"{method.name}: the checkpoint's training record has {name}={trained_value!r:.60}, which is "
                    f"not allowed; it is {error}. Correct the record."
                ) from None
            if values.setdefault(name, trained_value) != trained_value:
                flags.append(f"{name}={shown(values[name])}, trained with {shown(trained_value)}")
    return method(**values), flags
