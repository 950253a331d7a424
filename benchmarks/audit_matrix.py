"""What `audit_corpus.py` found: the classes named against those planted, and how often they are right.

Right: the expected class has most of the differing answers, and no other class that counts as a fault has any; if the
plan is not kept, the exit code is 1. Unexplained: most answers are, or the expected class and `unexplained` share them,
and no wrong class has any. Wrong: all else; `missed`: those of them that are near-ties or rounding. A fault that
changes no answer is counted apart.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mtbench.files import write_json
from mtbench.statistics import wilson

Row = Mapping[str, Any]
RIGHT, UNEXPLAINED, WRONG, NO_EFFECT = "right", "unexplained", "wrong", "no effect"
HARMLESS = ("near-tie", "rounding", "lossy")  # names that blame nothing
FEW = 2  # differing answers of a single fault


def judged(row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an audit says of a plant: the names of the differing answers, and the verdict on them."""
    findings, expected = found["findings"], row["expected"]
    named, total = Counter(finding["name"] for finding in findings), len(findings)
    faults = {finding["name"] for finding in findings if finding["fault"]} - {expected, UNEXPLAINED}
    wrong = set(named) - {expected, UNEXPLAINED, *HARMLESS} | faults
    failed = not found["explained"]
    verdict = WRONG
    if not total:
        verdict = NO_EFFECT
    elif named[expected] * 2 > total and not faults:
        verdict = RIGHT if failed or not row["fails"] else WRONG
    elif (named[expected] + named[UNEXPLAINED]) * 2 > total and not wrong:
        verdict = UNEXPLAINED
    most = max(named, key=lambda name: named[name], default="")
    evidence = next((finding["evidence"] for finding in findings if finding["name"] == most), "")
    counts = {"named": dict(named), "answers": sum(pair["items"] for pair in found["pairs"]), "faults": sorted(faults)}
    return {**counts, "verdict": verdict, "exit": int(failed), "evidence": evidence}


def most_named(row: Row) -> str:
    """Return the class that has most of the differing answers of a row."""
    named = Counter[str](row["named"])
    return max(named, key=lambda name: named[name], default="refused" if "refused" in row else NO_EFFECT)


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each model, number type and number of answers by a name."""
    yield "all", list(rows)
    for model in ("tiny", "real"):
        for dtype in ("float32", "bfloat16"):
            yield f"{model}, {dtype}", [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
    few = [sum(row["named"].values()) <= FEW < row.get("answers", 0) for row in rows]
    yield "one or two answers", [row for row, single in zip(rows, few, strict=True) if single]
    yield "more answers", [row for row, single in zip(rows, few, strict=True) if not single]


def rates(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the shares of the verdicts with 95 % intervals, and the seconds of an audit."""
    of = [row for row in rows if row["verdict"] != NO_EFFECT]
    found: dict[str, Any] = {"plants": len(of), NO_EFFECT: len(rows) - len(of)}
    for verdict in (RIGHT, WRONG, UNEXPLAINED):
        share = wilson(sum(row["verdict"] == verdict for row in of), len(of))
        found[verdict] = [share.value, share.ci_low, share.ci_high]
    found["missed"] = sum(row["verdict"] == WRONG and most_named(row) in HARMLESS for row in of)
    seconds = sorted(row["audit_s"] for row in of if row.get("audit_s") is not None)
    return found | {"median_s": seconds[len(seconds) // 2] if seconds else None, "most_s": max(seconds, default=None)}


def matrix(rows: Iterable[Row], honest: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Return how often a class is named for what was planted, by both: each counts as most of its answers."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["expected"], Counter())[most_named(row)] += 1
    for row in honest:
        found.setdefault("honest", Counter())[most_named(row) if row["named"] else "same"] += 1
    return {planted: dict(names) for planted, names in found.items()}


def show(folder: Path, sets: Iterable[str], console: Console) -> None:
    """Print the matrix and the rates of each set in a folder, and write them to matrix.json."""
    found: dict[str, Any] = {}
    honest = _read(folder / "honest.json")
    for name in sets:
        if rows := _read(folder / f"{name}.json"):
            counts = matrix(rows, honest)
            found[name] = {"matrix": counts, "rates": {group: rates(own) for group, own in groups(rows)}}
            columns = sorted({named for row in counts.values() for named in row})
            table = Table("planted / named", *columns, title=f"{name}: plants by the class of most answers")
            for planted, names in counts.items():
                table.add_row(planted, *(str(names.get(column, "")) for column in columns))
            console.print(table)
            console.print(_table_of_rates(found[name]["rates"]))
            for row in rows:
                if row["verdict"] == WRONG:
                    console.print(f"wrong: {row['fault']} | {row['variant']}: {row['expected']} → {row['named']}")
    write_json(folder / "matrix.json", found)


def _table_of_rates(found: Mapping[str, Mapping[str, Any]]) -> Table:
    counts = ("plants", NO_EFFECT, "missed", "median_s", "most_s")
    table = Table("plants of", *(f"{verdict} %" for verdict in (RIGHT, WRONG, UNEXPLAINED)), *counts)
    for group, of in found.items():
        shares = (
            "" if value is None else f"{100 * value:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
            for value, low, high in (of[verdict] for verdict in (RIGHT, WRONG, UNEXPLAINED))
        )
        table.add_row(group, *shares, *(str(of[name]) for name in counts))
    return table


def _read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []
