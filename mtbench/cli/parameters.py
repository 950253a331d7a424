"""From options (mtbench/options) to the parameters of a command.

`command` makes a command of a function whose parameters are options. `parameters` gives the options of a record.
"""

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ConfigDict, create_model
from pydantic.fields import FieldInfo

from mtbench import plugins
from mtbench.hardware.machine import choose_waiting
from mtbench.options import fields
from mtbench.options.common import PANELS
from mtbench.options.fields import fields_of, flag_of, option_of, read_options

LEADING = ("base", "head", "method", "suite")  # first of their panels

T = TypeVar("T")


def parameters(*kinds: type[Any], without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return the options of records and classes as parameters for Typer, in the order of the panels of `--help`."""
    placed = []
    for kind in kinds:
        for name, field in fields_of(kind).items():
            panel = option_of(field).panel or kind.panel
            place = not option_of(field).argument, PANELS.index(panel), name not in LEADING
            if name not in without:
                placed.append((place, _parameter(name, field, panel)))
    return [parameter for _, parameter in sorted(placed, key=lambda entry: entry[0])]


def with_parameters(function: Callable[..., Any], more: Collection[inspect.Parameter]) -> Callable[..., Any]:
    """Give a function that takes the context these parameters beside its own; it reads them from `ctx.params`."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    merged = [*own, *more]
    function.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in merged}
    return function


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Let a function whose parameters are options, but for the context, be a command."""
    signature = inspect.signature(function).parameters
    declared: dict[str, Any] = {
        name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in signature.items()
        if name != "ctx"
    }
    config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    kind = create_model(function.__name__, __config__=config, **declared)

    def run(ctx: typer.Context, **_: Any) -> None:
        chosen = record_of(ctx, kind)
        if "plugin" in declared:  # the command may decode
            choose_waiting(getattr(chosen, "directory", None))
        load_plugins(getattr(chosen, "plugin", ()))
        context = {"ctx": ctx} if "ctx" in signature else {}
        function(**context, **{name: getattr(chosen, name) for name in declared})

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return with_parameters(run, parameters(kind))


def load_plugins(paths: Collection[str]) -> tuple[str, ...]:
    """Import files that register methods, suites or engines; return their absolute paths. Raises UserError."""
    if paths:
        importlib.import_module("mtbench.decoding.arms")  # its check of default arms holds for them, too
    return tuple(plugins.load_file(path).path for path in paths)


def record_of(ctx: typer.Context, kind: type[T]) -> T:
    """Return the record or object with the options on the command line. Raises UserError for a wrong value."""
    words = ctx.command_path.split()[1:]  # the first is the program, however it was started
    return read_options(given(ctx, kind), kind, " ".join(["mtbench", *words, "--help"]))


def given(ctx: typer.Context, kind: type[Any]) -> dict[str, Any]:
    """Return the options that are on the command line, as Typer read them."""
    return {name: ctx.params[name] for name in fields_of(kind) if name in ctx.params and was_given(ctx, name)}


def was_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Return an option as a parameter. Typer reads switches and texts; values are made of texts by `read_options`."""
    option, switch = option_of(field), fields.number_of(field) is bool
    repeatable = option.parse_all is not None or (option.parse is None and fields.item_of(field) is not None)
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    shown = [] if value is None or value in ("", (), {}) else fields.as_texts(value, field)
    taken: Any
    default: Any
    if switch:
        taken, default = bool, value
    elif repeatable:
        taken, default = list[str], shown
    else:
        taken, default = str | None, shown[0] if shown else None
    if field.is_required():
        default = inspect.Parameter.empty
    if option.argument:
        shape: Any = typer.Argument(help=field.description, metavar=option.metavar, show_default=False)
    else:
        flags = option.flags or (flag_of(name, field),)
        if option.negatable:
            flags = (f"{flags[0]}/{fields.no(flags[0])}",)
        shape = typer.Option(
            *flags,
            help=field.description,
            metavar=None if switch else fields.metavar(field),
            hidden=option.hidden,
            rich_help_panel=panel,
        )
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD if option.argument else inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, place, default=default, annotation=Annotated[taken, shape])
