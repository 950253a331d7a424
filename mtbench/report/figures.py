"""The figures of a report, one set per suite and batch size: what was gained, what it cost, where it came from.

Drawn with matplotlib: an SVG and a PNG each, the same bytes from the same results. Colours are few: one accent for
what multi-token arms do, ink and grey for the rest, and one scale of shades, which the page's viewer shares, for how
many tokens a forward committed. Arms are told apart by the numbers they carry in the tables, not by hue.
"""

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

Cell = Mapping[str, Any]

INK, MUTED, RULE, ACCENT, PAPER, WARN = "#1c2127", "#5b6570", "#d5dbe1", "#1769aa", "#fefefe", "#a8471a"
ON_LOW, ON_HIGH = "#1c2128", "#fffffe"  # text on the lighter shades, and on the darker ones
SHADES = ("#f6f7f8", "#e4e9ed", "#cfe5f7", "#9ccbf0", "#62abe4", "#1f6fb5", "#17568f", "#103f6b", "#0a2a49")
HIGH = 5  # the first shade that needs light text

WIDTH = 400  # points, about what a phone has
MOST_TICKS = 5  # of an axis
HALVES, TENTHS = (tuple(1 + i / n for i in range(9 * n)) for n in (2, 10))  # of a decade
STYLE: Any = {
    "svg.hashsalt": "mtbench",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "text.color": INK,
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
    """One figure as files and in words."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes


def shade(tokens: int) -> int:
    """The shade for that many tokens in one forward; the last one stands for all that are more."""
    return min(tokens, len(SHADES) - 1)


def draw(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], note: str) -> list[Drawing]:
    """The figures of one suite and batch size, without those nothing was measured for.

    numbers: arm -> the number it carries; own: arm -> its `speedup` entry over the baseline on its own checkpoint;
    note: what a reader must know of figures that leave the page, such as that they are a demonstration.
    """
    sketches: list[Callable[..., Drawing | None]] = [_frontier, _histogram, _factors]
    cells = [cell for cell in cells if cell["status"] != "failed"]
    with mpl.rc_context(STYLE):
        drawn = [sketch(cells, numbers, own, note) for sketch in sketches]
    return [drawing for drawing in drawn if drawing is not None]


def _frontier(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], note: str) -> Drawing | None:
    """Speed against accuracy, with both intervals; without accuracy, speed alone."""
    timed = [c for c in cells if c["tokens_per_s"]["value"] is not None]
    scored = [c for c in timed if c["accuracy"] and c["accuracy"]["value"] is not None]
    if not scored:
        return _speeds(timed, numbers, own, note)
    figure, axes = canvas("Speed and accuracy of each arm", "up and to the right is better", 230, _key(scored, numbers))
    baselines = _baselines(cells)
    points = [(c["tokens_per_s"]["value"], c["accuracy"]["value"] * 100) for c in scored]
    for cell, (x, y) in zip(scored, points, strict=True):
        spread = cell["tokens_per_s"]
        if spread["ci_low"] is not None:
            axes.plot([spread["ci_low"], spread["ci_high"]], [y, y], color=MUTED, lw=1.1, zorder=2)
        if cell["accuracy"]["ci_low"] is not None:
            bounds = [cell["accuracy"]["ci_low"] * 100, cell["accuracy"]["ci_high"] * 100]
            axes.plot([x, x], bounds, color=MUTED, lw=1.1, zorder=2)
        _mark(axes, x, y, cell, baselines)
    sound = [p for cell, p in zip(scored, points, strict=True) if not cell["void"]]
    best = sorted(p for p in sound if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in sound))
    if len(best) > 1:
        axes.plot(*zip(*best, strict=True), color=ACCENT, lw=1, ls=(0, (4, 3)), alpha=0.7, zorder=1)
    low, high = _range([b for c in scored for b in _bounds(c["accuracy"], 100)])
    axes.set_ylim(max(-4.0, low), min(104.0, high))
    axes.set_xlim(*_range([b for c in scored for b in _bounds(c["tokens_per_s"])]))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("tokens per second")
    axes.set_ylabel("accuracy, %")
    axes.grid(color=RULE, lw=0.6)
    _label_points(axes, points, [numbers[c["arm"]] for c in scored])
    told = "; ".join(f"{c['arm']} {x:,.0f} tokens/s, {y:.1f}%" for c, (x, y) in zip(scored, points, strict=True))
    return finish(
        figure,
        note,
        name="frontier",
        title="Speed and accuracy of each arm",
        caption="Hollow points are the baselines. Lines through a point are its 95% intervals, and the dashed line "
        "joins the arms that no other beats in both (by their estimates; intervals may overlap).",
        alt=f"Scatter plot of accuracy over tokens per second: {told}.",
    )


def _speeds(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], note: str) -> Drawing | None:
    """Tokens per second alone, where nothing is scored."""
    if not cells:
        return None
    title = "Speed of each arm"
    figure, axes = canvas(title, "not scored: nothing is said of accuracy", 30 * len(cells) + 12, left=10)
    baselines = _baselines(cells)
    for row, cell in enumerate(cells):
        low, high = _bounds(cell["tokens_per_s"])[::2]
        axes.plot([low, high], [row, row], color=MUTED, lw=1.1, zorder=2)
        _mark(axes, cell["tokens_per_s"]["value"], row, cell, baselines)
        _row_label(axes, row - 0.34, cell, numbers)
    axes.set_ylim(len(cells) - 0.4, -0.8)
    axes.set_xlim(*_range([b for c in cells for b in _bounds(c["tokens_per_s"])]))
    axes.set_yticks([])
    axes.set_xlabel("tokens per second")
    axes.grid(axis="x", color=RULE, lw=0.6)
    told = "; ".join(f"{c['arm']} {c['tokens_per_s']['value']:,.1f}" for c in cells)
    return finish(
        figure,
        note,
        name="frontier",
        title=title,
        caption="Hollow points are the baselines. Lines are 95% intervals.",
        alt=f"Tokens per second: {told}.",
    )


def _histogram(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], note: str) -> Drawing | None:
    """Of an arm's forwards, how many committed 0, 1, 2 … tokens."""
    counted = [c for c in cells if c["commit_histogram"]]
    if not counted:
        return None
    title = "How many tokens each forward committed"
    sizes = sorted({shade(int(size)) for c in counted for size in c["commit_histogram"]})
    subtitle = "share of forwards; right: tokens per forward"
    figure, axes = canvas(title, subtitle, 34 * len(counted) + 10, left=14, right=44, axis=46)
    told = []
    for row, cell in enumerate(counted):
        shares = dict.fromkeys(sizes, 0.0)
        for size, n in cell["commit_histogram"].items():
            shares[shade(int(size))] += 100 * n / sum(cell["commit_histogram"].values())
        left = 0.0
        for size in sizes:
            empty = size == 0
            axes.barh(
                row,
                shares[size],
                left=left,
                height=0.44,
                color=SHADES[size],
                edgecolor=RULE if empty else PAPER,
                hatch="////" if empty else None,
                lw=0.8,
            )
            if shares[size] >= 7:
                color = ON_HIGH if size >= HIGH else ON_LOW
                share = f"{shares[size]:.0f}%"
                axes.text(
                    left + shares[size] / 2, row, share, ha="center", va="center_baseline", fontsize=9.5, color=color
                )
            left += shares[size]
        _row_label(axes, row - 0.32, cell, numbers)
        if cell["tokens_per_forward"] is not None:
            per_forward = f"{cell['tokens_per_forward']:.2f}"
            axes.text(102, row, per_forward, va="center_baseline", fontsize=11, fontweight="bold")
        told.append(f"{cell['arm']}: " + ", ".join(f"{shares[s]:.0f}% {_size(s)}" for s in sizes if shares[s]))
    axes.set_ylim(len(counted) - 0.6, -0.85)
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}%"))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    _shade_key(figure, sizes)
    return finish(
        figure,
        note,
        name="commits",
        title=title,
        caption="Shades are those of the generation viewer below. A forward that commits 0 tokens fills a cache or "
        "waits for a slower row of its batch.",
        alt=f"Stacked bars of tokens committed per forward. {'; '.join(told)}.",
    )


def _factors(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], note: str) -> Drawing | None:
    """A waterfall per arm: each factor moves on from where the last one ended, on a log scale."""
    explained = [c for c in cells if c["arm"] in own and own[c["arm"]]["factors"] and own[c["arm"]]["value"]]
    if not explained:
        return None
    title = "Where the speedup went"
    steps = {c["arm"]: _steps(own[c["arm"]]) for c in explained}
    lines = sum(len(s) + 1 for s in steps.values()) + 0.9 * len(explained)
    subtitle = "over the baseline on the same checkpoint; factors multiply"
    figure, axes = canvas(title, subtitle, 15.5 * lines, left=118, right=46, axis=26)
    edge = axes.get_yaxis_transform()
    y, reach, told = 0.0, [1.0], []
    for cell in explained:
        entry = own[cell["arm"]]
        label = name_of(cell, numbers, 50)
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
        y += 1
        at = 1.0
        for name, factor in steps[cell["arm"]]:
            color = ACCENT if factor >= 1 else WARN
            axes.barh(y, at * factor - at, left=at, height=0.62, color=color, alpha=0.85, lw=0)
            axes.plot([at * factor, at * factor], [y, y + 1], color=MUTED, lw=0.7, zorder=1)
            axes.text(-0.02, y, name, transform=edge, ha="right", va="center_baseline", fontsize=10, color=MUTED)
            axes.text(1.02, y, f"×{factor:.2f}", transform=edge, va="center_baseline", fontsize=10, color=MUTED)
            at *= factor
            reach.append(at)
            y += 1
        if entry["ci_low"] is not None:
            axes.plot([entry["ci_low"], entry["ci_high"]], [y, y], color=INK, lw=1.4, zorder=3)
            reach += [entry["ci_low"], entry["ci_high"]]
        axes.plot([entry["value"]], [y], "o", color=INK, ms=5.5, zorder=4)
        axes.text(-0.02, y, "speedup", transform=edge, ha="right", va="center_baseline", fontsize=10)
        total = f"×{entry['value']:.2f}"
        axes.text(1.02, y, total, transform=edge, va="center_baseline", fontsize=10, fontweight="bold")
        told.append(f"{cell['arm']}: " + ", ".join(f"{n} {f:.2f}" for n, f in steps[cell["arm"]]) + f", {total}")
        y += 1.9
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
        note,
        name="factors",
        title=title,
        caption="Each bar starts where the last one ended, and on this logarithmic scale their lengths add up to the "
        "speedup; the dot is the measured speedup with its 95% interval.",
        alt=f"Factors of the speedup over the baseline on the same checkpoint. {'; '.join(told)}.",
    )


def _steps(entry: Cell) -> list[tuple[str, float]]:
    """The factors whose product is the speedup; length only where it matters."""
    steps = [(label, float(entry["factors"][name])) for name, label in FACTORS.items()]
    length = entry["length_ratio"]
    if length and abs(length - 1) > 0.01:
        steps.append(("answer length", 1 / length))
    return [(name, factor) for name, factor in steps if factor > 0]


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
    """A figure of the common width, `height` points of which are the plot; under it `axis` points, then a key."""
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
    height = figure.get_size_inches()[1] * 72
    figure.text(4 / WIDTH, 5 / height, note, fontsize=8, color=MUTED, va="baseline")
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=200, facecolor="#ffffff", metadata={"Software": None})
    return Drawing(name, title, caption, alt, svg.getvalue(), png.getvalue())


def _mark(axes: Axes, x: float, y: float, cell: Cell, baselines: set[str]) -> None:
    if cell["void"]:
        axes.plot([x], [y], "x", color=MUTED, ms=7, mew=1.6, zorder=4)
        return
    hollow = cell["arm"] in baselines
    axes.plot([x], [y], "o", ms=7.5, mew=1.6, mec=INK if hollow else ACCENT, mfc=PAPER if hollow else ACCENT, zorder=4)


def _label_points(axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[int]) -> None:
    """Put each number beside its point, where it covers no other number, point or edge."""
    at = axes.transData.transform(points)
    box = axes.get_window_extent()
    scale = axes.figure.dpi / 72
    taken = [(float(x), float(y), 14.0) for x, y in at] + [(x, y, 8.0) for x, y in _dots(axes, 6 * scale)]
    for point, (x, y), name in zip(points, at, names, strict=True):
        best, least = (11.0, 9.0), math.inf
        for radius in (13, 20, 28, 38):
            for turn in (45, 135, 315, 225, 20, 160, 200, 340, 70, 110, 250, 290):
                dx, dy = radius * math.cos(math.radians(turn)), radius * math.sin(math.radians(turn))
                px, py = x + dx * scale, y + dy * scale
                inside = box.x0 + 6 * scale < px < box.x1 - 6 * scale and box.y0 + 6 * scale < py < box.y1 - 6 * scale
                crowd = sum(max(0.0, apart * scale - math.hypot(px - tx, py - ty)) for tx, ty, apart in taken)
                cost = crowd * 10 + radius + (0 if inside else 1000)
                if cost < least:
                    best, least = (dx, dy), cost
        taken.append((x + best[0] * scale, y + best[1] * scale, 14.0))
        far = math.hypot(*best) > 22
        axes.annotate(
            str(name),
            point,
            xytext=best,
            textcoords="offset points",
            ha="center",
            va="center_baseline",
            fontsize=11,
            fontweight="bold",
            zorder=5,
            arrowprops={"arrowstyle": "-", "color": MUTED, "lw": 0.6, "shrinkA": 5, "shrinkB": 4} if far else None,
        )


def _dots(axes: Axes, every: float) -> list[tuple[float, float]]:
    """The lines drawn so far as dots `every` pixels apart, to keep text off them."""
    dots = []
    for line in axes.get_lines():
        corners = axes.transData.transform(line.get_xydata())
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            steps = max(1, int(math.hypot(x1 - x0, y1 - y0) / every))
            dots += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return dots


def _baselines(cells: Sequence[Cell]) -> set[str]:
    return {entry["baseline"] for cell in cells for entry in cell["speedup"]}


def _key(cells: Sequence[Cell], numbers: Mapping[str, int]) -> list[str]:
    return [name_of(cell, numbers, 54) for cell in cells]


def name_of(cell: Cell, numbers: Mapping[str, int], most: int) -> str:
    """An arm as figures name it, with its number, in about `most` letters."""
    arm = cell["arm"] if len(cell["arm"]) <= most else f"{cell['arm'][: most - 1]}…"
    return f"{numbers[cell['arm']]}\u2002{arm}{' (void)' if cell['void'] else ''}"


def _row_label(axes: Axes, y: float, cell: Cell, numbers: Mapping[str, int]) -> None:
    edge = axes.get_yaxis_transform()
    axes.text(0, y, name_of(cell, numbers, 52), transform=edge, fontsize=10.5, va="baseline")


def _shade_key(figure: Figure, sizes: Sequence[int]) -> None:
    """Swatches under the plot: which shade is how many tokens."""
    height = figure.get_size_inches()[1] * 72
    x = 14.0
    for size in [None, *sizes]:
        text = "tokens:" if size is None else _count(size)
        if size is not None:
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
            x += 16
        figure.text(x / WIDTH, 26 / height, text, fontsize=10, color=MUTED, va="baseline")
        x += 13 + 6.2 * len(text)


def _count(size: int) -> str:
    return f"{size}+" if size == len(SHADES) - 1 else str(size)


def _size(size: int) -> str:
    return f"{_count(size)} token{'' if size == 1 else 's'}"


def _bounds(spread: Cell, times: float = 1.0) -> tuple[float, float, float]:
    value = spread["value"] * times
    if spread["ci_low"] is None or spread["ci_high"] is None:
        return value, value, value
    return spread["ci_low"] * times, value, spread["ci_high"] * times


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Axis limits with air on both sides, however close the values."""
    low, high = min(values), max(values)
    air = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
    return low - air, high + air


def log_ticks(low: float, high: float) -> list[float]:
    """At most five round numbers between the limits, 1 among them, apart enough for their labels."""
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), HALVES, TENTHS):
        ticks = [round(s * 10.0**e, 6) for e in range(-6, 7) for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 3:
            break
    apart = math.log(high / low) / 6
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: abs(math.log(t))):
        if len(kept) < MOST_TICKS and all(abs(math.log(tick / other)) >= apart for other in kept):
            kept.append(tick)
    return sorted(kept)
