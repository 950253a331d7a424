"""METHODS: every decoding method by its name. A method is one file in methods/, or a plugin's module."""

import dataclasses
import typing
from types import NoneType, UnionType
from typing import Any, Literal

from mtbench.decoding.method import Method
from mtbench.options import options_of
from mtbench.registry import Registry


def _check_method(cls: type[Any]) -> None:
    """Raise unless options can be shown and typed, and roles are named."""
    if not issubclass(cls, Method):
        raise TypeError(f"{cls.__name__} is no mtbench.decoding.method.Method")
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} is no @dataclass(frozen=True, kw_only=True), whose fields are the options")
    if bare := [f.name for f in dataclasses.fields(cls) if "help" not in f.metadata]:
        raise TypeError(f"{cls.__name__}.{bare[0]} is a field without mtbench.options.option(default, help)")
    kinds = typing.get_type_hints(cls)
    if odd := [f.name for f in dataclasses.fields(cls) if not _typed(kinds[f.name])]:
        raise TypeError(
            f"{cls.__name__}.{odd[0]} is of type {kinds[odd[0]]}, which nobody can write as `option=value`; "
            "use int, float, bool, str or Literal[...]"
        )
    options_of(cls)
    roles = getattr(cls, "roles", None)
    if not isinstance(roles, tuple) or not roles or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"{cls.__name__}.roles is {roles!r}, not the checkpoints it needs, such as ('ar',)")


def _typed(kind: Any) -> bool:
    """Can a value of this type be written on a command line?"""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return all(_typed(one) for one in typing.get_args(kind))
    return kind in (int, float, bool, str, NoneType) or typing.get_origin(kind) is Literal


METHODS: Registry[Any] = Registry("method", "mtbench.methods", _check_method)
