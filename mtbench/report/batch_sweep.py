"""What a run over several batch sizes shows: how an arm's speedup changes with it, and where it stops paying."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

from mtbench import statistics
from mtbench.report import figures
from mtbench.report.figures import ACCENT, INK, MUTED, RULE, Drawing
from mtbench.report.formatting import times

Cell = Mapping[str, Any]

SIZES = 3  # batch sizes that make a sweep


@dataclass(frozen=True, slots=True)
class Sweep:
    """One suite with one way of batching."""

    slug: str
    heading: str
    sentences: list[str]
    drawing: Drawing


def sweep(
    slug: str,
    suite: str,
    batching: str,
    cells: Sequence[Cell],
    entries: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, int],
    note: str,
) -> Sweep | None:
    """What there is to say of these `stops_paying` entries; None if none of them has enough sizes.

    The figure has the baselines on the arms' own checkpoints alone, else one arm would be drawn twice.
    """
    references = {c["arm"] for c in cells if c["reference"]}
    swept = [e for e in entries if len(e["swept"]) >= SIZES and e["arm"] not in references]
    own = [e for e in swept if _on(cells, e["arm"]) == _on(cells, e["baseline"])]
    if not swept:
        return None
    with mpl.rc_context(figures.STYLE):
        drawing = _draw(cells, own or swept, numbers, note)
    heading = f"{suite}, over batch sizes{'' if batching == 'static' else f', {batching}'}"
    return Sweep(slug, heading, [sentence(e) for e in swept], drawing)


def sentence(entry: Mapping[str, Any]) -> str:
    """Where an arm stops paying, by its verdicts; too little measured is no reason to say that it stops."""
    arm, baseline, sizes, stops = (entry[name] for name in ("arm", "baseline", "swept", "batch_size"))
    verdicts = dict(zip(sizes, entry["verdicts"], strict=True))
    largest = f"the largest of {_listed(sizes)}"
    if entry["reason"]:
        faster = [size for size, verdict in verdicts.items() if verdict.startswith("faster")]
        pays = f" It is faster at {_listed(faster)}." if faster else ""
        return f"Where {arm} stops paying over {baseline} cannot be told: {entry['reason']}, {largest}.{pays}"
    if stops is None:
        return f"{arm} is still faster than {baseline} at batch size {sizes[-1]}, {largest}."
    if stops == sizes[0]:
        return f"{arm} is not shown to be faster than {baseline} at any batch size of {_listed(sizes)}."
    last = sizes[sizes.index(stops) - 1]
    if statistics.withheld(verdicts[last]):
        return (
            f"{arm} is not shown to be faster than {baseline} from batch size {stops} on; at {last} too little was "
            f"measured to tell (of {_listed(sizes)})."
        )
    return (
        f"{arm} stops paying at batch size {stops}: it is faster than {baseline} at {last}, and from {stops} on it is "
        f"not shown to be (of {_listed(sizes)})."
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _on(cells: Sequence[Cell], arm: str) -> str:
    return next(str(c["on"]) for c in cells if c["arm"] == arm)


def _draw(
    cells: Sequence[Cell], entries: Sequence[Mapping[str, Any]], numbers: Mapping[str, int], note: str
) -> Drawing:
    """Speedup over batch size, both axes logarithmic; filled points are `faster` by their verdicts."""
    title = "Speedup over batch size"
    named = {e["arm"]: next(c for c in cells if c["arm"] == e["arm"]) for e in entries}
    key = [figures.name_of({**cell, "void": False}, numbers, 54) for cell in named.values()]
    figure, axes = figures.canvas(title, "over the baseline on the same checkpoint", 220, key)
    reach, told = [1.0], []
    for entry in entries:
        points = [(size, _speedup(cells, entry, size)) for size in entry["swept"]]
        found = [(size, s, verdict) for (size, s), verdict in zip(points, entry["verdicts"], strict=True) if s["value"]]
        if not found:
            continue
        sizes, values = [size for size, *_ in found], [float(s["value"]) for _, s, _ in found]
        axes.plot(sizes, values, color=ACCENT, lw=1, alpha=0.6, zorder=2)
        for size, s, verdict in found:
            if s["ci_low"] is not None:
                axes.plot([size, size], [s["ci_low"], s["ci_high"]], color=MUTED, lw=1, zorder=1)
                reach += [s["ci_low"], s["ci_high"]]
            faster = verdict.startswith("faster")
            color = ACCENT if faster else figures.PAPER
            axes.plot([size], [s["value"]], "o", ms=6, mec=ACCENT, mfc=color, zorder=3)
        number = str(numbers[entry["arm"]])
        axes.annotate(
            number,
            (sizes[-1], values[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            ha="center",
            va="center_baseline",
            fontsize=11,
            fontweight="bold",
        )
        reach += values
        told.append(f"{entry['arm']}: " + ", ".join(f"{times(v)} at {n}" for n, v in zip(sizes, values, strict=True)))
    axes.axhline(1, color=INK, lw=0.9, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({size for e in entries for size in e["swept"]})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.35)
    axes.set_ylim(min(reach) / 1.06, max(1.1, max(reach) * 1.06))
    marks = figures.log_ticks(*axes.get_ylim())
    axes.set_yticks(marks, [f"×{t:g}" for t in marks])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.grid(axis="y", color=RULE, lw=0.6)
    return figures.finish(
        figure,
        note,
        name="batch-sizes",
        title=title,
        caption="Filled points are faster by their verdict, hollow ones are not shown to be; lines through them are "
        "95% intervals.",
        alt=f"Speedup over the baseline on the same checkpoint, by batch size. {'; '.join(told)}.",
    )


def _speedup(cells: Sequence[Cell], entry: Mapping[str, Any], size: int) -> Cell:
    cell = next(c for c in cells if (c["arm"], c["batch_size"]) == (entry["arm"], size))
    found: Cell = next(s for s in cell["speedup"] if s["baseline"] == entry["baseline"])
    return found
