"""From options (mtbench/options) to the parameters of a command.

`command` makes a command of a function whose parameters are options. `parameters` gives the options of a record.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel, ConfigDict, create_model
from pydantic.fields import FieldInfo

from mtbench import plugins
from mtbench.options.common import PANELS
from mtbench.options.fields import Option, as_texts, flag_of, option_of, options_of, parts, read_options

LEADING = ("base", "head", "method", "suite")  # first of their panels


def parameters(*kinds: type[BaseModel], without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return the options of records as parameters for Typer, in the order of the panels of `--help`."""
    found = [
        (not option.argument, PANELS.index(option.panel), name not in LEADING, _parameter(kind, name, option))
        for kind in kinds
        for name, option in options_of(kind).items()
        if name not in without
    ]
    return [parameter for *_, parameter in sorted(found, key=lambda entry: entry[:3])]


def with_parameters(function: Callable[..., Any], found: Collection[inspect.Parameter]) -> Callable[..., Any]:
    """Give a function that takes the context these parameters beside its own; it reads them from `ctx.params`."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    merged = [*own, *found]
    function.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in merged}
    return function


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Let a function be a command: those of its parameters that are options are read as `read_options` does.

    Other parameters, such as arguments, are Typer's.
    """
    signature = inspect.signature(function)
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is p.empty else p.default)
        for p in signature.parameters.values()
        if _is_option(p)
    }
    kind = create_model(function.__name__, __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)

    @wraps(function)
    def run(ctx: typer.Context, **values: Any) -> None:
        read = read_options(given(ctx, kind), kind, f"{ctx.command_path} --help")
        load_plugins(getattr(read, "plugin", ()))
        chosen = {name: getattr(read, name) for name in fields}
        own = {name: value for name, value in values.items() if name in signature.parameters and name not in fields}
        function(**own, **chosen, **({"ctx": ctx} if "ctx" in signature.parameters else {}))

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    of_typer = [p for p in signature.parameters.values() if p.name not in {*fields, "ctx"}]
    merged = [context, *of_typer, *parameters(kind)]
    run.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in merged}
    return run


def load_plugins(paths: Collection[str]) -> tuple[str, ...]:
    """Import files that register methods, suites or engines; return their absolute paths. Raises UserError."""
    if paths:
        importlib.import_module("mtbench.decoding.arms")  # its check of default arms holds for them, too
    return tuple(plugins.load_file(path).path for path in paths)


def given(ctx: typer.Context, kind: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a record that are on the command line, as Typer read them."""
    return {name: ctx.params[name] for name in kind.model_fields if name in ctx.params and was_given(ctx, name)}


def was_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _is_option(parameter: inspect.Parameter) -> bool:
    marks = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(mark, FieldInfo) and option_of(mark) is not None for mark in marks)


def _parameter(kind: type[BaseModel], name: str, option: Option) -> inspect.Parameter:
    field = kind.model_fields[name]
    kinds = {get_origin(part) or part for part in parts(field.annotation)}
    repeatable = option.parse_all is not None or (option.parse is None and not {Sequence, Mapping}.isdisjoint(kinds))
    number = next((known for known in (bool, int, float) if known in kinds), str)
    value: Any = None if field.is_required() else field.get_default(call_default_factory=True)
    if repeatable:
        taken: Any = list[str]
        default: Any = as_texts(value, option) if value else []
    elif option.parse is not None or number is str:
        taken, default = str | None, as_texts(value, option)[0] if value or value == 0 else None
    else:
        taken, default = bool if number is bool else number | None, value
    if option.argument:
        argument = typer.Argument(help=field.description, show_default=False)
        return inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[taken, argument]
        )
    flags = option.flags or (flag_of(name, option),)
    if field.is_required():
        default = inspect.Parameter.empty
    shape = typer.Option(*flags, help=field.description, metavar=option.metavar, rich_help_panel=option.panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[taken, shape])
