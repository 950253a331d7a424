"""The figures of a report, one set per suite and batch size: speedups, speed and accuracy, tokens per forward, factors.

Each is drawn with matplotlib as an SVG and a PNG; the same results give the same bytes. There are few colours: one
accent for multi-token arms, ink and grey for the rest, and one scale of shades for the tokens that a forward committed,
which the page's viewer shares. The numbers of the tables tell the arms apart, not the hue.
"""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from mtbench.document.formatting import Spread, bounds, interval, listed, number, percent, times
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import ResultCell
from mtbench.results.verdict_words import withheld
from mtbench.statistics import LENGTH_RATIO_SHOWN_BEYOND

INK, MUTED, RULE, ACCENT, PAPER, WARN = "#1c2127", "#5b6570", "#d5dbe1", "#1769aa", "#fefefe", "#a8471a"
ON_LOW, ON_HIGH = "#1c2128", "#fffffe"  # text on the lighter shades, and on the darker ones
SHADES = ("#f6f7f8", "#e4e9ed", "#cfe5f7", "#9ccbf0", "#62abe4", "#1f6fb5", "#17568f", "#103f6b", "#0a2a49")
HIGH = 5  # the first shade that needs light text

SPEEDUPS = "speedups"  # name of the figure that a page starts with
WIDTH = 400  # points, about what a phone has
NAMES, NAME_LETTERS = 172, 25  # of the column with arms in a figure: points, and letters of a line
MOST_ROWS = 12  # arms of the figure that a page starts with
ROW = 26  # points of an arm in a figure with two lines for its name
NOTE_LETTERS, NOTE_LINE = 88, 10.5  # of the source below a figure: letters of a line, points of a line
MOST_TICKS = 4  # of an axis
HALVES, TENTHS = (tuple(1 + i / n for i in range(9 * n)) for n in (2, 10))  # of a decade
LABEL_RADII = (13, 20, 28, 38)  # distances of a label from its point, in points
LABEL_ANGLES = (45, 135, 315, 225, 20, 160, 200, 340, 70, 110, 250, 290)  # the preferred ones first
PART = re.compile(r"[ ,:@/]")  # between the parts of an arm's name
STYLE: Any = {
    "svg.hashsalt": "mtbench",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a $
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "hatch.linewidth": 0.6,
}
FACTORS = {
    "tokens_per_forward": "tokens per forward",
    "forward_time": "forward time",
    "utilisation": "utilisation",
    "host": "host",
    "decode_share": "decode share",
}


class Drawing(NamedTuple):
    """One figure: its files, its caption, and its content in words."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes


def shade(tokens: int) -> int:
    """Return the shade for so many tokens in one forward; the last shade stands for all larger numbers."""
    return min(tokens, len(SHADES) - 1)


@dataclass(frozen=True, slots=True)
class Scene:
    """What the figures of one suite and batch size are drawn from."""

    cells: Sequence[ResultCell]  # without failed ones
    numbers: Mapping[str, int]  # arm -> its number in the tables
    own: Mapping[str, Speedup]  # arm -> its speedup over the baseline on its own checkpoint
    note: str  # printed in every figure, since figures leave the page: its source, and that it is a demonstration
    headline: Mapping[str, Speedup] = field(default_factory=dict)  # arm -> its speedup in the main table
    names: Mapping[str, str] = field(default_factory=dict)  # arm -> its words; without them its id

    def label(self, cell: ResultCell, longest: int) -> str:
        """Return the name of an arm in a figure, with its number, cut at about `longest` letters."""
        return arm_label(self.numbers[cell.arm], self.name(cell.arm), longest, void=bool(cell.void))

    def name(self, arm: str) -> str:
        """Return an arm in words."""
        return self.names.get(arm, arm)

    def key(self, cells: Sequence[ResultCell]) -> list[str]:
        return [self.label(cell, 54) for cell in cells]

    @property
    def baselines(self) -> set[str]:
        return {speedup.baseline for cell in self.cells for speedup in cell.speedup}


def draw(scene: Scene) -> list[Drawing]:
    """Return the figures of one suite and batch size, without those that nothing was measured for."""
    sketches: list[Callable[[Scene], Drawing | None]] = [_speedups, _frontier, _histogram, _factors]
    with mpl.rc_context(STYLE):
        drawn = [sketch(scene) for sketch in sketches]
    return [drawing for drawing in drawn if drawing is not None]


def _speedups(scene: Scene) -> Drawing | None:
    """Draw the speedup of each arm with its interval, on a log scale; to the right its accuracy, if there is one."""
    shown = [(cell, scene.headline[cell.arm]) for cell in scene.cells if cell.arm in scene.headline]
    shown = [(cell, speedup) for cell, speedup in shown if speedup.value]
    if not shown:
        return None
    caption = (
        "Wall time of plain decoding over that of the arm, on the same prompts. Filled points are faster by their "
    )
    caption += "verdict; hollow points are not shown to be faster."
    if len(shown) > MOST_ROWS:
        caption += f" The {MOST_ROWS} fastest of {len(shown)} arms; the table has all."
        least = sorted((speedup.value or 0.0 for _, speedup in shown), reverse=True)[MOST_ROWS - 1]
        shown = [(cell, speedup) for cell, speedup in shown if (speedup.value or 0.0) >= least]
    baselines = {scene.name(speedup.baseline) for _, speedup in shown}
    over = baselines.pop() if len(baselines) == 1 else "the deployed baseline"
    title = f"Speedup over {over}"
    scored = any(cell.accuracy is not None for cell, _ in shown)
    subtitle = f"95% intervals; right: speedup{_and_accuracy(scene, shown)}"
    right = 88 if scored else 46
    figure, axes = canvas(title, subtitle, ROW * len(shown) + 6, left=NAMES, right=right, axis=26)
    reach, texts = [1.0], []
    for row, (cell, speedup) in enumerate(shown):
        _interval(axes, row, cell, speedup)
        reach += [speedup.value or 1.0, *(bounds(speedup) or ())]
        edge = axes.get_yaxis_transform()
        _arm_text(axes, row, scene, cell, WIDTH - NAMES - right)
        beside: Any = {"transform": edge, "va": "center_baseline", "fontsize": 10, "clip_on": False}
        unit = 1 / (WIDTH - NAMES - right)
        weight = "normal" if withheld(speedup.verdict) else "bold"
        axes.text(1 + 40 * unit, row, times(speedup.value, 2), ha="right", fontweight=weight, **beside)
        accuracy = None if cell.accuracy is None else cell.accuracy.value
        if scored:
            axes.text(1 + 86 * unit, row, f"{percent(accuracy)}%", ha="right", color=MUTED, **beside)
        texts.append(f"{scene.name(cell.arm)} {times(speedup.value, 2)} {interval(bounds(speedup), digits=2) or ''}")
    _log_axis(axes, reach)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks([])
    return finish(
        figure,
        scene.note,
        name=SPEEDUPS,
        title=title,
        caption=caption,
        alt=f"{title}, {subtitle}. {'; '.join(text.strip() for text in texts)}.",
    )


def _and_accuracy(scene: Scene, shown: Sequence[tuple[ResultCell, Speedup]]) -> str:
    """Return what the figure says of accuracy in its subtitle: that it has it, and that of a common baseline."""
    if all(cell.accuracy is None for cell, _ in shown):
        return ""
    baselines = {speedup.baseline for _, speedup in shown}
    common = [cell for cell in scene.cells if {cell.arm} == baselines and cell.accuracy is not None]
    own = "".join(f" (baseline {percent(cell.accuracy.value)}%)" for cell in common if cell.accuracy is not None)
    return f" and accuracy{own}"


def _arm_text(axes: Axes, row: int, scene: Scene, cell: ResultCell, plot: float) -> None:
    """Write an arm's number and words to the left of the plot, in two lines at most. plot: its width in points."""
    name = cut(scene.name(cell.arm), 2 * NAME_LETTERS - 4) + (" (void)" if cell.void else "")
    lines = wrapped(name, NAME_LETTERS)
    style: Any = {"transform": axes.get_yaxis_transform(), "fontsize": 10, "linespacing": 1.05}
    axes.text(-(NAMES - 18) / plot, row, str(scene.numbers[cell.arm]), va="center_baseline", ha="right", **style)
    align = "center_baseline" if len(lines) == 1 else "center"
    axes.text(-(NAMES - 23) / plot, row, "\n".join(lines), va=align, **style)


def _interval(axes: Axes, row: int, cell: ResultCell, speedup: Speedup) -> None:
    """Draw a speedup and its interval: a cross if the arm is void, filled if it is faster by its verdict."""
    limits = bounds(speedup)
    if limits is not None and min(limits) > 0:
        axes.plot(limits, [row, row], color=MUTED, lw=2, solid_capstyle="butt", zorder=2)
    if cell.void:
        axes.plot([speedup.value or 1.0], [row], "x", color=MUTED, ms=7, mew=1.6, zorder=4)
        return
    fill = ACCENT if speedup.verdict.startswith("faster") else PAPER
    edge = WARN if speedup.verdict.startswith("slower") else ACCENT
    axes.plot([speedup.value or 1.0], [row], "o", ms=7, mew=1.6, mec=edge, mfc=fill, zorder=4)


def _log_axis(axes: Axes, reach: Sequence[float]) -> None:
    """Give the x axis a log scale of factors that shows all of `reach` and marks 1."""
    known = [value for value in reach if value > 0]
    low, high = min(known), max(known)
    space = max(1.04, (high / low) ** 0.04)
    axes.axvline(1, color=INK, lw=0.9, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, low / space), max(1.1, high * space))
    ticks = log_ticks(*axes.get_xlim())
    axes.set_xticks(ticks, [f"×{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)


def _frontier(scene: Scene) -> Drawing | None:
    """Draw speed against accuracy, with both intervals; if nothing is scored, speed alone."""
    timed = [c for c in scene.cells if c.tokens_per_s.value is not None]
    points = [
        (c, c.tokens_per_s.value, 100 * c.accuracy.value)
        for c in timed
        if c.tokens_per_s.value is not None and c.accuracy is not None and c.accuracy.value is not None
    ]
    if not points:
        return _speeds(scene, timed)
    scored = [cell for cell, _, _ in points]
    title = "Speed and accuracy of each arm"
    figure, axes = canvas(title, "up and to the right is better", 230, scene.key(scored))
    rates = [_span(c.tokens_per_s) for c in scored]
    accuracies = [_span(c.accuracy, 100) for c in scored if c.accuracy is not None]
    for (cell, x, y), rate, accuracy in zip(points, rates, accuracies, strict=True):
        if len(rate) == 2:
            axes.plot(rate, [y, y], color=MUTED, lw=1.1, zorder=2)
        if len(accuracy) == 2:
            axes.plot([x, x], accuracy, color=MUTED, lw=1.1, zorder=2)
        _mark(axes, x, y, cell, scene.baselines)
    best = _undominated([(x, y) for cell, x, y in points if not cell.void])
    if len(best) > 1:
        axes.plot(*zip(*best, strict=True), color=ACCENT, lw=1, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    low, high = _range([b for span in accuracies for b in span] + [y for _, _, y in points])
    axes.set_ylim(max(-4.0, low), min(104.0, high))
    axes.set_xlim(*_range([b for span in rates for b in span] + [x for _, x, _ in points]))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("accuracy, %")
    axes.grid(color=RULE, lw=0.6)
    _label_points(axes, [(x, y) for _, x, y in points], [scene.numbers[c.arm] for c in scored])
    texts = [f"{scene.name(cell.arm)} {number(x, 0)} tokens/s, {number(y, 1)}%" for cell, x, y in points]
    return finish(
        figure,
        scene.note,
        name="frontier",
        title=title,
        caption="Squares are baselines. Lines through a point are its 95% intervals. The dashed line joins the "
        "arms that no other arm beats in both (by their estimates; intervals may overlap).",
        alt=f"Scatter plot of accuracy over tokens per second: {'; '.join(texts)}.",
    )


def _undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both coordinates, from left to right."""
    return sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))


def _speeds(scene: Scene, timed: Sequence[ResultCell]) -> Drawing | None:
    """Draw tokens per second alone, for a suite that is not scored."""
    if not timed:
        return None
    title = "Speed of each arm"
    figure, axes = canvas(title, "accuracy was not scored", 30 * len(timed) + 12, left=10)
    reach: list[float] = []
    for row, cell in enumerate(timed):
        rate = cell.tokens_per_s.value or 0.0
        span = _span(cell.tokens_per_s)
        axes.plot(span or [rate, rate], [row, row], color=MUTED, lw=1.1, zorder=2)
        _mark(axes, rate, row, cell, scene.baselines)
        _row_label(axes, row - 0.34, scene.label(cell, 52))
        reach += [rate, *span]
    axes.set_ylim(len(timed) - 0.4, -0.8)
    axes.set_xlim(*_range(reach))
    axes.set_yticks([])
    axes.set_xlabel("tokens per second")
    axes.grid(axis="x", color=RULE, lw=0.6)
    texts = [f"{scene.name(cell.arm)} {number(cell.tokens_per_s.value, 1)}" for cell in timed]
    return finish(
        figure,
        scene.note,
        name="frontier",
        title=title,
        caption="Squares are baselines. Lines are 95% intervals.",
        alt=f"Tokens per second: {'; '.join(texts)}.",
    )


def _histogram(scene: Scene) -> Drawing | None:
    """Draw the share of an arm's forwards that committed 0, 1, 2 … tokens."""
    counted_cells = [c for c in scene.cells if c.commit_histogram]
    if not counted_cells:
        return None
    title = "How many tokens each forward committed"
    sizes = sorted({shade(int(size)) for c in counted_cells for size in c.commit_histogram})
    subtitle = "share of forwards; right: tokens per forward"
    figure, axes = canvas(title, subtitle, 34 * len(counted_cells) + 10, left=14, right=44, axis=46)
    texts = []
    for row, cell in enumerate(counted_cells):
        shares = _commit_shares(cell, sizes)
        _stacked_bar(axes, row, shares)
        _row_label(axes, row - 0.32, scene.label(cell, 52))
        if cell.tokens_per_forward is not None:
            per_forward = number(cell.tokens_per_forward, 2)
            axes.text(102, row, per_forward, va="center_baseline", fontsize=11, fontweight="bold")
        shown = listed(f"{share:.0f}% {_tokens(size)}" for size, share in shares.items() if share)
        texts.append(f"{scene.name(cell.arm)}: {shown}")
    axes.set_ylim(len(counted_cells) - 0.6, -0.85)
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}%"))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    _shade_key(figure, sizes)
    return finish(
        figure,
        scene.note,
        name="commits",
        title=title,
        caption="The generation viewer below has the same shades. A forward that commits 0 tokens fills a cache or "
        "waits for a slower row of its batch.",
        alt=f"Stacked bars of tokens committed per forward. {'; '.join(texts)}.",
    )


def _commit_shares(cell: ResultCell, sizes: Sequence[int]) -> dict[int, float]:
    """Return the percentage of the forwards in each shade."""
    shares = dict.fromkeys(sizes, 0.0)
    forwards = sum(cell.commit_histogram.values())
    for size, n in cell.commit_histogram.items():
        shares[shade(int(size))] += 100 * n / forwards
    return shares


def _stacked_bar(axes: Axes, row: int, shares: Mapping[int, float]) -> None:
    left = 0.0
    for size, share in shares.items():
        empty = size == 0
        axes.barh(
            row,
            share,
            left=left,
            height=0.44,
            color=SHADES[size],
            edgecolor=RULE if empty else PAPER,
            hatch="////" if empty else None,
            lw=0.8,
        )
        if share >= 7:
            axes.text(
                left + share / 2,
                row,
                f"{share:.0f}%",
                ha="center",
                va="center_baseline",
                fontsize=9.5,
                color=ON_HIGH if size >= HIGH else ON_LOW,
            )
        left += share


def _factors(scene: Scene) -> Drawing | None:
    """Draw a waterfall per arm: each factor starts where the last one ended, on a log scale."""
    steps = {cell.arm: _steps(scene.own[cell.arm]) for cell in scene.cells if cell.arm in scene.own}
    explained = [cell for cell in scene.cells if steps.get(cell.arm)]
    if not explained:
        return None
    title = "Factors of the speedup"
    lines = sum(len(steps[cell.arm]) + 1 for cell in explained) + 0.9 * len(explained)
    subtitle = "over the baseline on the same checkpoint; factors multiply"
    figure, axes = canvas(title, subtitle, 15.5 * lines, left=118, right=46, axis=26)
    y, reach, texts = 0.0, [1.0], []
    for cell in explained:
        speedup, of_arm = scene.own[cell.arm], steps[cell.arm]
        _waterfall(axes, y, scene.label(cell, 50), of_arm, speedup)
        ends = itertools.accumulate((factor for _, factor in of_arm), lambda at, factor: at * factor)
        reach += [*ends, *(bounds(speedup) or ())]
        shown = listed(f"{name} {number(factor, 2)}" for name, factor in of_arm)
        texts.append(f"{scene.name(cell.arm)}: {shown}, {times(speedup.value, 2)}")
        y += len(of_arm) + 2.9
    axes.axvline(1, color=INK, lw=0.9, zorder=0)
    axes.set_xscale("log")
    span = max(1.25, *(max(r, 1 / r) for r in reach if r > 0))
    low, high = min(0.97, min(reach) / 1.06), max(1.03, max(reach) * 1.06)
    axes.set_xlim(min(low, span**-0.15), max(high, span**0.15))
    ticks = log_ticks(*axes.get_xlim())
    axes.set_xticks(ticks, [f"×{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(y - 1.2, -0.8)
    axes.set_yticks([])
    return finish(
        figure,
        scene.note,
        name="factors",
        title=title,
        caption="Each bar starts where the last one ended. On this logarithmic scale their lengths add up to the "
        "speedup. The dot is the measured speedup with its 95% interval.",
        alt=f"Factors of the speedup over the baseline on the same checkpoint. {'; '.join(texts)}.",
    )


def _steps(speedup: Speedup) -> list[tuple[str, float]]:
    """Return the factors whose product is the speedup, by name; the answer length only if it matters."""
    if speedup.factors is None or not speedup.value:
        return []
    steps = [(label, getattr(speedup.factors, name)) for name, label in FACTORS.items()]
    length = speedup.length_ratio
    if length and abs(length - 1) > LENGTH_RATIO_SHOWN_BEYOND:
        steps.append(("answer length", 1 / length))
    return [(label, factor) for label, factor in steps if factor > 0]


def _waterfall(axes: Axes, y: float, label: str, steps: Sequence[tuple[str, float]], speedup: Speedup) -> None:
    """Draw one arm's factors from row y on, and below them its speedup."""
    edge = axes.get_yaxis_transform()
    axes.text(
        -114 / (WIDTH - 164),
        y,
        label,
        transform=edge,
        fontsize=10.5,
        fontweight="bold",
        va="center_baseline",
        bbox={"facecolor": PAPER, "lw": 0, "pad": 1.5},
    )
    at = 1.0
    for row, (name, factor) in enumerate(steps, start=1):
        color = ACCENT if factor >= 1 else WARN
        axes.barh(y + row, at * factor - at, left=at, height=0.62, color=color, alpha=0.85, lw=0)
        axes.plot([at * factor, at * factor], [y + row, y + row + 1], color=MUTED, lw=0.7, zorder=1)
        _beside(axes, y + row, name, times(factor, 2), color=MUTED)
        at *= factor
    y += len(steps) + 1
    limits = bounds(speedup)
    if limits is not None:
        axes.plot(limits, [y, y], color=INK, lw=1.4, zorder=3)
    axes.plot([speedup.value or 0.0], [y], "o", color=INK, ms=5.5, zorder=4)
    _beside(axes, y, "speedup", times(speedup.value, 2), fontweight="bold")


def _beside(axes: Axes, y: float, name: str, value: str, color: str = INK, fontweight: str = "normal") -> None:
    """Write a name to the left of the plot and a value to the right of it."""
    edge = axes.get_yaxis_transform()
    style: dict[str, Any] = {"transform": edge, "va": "center_baseline", "fontsize": 10, "color": color}
    axes.text(-0.02, y, name, ha="right", **style)
    axes.text(1.02, y, value, fontweight=fontweight, **style)


def canvas(
    title: str,
    subtitle: str,
    height: float,
    key: Sequence[str] = (),
    *,
    left: float = 46,
    right: float = 10,
    axis: float = 44,
) -> tuple[Figure, Axes]:
    """Return a figure of the common width whose plot is `height` points high, and its axes.

    Under the plot are `axis` points for labels, then a line for every entry of the key.
    """
    top, below = 46, axis + 15.5 * len(key) + 16
    total = height + top + below
    figure = Figure(figsize=(WIDTH / 72, total / 72))
    axes = figure.add_axes((left / WIDTH, below / total, (WIDTH - left - right) / WIDTH, height / total))
    figure.text(4 / WIDTH, 1 - 14 / total, title, fontsize=13, fontweight="bold", va="baseline")
    figure.text(4 / WIDTH, 1 - 31 / total, subtitle, fontsize=10.5, color=MUTED, va="baseline")
    for line, text in enumerate(key):
        figure.text(14 / WIDTH, (below - axis - 8 - 15.5 * line) / total, text, fontsize=10.5, va="baseline")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, pad=5)
    return figure, axes


def finish(figure: Figure, note: str, *, name: str, title: str, caption: str, alt: str) -> Drawing:
    """Write the note below the figure, in as many lines as it needs, and return it as SVG and PNG."""
    height = figure.get_size_inches()[1] * 72
    lines = wrapped(note, NOTE_LETTERS)
    for line, text in enumerate(lines):
        place = (4 / WIDTH, (5 - NOTE_LINE * line) / height)
        figure.text(*place, text, fontsize=8, color=MUTED, va="baseline")
    below = NOTE_LINE * (len(lines) - 1)
    paper = Bbox([[0, -below / 72], [WIDTH / 72, height / 72]])
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True, bbox_inches=paper, metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=200, facecolor="#ffffff", bbox_inches=paper, metadata={"Software": None})
    return Drawing(name, title, caption, alt, svg.getvalue(), png.getvalue())


def _mark(axes: Axes, x: float, y: float, cell: ResultCell, baselines: set[str]) -> None:
    """Draw an arm's point: a cross if it is void, a square if it is a baseline."""
    if cell.void:
        axes.plot([x], [y], "x", color=MUTED, ms=7, mew=1.6, zorder=4)
        return
    marker, color = ("s", INK) if cell.arm in baselines else ("o", ACCENT)
    axes.plot([x], [y], marker, ms=7.5, mec=color, mfc=color, zorder=4)


def _label_points(axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[int]) -> None:
    """Write each number near its point, off the other numbers, the points, the lines and the edge of the plot."""
    places = axes.transData.transform(points)
    scale = axes.figure.dpi / 72
    taken = [(float(x), float(y), 14.0) for x, y in places] + [(x, y, 8.0) for x, y in _dots(axes, 6 * scale)]
    for point, (x, y), name in zip(points, places, names, strict=True):
        dx, dy = _free_offset(axes, x, y, taken)
        taken.append((x + dx * scale, y + dy * scale, 14.0))
        far = math.hypot(dx, dy) > 22
        arrow = {"arrowstyle": "-", "color": MUTED, "lw": 0.6, "shrinkA": 5, "shrinkB": 4}
        axes.annotate(
            str(name),
            point,
            xytext=(dx, dy),
            textcoords="offset points",
            ha="center",
            va="center_baseline",
            fontsize=11,
            fontweight="bold",
            zorder=5,
            arrowprops=arrow if far else None,
        )


def _free_offset(axes: Axes, x: float, y: float, taken: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the offset in points from pixel (x, y) at which a label covers least.

    taken: (x, y, distance to keep in points) of what is drawn, x and y in pixels.
    """
    box, scale = axes.get_window_extent(), axes.figure.dpi / 72
    best, least = (11.0, 9.0), math.inf
    for radius, angle in itertools.product(LABEL_RADII, LABEL_ANGLES):
        dx, dy = radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle))
        px, py = x + dx * scale, y + dy * scale
        inside = box.x0 + 6 * scale < px < box.x1 - 6 * scale and box.y0 + 6 * scale < py < box.y1 - 6 * scale
        overlap = sum(max(0.0, apart * scale - math.hypot(px - tx, py - ty)) for tx, ty, apart in taken)
        cost = 10 * overlap + radius + (0 if inside else 1000)
        if cost < least:
            best, least = (dx, dy), cost
    return best


def _dots(axes: Axes, every: float) -> list[tuple[float, float]]:
    """Return the lines drawn so far as dots `every` pixels apart, so that labels keep off them."""
    dots = []
    for line in axes.get_lines():
        corners = axes.transData.transform(line.get_xydata())
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            steps = max(1, int(math.hypot(x1 - x0, y1 - y0) / every))
            dots += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return dots


def arm_label(number: int, arm: str, longest: int, *, void: bool = False) -> str:
    """Return the name of an arm with its number; one of more than `longest` letters is cut between its parts."""
    return f"{number}\u2002{cut(arm, longest)}{' (void)' if void else ''}"


def cut(name: str, longest: int) -> str:
    """Return a name; one of more than `longest` letters is cut between its parts."""
    if len(name) <= longest:
        return name
    parts = [match.end() for match in PART.finditer(name) if match.end() < longest]
    return f"{name[: parts[-1] if parts else longest - 1].rstrip()}…"


def wrapped(text: str, letters: int) -> list[str]:
    """Return a text in lines of at most `letters` letters, broken between words; a longer word has a line alone."""
    return textwrap.wrap(text, letters, break_long_words=False, break_on_hyphens=False) or [""]


def _row_label(axes: Axes, y: float, label: str) -> None:
    axes.text(0, y, label, transform=axes.get_yaxis_transform(), fontsize=10.5, va="baseline")


def _shade_key(figure: Figure, sizes: Sequence[int]) -> None:
    """Draw the key of the shades under the plot."""
    height = figure.get_size_inches()[1] * 72
    x = _key_text(figure, 14.0, height, "tokens:")
    for size in sizes:
        swatch = Rectangle(
            (x / WIDTH, 24 / height),
            11 / WIDTH,
            11 / height,
            transform=figure.transFigure,
            facecolor=SHADES[size],
            edgecolor=RULE,
            hatch="////" if size == 0 else None,
            lw=0.8,
        )
        figure.add_artist(swatch)
        x = _key_text(figure, x + 16, height, _shade_name(size))


def _key_text(figure: Figure, x: float, height: float, text: str) -> float:
    """Write a text of the key at x and return where the next one starts, both in points."""
    figure.text(x / WIDTH, 26 / height, text, fontsize=10, color=MUTED, va="baseline")
    return x + 13 + 6.2 * len(text)


def _shade_name(size: int) -> str:
    return f"{size}+" if size == len(SHADES) - 1 else str(size)


def _tokens(size: int) -> str:
    return "1 token" if size == 1 else f"{_shade_name(size)} tokens"


def _span(spread: Spread, scale: float = 1.0) -> list[float]:
    """Return the interval of a record as a list, empty if it has none."""
    return [limit * scale for limit in bounds(spread) or ()]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return axis limits with space on both sides, also for values that are all alike."""
    low, high = min(values), max(values)
    space = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
    return low - space, high + space


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most MOST_TICKS round numbers between the limits, 1 among them, with room for their labels."""
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), HALVES, TENTHS):
        ticks = [round(s * 10.0**e, 6) for e in range(-6, 7) for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 3:
            break
    apart = math.log(high / low) / 4.5
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: abs(math.log(t))):
        if len(kept) < MOST_TICKS and all(abs(math.log(tick / other)) >= apart for other in kept):
            kept.append(tick)
    return sorted(kept)
