"""The published figures of a run's results, beside ours."""

from mtbench.document.formatting import NONE, bounds, interval, listed, number
from mtbench.document.model import SIGNS, Entry, Points, Row, Section, Table, Tone, Verdict
from mtbench.results.figure_formats import Publication, PublishedFigure, Quantity
from mtbench.results.publication import published

COLUMNS = [
    ("published", "as the paper prints it"),
    ("ours", ""),
    ("interval", "95% interval of ours"),
    (
        "inside",
        "whether the published figure, which is rounded, lies in our interval; or the reason below",
    ),
]
WORDS: dict[Quantity, tuple[str, int]] = {  # of a quantity, and its digits
    "accuracy": ("accuracy, %", 1),
    "accuracy_change": ("change, points", 1),
    "tokens_per_forward": ("tokens/forward", 2),
    "acceptance_length": ("accepted length", 2),
    "tokens_per_s": ("tokens/s", 1),
    "wall_s": ("seconds", 1),
    "speedup": ("speedup", 2),
}
INSIDE: dict[bool | None, tuple[str, Tone]] = {True: ("yes", "good"), False: ("no", "bad"), None: (NONE, "plain")}


def publication_section(found: Publication) -> Section:
    """Return the section: the figures, why some are not compared, and the paper."""
    table = published(found.name)
    source, setup = table.source, table.setup
    paper = f"{source.authors}: “{source.title}”, arXiv {source.arxiv}v{source.version}, table {source.table}"
    sentences = [f"{paper} ({source.licence}).", f"Decoding: {setup.decoding}.", f"Counting: {setup.counting}."]
    sentences += [f"{aside.what}: {aside.value}" for aside in table.also]
    reasons = reasons_of(found)
    numbered = [Points(reasons, numbered=True)] if reasons else []
    return Section(table.title, [publication_table(found), *numbered, Points([*sentences, *table.caveats])])


def publication_table(found: Publication) -> Table:
    """Return published, ours, interval, inside or not, a row for each figure."""
    reasons = reasons_of(found)
    rows = [_row(figure, reasons) for figure in found.figures]
    return Table(COLUMNS, rows, "figure", "Published figures and ours")


def reasons_of(found: Publication) -> list[str]:
    """Return why figures are not compared, each reason once."""
    return list(dict.fromkeys(figure.why for figure in found.figures if figure.why))


def _row(figure: PublishedFigure, reasons: list[str]) -> Row:
    words, digits = WORDS[figure.quantity]
    word, tone = INSIDE[figure.inside]
    shown = f"({reasons.index(figure.why) + 1})" if figure.why else word
    entries = [
        Entry(figure.published.replace("-", "−")),
        Entry(number(figure.ours.value, digits)),
        Entry(interval(bounds(figure.ours), 1, digits) or NONE),
        Entry("", verdict=Verdict(shown, tone=tone, sign=SIGNS[tone])),
    ]
    return Row(f"{figure.benchmark}, {words}", entries, group=f"{figure.row} ({listed([figure.arm])})")
