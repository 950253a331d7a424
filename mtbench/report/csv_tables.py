"""The tables of a section as CSV, for a spreadsheet: one figure a column, unrounded; an empty field is not measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mtbench.report.acceptance_table import guesses
from mtbench.report.phrases import cost_per_million
from mtbench.results.acceptance import OWNERS
from mtbench.results.comparisons import OwnSpeedups
from mtbench.results.format import AcceptanceFigures, Accuracy, Estimate, ResultCell, Speedup, TaskFigures, TaskSpeedup


def csv_tables(
    cells: Sequence[ResultCell], own: OwnSpeedups, names: Mapping[str, str], price_per_hour: float | None
) -> dict[str, str]:
    """Return the CSV files of a section by the end of their name, as the LaTeX tables have it; none without rows."""
    answered = [cell for cell in cells if cell.status != "failed"]
    rows = {
        "": [_main_row(cell, own.headline.get(cell.arm), price_per_hour) for cell in cells],
        ".acceptance": [_acceptance_row(cell.arm, cell.acceptance) for cell in answered if guesses(cell.acceptance)],
        ".tasks": [_task_row(cell, part, own.headline.get(cell.arm)) for cell in answered for part in cell.tasks],
    }
    return {end: _csv(found, names) for end, found in rows.items() if found}


def _csv(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    whole = [{"arm": row["arm"], "name": names.get(row["arm"], row["arm"]), **row} for row in rows]
    return pd.DataFrame(whole).to_csv(index=False, lineterminator="\n")


def _main_row(cell: ResultCell, speedup: Speedup | None, price_per_hour: float | None) -> dict[str, Any]:
    per_forward = cell.tokens_per_forward_ci or (None, None)
    row = {
        "arm": cell.arm,
        "items": cell.items,
        **_accuracy(cell.accuracy),
        **_speedup(speedup),
        "tokens_per_forward": cell.tokens_per_forward,
        "tokens_per_forward_low": per_forward[0],
        "tokens_per_forward_high": per_forward[1],
        **_interval("tokens_per_s", cell.tokens_per_s),
        "claims": cell.claims,
        "lossless": None if cell.lossless is None else cell.lossless.grade,
        "same_tokens_items": None if cell.lossless is None else cell.lossless.identical,
        "request_p50_s": None if cell.request_latency_s is None else cell.request_latency_s.p50,
        "request_p95_s": None if cell.request_latency_s is None else cell.request_latency_s.p95,
        "request_p99_s": None if cell.request_latency_s is None else cell.request_latency_s.p99,
        "status": cell.status,
        "void": "; ".join(cell.void),
        "flags": "; ".join(cell.flags),
    }
    if price_per_hour is not None:
        row["cost_per_million_tokens"] = cost_per_million(cell, price_per_hour)
    return row


def _acceptance_row(arm: str, figures: AcceptanceFigures | None) -> dict[str, Any]:
    if figures is None:
        return {"arm": arm}
    return {
        "arm": arm,
        "length": figures.length,
        "rate": figures.rate,
        "offered": figures.offered,
        **{owner: getattr(figures.derived, owner) for owner in OWNERS},
    }


def _task_row(cell: ResultCell, part: TaskFigures, headline: Speedup | None) -> dict[str, Any]:
    baseline = None if headline is None else headline.baseline
    return {
        "arm": cell.arm,
        "task": part.task,
        "items": part.items,
        **_accuracy(part.accuracy),
        **_speedup(next((s for s in part.speedup if s.baseline == baseline), None)),
        "tokens_per_forward": part.tokens_per_forward,
        "acceptance_rate": None if part.acceptance is None else part.acceptance.rate,
    }


def _accuracy(accuracy: Accuracy | None) -> dict[str, Any]:
    return {} if accuracy is None else _interval("accuracy", accuracy)


def _speedup(speedup: Speedup | TaskSpeedup | None) -> dict[str, Any]:
    if speedup is None:
        return dict.fromkeys(("speedup", "speedup_low", "speedup_high", "verdict", "baseline"))
    over = {"verdict": speedup.verdict, "baseline": speedup.baseline}
    return _interval("speedup", speedup) | over


def _interval(name: str, figure: Accuracy | Estimate | Speedup | TaskSpeedup) -> dict[str, Any]:
    return {name: figure.value, f"{name}_low": figure.ci_low, f"{name}_high": figure.ci_high}
