"""results.json: what the stored lines add up to, cell by cell, with intervals and verdicts.

Accuracy and speed come from the same generations. A block × round counts only if every arm of the group has a clean
line for it; per block the mean over its valid rounds is taken. Definitions: mtbench/statistics.py.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mtbench import lossless, statistics
from mtbench.machine import POWER_CAP
from mtbench.plan import SCHEMA_VERSION, Cell, Group, Plan
from mtbench.registry import METHODS
from mtbench.rundir import Record, RunDirectory
from mtbench.statistics import Difference, Ratio, Totals

ACCURACY_FLOOR = 0.05  # beneath it, speed is the speed of wrong answers


@dataclass(eq=False)
class Measured:
    """One cell's lines, and the samples of them that count."""

    cell: Cell
    lines: dict[str, Record]  # by item
    timings: list[Record]
    valid: set[tuple[int, int]]  # (round, block) clean for every arm of the group
    scores: Mapping[str, float]
    error: str | None

    @cached_property
    def samples(self) -> list[Record]:
        """The timing lines that count, ordered by block."""
        kept = [t for t in self.timings if (t["round"], t["block"]) in self.valid]
        return sorted(kept, key=lambda t: (t["block"], t["round"]))

    def by_block(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A quantity per block, the mean over its valid rounds, (K,)."""
        return statistics.mean_by([t["block"] for t in self.samples], [t[name] for t in self.samples])

    def by_round(self, name: str) -> list[float]:
        """A quantity per round over the blocks that every round has."""
        rounds = sorted({t["round"] for t in self.samples})
        shared = (
            set.intersection(*({t["block"] for t in self.samples if t["round"] == r} for r in rounds))
            if rounds
            else set()
        )
        return [sum(t[name] for t in self.samples if t["round"] == r and t["block"] in shared) for r in rounds]

    @cached_property
    def totals(self) -> Totals | None:
        """What the arm did on the blocks; None without a sample."""
        if not self.samples:
            return None
        names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
        total = {name: float(self.by_block(name).sum()) for name in names}
        slots = [t["rows"] * t["batch_forwards"] for t in self.samples]  # static batches: a block is one batch
        row_slots = float(statistics.mean_by([t["block"] for t in self.samples], slots).sum())
        return Totals(row_slots=row_slots, **total)


def assemble(run: RunDirectory) -> Record:
    """Read the run, write results.json and return it. Written even where cells failed."""
    plan = Plan.from_json(run.read_json("plan.json"))
    environment = run.read_json("environment.json")
    measured = _read(run, plan)
    memory = run.read_json("memory.json") if run.has("memory.json") else {}
    margin = plan.request["accuracy_margin"]
    session = (environment.get("sessions") or [{}])[-1]
    cells = []
    for group in plan.groups:
        of_group = {measured[name].cell.arm: measured[name] for name in group.cells}
        comparisons = _compare(of_group, session.get("synchronisation_s") or 0.0, margin)
        for name in group.cells:
            one = measured[name]
            cells.append(
                _cell_record(run, plan, group, one, of_group, session)
                | {"peak_memory_bytes": memory.get(name), **comparisons[one.cell.arm]}
            )
            cells[-1]["flags"] += _late_flags(cells[-1])
    results = {
        "schema_version": SCHEMA_VERSION,
        "run_id": plan.sha256[:12],
        "command": environment["command"],
        "environment": environment,
        "seed": plan.request["seed"],
        "plan_sha256": plan.sha256,
        "statistics": {
            "method": "ratios of totals, t interval on the log scale, unit = block (tokens per forward: item); "
            "Wilson; Bonett-Price; Holm over the arms of one suite, batch size and baseline decides the words, "
            "intervals are pointwise",
            "level": 0.95,
            "speed_margin": statistics.SPEED_MARGIN,
            "accuracy_margin": margin,
        },
        "cells": cells,
    }
    run.write_json("results.json", results)
    return results


def _read(run: RunDirectory, plan: Plan) -> dict[str, Measured]:
    errors = {f["cell"]: f["error"] for f in run.lines("failures.jsonl")}
    scores = run.read_json("scores.json") if run.has("scores.json") else {}
    measured = {}
    for group in plan.groups:
        timings = {name: run.lines(f"timings/{name}.jsonl") for name in group.cells}
        live = [name for name in group.cells if name not in errors]
        clean = [{(t["round"], t["block"]) for t in timings[name] if not t["dropped"]} for name in live]
        valid = set.intersection(*clean) if clean else set()
        for name in group.cells:
            lines = {g["item"]: g for g in run.lines(f"generations/{name}.jsonl")}
            measured[name] = Measured(
                plan.cell(name), lines, timings[name], valid, scores.get(name, {}), errors.get(name)
            )
    return measured


def _cell_record(
    run: RunDirectory,
    plan: Plan,
    group: Group,
    one: Measured,
    of_group: Mapping[str, Measured],
    session: Mapping[str, Any],
) -> Record:
    """What a cell is by itself; comparisons are added by the caller."""
    cell, suite = one.cell, plan.suite(one.cell.suite)
    lines = list(one.lines.values())
    tokens = [len(g["token_ids"]) for g in lines]
    forwards = [g["forwards"] for g in lines]
    finish = Counter(g["finish_reason"] for g in lines)
    fed = sum(g["positions_fed"] for g in lines)
    per_forward = statistics.ratio_of_totals([tokens], [forwards], unit="item")
    totals = one.totals
    rate = statistics.ratio_of_totals([one.by_block("tokens")], [one.by_block("wall_s")]) if totals else None
    prefill_s = float(one.by_block("prefill_s").sum()) if totals else None
    repeated = [t for t in one.timings if t["identical"] is not None]
    dropped = len(one.timings) - len(one.samples)
    return {
        "cell": cell.cell,
        "status": _status(one, group),
        "suite": cell.suite,
        "task": suite.task,
        "arm": cell.arm,
        "method": cell.method,
        "options": cell.options,
        "engine": cell.engine,
        "family": cell.family,
        "on": cell.on,
        "checkpoints": cell.checkpoints,
        "dtype": session.get("dtype"),
        "device": session.get("device"),
        "simulated": None,
        "demonstration": cell.demonstration,
        "batch_size": cell.batch_size,
        "length": cell.length,
        "batching": cell.batching,
        "items": len(lines),
        "max_new_tokens": suite.max_new_tokens,
        "blocks": len({t["block"] for t in one.samples}),
        "rounds": len(group.rounds),
        "samples": {"used": len(one.samples), "dropped": dropped},
        "accuracy": _accuracy(suite.metric, one.scores),
        "tokens_per_forward": per_forward.value,
        "tokens_per_forward_ci": _ci(per_forward),
        "commit_histogram": _histogram(lines),
        "tokens": sum(tokens),
        "finish": {reason: finish[reason] for reason in ("end", "stop", "length")},
        "tokens_per_s": _ratio(rate),
        "decode_tokens_per_s": {"value": totals.tokens / totals.decode_s if totals else None},
        "wall_s": totals.wall_s if totals else None,
        "prefill_s": prefill_s,
        "decode_s": totals.decode_s if totals else None,
        "device_s": totals.device_s if totals else None,
        "host_gap_s": totals.decode_s - totals.device_s if totals else None,
        "ttft_s": _percentiles([t["ttft_s"] for t in one.samples]),
        "commit_latency_s": _percentiles(_commit_gaps(one)),
        "parts": _named(statistics.parts(totals)) if totals else None,
        "positions_fed": fed,
        "positions_fed_per_token": fed / sum(tokens) if lines else None,
        "positions_fed_per_forward": fed / sum(forwards) if lines else None,
        "draft_forwards": sum(g["draft_forwards"] for g in lines),
        "kv_bytes": max((t["kv_bytes"] for t in one.timings), default=None),
        "energy_j": None,
        "repeated_identical": sum(t["identical"] for t in repeated) / sum(t["rows"] for t in repeated)
        if repeated
        else None,
        "claims": cell.claims,
        "reference": METHODS[cell.method].reference,
        "lossless": _lossless(run, one, of_group, session.get("dtype") or "float32"),
        "roofline_fraction": None,
        "void": _void(one, dropped),
        "flags": list(cell.flags)
        + ["power cap active"] * any(t["throttle"] and t["throttle"] & POWER_CAP for t in one.timings),
        "error": one.error,
    }


def _compare(of_group: Mapping[str, Measured], synchronisation_s: float, margin: float) -> dict[str, Record]:
    """arm -> its `speedup`, `accuracy_vs` and `agreement`. Words are decided over all arms of one baseline together."""
    found: dict[str, Record] = {arm: {"speedup": [], "accuracy_vs": [], "agreement": []} for arm in of_group}
    baselines = dict.fromkeys(itertools.chain.from_iterable(m.cell.baselines for m in of_group.values()))
    for baseline in baselines:
        against = of_group[baseline]
        arms = [m for m in of_group.values() if baseline in m.cell.baselines and not (m.error or against.error)]
        speedups = [statistics.ratio_of_totals([against.by_block("wall_s")], [m.by_block("wall_s")]) for m in arms]
        doubts = [
            statistics.too_short([t["wall_s"] for t in m.samples], synchronisation_s)
            or statistics.too_short([t["wall_s"] for t in against.samples], synchronisation_s)
            for m in arms
        ]
        words = statistics.speed_verdicts(speedups, doubts)
        differences = [_difference(m, against) for m in arms]
        accuracies = statistics.accuracy_verdicts([d for d, _ in differences], margin)
        for m, speedup, word, (difference, lower90), accuracy in zip(
            arms, speedups, words, differences, accuracies, strict=True
        ):
            entry = found[m.cell.arm]
            entry["speedup"].append(_speedup_record(baseline, m, against, speedup, str(word)))
            entry["agreement"].append({"baseline": baseline, **_agreement(m, against)})
            if difference.n:
                entry["accuracy_vs"].append(
                    {
                        "baseline": baseline,
                        **difference._asdict(),
                        "ci90_low": lower90,
                        "p_mcnemar": statistics.mcnemar_p(difference.gained, difference.lost),
                        "margin": margin,
                        "verdict": str(accuracy),
                        "n_needed": statistics.n_needed(difference.gained, difference.lost, difference.n, margin),
                    }
                )
    for arm, entry in found.items():
        for comparisons in entry.values():
            comparisons.sort(key=lambda c, own=of_group[arm].cell.baselines: own.index(c["baseline"]))
    return found


def _speedup_record(baseline: str, one: Measured, against: Measured, speedup: Ratio, verdict: str) -> Record:
    tokens, tokens0 = one.by_block("tokens"), against.by_block("tokens")
    wall, wall0 = one.by_block("wall_s"), against.by_block("wall_s")
    rate = statistics.ratio_of_totals([tokens, wall0], [wall, tokens0])
    repeat = statistics.ratio_of_totals([against.by_round("wall_s")], [one.by_round("wall_s")], unit="round")
    return {
        "baseline": baseline,
        **_ratio(speedup),
        "ci_repeat": _ci(repeat),
        "rate_ratio": rate.value,
        "rate_ratio_ci": _ci(rate),
        "length_ratio": statistics.ratio_of_totals([tokens], [tokens0]).value,
        "verdict": verdict,
        "factors": _named(statistics.factors(one.totals, against.totals)) if one.totals and against.totals else None,
    }


def _difference(one: Measured, against: Measured) -> tuple[Difference, float | None]:
    """The paired difference of accuracies with its 95 % interval, and the 90 % lower bound."""
    common = one.scores.keys() & against.scores.keys()
    gained = sum(one.scores[i] > against.scores[i] for i in common)
    lost = sum(one.scores[i] < against.scores[i] for i in common)
    lower90 = statistics.paired_difference(gained, lost, len(common), level=0.90).ci_low
    return statistics.paired_difference(gained, lost, len(common)), lower90


def _agreement(one: Measured, against: Measured) -> Record:
    common = one.lines.keys() & against.lines.keys()
    same = sum(one.lines[i]["token_ids"] == against.lines[i]["token_ids"] for i in common)
    return {"items": len(common), "identical": same}


def _lossless(run: RunDirectory, one: Measured, of_group: Mapping[str, Measured], dtype: str) -> Record | None:
    """The grade of an arm that promises another's tokens; None for one that promises nothing."""
    against = of_group.get(one.cell.held_to or "")
    if against is None:
        return None
    name = f"lossless/{one.cell.cell}.json"
    rescored = run.read_json(name) if run.has(name) else None
    verdict = lossless.grade(one.lines, against.lines, rescored, dtype)
    return None if verdict is None else {"against": one.cell.held_to, **verdict}


def _void(one: Measured, dropped: int) -> list[str]:
    """Why the cell cannot be trusted."""
    reasons = []
    for g in one.lines.values():
        if len(g["commits"]) != g["forwards"] or sum(g["commits"]) != len(g["token_ids"]):
            reasons.append(f"counts do not add up: {g['item']}")
            break
    if any(t["miscounted"] for t in one.timings):
        reasons.append("counts do not add up: the models saw other forwards than the lanes counted")
    if any(t["identical"] not in (None, t["rows"]) for t in one.timings):
        reasons.append("tokens differ between rounds")
    if one.timings and (few := statistics.too_many_dropped(used=len(one.samples), dropped=dropped)):
        reasons.append(few)
    return reasons


def _late_flags(record: Record) -> list[str]:
    """What to mind, once accuracy and lengths are known."""
    flags = []
    accuracy = record["accuracy"]["value"] if record["accuracy"] else None
    if accuracy is not None and accuracy < ACCURACY_FLOOR:
        flags.append(f"accuracy {accuracy:.1%}, below {ACCURACY_FLOOR:.0%}: this is the speed of wrong answers")
    if record["length"] == "natural":
        length_ratio = record["speedup"][0]["length_ratio"] if record["speedup"] else None
        cut = record["finish"]["length"]
        flags += statistics.length_flags(length_ratio=length_ratio, cut_by_budget=cut, items=record["items"])
    if any(a["verdict"].startswith(statistics.INCONCLUSIVE) for a in record["accuracy_vs"]):
        flags.append("accuracy inconclusive")
    return flags


def _accuracy(metric: str | None, scores: Mapping[str, float]) -> Record | None:
    if metric is None or not scores:
        return None
    return {"metric": metric, **statistics.wilson(round(sum(scores.values())), len(scores))._asdict()}


def _histogram(lines: Sequence[Record]) -> dict[str, int]:
    counted = Counter(itertools.chain.from_iterable(g["commits"] for g in lines))
    return {str(size): counted[size] for size in sorted(counted)}


def _commit_gaps(one: Measured) -> list[float]:
    """Seconds between two commits of the same row, in round 1; empty where the host did not watch."""
    steps = {t["block"]: t["step_s"] for t in one.samples if t["round"] == 1}
    gaps = []
    for line in one.lines.values():
        waited = None  # the first commit's wait is the time to first token
        for count, step_s in zip(line["commits"], steps.get(line["block"]) or [], strict=False):
            waited = None if waited is None else waited + step_s
            if count:
                if waited is not None:
                    gaps.append(waited)
                waited = 0.0
    return gaps


def _percentiles(values: Sequence[float]) -> Record:
    if not values:
        return {"p50": None, "p95": None}
    p50, p95 = np.percentile(values, [50, 95])
    return {"p50": float(p50), "p95": float(p95)}


def _ratio(ratio: Ratio | None) -> Record:
    if ratio is None:
        return {"value": None, "ci_low": None, "ci_high": None}
    return {"value": ratio.value, "ci_low": ratio.ci_low, "ci_high": ratio.ci_high}


def _ci(ratio: Ratio) -> list[float] | None:
    return None if ratio.ci_low is None or ratio.ci_high is None else [ratio.ci_low, ratio.ci_high]


def _named(values: Any) -> Record | None:
    return None if values is None else values._asdict()


def _status(one: Measured, group: Group) -> str:
    """`ok` if every block of every round was run."""
    if one.error:
        return "failed"
    ran = {(t["round"], t["block"]) for t in one.timings}
    return "ok" if len(ran) == sum(group.rounds) else "partial"
