"""The document of a reproduction: every published figure beside ours."""

from collections.abc import Mapping

from mtbench.document.formatting import NONE, bounds, interval, listed, number
from mtbench.document.model import SIGNS, Document, Entry, Notes, Pairs, Points, Row, Section, Table, Tone, Verdict
from mtbench.experiments.reproduce.agreement import Word
from mtbench.experiments.reproduce.format import KINDS, Figure, Reproduction
from mtbench.results.figure_formats import Estimate

COLUMNS = [
    ("published", "as the paper prints it"),
    ("ours", "with its 95% interval"),
    ("difference", "ours less theirs, or ours over theirs"),
    ("verdict", "in parentheses: the number of the reason below"),
]
BRIEF = ("verdict", "ours", "published")
TONES: dict[Word, Tone] = {"agrees": "good", "differs": "bad"}
READING = [
    ("agrees", "the whole 95% interval of the difference is inside the margin: 2 points of accuracy, 2% of a rate"),
    ("differs", "the interval exceeds the margin and excludes zero difference"),
    ("cannot tell", "neither of these; the reason states our n and how many would be needed"),
    (
        "not comparable",
        "ours measures something else: another family, benchmark, budget, engine, device, batch size or accounting, "
        "or a setting that the paper does not state",
    ),
    ("not run", "no checkpoint, no data, or left out; the reason says what to do"),
    (
        "Intervals",
        "Our figure has its own interval. A published accuracy gets the interval of as many items as the benchmark "
        "has. The two are treated as independent, although they are of the same items, so the interval of the "
        "difference is too wide and never too narrow. A published rate is treated as exact except for rounding.",
    ),
]


def document(result: Reproduction) -> Document:
    """Return the document of a reproduction."""
    reasons: dict[str, int] = {}
    rows = [_row(figure, reasons) for figure in result.figures]
    figures = Table(COLUMNS, rows, "figure", "Published figures and ours; 95% intervals in brackets", brief=BRIEF)
    source = result.source
    section = f", section {source.section}" if source.section else ""
    return Document(
        title=result.title,
        lead=summary(result.verdicts),
        subject=f"{source.authors}: “{source.title}”, arXiv {source.arxiv}v{source.version}, "
        f"table {source.table}{section} ({source.licence})",
        marks=list(dict.fromkeys(mark for run in result.runs for mark in run.disclaimers)),
        source="`reproduction.json`",
        sections=[
            Section("Figures", [figures, *([Points([*reasons], numbered=True)] if reasons else [])]),
            Section("Runs", [_runs(result)], folded=True),
            Section("As published", [_setup(result), Points(result.caveats)], folded=True),
            Section("How to read it", [Notes(READING)], folded=True),
        ],
    )


def summary(verdicts: Mapping[Word, int]) -> str:
    """Return a sentence that counts the figures by verdict.

    >>> summary({"agrees": 2, "differs": 0, "cannot tell": 1, "not comparable": 0, "not run": 3})
    'Verdicts on 6 published figures: agrees 2, differs 0, cannot tell 1, not run 3.'
    """
    counts = [f"{word} {n}" for word, n in verdicts.items() if n or word in TONES]
    return f"Verdicts on {sum(verdicts.values())} published figures: {', '.join(counts)}."


def _row(figure: Figure, reasons: dict[str, int]) -> Row:
    """Return a figure as a row. The reasons of verdicts are numbered in `reasons`."""
    kind = KINDS[figure.quantity]
    tone = TONES.get(figure.word, "plain")
    reason = f" ({reasons.setdefault(figure.why, len(reasons) + 1)})" if figure.why else ""
    entries = [
        Entry(figure.published.replace("-", "−")),
        Entry(*_with_interval(figure.ours, kind.digits, signed=kind.signed)),
        Entry(_difference(figure)),
        Entry("", verdict=Verdict(f"{figure.word}{reason}", tone=tone, sign=SIGNS[tone])),
    ]
    group = f"{figure.row} ({listed(filter(None, [figure.arm, figure.note]))})"
    return Row(f"{figure.benchmark}, {kind.words}", entries, group=group)


def _difference(figure: Figure) -> str:
    if figure.difference is None:
        return NONE
    percent = KINDS[figure.quantity].is_share
    value, limits = _with_interval(figure.difference, 1 if percent else 3, signed=percent)
    return f"{'' if percent else '×'}{value} {limits or ''}".strip()


def _with_interval(found: Estimate | None, digits: int, *, signed: bool) -> tuple[str, str | None]:
    """Return a value and its interval as text."""
    if found is None or found.value is None:
        return NONE, None
    return f"{'+' if signed and found.value >= 0 else ''}{number(found.value, digits)}", interval(
        bounds(found), 1, digits
    )


def _setup(result: Reproduction) -> Pairs:
    """Return the paper's setup, and its other figures."""
    setup = result.setup
    values = {
        "GPU": setup.gpu,
        "Engine": setup.engine,
        "Batch size": setup.batch_size,
        "New tokens": setup.max_new_tokens,
        "Decoding": setup.decoding,
        "Counting": setup.counting,
    }
    stated = [(name, "not stated" if value is None else str(value)) for name, value in values.items()]
    return Pairs([*stated, *((aside.what, str(aside.value)) for aside in result.also)])


def _runs(result: Reproduction) -> Pairs:
    """Return the report of each family's run, and the missing parts, with the reason."""
    texts, links = [], {}
    for run in result.runs:
        report = f"{run.folder}/report.html"
        texts.append((run.family, "not run" if run.folder is None else report))
        if run.folder is not None:
            links[run.family] = report
        for what, why in (*run.missing.items(), *run.closed.items()):
            texts.append((f"not run: {run.family}, {what}", why))
    return Pairs(texts, links=links)
