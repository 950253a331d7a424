"""The figure of a load: goodput over the offered load, a line per arm with its 95 % intervals."""

from collections.abc import Mapping

from matplotlib.ticker import MaxNLocator

from mtbench.document import plots
from mtbench.document.formatting import bounds, listed, number
from mtbench.document.model import Figure
from mtbench.document.plots import ACCENT, DASHES, INK, PAPER, RULE
from mtbench.experiments.load.format import Load

Point = tuple[float, float, list[float] | None]  # level, value, its interval


def draw(load: Load) -> list[Figure]:
    """Return the figure; none before a point has ended."""
    lines = {arm.name: _points(load, arm.name) for arm in load.arms}
    numbers = {arm: place for place, arm in enumerate(lines, start=1) if lines[arm]}
    with plots.style():
        return [_figure(load, lines, numbers)] if numbers else []


def _figure(load: Load, lines: Mapping[str, list[Point]], numbers: Mapping[str, int]) -> Figure:
    """Draw the goodput of every arm over the levels, and the offered rate."""
    limited = bool(load.request.slo)
    title = "Goodput" if limited else "Answered requests"
    y_label = f"requests per second answered{' within all limits' if limited else ''}"
    offered = f"{load.unit}s per second offered" if load.request.request_rate else f"{load.unit}s at a time"
    key = [plots.label(place, arm) for arm, place in numbers.items()]
    figure, axes = plots.canvas(f"{title} under load", y_label, max(210, plots.APART * len(key)), key, right=26)
    levels = sorted({level for points in lines.values() for level, *_ in points})
    ideal = bool(load.request.request_rate) and load.unit == "request"
    if ideal:
        axes.plot(levels, levels, color=RULE, lw=1.2, zorder=1)
    for arm, place in numbers.items():
        color = INK if place == 1 else ACCENT
        at, values = [level for level, *_ in lines[arm]], [v for _, v, _ in lines[arm]]
        axes.plot(at, values, color=color, lw=1.5, ls=DASHES[place % len(DASHES) - 1], zorder=3)
        axes.plot(at, values, "o", ms=4.5, mec=color, mfc=PAPER if place == 1 else color, zorder=4)
        for level, _, limits in lines[arm]:
            plots.whisker(axes, level, limits)
    axes.set_xscale("log")
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    axes.margins(0.05, 0.08)
    axes.autoscale_view()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid()
    axes.set_xlabel(offered)
    plots.label_ends(axes, [(*lines[arm][-1][:2], str(place), INK) for arm, place in numbers.items()])
    texts = [f"{arm}: {listed(f'{number(v, 2)} at {level:g}' for level, v, _ in lines[arm])}" for arm in numbers]
    return plots.finish(
        figure,
        f"mtbench load, {load.request.suite}, {load.client.name} {load.client.version}, {load.started}",
        name="goodput",
        title=f"{title} under load",
        caption="Numbers at the right end name the arms. Lines through points are 95% intervals."
        f"{' The grey line is the offered rate.' if ideal else ''}",
        alt=f"{title} by arm over the {offered}. {'; '.join(texts)}.",
    )


def _points(load: Load, arm: str) -> list[Point]:
    known = [(cell.level, cell.goodput) for cell in load.cells if cell.arm == arm]
    return [(level, goodput.value, bounds(goodput)) for level, goodput in known if goodput.value is not None]
