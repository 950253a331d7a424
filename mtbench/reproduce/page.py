"""A reproduction to look at: a table in the terminal, reproduction.md, and reproduction.html, one file without network.

Made from reproduction.json (mtbench/reproduce/beside.py) alone, in the look of the report.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtbench.report.formatting import NONE
from mtbench.report.phrases import DEMONSTRATION
from mtbench.report.tables import SIGNS
from mtbench.report.write import plain, template
from mtbench.reproduce.agreement import WORDS
from mtbench.runs.directory import Record, RunDirectory

PAGE = "reproduction.html"
QUANTITIES = {  # in words, and the digits that are shown
    "accuracy": ("accuracy, %", 1),
    "accuracy_change": ("change, points", 1),
    "tokens_per_forward": ("tokens/forward", 2),
    "tokens_per_s": ("tokens/s", 1),
    "wall_s": ("seconds", 1),
    "speedup": ("speedup", 2),
    "draft_forwards": ("draft forwards", 0),
    "draft_forwards_change": ("draft change, %", 0),
}
SIGNED = ("accuracy_change", "draft_forwards_change")
TONES = {"agrees": "good", "differs": "bad"}
MEANINGS = {
    "agrees": "the whole 95% interval of the difference lies within the margin: 2 points of accuracy, 2% of a rate",
    "differs": "the interval leaves the margin and excludes no difference",
    "cannot tell": "neither; with the n of ours, and how many it would take",
    "not comparable": "ours is of another thing: another family, benchmark, budget, engine, device, batch size or "
    "accounting, or what the paper leaves out",
    "not run": "no checkpoint, no data, or left out; the reason says what would run it",
}
READING = {
    "Intervals": "Ours has its own. Of an accuracy, theirs has that of as many items as the benchmark holds; the two "
    "are taken for independent, though they are of the same items, so the interval of the difference is too wide and "
    "never too narrow. A rate of theirs is taken as exact but for rounding.",
    "The paper's accounting": "It counts what the last forward accepted behind the end of the answer, and does not "
    "stop at stop strings. Its sampler has no forward that only reads the prompt: its first one commits, and so are "
    "those counted here. With --protocol paper answers are decoded so, and cut when they are scored.",
    "Change": "A change of accuracy is on the same items, from the same checkpoint at one token per forward, or from "
    "the arm that the table names.",
}


class Line(NamedTuple):
    """A figure as text."""

    benchmark: str
    quantity: str
    published: str
    ours: str
    interval: str
    difference: str
    verdict: str
    short: str  # the verdict, where its reason is one of those numbered below the table
    note: int | None  # that number
    tone: str

    @property
    def sign(self) -> str:
        return SIGNS[self.tone]


def write(folder: Path, result: Record) -> Path:
    """Write reproduction.md and reproduction.html; the path of the latter."""
    run = RunDirectory(folder)
    run.write_text("reproduction.md", _markdown(result))
    run.write_text(PAGE, _page(result))
    return folder / PAGE


def summary(result: Record) -> str:
    """How many figures got which verdict.

    >>> print(summary({"verdicts": {"agrees": 2, "differs": 0, "cannot tell": 1, "not comparable": 0, "not run": 3}}))
    Of 6 published figures 2 agree with ours and none differs; 1 cannot be told, 3 were not run.
    """
    of = result["verdicts"]

    def some(word: str, one: str, several: str) -> list[str]:
        return [f"{of[word]} {one if of[word] == 1 else several}"] * bool(of[word])

    first = some("agrees", "agrees", "agree") or ["none agrees"]
    second = some("differs", "differs", "differ") or ["none differs"]
    more = some("cannot tell", "cannot be told", "cannot be told")
    more += some("not comparable", "is not comparable", "are not comparable") + some(
        "not run", "was not run", "were not run"
    )
    beside = f"; {', '.join(more)}" if more else ""
    return f"Of {sum(of.values())} published figures {first[0]} with ours and {second[0]}{beside}."


def terminal_table(result: Record) -> Table:
    """A row per figure: arm and suite, theirs, ours with its interval, the verdict. Reasons are said once, below."""
    reasons: dict[str, int] = {}
    table = Table(
        title=escape(result["title"]),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading, side in (("figure", "left"), ("paper", "right"), ("ours", "right"), ("verdict", "left")):
        table.add_column(heading, justify=side, no_wrap=heading != "figure")  # type: ignore[arg-type]
    for row, figures in _by_row(result):
        table.add_row(f"[bold]{escape(row)}[/]")
        for figure in figures:
            line = line_of(figure, reasons)
            verdict = f"{line.short} ({line.note})" if line.note else line.short
            ours = " ".join(filter(None, (line.ours, line.interval)))
            table.add_row(*map(escape, (f"  {line.benchmark}, {line.quantity}", line.published, ours, verdict)))
        table.add_section()
    notes = [DEMONSTRATION] * _demonstrates(result) + [summary(result)]
    table.caption = escape("\n".join(notes + [f"({number}) {why}" for why, number in reasons.items()]))
    return table


def line_of(figure: Mapping[str, Any], reasons: dict[str, int]) -> Line:
    """One figure of reproduction.json as text. `reasons` of what is not compared are numbered as they come."""
    words, digits = QUANTITIES[figure["quantity"]]
    sign = "+" if figure["quantity"] in SIGNED else ""
    ours, apart = figure["ours"], figure["difference"]
    verdict = f"{figure['word']} ({figure['why']})" if figure["why"] else figure["word"]
    shared = figure["word"] in ("not comparable", "not run")
    difference = NONE
    if apart is not None:
        ratio = apart["kind"] == "ratio"
        form = ".3f" if ratio else "+.1f"
        difference = f"{'×' * ratio}{_number(apart['value'], form)} {_interval(apart, form)}".strip()
    return Line(
        figure["benchmark"],
        words,
        figure["published"].replace("-", "−"),
        NONE if ours is None else _number(ours["value"], f"{sign},.{digits}f"),
        "" if ours is None else _interval(ours, f"{sign},.{digits}f"),
        difference,
        verdict,
        figure["word"] if shared else verdict,
        reasons.setdefault(figure["why"], len(reasons) + 1) if shared else None,
        TONES.get(figure["word"], "plain"),
    )


def _number(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _interval(bounds: Mapping[str, Any], form: str) -> str:
    if bounds["ci_low"] is None:
        return ""
    return f"[{_number(bounds['ci_low'], form)}, {_number(bounds['ci_high'], form)}]"


def _by_row(result: Record) -> Iterator[tuple[str, list[Record]]]:
    """The figures of each row of the table."""
    for row, figures in itertools.groupby(result["figures"], key=lambda figure: figure["row"]):
        yield row, list(figures)


def _demonstrates(result: Record) -> bool:
    return any(run["demonstration"] for run in result["runs"])


def _source(result: Record) -> str:
    source = result["source"]
    section = f", section {source['section']}" if source["section"] else ""
    return (
        f"{source['authors']}: “{source['title']}”, arXiv {source['arxiv']}v{source['version']}, "
        f"table {source['table']}{section} ({source['licence']})"
    )


def _setup(result: Record) -> list[tuple[str, str]]:
    """The paper's setup as far as it is known, in pairs."""
    names = {
        "gpu": "GPU",
        "engine": "Engine",
        "batch_size": "Batch size",
        "max_new_tokens": "New tokens",
        "decoding": "Decoding",
        "counting": "Counting",
    }
    setup = result["setup"]
    return [(said, "not stated" if setup[name] is None else str(setup[name])) for name, said in names.items()]


def _runs(result: Record) -> list[tuple[str, str, str | None]]:
    """Each run: its family, what and where it ran, the folder of its report."""
    said = []
    for run in result["runs"]:
        machine = run["machine"]
        on = machine["gpu"] or machine["processor"] or "a machine that is not known"
        sizes = ", ".join(map(str, run["batch_sizes"]))
        what = f"{on}, {machine['dtype']}, engine {run['engine']}, batch size {sizes}, protocol {result['protocol']}"
        checkpoints = ", ".join(f"{role}: {where}" for role, where in run["checkpoints"].items())
        ran = run["folder"] is not None
        said.append((run["family"], f"{what}. {checkpoints}" if ran else "not run", run["folder"]))
    return said


def _not_run(result: Record) -> list[tuple[str, str]]:
    """What was not run and why, each once."""
    return [
        (f"{run['family']}, {one['arm' if 'arm' in one else 'suite']}", one["why"])
        for run in result["runs"]
        for one in (*run["missing"], *run["closed"])
    ]


def _accounting(result: Record) -> tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]:
    """Headings with their meanings, and a row for each cell."""
    columns = [
        ("tokens per forward", "ours: up to the end token, no prompt's forward"),
        ("by the paper's accounting", "with the tokens after the end token"),
        ("tokens after the end token", "accepted by the last forward behind the end of the answer"),
        ("with the prompt's forward", "ours, if the forward that only reads the prompt were counted"),
    ]
    rows = []
    for line in result["accounting"]:
        paper, after = line["paper_tokens_per_forward"], line["tokens_after_the_end"]
        values = [
            f"{line['tokens_per_forward']:.3f}",
            NONE if paper is None else f"{paper:.3f}",
            NONE if after is None else f"{after:,}",
            f"{line['tokens_per_forward_with_prompt_forward']:.3f}",
        ]
        rows.append((f"{line['arm']} on {line['suite']}, {line['family']}, batch size {line['batch_size']}", values))
    return columns, rows


def _page(result: Record) -> str:
    demonstration, reasons = _demonstrates(result), dict[str, int]()
    rows = [(row, figures[0], [line_of(f, reasons) for f in figures]) for row, figures in _by_row(result)]
    return template("reproduction.html.j2").render(
        title=DEMONSTRATION if demonstration else result["title"],
        subject=f"{result['title']}. {_source(result)}" if demonstration else _source(result),
        lead=summary(result),
        rows=rows,
        reasons=list(reasons),
        accounting=_accounting(result),
        runs=_runs(result),
        not_run=_not_run(result),
        setup=_setup(result),
        caveats=result["caveats"],
        also=result["also"],
        meanings=[(word, MEANINGS[word]) for word in WORDS],
        reading=READING,
    )


def _markdown(result: Record) -> str:
    lines = [f"# {result['title']}", ""] + [f"**{DEMONSTRATION}**", ""] * _demonstrates(result)
    lines += [plain(f"{_source(result)}."), "", summary(result), ""]
    lines += ["| row | benchmark | quantity | published | ours | difference | verdict |"]
    lines += ["|:--|:--|:--|--:|--:|--:|:--|"]
    for row, figures in _by_row(result):
        for line in (line_of(figure, {}) for figure in figures):
            ours = " ".join(filter(None, (line.ours, line.interval)))
            said = (row, line.benchmark, line.quantity, line.published, ours, line.difference, line.verdict)
            lines.append("| " + " | ".join(map(plain, said)) + " |")
    columns, cells = _accounting(result)
    if cells:
        lines += ["", "## Accounting", "", "| arm | " + " | ".join(heading for heading, _ in columns) + " |"]
        lines += ["|:--|" + "--:|" * len(columns)]
        lines += [f"| {plain(arm)} | " + " | ".join(values) + " |" for arm, values in cells]
    lines += ["", "## Runs", "", *(f"- {plain(f'{family}: {what}')}" for family, what, _ in _runs(result))]
    lines += [f"- not run: {plain(f'{what}: {why}')}" for what, why in _not_run(result)]
    lines += ["", "## As published", "", *(f"- {name}: {plain(value)}" for name, value in _setup(result))]
    lines += [f"- {plain(said)}" for said in result["caveats"]]
    lines += [f"- {plain(one['what'])}: {one['value']}" for one in result["also"]]
    lines += ["", "## How to read it", "", *(f"- **{word}.** {MEANINGS[word]}" for word in WORDS)]
    lines += [f"- **{name}.** {text}" for name, text in READING.items()]
    return "\n".join([*lines, ""])
