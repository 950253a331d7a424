"""The figure of a gate's page: head's time over base's, with its interval, for every cell.

It is drawn in the style of the report. A word has its own shape besides its colour and is written next to it.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench.document import Figure, plots
from mtbench.document.formatting import listed
from mtbench.document.plots import ACCENT, INK, MUTED, PAPER, WARN, above
from mtbench.experiments.gate.format import Gate, TimedCell, TimeTest, Verdict
from mtbench.experiments.gate.tables import ALL_CELLS, change, changed_by
from mtbench.report.phrases import suite_name

MARKS: dict[Verdict, dict[str, Any]] = {
    "PASS": {"marker": "o", "mec": ACCENT, "mfc": ACCENT, "ms": 6.5},
    "FAIL": {"marker": "s", "mec": WARN, "mfc": WARN, "ms": 7},
    "INCONCLUSIVE": {"marker": "D", "mec": INK, "mfc": PAPER, "ms": 6},
}
COLORS: dict[Verdict, str] = {"PASS": ACCENT, "FAIL": WARN, "INCONCLUSIVE": MUTED}
LONGEST = 40  # letters of a cell's label next to a value
ROW = 35.0  # points
LEFT, RIGHT = 10.0, 16.0  # points beside the plot: room for the last number under its axis
MARGIN_AT = 0.76  # the share of the width up to the margin, at most: the words stand to the right of it
FAR = 3.0  # an interval is cut at so many times the median reach of an interval beyond the estimates


def forest(gate: Gate) -> Figure:
    """Draw head's time over base's with its interval, for every cell and for their mean."""
    lines = [(plots.label(n, _name(gate, cell), LONGEST), cell.test) for n, cell in enumerate(gate.timed, start=1)]
    if gate.all_cells is not None:
        lines.insert(0, (ALL_CELLS, gate.all_cells))
    with plots.style():
        return _drawn(gate, lines)


def _drawn(gate: Gate, lines: Sequence[tuple[str, TimeTest]]) -> Figure:
    title, subtitle = "Time of head over base", "95% intervals; right is slower"
    figure, axes = plots.canvas(title, subtitle, ROW * len(lines) + 21, left=LEFT, right=RIGHT, axis=26)
    _limit(axes, [test for _, test in lines], gate.request.margin)
    for row, (name, test) in enumerate(lines):
        _interval(axes, row, test)
        above(axes, row - 0.27, name, fontweight="bold" if name == ALL_CELLS else "normal")
        heavy = "bold" if test.word == "FAIL" else "normal"
        text = f"{change(test)}  {test.word}"
        above(axes, row - 0.27, text, right=True, color=COLORS[test.word], fontweight=heavy)
    axes.set_ylim(len(lines) - 0.55, -1.15)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _percent(x)))
    axes.grid(axis="x")
    axes.set_yticks([])
    _reference_lines(axes, 100 * gate.request.margin)
    texts = [f"{name}: {changed_by(test)}, {test.word}" for name, test in lines]
    return plots.finish(
        figure,
        plots.cut(f"mtbench gate, {gate.head.label} against {gate.base.label}, {gate.started}", 100),
        name="forest",
        title=title,
        caption="Circle: PASS. Square: FAIL. Hollow diamond: INCONCLUSIVE. Lines are 95% intervals; one that ends in "
        "an arrow is longer than shown. The solid line is no difference, the dashed line the margin. Words follow from "
        "bounds at stricter levels.",
        alt=f"Head's time over base's, less 1, by cell. The margin is {100 * gate.request.margin:g}%. "
        f"{'; '.join(texts)}.",
    )


def _name(gate: Gate, cell: TimedCell) -> str:
    """Return a cell's arm, with its suite and batch size where the timed cells differ in them."""
    suites, sizes = ({getattr(other, name) for other in gate.timed} for name in ("suite", "batch_size"))
    suite, size = suite_name(cell.suite) if len(suites) > 1 else "", f"b{cell.batch_size}" if len(sizes) > 1 else ""
    return listed(filter(None, (cell.arm, suite, size)))


def _limit(axes: Axes, tests: Sequence[TimeTest], margin: float) -> None:
    """Set the limits of the percentages, so that a very long interval does not crowd out the others."""
    estimates = [0.0, 100 * margin, *(100 * (test.ratio - 1) for test in tests if test.ratio is not None)]
    limits = [(test.ci_low, test.ci_high) for test in tests if test.ci_low is not None and test.ci_high is not None]
    far = FAR * median(50 * (high - low) for low, high in limits) if limits else 0.0
    bounds = [100 * (bound - 1) for pair in limits for bound in pair]
    low = max(min(estimates + bounds), min(estimates) - far)
    high = min(max(estimates + bounds), max(estimates) + far)
    high = max(high, low + (100 * margin - low) / MARGIN_AT)
    space = 0.06 * (high - low)
    axes.set_xlim(low - space, high + space)


def _interval(axes: Axes, row: int, test: TimeTest) -> None:
    """Draw the estimate with the mark of its word, and its interval, with an arrow where it leaves the plot."""
    left, right = axes.get_xlim()
    if test.ci_low is not None and test.ci_high is not None:
        low, high = (100 * (bound - 1) for bound in (test.ci_low, test.ci_high))
        axes.plot([max(low, left), min(high, right)], [row, row], color=INK, lw=1.4, zorder=3, clip_on=False)
        for outside, at, marker in ((low < left, left, "<"), (high > right, right, ">")):
            if outside:
                axes.plot([at], [row], marker, color=INK, ms=5, zorder=3, clip_on=False)
    if test.ratio is not None:
        axes.plot([100 * (test.ratio - 1)], [row], ls="", mew=1.5, zorder=4, **MARKS[test.word])


def _reference_lines(axes: Axes, margin: float) -> None:
    """Draw the lines of no difference and of the margin in percent, and name the latter."""
    axes.axvline(0, color=INK, lw=0.9, zorder=1)
    axes.axvline(margin, color=WARN, lw=1, ls=(0, (4, 3)), zorder=1)
    place: dict[str, Any] = {"xytext": (4, -1), "textcoords": "offset points", "ha": "left", "va": "top"}
    axes.annotate(f"margin {_percent(margin)}", (margin, -1.12), fontsize=9.5, color=WARN, **place)


def _percent(value: float) -> str:
    """Return a percentage with its sign and as few digits as it has; 0 has no sign."""
    return f"{value:+g}%".replace("-", "−") if round(value, 9) else "0%"
