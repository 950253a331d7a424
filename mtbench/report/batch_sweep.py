"""A run over several batch sizes: how the speedup of an arm changes with the size, and where the arm stops paying."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from mtbench.document import Figure, plots
from mtbench.document.formatting import bounds, listed, times
from mtbench.document.plots import ACCENT, INK, MUTED, PAPER
from mtbench.report.arm_names import in_words
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import BreakEven, ResultCell

SIZES_NEEDED = 3  # batch sizes of a sweep


@dataclass(frozen=True, slots=True)
class Sweep:
    """One suite with one way of batching."""

    slug: str
    heading: str
    sentences: list[str]
    drawing: Figure


@dataclass(frozen=True, slots=True)
class _Curve:
    """An arm's speedup over one baseline at each batch size where it was measured."""

    arm: str
    sizes: list[int]
    speedups: list[Speedup]

    @property
    def values(self) -> list[float]:
        return [speedup.value or 0.0 for speedup in self.speedups]


def sweep(
    slug: str,
    heading: str,
    cells: Sequence[ResultCell],
    entries: Sequence[BreakEven],
    numbers: Mapping[str, int],
    note: str,
    names: Mapping[str, str],
) -> Sweep | None:
    """Return the sweep of one suite and way of batching; None if no arm ran at enough batch sizes.

    names: the words of every arm. The figure shows only baselines on the arms' own checkpoints if there are any, so
    that each arm has one curve.
    """
    references = {cell.arm for cell in cells if cell.reference}
    roles = {cell.arm: cell.on for cell in cells}
    swept = [e for e in entries if len(e.swept) >= SIZES_NEEDED and e.arm not in references]
    own = [e for e in swept if roles[e.arm] == roles[e.baseline]]
    if not swept:
        return None
    with plots.style():
        drawing = _draw(slug, cells, own or swept, numbers, note, names)
    return Sweep(slug, heading, [in_words(sentence(entry), names) for entry in swept], drawing)


def sentence(entry: BreakEven) -> str:
    """Return where an arm stops paying, by its verdicts; a size with too few measurements is no reason."""
    arm, baseline, sizes, stops = entry.arm, entry.baseline, entry.swept, entry.batch_size
    verdicts = dict(zip(sizes, entry.verdicts, strict=True))
    every = listed(sizes)
    if entry.reason:
        faster = [size for size in sizes if verdicts[size].startswith("faster")]
        unknown = f"It is not known where {arm} stops paying over {baseline}: {entry.reason}, the largest of {every}."
        return f"{unknown} It is faster at {listed(faster)}." if faster else unknown
    if stops is None:
        return f"{arm} is still faster than {baseline} at batch size {sizes[-1]}, the largest of {every}."
    shown = verdicts[stops].partition(":")[0]
    if stops == sizes[0]:
        return f"{arm} is not faster than {baseline} at batch size {stops}, the smallest of {every}."
    faster = [size for size in sizes if size < stops and verdicts[size].startswith("faster")]
    if not faster:
        return f"{arm} is not shown to be faster than {baseline} at any batch size of {every}."
    return (
        f"{arm} stops paying at batch size {stops}: it is faster than {baseline} at {faster[-1]}, and {shown} at "
        f"{stops} (sizes {every})."
    )


def _draw(
    slug: str,
    cells: Sequence[ResultCell],
    entries: Sequence[BreakEven],
    numbers: Mapping[str, int],
    note: str,
    names: Mapping[str, str],
) -> Figure:
    """Draw speedup over batch size, both axes logarithmic."""
    title = "Speedup over batch size"
    arms = dict.fromkeys(entry.arm for entry in entries)
    key = [plots.label(numbers[arm], names[arm]) for arm in arms]
    figure, axes = plots.canvas(title, "over the baseline on the same checkpoint", 220, key)
    reach, texts = [1.0], []
    drawn = [curve for curve in (_curve(cells, entry) for entry in entries) if curve.sizes]
    for curve in drawn:
        _draw_curve(axes, curve)
        for speedup in curve.speedups:
            reach += [speedup.value or 1.0, *(bounds(speedup) or ())]
        values = listed(f"{times(v)} at {n}" for n, v in zip(curve.sizes, curve.values, strict=True))
        texts.append(f"{names[curve.arm]}: {values}")
    ticks = sorted({size for entry in entries for size in entry.swept})
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.35)
    plots.factor_axis(axes, min(reach) / 1.06, max(1.1, max(reach) * 1.06), of="y")
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.set_xlabel("batch size")
    plots.label_ends(axes, [(c.sizes[-1], c.values[-1], str(numbers[c.arm]), INK) for c in drawn])
    return plots.finish(
        figure,
        note,
        name=slug,
        title=title,
        caption="Filled points are faster by their verdict; hollow points are not shown to be faster. Lines through "
        "points are 95% intervals.",
        alt=f"Speedup over the baseline on the same checkpoint, by batch size. {'; '.join(texts)}.",
    )


def _draw_curve(axes: Axes, curve: _Curve) -> None:
    """Draw one arm: filled points are `faster` by their verdicts."""
    axes.plot(curve.sizes, curve.values, color=ACCENT, lw=1, alpha=0.6, zorder=2)
    for size, value, speedup in zip(curve.sizes, curve.values, curve.speedups, strict=True):
        plots.whisker(axes, size, bounds(speedup), color=MUTED, lw=1, zorder=1)
        fill = ACCENT if speedup.verdict.startswith("faster") else PAPER
        axes.plot([size], [value], "o", ms=6, mec=ACCENT, mfc=fill, zorder=3)


def _curve(cells: Sequence[ResultCell], entry: BreakEven) -> _Curve:
    """Return the measured speedups of an entry, by batch size."""
    by_size = {cell.batch_size: cell.speedup for cell in cells if cell.arm == entry.arm}
    curve = _Curve(entry.arm, [], [])
    for size in entry.swept:
        for speedup in by_size[size]:
            if speedup.baseline == entry.baseline and speedup.value:
                curve.sizes.append(size)
                curve.speedups.append(speedup)
    return curve
