"""The figure of a gate's page: head's time over base's, with its interval, for every cell.

It is drawn in the style of the report. A verdict has its own shape besides its colour and is written next to it.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench.document import plots
from mtbench.document.formatting import bounds, listed
from mtbench.document.model import Figure
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
    axes.margins(x=0.06)
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
    axes.axvline(0, color=INK, lw=0.9, zorder=1)
    accepted = gate.request.max_slowdown
    axes.axvline(accepted, color=WARN, lw=1, ls=(0, (4, 3)), zorder=1)
    place: dict[str, Any] = {"xytext": (4, -1), "textcoords": "offset points", "ha": "left", "va": "top"}
    axes.annotate(f"accepted slowdown {_percent(accepted)}", (accepted, -1.12), fontsize=9.5, color=WARN, **place)
    texts = [f"{name}: {changed_by(test)}, {test.word}" for name, test in lines]
    return plots.finish(
        figure,
        plots.cut(f"mtbench gate, {gate.head.label} against {gate.base.label}, {gate.started}", 100),
        name="forest",
        title=title,
        caption="Lines are 95% intervals. The solid line is no difference, the dashed line the accepted slowdown. "
        "Words follow from bounds at stricter levels.",
        alt=f"Head's time over base's, less 1, by cell. The accepted slowdown is {accepted:g}%. {'; '.join(texts)}.",
    )


def _name(gate: Gate, cell: TimedCell) -> str:
    """Return a cell's arm, with its suite and batch size where the timed cells differ in them."""
    suites, sizes = ({getattr(other, name) for other in gate.timed} for name in ("suite", "batch_size"))
    suite, size = suite_name(cell.suite) if len(suites) > 1 else "", f"b{cell.batch_size}" if len(sizes) > 1 else ""
    return listed(filter(None, (cell.arm, suite, size)))


def _interval(axes: Axes, row: int, test: TimeTest) -> None:
    if (limits := bounds(test)) is not None:
        axes.plot([100 * (limit - 1) for limit in limits], [row, row], color=INK, lw=1.4, zorder=3)
    if test.ratio is not None:
        axes.plot([100 * (test.ratio - 1)], [row], ls="", mew=1.5, zorder=4, **MARKS[test.word])


def _percent(value: float) -> str:
    """Return a percentage with its sign and as few digits as it has; 0 has no sign."""
    return f"{value:+g}%".replace("-", "−") if round(value, 9) else "0%"
