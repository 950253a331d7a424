"""Pairs of honest outputs for `audit_corpus.py`: a run has many arms, and each of its cells is compared with one."""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from audit_maker import REAL, TINY, Maker, dialogues
from rich.console import Console
from rich.table import Table

import mtbench

ALONE = ("ar", "prompt-lookup", "suffix", "jacobi", "lookahead")  # methods that need no other checkpoint
ARMS = (
    *ALONE,
    *("prompt-lookup:match=latest", "jacobi:ahead=8", "speculative", "speculative:ahead=8", "speculative:ahead=1"),
    *("speculative:draft=draft_mars,per_forward=4", "eagle", "eagle:tree=3x2", "medusa"),
)
MARS = ("ar:on=mars", "mars", "mars-selfspec", "mars:cache=none")
SIZES = (1, 2, 4, 8)


class Set(NamedTuple):
    """A run, and what it is compared with."""

    name: str
    model: str
    request: Mapping[str, Any]
    arms: Sequence[str]
    beside: Sequence[str]  # runs whose plain decoding at batch size 1 it is compared with


def sets(maker: Maker, engines: Sequence[str]) -> Iterator[Set]:
    """Yield the runs in the order in which they are made."""
    both = {"engine": ("graph", "eager"), "limit": 8, "max_new_tokens": 64}
    for dtype in ("float32", "bfloat16", "float16"):
        given = {**both, "dtype": dtype, "batch_size": SIZES if dtype == "bfloat16" else (1, 4)}
        yield Set(dtype, TINY, given, [*ARMS, "hf-generate", "corpus-lookup"], [dtype, "float32"])
    yield Set("mars", TINY, {"limit": 8, "dtype": "bfloat16", "batch_size": (1, 4)}, MARS, ["mars"])
    hot = {"limit": 8, "dtype": "float32", "batch_size": (1, 4), "temperature": 0.8}
    yield Set("hot", TINY, hot, ARMS, ["hot"])
    yield Set("hot in bfloat16", TINY, {**hot, "dtype": "bfloat16"}, ARMS, ["hot in bfloat16", "hot"])
    short = {**both, "dtype": "bfloat16", "batch_size": (1, 8), "max_new_tokens": 23, "seed": 1}
    yield Set("short budget", TINY, short, ARMS[:8], ["short budget"])
    real = {"limit": 4, "batch_size": (1, 4), "max_new_tokens": 32}
    arms = [*ALONE, "ar:engine=eager", "hf-generate", "corpus-lookup"]
    yield Set("real", REAL, real, arms, ["real"])
    yield Set("real in float32", REAL, {**real, "batch_size": (1,), "dtype": "float32"}, ("ar",), ["real"])
    warm = {**real, "temperature": 0.7}
    yield Set("real, hot", REAL, warm, ALONE[:3], ["real, hot"])
    many = {"limit": 16, "batch_size": (1, 8), "max_new_tokens": 40, "suite": (dialogues(maker.folder, REAL),)}
    yield Set("real, 16 answers", REAL, many, ("ar", "prompt-lookup"), ["real, 16 answers"])
    yield Set("real, 16 answers, eager", REAL, {**many, "engine": ("eager",)}, ("ar",), ["real, 16 answers"])
    for engine in engines:
        spec = [f"ar:engine={engine}", f"prompt-lookup:engine={engine}"]
        for dtype in ("bfloat16", "float32"):
            asked = {**many, "batch_size": (1, 4), "dtype": dtype}
            yield Set(f"{engine}, {dtype}", REAL, asked, ["ar", *spec], [f"{engine}, {dtype}"])


def honest(maker: Maker, folder: Path, console: Console, engines: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
    """Make the runs, audit each beside its reference in a folder, and yield a row for each pair."""
    for one in sets(maker, engines):
        if (one.model == REAL and not maker.real) or only not in one.name:
            continue
        run = maker.run(maker.request(one.model, one.request, one.arms), f"honest-{one.name}".replace(", ", "-"))
        for other in dict.fromkeys(one.beside):
            first = maker.folder / f"honest-{other}".replace(", ", "-")
            cell = sorted((first / "generations").glob("*.b1.jsonl"), key=lambda f: (".ar." not in f.name, f.name))[0]
            out = folder / f"audit-{one.name}-{other}".replace(", ", "-")
            shutil.rmtree(out, ignore_errors=True)
            record = mtbench.audit(f"{first}:{cell.stem}", str(run), out=out, device="cpu").record
            console.print(f"{one.name} / {other}: {record['sentence']}", soft_wrap=True)
            for finding in record["findings"]:
                if finding["fault"]:
                    console.print("  ", record["pairs"][finding["pair"]]["b"], finding["item"], finding["evidence"])
            yield from _rows(record, f"{one.name} / {other}")


def summary(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print how many pairs differ, by what, and how many are called a fault."""
    table = Table("runs", "pairs", "that differ", "answers", "that differ", "named", "called a fault", title="honest")
    for name in dict.fromkeys(row["runs"] for row in rows):
        own = [row for row in rows if row["runs"] == name]
        named: Counter[str] = sum((Counter(row["named"]) for row in own), Counter())
        counts = (len(own), sum(bool(row["named"]) for row in own), sum(row["items"] for row in own), named.total())
        words = ", ".join(f"{count} {word}" for word, count in named.items())
        table.add_row(name, *map(str, counts), words, str(sum(bool(row["faults"]) for row in own)))
    console.print(table)
    called = sum(bool(row["faults"]) for row in rows)
    console.print(f"{called} of {len(rows)} pairs called a fault, {sum(bool(row['named']) for row in rows)} differ")


def _rows(record: Mapping[str, Any], runs: str) -> list[dict[str, Any]]:
    rows = []
    for number, pair in enumerate(record["pairs"]):
        own = [finding for finding in record["findings"] if finding["pair"] == number]
        named = Counter(finding["name"] for finding in own)
        faults = sum(finding["fault"] for finding in own)
        places = {"a": pair["a"].rpartition("/")[2], "b": pair["b"].rpartition("/")[2]}
        rows.append({"runs": runs, **places, "items": pair["items"], "named": dict(named), "faults": faults})
    return rows
