"""Write the pages of a reproduction: reproduction.md, reproduction.html (one self-contained file), a terminal table.

They are made from reproduction.json alone (mtbench/experiments/reproduce/compare.py), in the style of the report.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtbench.document.formatting import NONE
from mtbench.experiments.reproduce.agreement import WORDS, Word
from mtbench.experiments.reproduce.format import Figure, FigureDifference, OurFigure, Quantity, Reproduction
from mtbench.report.markdown import plain
from mtbench.report.phrases import DEMONSTRATION, SMALL_MODEL, is_synthetic
from mtbench.report.table import SIGNS
from mtbench.report.write import template
from mtbench.runs.directory import RunDirectory

PAGE = "reproduction.html"
QUANTITIES: dict[Quantity, tuple[str, int]] = {  # in words, and the number of digits shown
    "accuracy": ("accuracy, %", 1),
    "accuracy_change": ("change, points", 1),
    "tokens_per_forward": ("tokens/forward", 2),
    "acceptance_length": ("accepted length", 2),
    "tokens_per_s": ("tokens/s", 1),
    "wall_s": ("seconds", 1),
    "speedup": ("speedup", 2),
    "draft_forwards": ("draft forwards", 0),
    "draft_forwards_change": ("draft change, %", 0),
}
SIGNED = ("accuracy_change", "draft_forwards_change")
TONES = {"agrees": "good", "differs": "bad"}
MEANINGS = {
    "agrees": "the whole 95% interval of the difference is inside the margin: 2 points of accuracy, 2% of a rate",
    "differs": "the interval exceeds the margin and excludes zero difference",
    "cannot tell": "neither of these; the reason states our n and how many would be needed",
    "not comparable": "ours measures something else: another family, benchmark, budget, engine, device, batch size or "
    "accounting, or a setting that the paper does not state",
    "not run": "no checkpoint, no data, or left out; the reason names the command that would run it",
}
READING = {  # heading -> text; some only for tables of these quantities
    "Intervals": "Our figure has its own interval. A published accuracy gets the interval of as many items as the "
    "benchmark has. The two are treated as independent, although they are of the same items, so the interval of the "
    "difference is too wide and never too narrow. A published rate is treated as exact except for rounding.",
    "The paper's accounting": "It counts the tokens that the last forward accepted after the end of the answer, and it "
    "does not stop at stop strings. Its sampler has no forward that only reads the prompt: its first forward commits, "
    "as do the forwards counted here. With --protocol paper answers are decoded in this way and cut before scoring.",
    "Accepted length": "Tokens up to the end token over the forwards that committed any, all answers together. It is "
    "the acceptance length of the run's own report. The prompt's forward and tokens after the end do not count.",
    "Change": "A change of accuracy is measured on the same items. It is against the same checkpoint at one token per "
    "forward, or against the arm that the table names.",
}
READING_OF: Mapping[str, Sequence[Quantity]] = {
    "The paper's accounting": ("tokens_per_forward", "speedup"),
    "Accepted length": ("acceptance_length",),
    "Change": ("accuracy_change",),
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
    short: str  # the verdict without its reason if the reason is numbered below the table
    note: int | None  # the number of the reason
    tone: str

    @property
    def sign(self) -> str:
        return SIGNS[self.tone]


def write(folder: Path, result: Reproduction) -> Path:
    """Write reproduction.md and reproduction.html, and return the path of the latter."""
    run = RunDirectory(folder)
    run.write_text("reproduction.md", _markdown(result))
    run.write_text(PAGE, _page(result))
    return folder / PAGE


def summary(verdicts: Mapping[Word, int]) -> str:
    """Return a sentence that counts the figures by verdict.

    >>> print(summary({"agrees": 2, "differs": 0, "cannot tell": 1, "not comparable": 0, "not run": 3}))
    Of 6 published figures 2 agree with ours and none differs; 1 cannot be told, 3 were not run.
    """
    agrees = _count(verdicts["agrees"], "agrees", "agree")
    differs = _count(verdicts["differs"], "differs", "differ")
    others = [
        _count(verdicts["cannot tell"], "cannot be told", "cannot be told"),
        _count(verdicts["not comparable"], "is not comparable", "are not comparable"),
        _count(verdicts["not run"], "was not run", "were not run"),
    ]
    rest = ", ".join(text for text in others if not text.startswith("none"))
    end = f"; {rest}." if rest else "."
    return f"Of {sum(verdicts.values())} published figures {agrees} with ours and {differs}{end}"


def _count(n: int, one: str, several: str) -> str:
    """Return `none agrees`, `1 agrees`, `2 agree`."""
    if n == 0:
        return f"none {one}"
    return f"{n} {one if n == 1 else several}"


def terminal_table(result: Reproduction) -> Table:
    """Return the table for the terminal: one row per figure. Repeated reasons are numbered below it."""
    reasons: dict[str, int] = {}
    table = Table(
        title=escape(result.title),
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
    notes = [summary(result.verdicts), *(f"({number}) {why}" for why, number in reasons.items())]
    demonstration = _demonstration(result)
    if demonstration is not None:
        notes.insert(0, demonstration)
    table.caption = escape("\n".join(notes))
    return table


def line_of(figure: Figure, reasons: dict[str, int]) -> Line:
    """Return a figure as text. The reasons of figures that are not compared are numbered in `reasons`."""
    words, digits = QUANTITIES[figure.quantity]
    form = f"+,.{digits}f" if figure.quantity in SIGNED else f",.{digits}f"
    ours, shared = figure.ours, figure.word in ("not comparable", "not run")
    verdict = f"{figure.word} ({figure.why})" if figure.why else figure.word
    return Line(
        benchmark=figure.benchmark,
        quantity=words,
        published=figure.published.replace("-", "−"),
        ours=NONE if ours is None else _number(ours.value, form),
        interval="" if ours is None else _interval(ours, form),
        difference=_difference(figure.difference),
        verdict=verdict,
        short=figure.word if shared else verdict,
        note=reasons.setdefault(figure.why, len(reasons) + 1) if shared else None,
        tone=TONES.get(figure.word, "plain"),
    )


def _difference(difference: FigureDifference | None) -> str:
    if difference is None:
        return NONE
    if difference.kind == "ratio":
        return f"×{_number(difference.value, '.3f')} {_interval(difference, '.3f')}".strip()
    return f"{_number(difference.value, '+.1f')} {_interval(difference, '+.1f')}".strip()


def _number(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _interval(bounds: OurFigure | FigureDifference, form: str) -> str:
    if bounds.ci_low is None or bounds.ci_high is None:
        return ""
    return f"[{_number(bounds.ci_low, form)}, {_number(bounds.ci_high, form)}]"


def _by_row(result: Reproduction) -> Iterator[tuple[str, list[Figure]]]:
    """Yield each row of the table with its figures."""
    for row, figures in itertools.groupby(result.figures, key=lambda figure: figure.row):
        yield row, list(figures)


def _demonstration(result: Reproduction) -> str | None:
    """Return the disclaimer of a reproduction by a family that was made for one task; None without such a family."""
    runs = [run for run in result.runs if run.demonstration]
    if not runs:
        return None
    suites = {figure.suite for figure in result.figures if figure.suite is not None}
    synthetic = all(is_synthetic(run.family, suite, run.machine.device) for run in runs for suite in suites)
    return DEMONSTRATION if synthetic else SMALL_MODEL


def _source(result: Reproduction) -> str:
    source = result.source
    section = f", section {source.section}" if source.section else ""
    return (
        f"{source.authors}: “{source.title}”, arXiv {source.arxiv}v{source.version}, "
        f"table {source.table}{section} ({source.licence})"
    )


def _setup(result: Reproduction) -> list[tuple[str, str]]:
    """Return the paper's setup in pairs of name and value."""
    setup = result.setup
    values = {
        "GPU": setup.gpu,
        "Engine": setup.engine,
        "Batch size": setup.batch_size,
        "New tokens": setup.max_new_tokens,
        "Decoding": setup.decoding,
        "Counting": setup.counting,
    }
    return [(name, "not stated" if value is None else str(value)) for name, value in values.items()]


def _runs(result: Reproduction) -> list[tuple[str, str, str | None]]:
    """Return for each run: its family, what ran on which machine, the folder of its report."""
    texts = []
    for run in result.runs:
        text = "not run"
        if run.folder is not None:
            machine = run.machine
            place = machine.gpu or machine.processor or "an unknown machine"
            sizes = ", ".join(map(str, run.batch_sizes))
            checkpoints = ", ".join(f"{role}: {source}" for role, source in run.checkpoints.items())
            text = (
                f"{place}, {machine.dtype}, engine {run.engine}, batch size {sizes}, protocol {result.protocol}. "
                f"{checkpoints}"
            )
        texts.append((run.family, text, run.folder))
    return texts


def _not_run(result: Reproduction) -> list[tuple[str, str]]:
    """Return what was not run, each with its reason."""
    return [
        *((f"{run.family}, {missing.arm}", missing.why) for run in result.runs for missing in run.missing),
        *((f"{run.family}, {closed.suite}", closed.why) for run in result.runs for closed in run.closed),
    ]


def _accounting(result: Reproduction) -> tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]:
    """Return the headings with their meanings, and a row for each cell."""
    columns = [
        ("tokens per forward", "ours: up to the end token, without the prompt's forward"),
        ("by the paper's accounting", "with the tokens after the end token"),
        ("tokens after the end token", "accepted by the last forward after the end of the answer"),
        ("with the prompt's forward", "ours, if the forward that only reads the prompt were counted"),
    ]
    rows = []
    for line in result.accounting:
        paper, after = line.paper_tokens_per_forward, line.tokens_after_the_end
        values = [
            f"{line.tokens_per_forward:.3f}",
            NONE if paper is None else f"{paper:.3f}",
            NONE if after is None else f"{after:,}",
            f"{line.tokens_per_forward_with_prompt_forward:.3f}",
        ]
        rows.append((f"{line.arm} on {line.suite}, {line.family}, batch size {line.batch_size}", values))
    return columns, rows


def _reading(result: Reproduction) -> dict[str, str]:
    """Return how to read the table: what concerns its quantities."""
    shown = {figure.quantity for figure in result.figures}
    return {name: text for name, text in READING.items() if shown.intersection(READING_OF.get(name, shown))}


def _page(result: Reproduction) -> str:
    demonstration, reasons = _demonstration(result), dict[str, int]()
    rows = [(row, figures[0], [line_of(f, reasons) for f in figures]) for row, figures in _by_row(result)]
    return template("reproduction.html.j2").render(
        title=demonstration or result.title,
        subject=f"{result.title}. {_source(result)}" if demonstration else _source(result),
        lead=summary(result.verdicts),
        rows=rows,
        reasons=list(reasons),
        accounting=_accounting(result),
        runs=_runs(result),
        not_run=_not_run(result),
        setup=_setup(result),
        caveats=result.caveats,
        also=result.also,
        meanings=[(word, MEANINGS[word]) for word in WORDS],
        reading=_reading(result),
    )


def _markdown(result: Reproduction) -> str:
    lines = [f"# {result.title}", ""]
    demonstration = _demonstration(result)
    if demonstration is not None:
        lines += [f"**{demonstration}**", ""]
    lines += [plain(f"{_source(result)}."), "", summary(result.verdicts), ""]
    lines += ["| row | benchmark | quantity | published | ours | difference | verdict |"]
    lines += ["|:--|:--|:--|--:|--:|--:|:--|"]
    for row, figures in _by_row(result):
        for figure in figures:
            line = line_of(figure, {})
            ours = f"{line.ours} {line.interval}".strip()
            lines.append(
                _row([row, line.benchmark, line.quantity, line.published, ours, line.difference, line.verdict])
            )
    lines += _accounting_markdown(result)
    lines += ["", "## Runs", "", *(f"- {plain(f'{family}: {text}')}" for family, text, _ in _runs(result))]
    lines += [f"- not run: {plain(f'{name}: {why}')}" for name, why in _not_run(result)]
    lines += ["", "## As published", "", *(f"- {name}: {plain(value)}" for name, value in _setup(result))]
    lines += [f"- {plain(caveat)}" for caveat in result.caveats]
    lines += [f"- {plain(aside.what)}: {aside.value}" for aside in result.also]
    lines += ["", "## How to read it", "", *(f"- **{word}.** {MEANINGS[word]}" for word in WORDS)]
    lines += [f"- **{name}.** {text}" for name, text in _reading(result).items()]
    return "\n".join([*lines, ""])


def _accounting_markdown(result: Reproduction) -> list[str]:
    columns, rows = _accounting(result)
    if not rows:
        return []
    lines = ["", "## Accounting", "", "| arm | " + " | ".join(heading for heading, _ in columns) + " |"]
    lines += ["|:--|" + "--:|" * len(columns)]
    lines += [f"| {plain(arm)} | " + " | ".join(values) + " |" for arm, values in rows]
    return lines


def _row(texts: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(plain, texts)) + " |"
