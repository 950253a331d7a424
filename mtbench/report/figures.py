"""The figures of a report: speedups, speed and accuracy; speedup over batch sizes.

The numbers of the tables tell the arms apart, not the hue (mtbench/document/plots.py).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mtbench.document import plots
from mtbench.document.formatting import bounds, interval, listed, number, percent, times
from mtbench.document.model import Figure
from mtbench.document.plots import ACCENT, INK, MUTED, PAPER, WARN, WIDTH
from mtbench.report.phrases import DIVISIONS
from mtbench.results.figure_formats import AcceptancePart, Speedup, TaskSpeedup
from mtbench.results.format import BreakEven, ResultCell

SPEEDUPS = "speedups"  # name of the figure that a page starts with
NAMES, NAME_LETTERS = 172, 25  # of the column with arms in a figure: points, and letters of a line
MOST_ROWS = 12  # arms of the figure that a page starts with
ROW = 26  # points of an arm in a figure with two lines for its name
Point = TaskSpeedup | AcceptancePart
Curves = Sequence[tuple[str, Mapping[int, Point]]]  # arm, and its points by their place on the axis
Panels = Mapping[str, Mapping[str, Mapping[str, Point]]]  # label of an axis, arm, part -> point
FILLED = "Filled points are faster by their verdict; hollow points are not shown to be faster."
WHISKERS = "Lines through points are 95% intervals."
CURVES = f"{FILLED} {WHISKERS}"
RANGES = {"turns": "turn", "contexts": "prompt tokens of a request, mean over a block"}  # field of a cell, and its axis


@dataclass(frozen=True, slots=True)
class Scene:
    """The data of the figures of one suite and batch size."""

    cells: Sequence[ResultCell]  # without failed ones
    numbers: Mapping[str, int]  # arm -> its number in the tables
    headline: Mapping[str, Speedup]  # arm -> its speedup in the main table
    note: str = ""  # printed in every figure, since figures leave the page: its source, and that it is a demonstration
    names: Mapping[str, str] = field(default_factory=dict)  # arm -> its readable name; without one its id

    def name(self, arm: str) -> str:
        """Return the readable name of an arm."""
        return self.names.get(arm, arm)

    def key(self, cells: Sequence[ResultCell]) -> list[str]:
        return [plots.label(self.numbers[c.arm], self.name(c.arm), void=bool(c.void)) for c in cells]

    @property
    def baselines(self) -> set[str]:
        return {speedup.baseline for cell in self.cells for speedup in cell.speedup}


def draw(scene: Scene) -> list[Figure]:
    """Return the figures of one suite and batch size that have data."""
    sketches: list[Callable[[Scene], Figure | None]] = [_speedups, _frontier, _conversations, _acceptance]
    with plots.style():
        drawn = [sketch(scene) for sketch in sketches]
    return [drawing for drawing in drawn if drawing is not None]


def _speedups(scene: Scene) -> Figure | None:
    """Draw the speedup of each arm with its interval, on a log scale; to the right its accuracy, if there is one."""
    shown = [(cell, own) for cell in scene.cells if (own := scene.headline.get(cell.arm)) and bounds(own)]
    if not shown:
        return None
    caption = f"Wall time of plain decoding over that of the arm, on the same prompts. {FILLED}"
    if len(shown) > MOST_ROWS:
        caption += f" The {MOST_ROWS} fastest of {len(shown)} arms; the table has all."
        least = sorted((speedup.value or 0.0 for _, speedup in shown), reverse=True)[MOST_ROWS - 1]
        shown = [(cell, speedup) for cell, speedup in shown if (speedup.value or 0.0) >= least]
    baselines = {scene.name(speedup.baseline) for _, speedup in shown}
    over = baselines.pop() if len(baselines) == 1 else "the deployed baseline"
    title = f"Speedup over {over}"
    scored = any(cell.accuracy is not None for cell, _ in shown)
    size = f"batch size {shown[0][0].batch_size}"
    subtitle = f"{size}, 95% intervals; right: speedup{' and accuracy' if scored else ''}"
    right = 88 if scored else 46
    figure, axes = plots.canvas(title, subtitle, ROW * len(shown) + 6, left=NAMES, right=right, axis=26)
    reach, texts = [1.0], []
    for row, (cell, speedup) in enumerate(shown):
        _interval(axes, row, cell, speedup)
        reach += [speedup.value or 1.0, *(bounds(speedup) or ())]
        edge = axes.get_yaxis_transform()
        _arm_text(axes, row, scene, cell, WIDTH - NAMES - right)
        beside: Any = {"transform": edge, "va": "center_baseline", "fontsize": 10, "clip_on": False}
        unit = 1 / (WIDTH - NAMES - right)
        weight = "normal" if speedup.verdict.reason else "bold"
        axes.text(1 + 40 * unit, row, times(speedup.value), ha="right", fontweight=weight, **beside)
        accuracy = None if cell.accuracy is None else cell.accuracy.value
        if scored:
            axes.text(1 + 86 * unit, row, f"{percent(accuracy)}%", ha="right", color=MUTED, **beside)
        texts.append(f"{scene.name(cell.arm)} {_in_words(speedup)}")
    low, high = min(value for value in reach if value > 0), max(reach)
    space = max(1.04, (high / low) ** 0.04)
    plots.factor_axis(axes, min(0.9, low / space), max(1.1, high * space))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks([])
    return plots.finish(
        figure,
        scene.note,
        name=SPEEDUPS,
        title=title,
        caption=caption,
        alt=f"{title}, {subtitle}. {'; '.join(texts)}.",
    )


def _arm_text(axes: Axes, row: int, scene: Scene, cell: ResultCell, plot: float) -> None:
    """Write an arm's number and words to the left of the plot, in two lines at most. plot: its width in points."""
    name = plots.cut(scene.name(cell.arm), 2 * NAME_LETTERS - 4) + (" (void)" if cell.void else "")
    lines = plots.wrapped(name, NAME_LETTERS)
    style: Any = {"transform": axes.get_yaxis_transform(), "fontsize": 10, "linespacing": 1.05}
    axes.text(-(NAMES - 18) / plot, row, str(scene.numbers[cell.arm]), va="center_baseline", ha="right", **style)
    align = "center_baseline" if len(lines) == 1 else "center"
    axes.text(-(NAMES - 23) / plot, row, "\n".join(lines), va=align, **style)


def _interval(axes: Axes, row: int, cell: ResultCell, speedup: Speedup) -> None:
    """Draw a speedup and its interval: a cross if the arm is void, filled if it is faster by its verdict."""
    if (limits := bounds(speedup)) and min(limits) > 0:
        plots.whisker(axes, row, limits, flat=True, lw=2, solid_capstyle="butt")
    if cell.void:
        axes.plot([speedup.value or 1.0], [row], "x", color=MUTED, ms=7, mew=1.6, zorder=4)
        return
    fill = ACCENT if speedup.verdict.word == "faster" else PAPER
    edge = WARN if speedup.verdict.word == "slower" else ACCENT
    axes.plot([speedup.value or 1.0], [row], "o", ms=7, mew=1.6, mec=edge, mfc=fill, zorder=4)


def _in_words(speedup: Point) -> str:
    """Return a speedup with its interval, where measurements suffice for a verdict; or an acceptance length."""
    ends = interval(bounds(speedup))
    if isinstance(speedup, AcceptancePart):
        return f"{number(speedup.value)} {ends or ''}".rstrip()
    return "no verdict" if ends is None or speedup.verdict.reason else f"{times(speedup.value)} {ends}"


def _frontier(scene: Scene) -> Figure | None:
    """Draw accuracy over speed, with both intervals, if the suite is scored."""
    points = [
        (cell, cell.tokens_per_s.value, 100 * cell.accuracy.value)
        for cell in scene.cells
        if cell.tokens_per_s.value is not None and bounds(cell.tokens_per_s)
        if cell.accuracy is not None and cell.accuracy.value is not None
    ]
    if not points:
        return None
    scored = [cell for cell, _, _ in points]
    title = "Speed and accuracy of each arm"
    figure, axes = plots.canvas(title, "up and to the right is better", 230, scene.key(scored))
    rates = [bounds(c.tokens_per_s) or () for c in scored]
    accuracies = [[100 * end for end in bounds(c.accuracy) or ()] for c in scored if c.accuracy is not None]
    for (cell, x, y), rate, accuracy in zip(points, rates, accuracies, strict=True):
        plots.whisker(axes, y, rate, flat=True)
        plots.whisker(axes, x, accuracy)
        baseline = cell.arm in scene.baselines
        color = MUTED if cell.void else INK if baseline else ACCENT
        mark = {"boxstyle": f"{'square' if baseline else 'circle'},pad=0.2", "facecolor": color, "lw": 0}
        number_ = str(scene.numbers[cell.arm])
        axes.text(x, y, number_, ha="center", va="center", fontsize=9, color=PAPER, bbox=mark, zorder=4)
    sound = [(x, y) for cell, x, y in points if not cell.void]
    best = sorted(p for p in sound if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in sound))
    if len(best) > 1:
        axes.plot(*zip(*best, strict=True), color=ACCENT, lw=1, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    low, high = _range([b for span in accuracies for b in span] + [y for _, _, y in points])
    axes.set_ylim(max(-4.0, low), min(104.0, high))
    axes.set_xlim(*_range([b for span in rates for b in span] + [x for _, x, _ in points]))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("accuracy, %")
    axes.grid()
    texts = [f"{scene.name(cell.arm)} {number(x, 0)} tokens/s, {number(y, 1)}%" for cell, x, y in points]
    return plots.finish(
        figure,
        scene.note,
        name="frontier",
        title=title,
        caption="Squares are baselines. Lines through a point are its 95% intervals. The dashed line joins the "
        "arms that no other arm beats in both (by their estimates; intervals may overlap).",
        alt=f"Scatter plot of accuracy over tokens per second: {'; '.join(texts)}.",
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    space = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
    return low - space, high + space


def _conversations(scene: Scene) -> Figure | None:
    """Draw speedup by turn and by context, if conversations have later turns."""
    shown = [(c, scene.headline[c.arm].baseline) for c in scene.cells if c.arm in scene.headline and c.turns]
    panels: Panels = {
        label: {c.arm: {p.part: s for p in getattr(c, name) for s in _over(base, p.speedup)} for c, base in shown}
        for name, label in RANGES.items()
    }
    title, subtitle = "Speedup by turn and by context", "over plain decoding, on the same prompts"
    return _panels(scene, panels, title, subtitle, name="by-turn", caption=CURVES)


def _acceptance(scene: Scene) -> Figure | None:
    """Draw the acceptance length by context, category and thinking, if forwards are of several parts."""
    panels: Panels = {
        label: {c.arm: {p.part: p for p in c.acceptance_by[name]} for c in scene.cells if name in c.acceptance_by}
        for name, label in DIVISIONS.items()
    }
    subtitle = "tokens per forward that committed any"
    return _panels(scene, panels, "Acceptance length", subtitle, name="acceptance", caption=WHISKERS)


def _panels(scene: Scene, every: Panels, title: str, subtitle: str, **given: str) -> Figure | None:
    panels, texts = {label: curves for label, curves in every.items() if any(curves.values())}, list[str]()
    if not panels:
        return None
    key = scene.key([cell for cell in scene.cells if any(cell.arm in curves for curves in panels.values())])
    figure, _ = plots.canvas(title, subtitle, max(150, plots.APART * len(key)), key, panels=len(panels), right=24)
    for axes, (label, curves) in zip(figure.axes, panels.items(), strict=True):
        parts = list(dict.fromkeys(part for of in sorted(curves.values(), key=len, reverse=True) for part in of))
        placed = [(arm, {parts.index(part): point for part, point in of.items()}) for arm, of in curves.items()]
        axes.set_xlim(-0.5, len(parts) - 0.5)
        apart = min(0.02 * len(parts), 0.6 / len(curves))
        texts.append(_curves(axes, scene, placed, dict(enumerate(parts)), label, apart))
        if not any(isinstance(point, TaskSpeedup) for of in curves.values() for point in of.values()):
            axes.yaxis.set_major_formatter("{x:g}")
    return plots.finish(figure, scene.note, title=title, alt=f"{title}, {subtitle}. {'. '.join(texts)}.", **given)


def sweep(scene: Scene, entries: Sequence[BreakEven], name: str) -> Figure:
    """Draw speedup over batch size, both axes logarithmic.

    entries: the arms that are drawn, and the baseline of each. The cells of `scene` are those of all batch sizes.
    """
    title, subtitle = "Speedup over batch size", "over the baseline on the same checkpoint"
    ticks = {size: str(size) for size in sorted({size for entry in entries for size in entry.swept})}
    with plots.style():
        key = [plots.label(scene.numbers[arm], scene.name(arm)) for arm in dict.fromkeys(e.arm for e in entries)]
        figure, axes = plots.canvas(title, subtitle, max(220, plots.APART * len(key)), key)
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(ticks) / 1.2, max(ticks) * 1.35)
        by_size = {e.arm: sorted((c.batch_size, c.speedup) for c in scene.cells if c.arm == e.arm) for e in entries}
        curves = [(e.arm, {size: s for size, of in by_size[e.arm] for s in _over(e.baseline, of)}) for e in entries]
        alt = f"{title}, {subtitle}. {_curves(axes, scene, curves, ticks, 'batch size')}."
        return plots.finish(figure, scene.note, name=name, title=title, caption=CURVES, alt=alt)


def _curves(axes: Axes, scene: Scene, curves: Curves, ticks: Mapping[int, str], label: str, apart: float = 0.0) -> str:
    """Draw a line of points for each arm, `apart` from the others at each tick, and return the points in words."""
    reach, texts, ends, half = [1.0], [], [], apart * (len(curves) - 1) / 2
    for place, (arm, curve) in enumerate(curves):
        drawn = [(x - half + apart * place, speedup) for x, speedup in curve.items()]
        axes.plot([x for x, _ in drawn], [s.value or 1.0 for _, s in drawn], color=ACCENT, lw=1, alpha=0.6, zorder=2)
        for x, speedup in drawn:
            plots.whisker(axes, x, bounds(speedup), color=MUTED, lw=1, zorder=1)
            fill = PAPER if isinstance(speedup, TaskSpeedup) and speedup.verdict.word != "faster" else ACCENT
            axes.plot([x], [speedup.value or 1.0], "o", ms=6, mec=ACCENT, mfc=fill, zorder=3)
            reach += [speedup.value or 1.0, *(bounds(speedup) or ())]
        ends += [(x + half, s.value or 1.0, str(scene.numbers[arm]), INK) for x, s in [*curve.items()][-1:]]
        texts.append(f"{scene.name(arm)}: {listed(f'{_in_words(s)} at {ticks[x]}' for x, s in curve.items())}")
    plots.factor_axis(axes, min(reach) / 1.06, max(1.1, max(reach) * 1.06), of="y")
    words = [re.sub(r"^.*–(?=.{4,})", "≤ ", tick) for tick in ticks.values()]
    size = min(10.5, 500 / len(words) / max(map(len, words)))  # so that labels have room
    axes.set(xticks=[*ticks], xlabel=label if size > 7 else "")
    axes.set_xticklabels(words, **({"size": size} if size > 7 else {"size": 8, "rotation": 30, "ha": "right"}))
    plots.label_ends(axes, ends)
    return "; ".join(texts)


def _over(baseline: str, speedups: Iterable[TaskSpeedup]) -> list[TaskSpeedup]:
    """Return the measured speedup over a baseline, if there is one."""
    return [speedup for speedup in speedups if speedup.baseline == baseline and speedup.value]
