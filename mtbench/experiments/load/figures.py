"""The figures of a load: goodput and accuracy over the offered load, a line per arm with its 95 % band."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from mtbench.document import plots
from mtbench.document.formatting import listed, number
from mtbench.document.model import Figure
from mtbench.document.plots import ACCENT, DASHES, INK, MUTED, PAPER, RULE, SHADES
from mtbench.experiments.load.format import Estimate, Load, LoadCell

MARKERS = "osD^vP"


class Line(NamedTuple):
    """The points of an arm, in the order of the levels: level, value, lower and upper end of the interval."""

    number: int
    arm: str
    points: list[tuple[float, float, float, float]]


def draw(load: Load) -> list[Figure]:
    """Return the figures; without accuracy if the suite is not scored."""
    limited = any(limit is not None for limit in dict(load.request.slo).values())
    word = "Goodput" if limited else "Answered requests"
    inside = "requests per second answered within all limits" if limited else "requests per second answered"
    ideal = bool(load.request.request_rate)
    goodput, accuracy = _lines(load, lambda cell: cell.goodput, 1.0), _lines(load, lambda cell: cell.accuracy, 100.0)
    with plots.style():
        found = [_figure(load, goodput, "goodput", word, inside, ideal=ideal)] if goodput else []
        found += [_figure(load, accuracy, "accuracy", "Accuracy", "% of the answered items")] if accuracy else []
    return found


def _lines(load: Load, value: Callable[[LoadCell], Estimate | None], scale: float) -> list[Line]:
    found = []
    for number_, arm in enumerate(load.arms, start=1):
        points = []
        for cell in load.cells:
            known = value(cell) if cell.arm == arm.name else None
            if known is not None and known.value is not None:
                ends = (known.value if end is None else end for end in (known.ci_low, known.ci_high))
                points.append((cell.level, *(scale * v for v in (known.value, *ends))))
        found.append(Line(number_, arm.name, points))  # type: ignore[arg-type]
    return [line for line in found if line.points]


def _figure(load: Load, lines: Sequence[Line], name: str, title: str, y_label: str, *, ideal: bool = False) -> Figure:
    """Draw one value of every arm over the levels. ideal: and the offered rate."""
    offered = "requests per second offered" if load.request.request_rate else "requests at a time"
    key = [plots.label(line.number, line.arm) for line in lines]
    figure, axes = plots.canvas(f"{title} under load", y_label, 210, key, right=26)
    levels = sorted({level for line in lines for level, *_ in line.points})
    if ideal:
        axes.plot(levels, levels, color=RULE, lw=1.2, zorder=1)
    for line in lines:
        _line(axes, line)
    _axes(axes, levels, [value for line in lines for _, *values in line.points for value in values], name == "goodput")
    axes.set_xlabel(offered)
    plots.label_ends(axes, [(*line.points[-1][:2], str(line.number), INK) for line in lines])
    texts = [f"{line.arm}: {listed(f'{number(v, 2)} at {level:g}' for level, v, *_ in line.points)}" for line in lines]
    return plots.finish(
        figure,
        f"mtbench load, {load.request.suite}, {load.client.name} {load.client.version}, {load.started}",
        name=name,
        title=f"{title} under load",
        caption="Numbers at the right end name the arms. Bands are 95% intervals."
        f"{' The grey line is the offered rate.' if ideal else ''}",
        alt=f"{title} by arm over the {offered}. {'; '.join(texts)}.",
    )


def _line(axes: Axes, line: Line) -> None:
    first, place = line.number == 1, line.number - 1
    color = INK if first else (ACCENT, SHADES[7], MUTED)[line.number % 3]
    levels, values, low, high = zip(*line.points, strict=True)
    axes.plot(levels, values, color=color, lw=1.5, ls=DASHES[place % len(DASHES)], zorder=3)
    marker = MARKERS[place % len(MARKERS)]
    axes.plot(levels, values, ls="", marker=marker, ms=4.5, mec=color, mfc=PAPER if first else color, zorder=4)
    axes.fill_between(levels, low, high, color=color, alpha=0.13, lw=0, zorder=2)


def _axes(axes: Axes, levels: Sequence[float], reach: Sequence[float], from_zero: bool) -> None:
    """Give the axes a log scale of levels, and limits with space around the values in `reach`."""
    low, high = levels[0], levels[-1]
    space = (high / low) ** 0.04 if high > low else 1.2
    axes.set(xscale="log", xlim=(low / space, high * space))
    axes.set_xticks(list(levels), [f"{level:g}" for level in levels])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    bottom = 0.0 if from_zero else min(reach)
    beyond = 0.08 * (max(reach) - bottom) or 1.0
    axes.set_ylim(max(0.0, bottom - beyond), max(reach) + beyond)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid()
