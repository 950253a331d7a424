"""How the arms of a group compare: speed, accuracy, agreement with their baselines; and across batch sizes, how far an
arm agrees with itself, and from which on it no longer pays.

Baselines by the same engine say what decoding gains, or what deployment would. Baselines by another engine stand in
entries marked `includes_engine`, each beside the same ratio for the plain reference by the arm's own engine, so that
an engine's gain is never taken for a method's.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.results.samples import Measured
from mtbench.runs.directory import Record
from mtbench.statistics import Difference, Ratio, Verdict


def compare(of_group: Mapping[str, Measured], synchronisation_s: float, margin: float) -> dict[str, Record]:
    """arm -> its `speedup`, `accuracy_vs` and `agreement`. Words are decided over all arms of one baseline together."""
    found: dict[str, Record] = {arm: {"speedup": [], "accuracy_vs": [], "agreement": []} for arm in of_group}
    for against, arms in _compared(of_group, lambda one: one.cell.baselines):
        baseline = against.cell.arm
        differences = [_difference(m, against) for m in arms]
        accuracies = statistics.accuracy_verdicts([d for d, _ in differences], margin)
        for m, (speedup, word), (difference, lower90), accuracy in zip(
            arms, _speeds(arms, against, synchronisation_s), differences, accuracies, strict=True
        ):
            entry = found[m.cell.arm]
            entry["speedup"].append(_speedup_record(m, against, speedup, word))
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
    for against, arms in _compared(of_group, lambda one: one.cell.engine_baselines):
        for m, (speedup, word) in zip(arms, _speeds(arms, against, synchronisation_s), strict=True):
            record = _speedup_record(m, against, speedup, word)
            record |= {"includes_engine": True, "plain": _plain_record(m, against, of_group)}
            found[m.cell.arm]["speedup"].append(record)
    for arm, entry in found.items():
        order = [*of_group[arm].cell.baselines, *of_group[arm].cell.engine_baselines]
        for comparisons in entry.values():
            comparisons.sort(key=lambda c, order=order: order.index(c["baseline"]))
    return found


def stops_paying(cells: Sequence[Record]) -> list[Record]:
    """For every arm and baseline by the same engine that ran at several batch sizes: where `faster` ends for good.

    `batch_size` is `statistics.stops_paying` of the verdicts at the sizes `swept`. A size at which too little was
    measured says nothing, so only those larger than it count. null: it pays at the largest one; or too little was
    measured there, which `reason` says. Void cells and failed ones are not swept.
    """
    sound = {(c["suite"], c["arm"], c["batching"], c["batch_size"]) for c in cells if not c["void"]}
    verdicts: dict[tuple[str, str, str, str], dict[int, str]] = {}
    for cell in cells:
        suite, arm, batching, size = (cell[name] for name in ("suite", "arm", "batching", "batch_size"))
        for entry in cell["speedup"]:
            both = {(suite, name, batching, size) for name in (arm, entry["baseline"])}
            if both <= sound and not entry.get("includes_engine"):
                verdicts.setdefault((suite, arm, entry["baseline"], batching), {})[size] = entry["verdict"]
    return [
        {
            "suite": suite,
            "arm": arm,
            "baseline": baseline,
            "batching": batching,
            "swept": sorted(of_arm),
            "verdicts": [of_arm[size] for size in sorted(of_arm)],
            **_where_it_stops(of_arm),
        }
        for (suite, arm, baseline, batching), of_arm in verdicts.items()
        if len(of_arm) > 1
    ]


def _where_it_stops(verdicts: Mapping[int, str]) -> Record:
    """`batch_size` and `reason`, by the verdicts at the sizes beyond the last at which too little was measured."""
    unknown = max((size for size, verdict in verdicts.items() if statistics.withheld(verdict)), default=0)
    known = {size: verdict for size, verdict in verdicts.items() if size > unknown}
    reason = None if known else f"{verdicts[unknown].partition(': ')[2]} at batch size {unknown}"
    return {"batch_size": statistics.stops_paying(known), "reason": reason}


def floor(cells: Iterable[Measured]) -> Record | None:
    """What batching alone does to an arm's tokens: its items at the smallest batch size against those at the largest.

    cells: of one suite and arm. Static batches are taken where there are any, for nothing is refilled at batch size 1.
    None where no two sizes have an item in common.
    """
    sound = [m for m in cells if m.lines and not m.error]
    sized = {m.cell.batch_size: m for m in sorted(sound, key=lambda m: m.cell.batching == "static")}
    if len(sized) < 2:
        return None
    sizes = [min(sized), max(sized)]
    agreement = _agreement(*(sized[size] for size in sizes))
    return {"arm": sound[0].cell.arm, "batch_sizes": sizes, **agreement} if agreement["items"] else None


def ratio(value: Ratio | None) -> Record:
    if value is None:
        return {"value": None, "ci_low": None, "ci_high": None}
    return {"value": value.value, "ci_low": value.ci_low, "ci_high": value.ci_high}


def bounds(value: Ratio) -> list[float] | None:
    return None if value.ci_low is None or value.ci_high is None else [value.ci_low, value.ci_high]


def _compared(
    of_group: Mapping[str, Measured], baselines: Callable[[Measured], list[str]]
) -> list[tuple[Measured, list[Measured]]]:
    """Each baseline with the arms compared with it, none of them failed."""
    names = dict.fromkeys(itertools.chain.from_iterable(baselines(m) for m in of_group.values()))
    sound = [of_group[name] for name in names if not of_group[name].error]
    return [(a, [m for m in of_group.values() if a.cell.arm in baselines(m) and not m.error]) for a in sound]


def _speeds(arms: Sequence[Measured], against: Measured, synchronisation_s: float) -> list[tuple[Ratio, Verdict]]:
    speedups = [_speedup(m, against) for m in arms]
    doubts = [
        statistics.too_short([t["wall_s"] for t in m.samples], synchronisation_s)
        or statistics.too_short([t["wall_s"] for t in against.samples], synchronisation_s)
        for m in arms
    ]
    return list(zip(speedups, statistics.speed_verdicts(speedups, doubts), strict=True))


def _speedup(one: Measured, against: Measured) -> Ratio:
    return statistics.ratio_of_totals([against.by_block("wall_s")], [one.by_block("wall_s")])


def _speedup_record(one: Measured, against: Measured, speedup: Ratio, verdict: Verdict) -> Record:
    tokens, tokens0 = one.by_block("tokens"), against.by_block("tokens")
    wall, wall0 = one.by_block("wall_s"), against.by_block("wall_s")
    rate = statistics.ratio_of_totals([tokens, wall0], [wall, tokens0])
    repeat = statistics.ratio_of_totals([against.by_round("wall_s")], [one.by_round("wall_s")], unit="round")
    factors = statistics.factors(one.totals, against.totals) if one.totals and against.totals else None
    return {
        "baseline": against.cell.arm,
        **ratio(speedup),
        "ci_repeat": bounds(repeat),
        "rate_ratio": rate.value,
        "rate_ratio_ci": bounds(rate),
        "length_ratio": statistics.ratio_of_totals([tokens], [tokens0]).value,
        "verdict": str(verdict),
        "factors": factors and factors._asdict(),
    }


def _plain_record(one: Measured, against: Measured, of_group: Mapping[str, Measured]) -> Record | None:
    """The same ratio for the plain reference by the arm's own engine, on the baseline's checkpoint if it is there.

    None for the plain reference itself, for an engine that is not ours, and where the run has no such arm.
    """
    cell = one.cell
    plain = [
        m
        for m in of_group.values()
        if METHODS[m.cell.method].reference and m.cell.engine == cell.engine and m.cell.on in (against.cell.on, cell.on)
    ]
    if cell.engine is None or one in plain or METHODS[cell.method].reference or not plain:
        return None
    chosen = min(plain, key=lambda m: m.cell.on != against.cell.on)
    return None if chosen.error else {"arm": chosen.cell.arm, **ratio(_speedup(chosen, against))}


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
