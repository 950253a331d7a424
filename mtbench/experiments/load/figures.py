"""The figures of a load: goodput and accuracy over the offered load, a line per arm with its 95 % band."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from mtbench.document.formatting import NONE, listed, number
from mtbench.experiments.load.format import Estimate, Load, LoadCell
from mtbench.report import figures
from mtbench.report.figures import ACCENT, INK, MUTED, PAPER, RULE, SHADES, WIDTH, Drawing, arm_label

HEIGHT, LEFT, RIGHT = 210.0, 46.0, 26.0  # points; to the right of the plot stand the numbers of the arms
APART = 12.0  # points between two numbers
LONGEST = 54  # letters of an arm's name in the key
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vP"


class Line(NamedTuple):
    """The points of an arm, in the order of the levels."""

    number: int
    arm: str
    levels: list[float]
    values: list[Estimate]


def draw(load: Load) -> list[Drawing]:
    """Return the figures; without accuracy if the suite is not scored."""
    offered = "requests per second offered" if load.request.request_rate else "requests at a time"
    limited = any(limit is not None for limit in dict(load.request.slo).values())
    word = "Goodput" if limited else "Answered requests"
    inside = "requests per second answered within all limits" if limited else "requests per second answered"
    ideal = bool(load.request.request_rate)
    sketches = [
        _lines(load, "goodput", word, inside, offered, lambda cell: cell.goodput, 1.0, ideal=ideal),
        _lines(load, "accuracy", "Accuracy", "% of the answered items", offered, lambda cell: cell.accuracy, 100.0),
    ]
    return [drawing for drawing in sketches if drawing is not None]


def _lines(
    load: Load,
    name: str,
    title: str,
    y_label: str,
    x_label: str,
    value: Callable[[LoadCell], Estimate | None],
    scale: float,
    *,
    ideal: bool = False,
) -> Drawing | None:
    """Draw one value of every arm over the levels."""
    lines = [line for line in _of_arms(load, value, scale) if line.values]
    if not lines:
        return None
    with mpl.rc_context(figures.STYLE):
        key = [arm_label(line.number, line.arm, LONGEST) for line in lines]
        figure, axes = figures.canvas(f"{title} under load", y_label, HEIGHT, key, left=LEFT, right=RIGHT)
        levels = sorted({level for line in lines for level in line.levels})
        if ideal:
            axes.plot(levels, levels, color=RULE, lw=1.2, zorder=1)
        for line in lines:
            _line(axes, line)
        _axes(axes, levels, lines, x_label, from_zero=name == "goodput")
        _numbers(axes, lines)
        texts = [
            f"{line.arm}: {listed(_told(at, v) for at, v in zip(line.levels, line.values, strict=True))}"
            for line in lines
        ]
        above = " The grey line is the offered rate." if ideal else ""
        return figures.finish(
            figure,
            f"mtbench load, {load.request.suite}, {load.client.name} {load.client.version}, {load.started}",
            name=name,
            title=f"{title} under load",
            caption=f"Numbers at the right end name the arms. Bands are 95% intervals.{above}",
            alt=f"{title} by arm over the {x_label}. {'; '.join(texts)}.",
        )


def _of_arms(load: Load, value: Callable[[LoadCell], Estimate | None], scale: float) -> list[Line]:
    found = []
    for place, arm in enumerate(load.arms, start=1):
        points = [(cell.level, value(cell)) for cell in load.cells if cell.arm == arm.name]
        known = [(level, _scaled(v, scale)) for level, v in points if v is not None and v.value is not None]
        found.append(Line(place, arm.name, [level for level, _ in known], [v for _, v in known]))
    return found


def _line(axes: Axes, line: Line) -> None:
    first = line.number == 1
    color = INK if first else (ACCENT, SHADES[7], MUTED)[line.number % 3]
    y = [v.value or 0.0 for v in line.values]
    axes.plot(line.levels, y, color=color, lw=1.5, ls=DASHES[(line.number - 1) % len(DASHES)], zorder=3)
    marker = MARKERS[(line.number - 1) % len(MARKERS)]
    axes.plot(line.levels, y, ls="", marker=marker, ms=4.5, mec=color, mfc=PAPER if first else color, zorder=4)
    band = [[v.ci_low for v in line.values], [v.ci_high for v in line.values]]
    low, high = ([v if bound is None else bound for v, bound in zip(y, ends, strict=True)] for ends in band)
    axes.fill_between(line.levels, low, high, color=color, alpha=0.13, lw=0, zorder=2)


def _axes(axes: Axes, levels: Sequence[float], lines: Sequence[Line], x_label: str, *, from_zero: bool) -> None:
    axes.set_xscale("log")
    low, high = min(levels), max(levels)
    space = (high / low) ** 0.04 if high > low else 1.2
    axes.set_xlim(low / space, high * space)
    axes.set_xticks(list(levels), [f"{level:g}" for level in levels])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x_label)
    bounds = [b for line in lines for v in line.values for b in (v.value, v.ci_low, v.ci_high) if b is not None]
    top, bottom = max(bounds), 0.0 if from_zero else min(bounds)
    reach = 0.08 * (top - bottom) or 1.0
    axes.set_ylim(max(0.0, bottom - reach), top + reach)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(color=RULE, lw=0.6)
    axes.set_axisbelow(True)


def _numbers(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each arm's number at the right end of its line, one above the other where the lines meet."""
    low, high = axes.get_ylim()
    per_point = (high - low) / HEIGHT
    ends = sorted((line.values[-1].value or 0.0, line.number) for line in lines)
    heights: list[float] = []
    for value, _ in ends:
        heights.append(max(value, heights[-1] + APART * per_point) if heights else value)
    over = max(0.0, heights[-1] - high)
    for (_, name), y in zip(ends, heights, strict=True):
        axes.text(
            1 + 7 / (WIDTH - LEFT - RIGHT),
            y - over,
            str(name),
            transform=axes.get_yaxis_transform(),
            va="center_baseline",
            fontsize=11,
            fontweight="bold",
        )


def _scaled(estimate: Estimate, scale: float) -> Estimate:
    values: Mapping[str, float | None] = dict(estimate)
    return Estimate(**{name: None if v is None else v * scale for name, v in values.items()})


def _told(level: float, estimate: Estimate) -> str:
    value = NONE if estimate.value is None else number(estimate.value, 2)
    return f"{value} at {level:g}"
