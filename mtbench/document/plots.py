"""The common style of the figures: colours, a canvas of one width, labels, axes; and a figure as SVG and PNG.

The same results give the same bytes. There are few colours: one accent for multi-token arms, ink and grey for the rest,
and one scale of shades for the tokens that a forward committed, which the page's viewer shares. Numbers and marks tell
arms apart, not the hue.
"""

import io
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import Bbox

from mtbench.document.model import Figure

INK, MUTED, RULE, ACCENT, PAPER, WARN = "#1c2127", "#5b6570", "#d5dbe1", "#1769aa", "#fefefe", "#a8471a"
ON_LOW, ON_HIGH = "#1c2128", "#fffffe"  # text on the lighter shades, and on the darker ones
SHADES = ("#f6f7f8", "#e4e9ed", "#cfe5f7", "#9ccbf0", "#62abe4", "#1f6fb5", "#17568f", "#103f6b", "#0a2a49")

WIDTH = 400  # points, about what a phone has
LONGEST = 54  # letters of a name in a key
NOTE_LETTERS, NOTE_LINE = 88, 10.5  # of the source below a figure: letters of a line, points of a line
MOST_TICKS = 4  # of an axis
HALVES, TENTHS = (tuple(1 + i / n for i in range(9 * n)) for n in (2, 10))  # of a decade
PART = re.compile(r"[ ,:@/]")  # between the parts of an arm's name
APART = 12.5  # points between the labels of two lines, at least
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
STYLE: Any = {
    "svg.hashsalt": "mtbench",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a name may hold a $
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "hatch.linewidth": 0.6,
}


def style() -> Any:
    """Return the context in which all figures are drawn."""
    return mpl.rc_context(STYLE)


def canvas(
    title: str,
    subtitle: str,
    height: float,
    key: Sequence[str] = (),
    *,
    left: float = 46,
    right: float = 10,
    axis: float = 44,
    panels: int = 1,
) -> tuple[Canvas, Axes]:
    """Return a figure of the common width with plots above each other, `height` points high, and the axes of the last.

    Under each plot are `axis` points for labels, then a line for every entry of the key.
    """
    top, below = 46, axis + 15.5 * len(key) + 16
    total = height * panels + axis * (panels - 1) + top + below
    figure = Canvas(figsize=(WIDTH / 72, total / 72))
    for panel in reversed(range(panels)):
        low = below + (height + axis) * panel
        axes = figure.add_axes((left / WIDTH, low / total, (WIDTH - left - right) / WIDTH, height / total))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, pad=5)
    figure.text(4 / WIDTH, 1 - 14 / total, title, fontsize=13, fontweight="bold", va="baseline")
    figure.text(4 / WIDTH, 1 - 31 / total, subtitle, fontsize=10.5, color=MUTED, va="baseline")
    for line, text in enumerate(key):
        figure.text(14 / WIDTH, (below - axis - 8 - 15.5 * line) / total, text, fontsize=10.5, va="baseline")
    return figure, axes


def finish(figure: Canvas, note: str, *, name: str, title: str, caption: str, alt: str) -> Figure:
    """Write the note below the figure, in as many lines as it needs, and return it as SVG and PNG; also without it."""
    height = figure.get_size_inches()[1] * 72
    bare, svg, png = io.StringIO(), io.StringIO(), io.BytesIO()
    plain: Any = {"format": "svg", "transparent": True, "metadata": {"Date": None, "Creator": None}}
    figure.savefig(bare, **plain)
    lines = wrapped(note, NOTE_LETTERS)
    for line, text in enumerate(lines):
        place = (4 / WIDTH, (5 - NOTE_LINE * line) / height)
        figure.text(*place, text, fontsize=8, color=MUTED, va="baseline")
    below = NOTE_LINE * (len(lines) - 1)
    paper = Bbox([[0, -below / 72], [WIDTH / 72, height / 72]])
    figure.savefig(svg, bbox_inches=paper, **plain)
    figure.savefig(png, format="png", dpi=200, facecolor="#ffffff", bbox_inches=paper, metadata={"Software": None})
    return Figure(name, title, caption, alt, svg.getvalue(), png.getvalue(), note, bare.getvalue())


def label(number: int, name: str, longest: int = LONGEST, *, void: bool = False) -> str:
    """Return a name with its number; one of more than `longest` letters is cut between its parts."""
    return f"{number}\u2002{cut(name, longest)}{' (void)' if void else ''}"


def cut(name: str, longest: int) -> str:
    """Return a name; one of more than `longest` letters is cut between its parts."""
    if len(name) <= longest:
        return name
    parts = [match.end() for match in PART.finditer(name) if match.end() < longest]
    return f"{name[: parts[-1] if parts else longest - 1].rstrip()}…"


def wrapped(text: str, letters: int) -> list[str]:
    """Return a text in lines of at most `letters` letters, broken between words; a longer word has a line alone."""
    return textwrap.wrap(text, letters, break_long_words=False, break_on_hyphens=False) or [""]


def above(axes: Axes, y: float, text: str, *, right: bool = False, **given: Any) -> None:
    """Write a text above row y, at the left or the right end of the plot; it covers the lines behind it."""
    box = {"facecolor": PAPER, "lw": 0, "pad": 1.2}
    place = {"transform": axes.get_yaxis_transform(), "ha": "right" if right else "left", "va": "baseline"}
    axes.text(1 if right else 0, y, text, **{"fontsize": 10.5, "zorder": 5, "bbox": box, **place, **given})


def whisker(axes: Axes, x: float, limits: Sequence[float] | None, *, flat: bool = False, **given: Any) -> None:
    """Draw an interval through a point at x as a vertical line; flat: at y = x as a horizontal one."""
    if limits:
        ends = (limits, [x, x]) if flat else ([x, x], limits)
        axes.plot(*ends, **{"color": MUTED, "lw": 1.1, "zorder": 2, **given})


def factor_axis(axes: Axes, low: float, high: float, *, of: str = "x") -> None:
    """Give an axis a log scale of factors from low to high, with few ticks, and mark 1."""
    (axes.axvline if of == "x" else axes.axhline)(1, color=INK, lw=0.9, zorder=0)
    axes.set(**{f"{of}scale": "log", f"{of}lim": (low, high)})
    ticks = log_ticks(low, high)
    (axes.set_xticks if of == "x" else axes.set_yticks)(ticks, [f"×{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x" if of == "x" else "y")


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


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the labels (x, y, text, colour) at the ends of lines; labels at the same x are moved so none overlap."""
    scale = axes.figure.dpi / 72
    floor, height = axes.get_window_extent().y0 / scale, axes.get_window_extent().height / scale
    heights = axes.transData.transform([(x, y) for x, y, *_ in ends])[:, 1] / scale - floor
    columns: Mapping[float, list[int]] = defaultdict(list)
    for index in sorted(range(len(ends)), key=lambda i: float(heights[i])):
        columns[ends[index][0]].append(index)
    for indices in columns.values():
        placed: list[float] = []
        for index in indices:
            placed.append(max(heights[index], placed[-1] + APART) if placed else heights[index])
        # Move all labels down by their mean displacement, and below the top, but not below the axis.
        mean = (sum(placed) - sum(heights[indices])) / len(placed)
        shift = min(max(mean, placed[-1] - height - APART / 2), max(0.0, placed[0] - APART / 2))
        for index, above_axis in zip(indices, placed, strict=True):
            x, y, text, color = ends[index]
            axes.annotate(
                text,
                (x, y),
                xytext=(8, above_axis - shift - heights[index]),
                textcoords="offset points",
                va="center_baseline",
                fontsize=10.5,
                fontweight="bold",
                color=color,
                annotation_clip=False,
                zorder=5,
            )
