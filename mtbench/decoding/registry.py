"""METHODS: every decoding method, by name. A method is one file in methods/, or a plugin's module.

SERVING_ENGINES: every serving engine, by name (mtbench/clients/serving_engine.py). An engine is one file in engines/.
"""

import dataclasses
import typing
from types import NoneType, UnionType
from typing import Any, Literal

from mtbench.decoding.method import Method
from mtbench.options.fields import fields_of
from mtbench.plugins import Registry


def _check_method(cls: type[Any]) -> None:
    """Raise TypeError unless the class is a method whose options can be written on a command line."""
    if not issubclass(cls, Method):
        raise TypeError(f"{cls.__name__} is not a subclass of mtbench.decoding.method.Method")
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} is not a @dataclass(frozen=True, kw_only=True); its fields are the options")
    if bare := [f.name for f in dataclasses.fields(cls) if "option" not in f.metadata]:
        raise TypeError(f"{cls.__name__}.{bare[0]} is a field without mtbench.options.option(default, help)")
    kinds = typing.get_type_hints(cls)
    if untyped := [f.name for f in dataclasses.fields(cls) if not _can_be_written(kinds[f.name])]:
        raise TypeError(
            f"{cls.__name__}.{untyped[0]} is of type {kinds[untyped[0]]}, which cannot be written as `option=value`; "
            "use int, float, bool, str or Literal of texts"
        )
    fields_of(cls)
    roles = getattr(cls, "roles", None)
    if not isinstance(roles, tuple) or not roles or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"{cls.__name__}.roles is {roles!r}, not the checkpoints it needs, such as ('ar',)")


def _can_be_written(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return all(_can_be_written(member) for member in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return all(isinstance(word, str) for word in typing.get_args(kind))
    return kind in (int, float, bool, str, NoneType)


def _check_engine(cls: type[Any]) -> None:
    """Raise TypeError unless the class has its names and its methods."""
    for name in ("title", "start", "methods"):
        if not getattr(cls, name, None):
            raise TypeError(f"{cls.__name__}.{name} is missing; see mtbench/clients/serving_engine.py")


METHODS: Registry[Any] = Registry("method", "mtbench.methods", _check_method)
SERVING_ENGINES: Registry[Any] = Registry("engine", "mtbench.engines", _check_engine)


def plain_decoding() -> list[str]:
    """Return the methods of plain decoding in mtbench's own loop."""
    return [name for name in METHODS if METHODS[name].reference and not METHODS[name].outside]
