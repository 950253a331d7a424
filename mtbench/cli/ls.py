"""`mtbench ls`: one line for every method, suite or family; with a name, its details. And the arms that can run."""

import inspect
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from mtbench.cli.parameters import command
from mtbench.cli.session import out, say
from mtbench.errors import UserError, unknown
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import EMBEDDED, FAMILIES, RANDOM, SHAPES
from mtbench.options import common
from mtbench.options.classes import arm_options, roles_of
from mtbench.options.common import COMPARED
from mtbench.options.fields import allowed, fields_of, option
from mtbench.options.texts import shown
from mtbench.plugins import Registry

app = typer.Typer()

GAP = 2  # spaces between columns
NONE = "–"
OURS = ("graph",)  # the engines of `ls arms` by default


@app.command()
@command
def ls(
    kind: Annotated[str, option("methods, suites, families, engines or arms.", COMPARED, argument=True)] = "methods",
    name: Annotated[
        str | None, option("Show the options, subtasks or roles of this one.", COMPARED, argument=True)
    ] = None,
    family: common.Family = None,
    model: common.Model = None,
    checkpoint: common.Checkpoints = {},  # noqa: B006
    engine: common.Engines = OURS,
    offline: common.Offline = False,
    plugin: common.Plugins = (),
) -> None:
    """List methods, suites, families or engines, or describe one of them.

    `engines` lists the serving engines, and which methods each has by which name of its own.
    `arms` lists what `mtbench choose` can race on the checkpoints of --family, --model and --checkpoint, and why other
    methods cannot run on them; with --engine in each of these engines, installed or not.
    """
    if kind == "arms":
        if name is not None:
            raise UserError(f"`mtbench ls arms` takes no name, and {name!r} is one; see `mtbench ls methods {name}`.")
        _list_arms({"family": family, "model": model, "checkpoint": checkpoint, "offline": offline}, engine)
        return
    if family or model or checkpoint or tuple(engine) != OURS:
        raise UserError("--family, --model, --checkpoint and --engine belong to `mtbench ls arms`.")
    listings = {"methods": (_list_methods, _show_method), "suites": (_list_suites, _show_suite)}
    listings |= {"families": (_list_families, _show_family), "engines": (_list_engines, _show_engine)}
    if kind not in listings:
        raise unknown("listing", kind, (*listings, "arms"), "mtbench ls --help")
    list_all, show_one = listings[kind]
    if name is None:
        list_all()
    else:
        show_one(name)


def _list_arms(asked: Mapping[str, Any], engines: Sequence[str]) -> None:
    from mtbench.decoding.registry import SERVING_ENGINES
    from mtbench.experiments.choose.candidates import candidates
    from mtbench.plan.request import RunRequest

    for name in engines:
        found = candidates(RunRequest(**asked, engine=(name,)), installed=False)
        if name in SERVING_ENGINES:
            say(f"{SERVING_ENGINES[name].title} ({SERVING_ENGINES[name].state()})")
        for table in found.tables():
            out.print(table)


def _methods() -> Registry[Any]:
    from mtbench.decoding.registry import METHODS  # imports torch, which suites and families do not need

    return METHODS


def _list_methods() -> None:
    methods = _methods()
    rows = [(name, claims(methods[name]), _first_line(methods[name])) for name in methods]
    _print_list(("method", "claims", "what it does"), rows)
    _print_broken(methods)
    say("")
    _wrapped("Options of a method: `mtbench ls methods NAME`. Its claims are checked against the baseline `ar`.")


def _show_method(name: str) -> None:
    from mtbench.decoding.arms import ENGINES

    method = _methods()[name]
    _print_docstring(method)
    _print_facts(method_facts(method))
    if fields := fields_of(method):
        say("")
        table = _table(("option", "default", "allowed", "what it does"))
        for its, field in fields.items():
            values = (allowed(field) or "text").replace("|", " | ")
            table.add_row(*_plain(its, shown(field.default), values, field.description or ""))
        out.print(table)
    say("")
    engines = f", engine={'|'.join(ENGINES)}" if "engine" in arm_options(method) else ""
    _wrapped(f"Every method also takes: on=ROLE{engines}. 'a|b' makes two arms; quote it in a shell.")


def claims(method: Any) -> str:
    """Return a method's claim; `by options` if the claim depends on them."""
    return method.claims if isinstance(method.claims, str) else "by options"


def method_facts(method: Any) -> list[tuple[str, str]]:
    """Return the facts of a method besides its docstring and its options."""
    return [
        ("claims", claims(method)),
        ("checkpoints", ", ".join([*method.roles, *roles_of(method, {})]) or NONE),
        ("default arms", "\n".join(method.default_arms) or NONE),
        ("arms in a choice", "\n".join(method.choices or method.default_arms or (method.name,))),
    ]


def _list_suites() -> None:
    rows = [(name, str(SUITES[name].max_new_tokens), _first_line(SUITES[name])) for name in SUITES]
    _print_list(("suite", "new tokens", "what it is"), rows)
    _print_broken(SUITES)
    say("")
    _wrapped("Subtasks and task of a suite: `mtbench ls suites NAME`.")


def _show_suite(name: str) -> None:
    _print_docstring(SUITES[name])
    _print_facts(suite_facts(SUITES[name]))


def suite_facts(suite: Any) -> list[tuple[str, str]]:
    """Return the facts of a suite besides its docstring."""
    facts = [
        ("family", f"{suite.family} (without --family, --model or --weights)"),
        ("new tokens", f"at most {suite.max_new_tokens}"),
        ("scored by", suite.metric or "nothing: measures speed and agreement"),
        ("stored text", "answers only: the prompts are private" if suite.private else "prompts and answers"),
        ("subtasks", ", ".join(suite.subtasks) or NONE),
    ]
    if issubclass(suite, HarnessSuite):
        facts += [
            ("lm-eval tasks", suite.group or ", ".join(suite.tasks)),
            ("few-shot", f"{suite.num_fewshot} examples"),
            ("chat template", "yes" if suite.chat_template else "no"),
            ("filter", suite.filter),
        ]
    return facts


def _list_families() -> None:
    rows = [(family.name, str(len(family.roles)), family.about) for family in FAMILIES.values()]
    _print_list(("family", "roles", "what it is"), rows)
    say("")
    _wrapped("Checkpoints of a family: `mtbench ls families NAME`.")
    shapes = ", ".join(RANDOM + shape for shape in SHAPES)
    _wrapped(f"Random weights, to measure speed only: --weights {shapes}.")


def _show_family(name: str) -> None:
    if name not in FAMILIES:
        raise unknown("family", name, FAMILIES, "mtbench ls families")
    family = FAMILIES[name]
    _wrapped(family.about)
    say("")
    table = _table(("role", "checkpoint"))
    for role, source in family.roles.items():
        table.add_row(*_plain(role, "embedded" if source.startswith(EMBEDDED) else source))
    out.print(table)


def _list_engines() -> None:
    """Print the engines and the matrix method × engine: the engine's own name of a method with default options."""
    from mtbench.decoding.registry import SERVING_ENGINES

    engines = {name: SERVING_ENGINES[name]() for name in SERVING_ENGINES}
    rows = [(name, engine.title, engine.state(), _first_line(type(engine))) for name, engine in engines.items()]
    _print_list(("engine", "title", "installed", "what it is"), rows)
    _print_broken(SERVING_ENGINES)
    say("")
    table = _table(("method", *engines))
    having = [_settings(engine) for engine in engines.values()]
    for name in sorted(set().union(*having)):
        settings = [settings.get(name, NONE) for settings in having]
        table.add_row(*_plain(name, *(NONE if isinstance(s, str) else s.name or "plain" for s in settings)))
    out.print(table)
    say("")
    _wrapped("An arm in an engine: `--method 'METHOD:engine=NAME'`. What differs: `mtbench ls engines NAME`.")


def _show_engine(name: str) -> None:
    from mtbench.clients.serving_engine import Setting
    from mtbench.decoding.registry import SERVING_ENGINES

    _print_docstring(SERVING_ENGINES[name])
    for method, setting in _settings(SERVING_ENGINES[name]()).items():
        words = setting if isinstance(setting, str) else shlex.join(setting.words) or "no option"
        say(f"\n{method}: {words}")
        if isinstance(setting, Setting) and setting.differs:
            _wrapped(setting.differs)


def _settings(engine: Any) -> dict[str, Any]:
    """Return an engine's setting for each of its methods with default options, and for its own arms in a race."""
    from mtbench.decoding.arms import parse_arms

    settings = {}
    for arm in parse_arms([*engine.methods, *engine.choices]):
        method = _methods()[arm.method](**arm.options)
        drafts = dict.fromkeys(roles_of(type(method), {}), "DRAFT")
        settings[str(arm).partition("@")[0]] = engine.setting(method, drafts)
    return settings


def _first_line(registered: type) -> str:
    return docstring(registered).partition("\n")[0]


def docstring(registered: type) -> str:
    """Return the docstring of the file that registered a method or a suite."""
    return inspect.cleandoc(sys.modules[registered.__module__].__doc__ or "")


def _print_docstring(registered: type) -> None:
    """Print a docstring. Wrap paragraphs again, unless they contain indented lines."""
    for paragraph in docstring(registered).split("\n\n"):
        if re.search("^ {4}", paragraph, re.MULTILINE):
            say(paragraph)
        else:
            for item in re.split(r"\n(?=- )", paragraph):
                _wrapped(item)
        say("")


def _wrapped(text: str) -> None:
    say(textwrap.fill(" ".join(text.split()), out.width, subsequent_indent="  " if text.startswith("- ") else ""))


def _print_list(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one line per row; the last column, a docstring's first line, is cut at the width of the terminal."""
    table = _table(headings)
    table.expand = True
    table.columns[-1].no_wrap, table.columns[-1].ratio = True, 1
    for *start, text in rows:
        table.add_row(*_plain(*start, text.partition(". ")[0].rstrip(".")))
    out.print(table)


def _print_broken(registry: Registry[Any]) -> None:
    for name, reason in registry.broken.items():
        say(f"{name}  broken: {reason}")


def _print_facts(facts: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, GAP, 0, 0))
    for name, value in facts:
        table.add_row(*_plain(name, value))
    out.print(table)


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1] and heading != "allowed")
    return table


def _plain(*cells: str) -> list[str]:
    return [escape(cell) for cell in cells]
