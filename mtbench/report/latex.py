"""Tables for papers: LaTeX with the package booktabs, the columns that a paper has, and notes below the table."""

import re
from collections.abc import Sequence

from mtbench.report.table import Entry, Table


def latex(table: Table, notes: Sequence[str]) -> str:
    """Return a table with one line an arm: values with intervals. Verdicts, where shown, stand in parentheses."""
    columns = [heading for heading, _ in table.columns]
    lines = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join([_tex(table.of), *map(_tex, columns)]) + " \\\\",
        "\\midrule",
    ]
    for row in table.rows:
        if row.failed:
            lines.append(f"{_tex(row.title)} & \\multicolumn{{{len(columns)}}}{{l}}{{failed}} \\\\")
            continue
        arm = _tex(row.title) + "".join(f"\\,({_tex(tag)})" for tag in row.tags)
        lines.append(" & ".join([arm, *map(_entry, row.entries)]) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", "", "\\smallskip", "{\\footnotesize\\raggedright%"]
    of_rows = [f"{row.title}: {text}" for row in table.rows for kind, text in row.notes if kind in ("failed", "void")]
    lines += [f"{_tex(note)}\\par" for note in [*notes, *of_rows]]
    return "\n".join([*lines, "}", ""])


def _entry(entry: Entry) -> str:
    return _tex(f"{entry.value} {entry.interval}" if entry.interval else entry.value)


def _tex(text: str) -> str:
    """Return text with its LaTeX signs escaped."""
    text = text.replace("\\", "\\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    signs = (("~", "\\textasciitilde "), ("^", "\\textasciicircum "), ("×", "$\\times$"), ("–", "--"), ("τ", "$\\tau$"))
    for sign, written in signs:
        text = text.replace(sign, written)
    return text.replace("≈", "$\\approx$").replace("−", "$-$").replace("\n", " ")
