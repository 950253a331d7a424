"""The figures of a gate's page: time of head over base, its pairs over time, and where the difference lies.

They are drawn in the style of the report. A word has its own shape besides its colour and is written next to it.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench.document import Figure, plots
from mtbench.document.formatting import listed
from mtbench.document.plots import ACCENT, INK, MUTED, PAPER, SHADES, WARN, above
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.format import Attribution, Gate, TimedCell, TimeTest, Verdict
from mtbench.experiments.gate.tables import ALL_CELLS

MARKS: dict[Verdict, dict[str, Any]] = {
    "PASS": {"marker": "o", "mec": ACCENT, "mfc": ACCENT, "ms": 6.5},
    "FAIL": {"marker": "s", "mec": WARN, "mfc": WARN, "ms": 7},
    "INCONCLUSIVE": {"marker": "D", "mec": INK, "mfc": PAPER, "ms": 6},
}
COLORS: dict[Verdict, str] = {"PASS": ACCENT, "FAIL": WARN, "INCONCLUSIVE": MUTED}
SHAPES = "Circle: PASS. Square: FAIL. Hollow diamond: INCONCLUSIVE."
LONGEST = 40  # letters of a cell's label next to a value
ROW, STRIP = 35.0, 54.0  # points
LEFT, RIGHT = 10.0, 16.0  # points beside a plot: room for the last number under its axis
MOST_STRIPS = 8
MARGIN_AT = 0.76  # the share of the width up to the margin, at most: the words stand to the right of it
FAR = 3.0  # an interval is cut at so many times the median reach of an interval beyond the estimates


class Part(NamedTuple):
    """A part of the difference of the time."""

    name: str
    shade: str
    hatch: str | None


PREFILL, FORWARD = Part("prefill", SHADES[2], None), Part("forward passes", SHADES[5], None)
HOST, DECODING = Part("host", PAPER, "////"), Part("decoding", SHADES[5], None)


def draw(gate: Gate) -> list[Figure]:
    """Return the figures; none if nothing was timed."""
    numbers = {row.cell: row.number for row in tables.rows(gate)}
    with plots.style():
        drawn = [_forest(gate, numbers), _pairs(gate, numbers), _attribution(gate, numbers)]
    return [drawing for drawing in drawn if drawing is not None]


def _note(gate: Gate) -> str:
    note = f"mtbench gate, {gate.head.label} against {gate.base.label}, {gate.started}"
    return _cut(note, 100)


def _name(gate: Gate, cell: TimedCell, numbers: dict[str, int], longest: int = LONGEST) -> str:
    """Return a cell's number and label. Suite and batch size are cut off last."""
    tail = _cut("".join(f", {part}" for part in tables.distinct(gate, cell)), longest // 2)
    return f"{numbers[cell.cell]}\u2002{_cut(cell.arm, longest - len(tail))}{tail}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _forest(gate: Gate, numbers: dict[str, int]) -> Figure | None:
    """Draw head's time over base's with its interval, for every cell and for their mean."""
    lines = [(_name(gate, cell, numbers), cell.test, _word(gate, cell)) for cell in gate.timed]
    if not lines:
        return None
    if gate.all_cells is not None:
        word = tables.mean_status(gate, gate.all_cells).word or gate.all_cells.word
        lines.insert(0, (ALL_CELLS, gate.all_cells, word))
    title, subtitle = "Time of head over base", "95% intervals; right is slower"
    figure, axes = plots.canvas(title, subtitle, ROW * len(lines) + 21, left=LEFT, right=RIGHT, axis=26)
    _limit(axes, [test for _, test, _ in lines], gate.request.margin)
    for row, (name, test, word) in enumerate(lines):
        _interval(axes, row, test, word)
        bold = "bold" if name == ALL_CELLS else "normal"
        value = f"{tables.change(test.ratio, narrow=tables.is_narrow(test))}  {word}"
        heavy = "bold" if word == "FAIL" else "normal"
        above(axes, row - 0.27, name, fontweight=bold)
        above(axes, row - 0.27, value, right=True, color=COLORS[word], fontweight=heavy)
    axes.set_ylim(len(lines) - 0.55, -1.15)
    _percent_axis(axes)
    _reference_lines(axes, gate.request.margin, -1.12)
    texts = [f"{name}: {tables.changed_by(test)}, {word}" for name, test, word in lines]
    undecided = gate.all_cells is not None and gate.all_cells.word == "INCONCLUSIVE"
    mean = " The mean of all cells can fail the gate, but a pass does not need it." if undecided else ""
    return plots.finish(
        figure,
        _note(gate),
        name="forest",
        title=title,
        caption=f"{SHAPES} Lines are 95% intervals; one that ends in an arrow is longer than shown. The solid line is "
        f"no difference, the dashed line the margin. Words follow from bounds at stricter levels.{mean}",
        alt=f"Head's time over base's, less 1, by cell. The margin is {100 * gate.request.margin:g}%. "
        f"{'; '.join(texts)}.",
    )


def _word(gate: Gate, cell: TimedCell) -> Verdict:
    return tables.timed_status(gate, cell, cell.cell).word or cell.test.word


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


def _interval(axes: Axes, row: int, test: TimeTest, word: Verdict) -> None:
    """Draw the estimate with the mark of its word, and its interval, with an arrow where it leaves the plot."""
    left, right = axes.get_xlim()
    if test.ci_low is not None and test.ci_high is not None:
        low, high = (100 * (bound - 1) for bound in (test.ci_low, test.ci_high))
        axes.plot([max(low, left), min(high, right)], [row, row], color=INK, lw=1.4, zorder=3, clip_on=False)
        for outside, at, marker in ((low < left, left, "<"), (high > right, right, ">")):
            if outside:
                axes.plot([at], [row], marker, color=INK, ms=5, zorder=3, clip_on=False)
    if test.ratio is not None:
        axes.plot([100 * (test.ratio - 1)], [row], ls="", mew=1.5, zorder=4, **MARKS[word])


def _percent_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.percent_tick(x)))
    axes.grid(axis="x")
    axes.set_yticks([])


def _reference_lines(axes: Axes, margin: float, top: float) -> None:
    """Draw the lines of no difference and of the margin, and name the latter."""
    at, (left, right) = 100 * margin, axes.get_xlim()
    axes.axvline(0, color=INK, lw=0.9, zorder=1)
    axes.axvline(at, color=WARN, lw=1, ls=(0, (4, 3)), zorder=1)
    beside = {"ha": "left", "x": 4} if at < left + 0.7 * (right - left) else {"ha": "right", "x": -4}
    axes.annotate(
        f"margin {tables.percent_tick(at)}",
        (at, top),
        xytext=(beside["x"], -1),
        textcoords="offset points",
        ha=beside["ha"],
        va="top",
        fontsize=9.5,
        color=WARN,
    )


def _pairs(gate: Gate, numbers: dict[str, int]) -> Figure | None:
    """Draw the difference of every pair over time, a strip per cell; of many cells, those that do not pass."""
    strips = {_name(gate, cell, numbers, 54): _differences(cell) for cell in gate.timed}
    shortened = len(strips) > MOST_STRIPS
    if shortened:
        unsettled = [cell for cell in gate.timed if _word(gate, cell) != "PASS"][: MOST_STRIPS - 1]
        mean = [sum(values) / len(values) for values in zip(*strips.values(), strict=False)]
        strips = {ALL_CELLS: mean} | {_name(gate, cell, numbers, 54): _differences(cell) for cell in unsettled}
    last = max(map(len, strips.values()), default=0)
    if last < 2:
        return None
    title = "The pairs over time"
    figure, axes = plots.canvas(
        title, "each pair's difference; one scale for all", STRIP * len(strips) + 8, left=LEFT, right=RIGHT, axis=40
    )
    margin = 100 * gate.request.margin
    every = [0.0, margin, *(value for values in strips.values() for value in values)]
    for row, (name, values) in enumerate(strips.items()):
        _strip(axes, row, values, margin, min(every), max(every))
        above(axes, row - 0.36, name)
        above(axes, row - 0.36, f"{tables.percent(min(values))} to {tables.percent(max(values))}", right=True)
    axes.set_ylim(len(strips) - 0.5, -0.65)
    axes.set_xlim(1 - 0.03 * last, last + 0.03 * last)
    axes.set_yticks([])
    ticks = _pair_ticks(gate.looks, last)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_xlabel("pair")
    axes.grid(axis="x")
    left_out = "" if not shortened else " Of many cells only their mean and those that do not pass are shown."
    texts = [f"{name}: {listed(tables.percent(v) for v in values)}" for name, values in strips.items()]
    return plots.finish(
        figure,
        _note(gate),
        name="pairs",
        title=title,
        caption="Up is slower. The solid line of each strip is no difference, the dashed line the margin. Vertical "
        f"lines stand at the looks. A cell that has passed needs no further pairs.{left_out}",
        alt=f"Difference of each pair in the order of time. {'; '.join(texts)}.",
    )


def _differences(cell: TimedCell) -> list[float]:
    """Return the difference of each pair in percent."""
    return [100 * (b / a - 1) for a, b in zip(cell.base_s, cell.head_s, strict=False) if a > 0]


def _strip(axes: Axes, row: int, values: Sequence[float], margin: float, low: float, high: float) -> None:
    """Draw one strip, in which `low` to `high` fill the height; rows grow downwards, slower is up."""

    def height(value: float) -> float:
        return row + 0.36 - 0.58 * (value - low) / (high - low)

    axes.axhline(height(0), color=INK, lw=0.7, zorder=1)
    axes.axhline(height(margin), color=WARN, lw=0.8, ls=(0, (4, 3)), zorder=1)
    x, y = range(1, len(values) + 1), [height(value) for value in values]
    axes.plot(x, y, color=ACCENT, lw=0.8, alpha=0.5, zorder=2)
    axes.plot(x, y, "o", color=ACCENT, ms=3.5, zorder=3)


def _pair_ticks(looks: Sequence[int], last: int) -> list[int]:
    """Return the first pair, the looks that were reached, and the last pair, with room between them."""
    ticks: list[int] = []
    for tick in sorted({1, last, *(look for look in looks if look < last)}, key=lambda t: (t not in (1, last), t)):
        if all(abs(tick - other) >= 0.05 * last for other in ticks):
            ticks.append(tick)
    return sorted(ticks)


def _attribution(gate: Gate, numbers: dict[str, int]) -> Figure | None:
    """Draw the parts of each difference from 0 on, slower to the right and faster to the left."""
    cells = [(cell, cell.attribution) for cell in gate.timed if cell.attribution is not None]
    if not cells:
        return None
    title = "Where the difference lies"
    subtitle = "shares of base's time; right: the whole difference"
    figure, axes = plots.canvas(title, subtitle, ROW * len(cells) + 10, left=LEFT, right=RIGHT, axis=48)
    reach, texts, used = [0.0], [], dict[Part, None]()
    for row, (cell, found) in enumerate(cells):
        parts = parts_of(found)
        used |= dict.fromkeys(parts)
        reach += [*_stack(axes, row, parts), 100 * found.total]
        axes.plot([100 * found.total], [row], "d", mec=INK, mfc=INK, ms=5, zorder=4)
        above(axes, row - 0.3, _name(gate, cell, numbers, 54))
        above(axes, row - 0.3, tables.share(found.total), right=True)
        shown = listed(f"{part.name} {tables.share(value)}" for part, value in parts.items())
        texts.append(f"{_name(gate, cell, numbers)}: {shown}, whole {tables.share(found.total)}")
    axes.set_ylim(len(cells) - 0.6, -0.75)
    space = 0.06 * (max(reach) - min(reach)) or 1.0
    axes.set_xlim(min(reach) - space, max(reach) + space)
    _percent_axis(axes)
    axes.axvline(0, color=INK, lw=0.9, zorder=3)
    _key(figure, list(used))
    return plots.finish(
        figure,
        _note(gate),
        name="attribution",
        title=title,
        caption="Parts right of 0 became slower, parts left of 0 faster. The diamond is the whole difference, the sum "
        "of the parts: an arithmetic mean of the pairs. No word depends on it.",
        alt=f"Parts of the difference as shares of base's time. {'; '.join(texts)}.",
    )


def parts_of(found: Attribution) -> dict[Part, float]:
    """Return the parts of a difference; what was not measured apart is one part."""
    if found.forward is None or found.host is None:
        return {PREFILL: found.prefill, DECODING: found.total - found.prefill}
    return {PREFILL: found.prefill, FORWARD: found.forward, HOST: found.host}


def _stack(axes: Axes, row: int, parts: dict[Part, float]) -> tuple[float, float]:
    """Draw the parts and return how far they reach to both sides, in percent."""
    ends = {True: 0.0, False: 0.0}  # by whether it grew
    for part, value in parts.items():
        style: dict[str, Any] = {"color": part.shade, "edgecolor": INK, "hatch": part.hatch, "lw": 0.6}
        axes.barh(row, 100 * value, left=ends[value >= 0], height=0.34, zorder=2, **style)
        ends[value >= 0] += 100 * value
    return ends[False], ends[True]


def _key(figure: Canvas, parts: Sequence[Part]) -> None:
    """Name the shades below the plot."""
    style: dict[str, Any] = {"edgecolor": INK, "lw": 0.6}
    patches = [Patch(facecolor=part.shade, hatch=part.hatch, label=part.name, **style) for part in parts]
    figure.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0, 15 / (72 * figure.get_figheight())),
        ncols=len(patches),
        frameon=False,
        fontsize=10,
        labelcolor=MUTED,
        handlelength=1.1,
        columnspacing=1.4,
        borderpad=0,
        borderaxespad=0.4,
    )
