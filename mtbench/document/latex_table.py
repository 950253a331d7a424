"""Tables for papers: LaTeX with booktabs and adjustbox, the columns that a paper has, and notes below the table."""

import re
import textwrap
from collections.abc import Sequence

from mtbench.document.formatting import NONE
from mtbench.document.model import Entry, Table

WIDEST_CELL = 22  # characters of a line in a place of a table; longer text wraps

Lines = list[str]  # of one place


def latex(table: Table, label: str, notes: Sequence[str]) -> str:
    """Return a table under its caption: values, intervals and verdicts. A wider table is shrunk to the page."""
    first = [_wrapped(table.of)]
    first += [_wrapped(row.name + "".join(f" ({tag})" for tag in row.tags)) for row in table.rows]
    columns = []
    for place, (heading, _) in enumerate(table.columns):
        entries = [_entry(row.entries[place]) if row.entries else [NONE if place else "failed"] for row in table.rows]
        columns.append([_wrapped(heading), *entries])
    lines = ["% \\usepackage{adjustbox,booktabs}", "\\begin{table}", "\\centering\\footnotesize"]
    lines += [f"\\caption{{{_tex(table.caption)}}}", f"\\label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', label)}}}"]
    lines += ["\\begin{adjustbox}{max width=\\textwidth}", *_tabular([first, *columns]), "\\end{adjustbox}"]
    of_rows = [f"{row.name}: {text}" for row in table.rows for kind, text in row.notes if kind in ("failed", "void")]
    lines += ["{\\raggedright%", *(f"{_tex(note)}\\par" for note in [*notes, *of_rows])]
    return "\n".join([*lines, "}", "\\end{table}", ""])


def _tabular(columns: Sequence[Sequence[Lines]]) -> list[str]:
    rows = [
        " & ".join(_stacked(lines, "r" if n else "l") for n, lines in enumerate(row))
        for row in zip(*columns, strict=True)
    ]
    heading, *others = [f"{row} \\\\" for row in rows]
    begin = f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return [begin, "\\toprule", heading, "\\midrule", *others, "\\bottomrule", "\\end{tabular}"]


def _entry(entry: Entry) -> Lines:
    word = entry.verdict.text if entry.verdict else None
    verdict = word and (f"{word} (against {entry.against})" if entry.against else word)
    value = f"{entry.value} {entry.interval}" if entry.interval else entry.value
    return [*_wrapped(value), *(_wrapped(verdict) if verdict else [])]


def _wrapped(text: str) -> Lines:
    return textwrap.wrap(text, WIDEST_CELL, break_on_hyphens=False) or [""]


def _stacked(lines: Lines, side: str) -> str:
    written = " \\\\{} ".join(map(_tex, lines))  # {} keeps a `[` from being an argument
    return written if len(lines) == 1 else f"\\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}{written}\\end{{tabular}}"


def _tex(text: str) -> str:
    text = text.replace("\\", "\\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    signs = (("~", "\\textasciitilde "), ("^", "\\textasciicircum "), ("×", "$\\times$"), ("–", "--"), ("τ", "$\\tau$"))
    for sign, written in signs:
        text = text.replace(sign, written)
    return text.replace("≈", "$\\approx$").replace("−", "$-$").replace("\n", " ")
