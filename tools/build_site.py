"""`make docs`: the pages of the documentation site, from docs/ and from the source, in build/docs/.

The reference is made of the source: commands of their `--help`, methods and suites of their registries and docstrings,
families, formats of the JSON Schemas, the library of the public names. In a page of docs/ a comment
`<!-- generated: KIND NAMES -->` stands for a part that is made; PARTS lists the kinds.
"""

import html
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import mtbench
from mtbench.cli import ls
from mtbench.cli.main import COMMANDS, load
from mtbench.cli.schemas import SCHEMAS, schema
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import EMBEDDED, FAMILIES, RANDOM, SHAPES
from mtbench.options.fields import allowed, fields_of
from mtbench.options.texts import shown as as_text
from mtbench.plugins import Registry
from mtbench.results import publication

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "docs"
DOCUMENTS = {"design.md": "ARCHITECTURE.md", "security.md": "SECURITY.md"}  # page of the site -> file of the checkout
PART = re.compile(r"<!-- generated: (\w+) ?(.*?) ?-->")
NONE = "–"


def pages() -> Mapping[str, Callable[[], str]]:
    """The pages of the reference: name of the file -> what makes its text."""
    return {
        "api.md": api,
        "commands.md": commands,
        "families.md": families,
        "formats.md": formats,
        "methods.md": methods,
        "suites.md": suites,
    }


def commands() -> str:
    """Every command with its arguments and options, in the panels of its help."""
    found = ["# Commands", "Each command has this text as `--help`."]
    for name in COMMANDS:
        found += _command(f"mtbench {name}", load(name), level=2)
    return joined(found)


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    """Yield a command, then the commands below it."""
    yield f"{'#' * level} {name}"
    yield prose(command.help or "")
    parameters = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    usage = [name, *(_argument(p) for p in arguments), "[OPTIONS]" * (len(arguments) < len(parameters))]
    children = _children(command)
    if children:
        usage.append("COMMAND …")
    yield f"```text\n{' '.join(filter(None, usage))}\n```"
    if arguments:
        yield table(("argument", "what it is"), [(code(_argument(p)), prose(p.help or "")) for p in arguments])
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        if parameter not in arguments:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    for panel, of_panel in panels.items():
        yield table((panel.lower() if panel == "Options" else panel, "default", "what it does"), map(_option, of_panel))
    for child in children:
        yield from _command(f"{name} {child.name}", child, level + 1)


def _children(command: Any) -> list[Any]:
    """Return the commands of a group, without those that it hides."""
    if not hasattr(command, "list_commands"):
        return []
    context = typer.Context(command)
    found = [command.get_command(context, name) for name in command.list_commands(context)]
    return [child for child in found if not child.hidden]


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    return f"{name}{'…' if parameter.nargs == -1 else ''}"


def _option(parameter: Any) -> tuple[str, str, str]:
    default = parameter.default
    if callable(default) or default in (None, (), [], "") or default is False:
        shown = NONE
    elif isinstance(default, list | tuple):
        shown = code(", ".join(map(str, default)))
    else:
        shown = code(as_text(default))
    names = ", ".join(code(name) for name in [*parameter.opts, *parameter.secondary_opts])
    required = " Required." if parameter.required else ""
    return names, shown, prose(parameter.help or "") + required


def _own(registry: Registry[Any]) -> list[str]:
    """Return the names that mtbench itself registers; other packages may be installed beside it."""
    return [name for name in registry if registry[name].__module__.startswith(f"{registry.package}.")]


def methods() -> str:
    """Every method: its docstring, claim, roles and options."""
    found = ["# Methods", "`mtbench ls methods NAME` prints the same."]
    found.append(methods_table())
    for name in _own(METHODS):
        method = METHODS[name]
        found += [f"## {name}", prose(ls.docstring(method)), _facts(ls.method_facts(method))]
        rows = [
            (code(option), code(as_text(field.default)), code(allowed(field) or "text"), prose(field.description or ""))
            for option, field in fields_of(method).items()
        ]
        if rows:
            found.append(table(("option", "default", "allowed", "what it does"), rows))
    return joined(found)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return table(("", ""), [(name, plain(value.replace("\n", ", "))) for name, value in facts])


def methods_table() -> str:
    """One row per method."""
    rows = [
        (f"[`{name}`](#{anchor(name)})", ls.claims(METHODS[name]), _summary(METHODS[name])) for name in _own(METHODS)
    ]
    return table(("method", "claims", "what it does"), rows)


def suites() -> str:
    """Every suite: its docstring, budget, metric and subtasks."""
    found = ["# Suites", "`mtbench ls suites NAME` prints the same.", suites_table()]
    for name in _own(SUITES):
        found += [f"## {name}", prose(ls.docstring(SUITES[name])), _facts(ls.suite_facts(SUITES[name]))]
    return joined(found)


def suites_table() -> str:
    """One row per suite."""
    rows = [
        (
            f"[`{name}`](#{anchor(name)})",
            f"{SUITES[name].max_new_tokens:,}",
            str(len(SUITES[name].subtasks) or NONE),
            code(SUITES[name].metric) if SUITES[name].metric else NONE,
            _summary(SUITES[name]),
        )
        for name in _own(SUITES)
    ]
    return table(("suite", "new tokens", "subtasks", "scored by", "what it is"), rows)


def families() -> str:
    """Every family with its checkpoints."""
    found = [
        "# Families",
        "`--family NAME` names the checkpoints of a run. `mtbench ls families NAME` prints the same.",
    ]
    for family in FAMILIES.values():
        rows = [
            (code(role), "embedded" if source.startswith(EMBEDDED) else code(source))
            for role, source in family.roles.items()
        ]
        found += [f"## {family.name}", prose(family.about), table(("role", "checkpoint"), rows)]
    shapes = ", ".join(code(RANDOM + name) for name in SHAPES)
    found += ["## Random weights", f"To measure speed only: `--weights` with one of {shapes}, or `{RANDOM}FOLDER`."]
    return joined(found)


def formats() -> str:
    """Every file on disk: its keys, then those of the objects in it."""
    found = [
        "# Files and their keys",
        "Each file has a JSON Schema (draft 2020-12): `mtbench schemas DIR` writes them. A key is "
        "required unless it is called optional.",
    ]
    for kind in SCHEMAS:
        described = schema(kind)
        found += [f"## {kind}", prose(described["description"]), _keys(described, described)]
        for name, part in described.get("$defs", {}).items():
            if "properties" in part:
                found += [f"### {name} in {kind}", prose(part.get("description", "")), _keys(part, described)]
    return joined(found)


def _keys(described: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the keys of an object as a table."""
    required = described.get("required", [])
    rows = [
        (code(name), _type(about, whole), prose(about.get("description", "")) + " Optional." * (name not in required))
        for name, about in described.get("properties", {}).items()
    ]
    return table(("key", "type", "what it is"), rows) if rows else ""


def _type(about: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the type of a key in a word or two."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        kind = whole["$defs"][name].get("type", "object")
        return name if kind == "object" else _type(whole["$defs"][name], whole)
    if "anyOf" in about:
        return " or ".join(_type(choice, whole) for choice in about["anyOf"])
    if "const" in about or "enum" in about:
        return " or ".join(code(json.dumps(value)) for value in about.get("enum", [about.get("const")]))
    kind = about.get("type", "any")
    if kind == "array" and isinstance(about.get("items"), dict):
        return f"list of {_type(about['items'], whole)}"
    return " or ".join(kind) if isinstance(kind, list) else kind


def api() -> str:
    """The public names with their docstrings."""
    found = ["# Names of the library", "`import mtbench` gives these names."]
    for name in sorted(mtbench.__all__, key=str.lower):
        value = getattr(mtbench, name)
        found.append(f"## {name}")
        if inspect.isclass(value) or inspect.isfunction(value):
            found.append(_signature(name, value))
            found.append(prose(inspect.getdoc(value) or ""))
            found += list(_members(name, value))
        else:
            found.append(f"`{type(value).__name__}`: {ABOUT.get(name) or code(repr(value))}")
    return joined(found)


ABOUT = {
    "AUTO": "the value `auto` of an option: the loop chooses it from the option's `widths`.",
    "METHODS": "the methods by name. `METHODS.register(NAME)` is a class decorator; `METHODS[NAME]` is a class.",
    "NONE": "marks a missing draft; it equals no token id.",
    "SUITES": "the suites by name, as `METHODS`.",
}


def _members(name: str, value: Any) -> Iterator[str]:
    """Yield the public methods of a class."""
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return
    for member, function in vars(value).items():
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function) and not member.startswith("_"):
            yield f"### {name}.{member}"
            yield _signature(member, function)
            yield prose(inspect.getdoc(function) or "")


def _signature(name: str, value: Any) -> str:
    """Return the signature, with a line for each parameter if it is long."""
    try:
        parameters = [_without_modules(str(p)) for p in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return ""
    if "*args" in parameters:  # a protocol
        return ""
    line = f"{name}({', '.join(parameters)})"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")"
    return f"```python\n{line}\n```"


def _without_modules(annotated: str) -> str:
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])|collections\.abc\.|\bpathlib\.", "", annotated)


def _file(name: str) -> str:
    return f"```python\n{(ROOT / name).read_text(encoding='utf-8')}```"


def _published() -> str:
    found = map(publication.published, publication.names())
    return table(("table", "what it compares"), [(code(t.name), prose(t.what)) for t in found])


PARTS: Mapping[str, Callable[..., str]] = {
    "file": _file,  # a file of the checkout, as code
    "methods": lambda: methods_table().replace("](#", "](reference/methods.md#"),
    "published": _published,
    "suites": lambda: suites_table().replace("](#", "](reference/suites.md#"),
}


def page(text: str) -> str:
    """Return a page of docs/ with its generated parts. Links to other documents lead to their pages of the site."""
    for name, document in DOCUMENTS.items():
        text = text.replace(f"](../{document})", f"]({name})")
    return PART.sub(lambda part: PARTS[part[1]](*part[2].split()), text)


def document(name: str) -> str:
    """Return a document of the checkout. Its links lead to files that the site does not have."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", (ROOT / name).read_text(encoding="utf-8"))


def write(site: Path) -> None:
    """Write every page of the site into a new folder."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "docs", site)
    texts = {f"reference/{name}": make() for name, make in pages().items()}
    texts |= {name: document(source) for name, source in DOCUMENTS.items()}
    texts |= {file.name: page(file.read_text(encoding="utf-8")) for file in site.glob("*.md")}
    (site / "reference").mkdir()
    for name, text in texts.items():
        (site / name).write_text(text, encoding="utf-8")


def _summary(registered: type) -> str:
    """Return the first sentence of that docstring."""
    return prose(ls.docstring(registered)).partition("\n")[0].partition(". ")[0].rstrip(".")


# Markdown: prose that survives a Markdown parser, code, tables.


def prose(text: str) -> str:
    """Return text, such as a docstring, in which characters of HTML and Markdown outside code are plain.

    Lines indented by four spaces are code; they get an empty line before and behind.
    """
    lines: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        is_code = line.startswith("    ")
        if lines and lines[-1] and line and is_code != lines[-1].startswith("    "):
            lines.append("")
        lines.append(line if is_code else plain(line))
    return "\n".join(lines)


def plain(line: str) -> str:
    """Return a line in which `<`, `*` and `|` outside code have no meaning.

    >>> plain("a *b* <c>, `<d>`")
    'a &#42;b&#42; &lt;c>, `<d>`'
    """
    pieces = line.split("`")
    pieces[::2] = [p.replace("<", "&lt;").replace("*", "&#42;").replace("|", "&#124;") for p in pieces[::2]]
    return "`".join(pieces)


def code(text: str) -> str:
    """Return text as code. A bar, which would end a cell of a table, is written as an entity."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Line breaks in cells become spaces."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |" for line in lines)


def anchor(heading: str) -> str:
    """Return the fragment of a heading's address."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def joined(parts: Iterable[str]) -> str:
    """Return the parts of a page with empty lines between them; an empty part is left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


if __name__ == "__main__":
    write(SITE)
