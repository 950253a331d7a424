"""The figures of a section as CSV, for a spreadsheet: one a column, named as in `Results.to_frame()`, unrounded."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mtbench.records import dump
from mtbench.report.phrases import cost_per_million
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import ResultCell


def csv_tables(
    cells: Sequence[ResultCell], headline: Mapping[str, Speedup], names: Mapping[str, str], price: float | None
) -> dict[str, str]:
    """Return the CSV files of a section by the end of their name: a row per arm, and one per arm and task.

    headline: of the speedups of an arm, the one that has columns. price: of the machine, per hour.
    """
    arms, tasks = [], []
    for cell in cells:
        own = headline.get(cell.arm)
        about = {"arm": cell.arm, "name": names.get(cell.arm, cell.arm)}
        costs = {} if price is None else {"cost_per_million_tokens": cost_per_million(cell, price)}
        own_figures = {"speedup": {} if own is None else dump(own)}
        if cell.tokens_per_forward_ci is not None:
            own_figures["tokens_per_forward_ci"] = dict(zip(("low", "high"), cell.tokens_per_forward_ci, strict=True))
        arms.append({**about, **dump(cell), **own_figures, **costs})
        if cell.status != "failed":
            for task in cell.tasks:
                found = [dump(over) for over in task.speedup if own is not None and over.baseline == own.baseline]
                tasks.append({**about, **dump(task), "speedup": found[0] if found else {}})
    return {end: _csv(rows) for end, rows in {"": arms, ".tasks": tasks}.items() if rows}


def _csv(rows: list[dict[str, Any]]) -> str:
    frame = pd.json_normalize(rows).map(_field)
    return frame.dropna(axis="columns", how="all").to_csv(index=False, lineterminator="\n")


def _field(value: Any) -> Any:
    """Return a list of words as text; records within a record have files of their own."""
    if not isinstance(value, list):
        return None if isinstance(value, dict) else value
    return None if any(isinstance(entry, dict) for entry in value) else "; ".join(map(str, value)) or None
