"""results.json: what the stored lines add up to, cell by cell, with intervals and verdicts.

Accuracy and speed come from the same generations. What counts is in mtbench/results/samples.py, what was accepted in
mtbench/results/acceptance.py, tasks apart in mtbench/results/subtasks.py, how arms compare in
mtbench/results/comparisons.py, every definition in mtbench/statistics.py. What an engine hides is null.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.hardware.machine import POWER_CAP
from mtbench.options import decoding_options
from mtbench.records import dump
from mtbench.results import acceptance
from mtbench.results.comparisons import compare, floor, stops_paying
from mtbench.results.roofline import fraction
from mtbench.results.samples import Measured, read, served
from mtbench.results.subtasks import by_task, summarize
from mtbench.runs import energy, rescoring
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.plan import SCHEMA_VERSION, Group, Plan, read_plan

MOST_OF = 0.75  # of a batch's rows: with fewer it is another batch size that was measured
ACCURACY_FLOOR = 0.05  # beneath it, speed is the speed of wrong answers


def assemble(run: RunDirectory) -> Record:
    """Read the run, write results.json and return it. Written even where cells failed."""
    plan = read_plan(run)
    environment = run.read_json("environment.json")
    measured = read(run, plan)
    memory = run.read_json("memory.json") if run.has("memory.json") else {}
    joules = run.read_json("energy.json") if run.has("energy.json") else {}
    margin, digest = plan.request.accuracy_margin, run.sha256("plan.json")
    sessions = environment.get("sessions", [])
    session = (sessions or [{}])[-1]
    cells = []
    for group in plan.groups:
        of_group = {measured[name].cell.arm: measured[name] for name in group.cells}
        suite, synchronisation_s = plan.suite(group.suite), session.get("synchronisation_s") or 0.0
        comparisons = compare(of_group, synchronisation_s, margin)
        apart = by_task(of_group, suite.items, group.blocks, suite.metric, synchronisation_s, margin)
        for name in group.cells:
            one = measured[name]
            cells.append(
                _cell_record(run, plan, group, one, measured, sessions)
                | {"peak_memory_bytes": memory.get(name), **energy.of(joules, name, one.error)}
                | {**_roofline(one, sessions), **comparisons[one.cell.arm], "tasks": apart[one.cell.arm]}
            )
            cells[-1]["flags"] += _late_flags(cells[-1])
    results = {
        "schema_version": SCHEMA_VERSION,
        "run_id": digest[:12],
        "command": environment["command"],
        "environment": {**environment, "idle_power_w": joules.get("idle_power_w")},
        "seed": plan.request.seed,
        "temperature": plan.request.temperature,
        "plan_sha256": digest,
        "statistics": {
            "method": "ratios of totals, t interval on the log scale, unit = block (tokens per forward: item); "
            "Wilson; Bonett-Price; Holm over the arms of one suite or task, batch size and baseline decides the "
            "words, intervals are pointwise",
            "level": 0.95,
            "speed_margin": statistics.SPEED_MARGIN,
            "accuracy_margin": margin,
        },
        "cells": cells,
        "stops_paying": stops_paying(cells),
    }
    run.write_json("results.json", results)
    return results


def _cell_record(
    run: RunDirectory,
    plan: Plan,
    group: Group,
    one: Measured,
    measured: Mapping[str, Measured],
    sessions: Sequence[Record],
) -> Record:
    """What a cell is by itself; comparisons are added by the caller. measured: every cell of the run."""
    cell, suite = one.cell, plan.suite(one.cell.suite)
    session: Record = (sessions or [{}])[-1]
    lines = list(one.lines.values())
    tokens = sum(len(g["token_ids"]) for g in lines)
    fed, draft_forwards = one.counted("positions_fed"), one.counted("draft_forwards")
    finish = Counter(g["finish_reason"] for g in lines)
    totals = one.totals
    decode_s, device_s = one.total("decode_s"), one.total("device_s")
    prepared_s = [p["preparation_s"] for p in run.lines("preparation.jsonl") if p["cell"] == cell.cell]
    identical, repeated = one.repeated
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
        "simulated": None if cell.simulated is None else dump(cell.simulated),
        "demonstration": cell.demonstration,
        "batch_size": cell.batch_size,
        "length": cell.length,
        "batching": cell.batching,
        "max_new_tokens": suite.max_new_tokens,
        "blocks": len({t["block"] for t in one.samples}),
        "rounds": len(group.rounds),
        "samples": {"used": len(one.samples), "dropped": dropped},
        **summarize(one, suite.metric),
        "commit_histogram": acceptance.histogram([g["commits"] or () for g in lines]),
        "tokens": tokens,
        "finish": {reason: finish[reason] for reason in ("end", "stop", "length")},
        "decode_tokens_per_s": {"value": _over(one.total("tokens"), decode_s)},
        "wall_s": one.total("wall_s"),
        "prefill_s": one.total("prefill_s"),
        "decode_s": decode_s,
        "device_s": device_s,
        "host_gap_s": None if decode_s is None or device_s is None else decode_s - device_s,
        "preparation_s": sum(prepared_s) if prepared_s else None,
        "ttft_s": _percentiles([t["ttft_s"] for t in one.samples if t["ttft_s"] is not None]),
        "commit_latency_s": _percentiles(_commit_gaps(one)),
        "parts": _named(statistics.parts(totals)) if totals else None,
        "positions_fed": fed,
        "positions_fed_per_token": _over(fed, tokens),
        "positions_fed_per_forward": _over(fed, one.counted("forwards")),
        "draft_forwards": draft_forwards,
        "draft_forwards_per_token": _over(draft_forwards, tokens),
        "draft_s": one.total("draft_s"),
        "head_s": one.total("head_s"),
        "kv_bytes": max((t["kv_bytes"] for t in one.timings if t["kv_bytes"] is not None), default=None),
        "repeated_identical": identical / repeated if repeated else None,
        "claims": cell.claims,
        "reference": METHODS[cell.method].reference and not decoding_options(METHODS[cell.method], cell.options),
        "lossless": _lossless(run, one, measured, session.get("dtype") or "float32"),
        "void": _void(one, dropped),
        "flags": list(cell.flags)
        + _shared(one, sessions)
        + _thin(one)
        + ["power cap active"] * any(t["throttle"] and t["throttle"] & POWER_CAP for t in one.timings)
        + _recounted(one),
        "error": one.error,
    }


def _shared(one: Measured, sessions: Sequence[Record]) -> list[str]:
    """Workers on a CPU slow one another down, which GPUs of their own do not."""
    those = [sessions[t["session"] - 1] for t in one.samples if t["session"] <= len(sessions)]
    crowded = [s["workers"] for s in those if s["device"] == "cpu" and s.get("workers", 1) > 1]
    when = "" if len(crowded) == len(those) else f" in {len(crowded)} of {len(those)} samples"
    return [f"{max(crowded)} workers shared the machine{when}"] if crowded else []


def _thin(one: Measured) -> list[str]:
    """Small subtasks, or a small limit, leave batches short of the size they are named by."""
    rows = [t["rows"] for t in one.samples]
    if not rows or np.mean(rows) >= MOST_OF * one.cell.batch_size:
        return []
    return [f"batches held {np.mean(rows):.1f} rows of {one.cell.batch_size}"]


def _roofline(one: Measured, sessions: Sequence[Record]) -> Record:
    """The share of the measured roofline, and where there is none, why."""
    cell = one.cell
    judged = 1
    if cell.engine is not None and not cell.fault:
        variants = METHODS[cell.method](**cell.options).variants
        if len(variants) > 1:
            return {"roofline_fraction": None, "roofline_reason": "its width differs from forward to forward"}
        judged = variants[0].window().guesses + 1
    value, reason = fraction(cell, judged, one.lines.values(), one.samples, sessions)
    return {"roofline_fraction": value, "roofline_reason": reason}


def _lossless(run: RunDirectory, one: Measured, measured: Mapping[str, Measured], dtype: str) -> Record | None:
    """The grade of an arm that promises another's tokens; None for one that promises nothing, or a distribution.

    Beside it the floor: how far the arm it is held to agrees with itself.
    """
    cell = one.cell
    if cell.held_to is None or cell.claims == "distribution":
        return None
    alike = [m for m in measured.values() if (m.cell.suite, m.cell.arm) == (cell.suite, cell.held_to)]
    placed = {(m.cell.batch_size, m.cell.batching): m for m in alike}
    against = placed.get((cell.batch_size, cell.batching))
    if against is None:
        return None
    name = f"lossless/{cell.cell}.json"
    rescored = run.read_json(name) if run.has(name) else None
    verdict = rescoring.grade(one.lines, against.lines, rescored, dtype)
    return None if verdict is None else {"against": cell.held_to, **verdict, "floor": floor(alike)}


def _void(one: Measured, dropped: int) -> list[str]:
    """Why the cell cannot be trusted."""
    reasons = []
    for g in one.lines.values():
        commits = g["commits"]
        if commits is not None and (len(commits), sum(commits)) != (g["forwards"], len(g["token_ids"])):
            reasons.append(f"counts do not add up: {g['item']}")
            break
    if any(t["miscounted"] for t in one.timings):
        reasons.append("counts do not add up: the models saw other forwards than the lanes counted")
    if any(t["identical"] not in (None, served(t)) for t in one.timings):
        reasons.append("tokens differ between rounds")
    if one.timings and (few := statistics.too_many_dropped(used=len(one.samples), dropped=dropped)):
        reasons.append(few)
    return reasons


def _recounted(one: Measured) -> list[str]:
    """A flag where an outside engine counts other tokens than its answers have here."""
    told = [t for t in one.timings if t.get("counted") is not None]
    if all(t["counted"] == t["tokens"] for t in told):
        return []
    theirs, ours = (sum(t[name] for t in told) for name in ("counted", "tokens"))
    return [f"the engine counts {theirs:,} tokens, its answers have {ours:,} here"]


def _late_flags(record: Record) -> list[str]:
    """What to mind, once accuracy and lengths are known."""
    flags = []
    accuracy = record["accuracy"]["value"] if record["accuracy"] else None
    if accuracy is not None and accuracy < ACCURACY_FLOOR:
        flags.append(f"accuracy {accuracy:.1%}, below {ACCURACY_FLOOR:.0%}: this is the speed of wrong answers")
    if record["length"] == "natural":
        compared = [s["length_ratio"] for s in record["speedup"] if not s.get("includes_engine")]
        length_ratio = compared[0] if compared else None
        cut = record["finish"]["length"]
        flags += statistics.length_flags(length_ratio=length_ratio, cut_by_budget=cut, items=record["items"])
    if any(a["verdict"].startswith(statistics.INCONCLUSIVE) for a in record["accuracy_vs"]):
        flags.append("accuracy inconclusive")
    return flags


def _commit_gaps(one: Measured) -> list[float]:
    """Seconds between two commits of the same row, in round 1; empty where the host did not watch.

    So it is with refilled slots: when in the block a row began is not stored.
    """
    if one.cell.batching != "static":
        return []
    steps = {t["block"]: t["step_s"] for t in one.samples if t["round"] == 1}
    gaps = []
    for line in one.lines.values():
        waited = None  # the first commit's wait is the time to first token
        for count, step_s in zip(line["commits"] or [], steps.get(line["block"]) or [], strict=False):
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


def _over(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _named(values: Any) -> Record | None:
    return None if values is None else values._asdict()


def _status(one: Measured, group: Group) -> str:
    """`ok` if every block of every round was run."""
    if one.error:
        return "failed"
    ran = {(t["round"], t["block"]) for t in one.timings}
    return "ok" if len(ran) == sum(group.rounds) else "partial"
