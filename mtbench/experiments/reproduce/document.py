"""What a reproduction shows: every published figure beside ours, and how the two were counted."""

from collections.abc import Mapping, Sequence

from mtbench.document import SIGNS, Document, Entry, Notes, Pairs, Points, Row, Section, Table, Tone, Verdict
from mtbench.document.formatting import NONE, listed
from mtbench.experiments.reproduce.agreement import WORDS, Word
from mtbench.experiments.reproduce.format import Figure, FigureDifference, OurFigure, Quantity, Reproduction
from mtbench.report.phrases import DEMONSTRATION, SMALL_MODEL, is_synthetic

COLUMNS = [
    ("published", "as the paper prints it"),
    ("ours", "with its 95% interval"),
    ("difference", "ours less theirs, or ours over theirs"),
    ("verdict", "in parentheses: the number of the reason below"),
]
ACCOUNTING = [
    ("tokens per forward", "ours: up to the end token, without the prompt's forward"),
    ("by the paper's accounting", "with the tokens after the end token"),
    ("tokens after the end token", "accepted by the last forward after the end of the answer"),
    ("with the prompt's forward", "ours, if the forward that only reads the prompt were counted"),
]
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
BRIEF = ("verdict", "ours", "published")
TONES: dict[Word, Tone] = {"agrees": "good", "differs": "bad"}
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


def document(result: Reproduction) -> Document:
    """Return what a reproduction shows."""
    demonstration, reasons = _demonstration(result), dict[str, int]()
    rows = [_row(figure, reasons) for figure in result.figures]
    figures = Table(COLUMNS, rows, "figure", "Published figures and ours; 95% intervals in brackets", brief=BRIEF)
    accounting = Table(ACCOUNTING, _accounting(result), caption="Both columns count the same forwards")
    return Document(
        title=result.title,
        lead=summary(result.verdicts),
        subject=_source(result),
        marks=[demonstration] if demonstration else [],
        source="`reproduction.json`",
        sections=[
            Section("Figures", [figures, *([Points([*reasons], numbered=True)] if reasons else [])]),
            *([Section("Tokens per forward, counted two ways", [accounting], folded=True)] if accounting.rows else []),
            Section("Runs", [_runs(result)], folded=True),
            Section("As published", [_setup(result), Points(result.caveats)], folded=True),
            Section("How to read it", [Notes([*((w, MEANINGS[w]) for w in WORDS), *_reading(result)])], folded=True),
        ],
    )


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


def _row(figure: Figure, reasons: dict[str, int]) -> Row:
    """Return a figure as a row. The reasons of verdicts are numbered in `reasons`."""
    words, digits = QUANTITIES[figure.quantity]
    form = f"+,.{digits}f" if figure.quantity in SIGNED else f",.{digits}f"
    ours, tone = figure.ours, TONES.get(figure.word, "plain")
    number = f" ({reasons.setdefault(figure.why, len(reasons) + 1)})" if figure.why else ""
    entries = [
        Entry(figure.published.replace("-", "−")),
        Entry() if ours is None else Entry(_number(ours.value, form), _interval(ours, form) or None),
        Entry(_difference(figure.difference)),
        Entry("", verdict=Verdict(f"{figure.word}{number}", tone=tone, sign=SIGNS[tone])),
    ]
    group = f"{figure.row} ({listed(filter(None, [figure.arm, figure.note]))})"
    return Row(f"{figure.benchmark}, {words}", entries, group=group)


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


def _setup(result: Reproduction) -> Pairs:
    """Return the paper's setup, and what else it prints."""
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
    """Return what ran on which machine, with the run's report, and what did not run, with the reason."""
    texts, links = [], {}
    for run in result.runs:
        text = "not run"
        if run.folder is not None:
            machine = run.machine
            place = machine.gpu or machine.processor or "an unknown machine"
            checkpoints = listed(f"{role}: {source}" for role, source in run.checkpoints.items())
            text = (
                f"{place}, {machine.dtype}, engine {run.engine}, batch size {listed(run.batch_sizes)}, protocol "
                f"{result.protocol}. {checkpoints}"
            )
            links[run.family] = f"{run.folder}/report.html"
        texts.append((run.family, text))
    missing = [(f"{run.family}, {absent.arm}", absent.why) for run in result.runs for absent in run.missing]
    missing += [(f"{run.family}, {closed.suite}", closed.why) for run in result.runs for closed in run.closed]
    return Pairs([*texts, *((f"not run: {what}", why) for what, why in missing)], links=links)


def _accounting(result: Reproduction) -> list[Row]:
    rows = []
    for line in result.accounting:
        paper, after = line.paper_tokens_per_forward, line.tokens_after_the_end
        values = [
            f"{line.tokens_per_forward:.3f}",
            NONE if paper is None else f"{paper:.3f}",
            NONE if after is None else f"{after:,}",
            f"{line.tokens_per_forward_with_prompt_forward:.3f}",
        ]
        name = f"{line.arm} on {line.suite}, {line.family}, batch size {line.batch_size}"
        rows.append(Row(name, [Entry(value) for value in values]))
    return rows


def _reading(result: Reproduction) -> list[tuple[str, str]]:
    """Return how to read the table: what concerns its quantities."""
    shown = {figure.quantity for figure in result.figures}
    return [(name, text) for name, text in READING.items() if shown.intersection(READING_OF.get(name, shown))]
