"""The figures of a training's page: loss over steps, accuracy over how far ahead, share right over confidence.

Reliability diagrams as in Guo et al. (arXiv 1706.04599). Colours and dashes tell lines apart; so do the numbers that
trainings carry, or the names of a loss's parts, at their ends.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench import statistics
from mtbench.report import figures
from mtbench.report.figures import ACCENT, INK, MUTED, PAPER, RULE, SHADES, WARN, Drawing
from mtbench.statistics import Proportion

COLORS, DASHES = (ACCENT, INK, WARN, MUTED), ("-", (0, (5, 2)), (0, (1.5, 1.5)))
STYLE = {**figures.STYLE, "text.parse_math": False}  # a folder's name may hold a $
APART = 12.5  # points between the names of two lines

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Training:
    """The record of one, and the number it carries wherever several are told apart."""

    number: int
    name: str
    record: Record

    @property
    def evaluation(self) -> Record | None:
        """What was found on conversations kept apart; None if they held nothing to predict, or none were."""
        found: Record = self.record.get("evaluation") or {}
        return found if found.get("ahead") else None

    @property
    def parts(self) -> list[str]:
        """The terms of its loss."""
        return [name for name in self.record["curve"][0] if name not in ("step", "loss", "learning_rate")]

    @property
    def predictions(self) -> str:
        """Which ones its calibration is of."""
        ahead = self.evaluation["ahead"] if self.evaluation else []
        return "predictions beyond the next token" if any(e["ahead"] > 1 for e in ahead) else "next-token predictions"


class Drawn(NamedTuple):
    """All figures of a page; those of confidence by the training's number."""

    losses: list[Drawing]
    depths: list[Drawing]
    reliability: dict[int, Drawing]


class _Line(NamedTuple):
    label: str
    style: int
    x: list[float]
    y: list[float]
    held_out: float | None


def draw(trainings: Sequence[Training], note: str) -> Drawn:
    """`note`: what a reader must know of a figure that leaves the page."""
    with mpl.rc_context(STYLE):
        return Drawn(
            _losses(trainings, note),
            _depths(trainings, note),
            {t.number: _reliability(t, len(trainings) == 1, note) for t in trainings if t.evaluation},
        )


def share_right(entry: Record) -> Proportion:
    """An entry's `accuracy` of its `n`, with its interval."""
    return statistics.wilson(round(entry["accuracy"] * entry["n"]), entry["n"])


def _losses(trainings: Sequence[Training], note: str) -> list[Drawing]:
    """A figure for each part that several trainings have, and one for what parts a training has to itself."""
    alike = len({t.record["settings"]["batch_size"] for t in trainings}) == 1
    over = "step" if alike else "conversation"
    having: dict[str, list[Training]] = defaultdict(list)
    for training in trainings:
        for part in training.parts:
            having[part].append(training)
    drawings = []
    for part, several in having.items():
        if len(several) > 1:
            lines = [_curve(t, part, str(t.number), t.number - 1, alike) for t in several]
            drawings.append(_loss(f"Loss: {part}", f"loss-{part}", over, lines, _key(several), note))
    for training in trainings:
        own = [part for part in training.parts if len(having[part]) == 1]
        lines = [_curve(training, part, part, index, alike) for index, part in enumerate(own)]
        title, name = (
            f"Loss: {', '.join(own)}" if len(own) < 4 else f"Loss: {own[0]} to {own[-1]}",
            f"loss-{training.number}",
        )
        if own:
            drawings.append(_loss(title, name, over, lines, _key([training][: len(trainings) - 1]), note))
    return drawings


def _curve(training: Training, part: str, label: str, style: int, steps: bool) -> _Line:
    curve, evaluation = training.record["curve"], training.evaluation or {}
    times = 1 if steps else training.record["settings"]["batch_size"]
    return _Line(label, style, [times * p["step"] for p in curve], [p[part] for p in curve], evaluation.get(part))


def _loss(title: str, name: str, over: str, lines: Sequence[_Line], key: Sequence[str], note: str) -> Drawing:
    subtitle = "mean since the last point; hollow: on conversations kept apart"
    figure, axes = figures.canvas(title, subtitle, 220, key, right=52)
    values = [value for line in lines for value in (*line.y, line.held_out) if value is not None]
    for line in lines:
        axes.plot(line.x, line.y, marker="" if len(line.x) > 1 else "o", ms=4, **_style(line.style))
        if line.held_out is not None:
            axes.plot(line.x[-1:], [line.held_out], "o", ms=6, mec=_color(line.style), mfc=PAPER, zorder=4)
    if min(values) > 0:
        axes.set_yscale("log")
        span = max(1.5, max(values) / min(values))
        axes.set_ylim(min(values) / span**0.1, min(values) * span**1.05)
        ticks = figures.log_ticks(*axes.get_ylim())
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel(f"{over}s")
    axes.grid(axis="y", color=RULE, lw=0.6)
    _name_ends(axes, [(line.x[-1], line.y[-1], line.label, line.style) for line in lines])
    told = "; ".join(f"{line.label}: {line.y[0]:.4g} to {line.y[-1]:.4g} at {over} {line.x[-1]:,}" for line in lines)
    return figures.finish(
        figure,
        note,
        name=name,
        title=title,
        caption="A part is drawn as it counts in the whole, its weight included.",
        alt=f"{title}, over {over}s. {told}.",
    )


def _depths(trainings: Sequence[Training], note: str) -> list[Drawing]:
    """Nothing where all predict next tokens only."""
    evaluated = [t for t in trainings if t.evaluation]
    if not any(len(t.evaluation["ahead"]) > 1 for t in evaluated if t.evaluation):
        return []
    title, several = "Right, by how far ahead", len(trainings) > 1
    subtitle = "1 is the next token; lines through points: 95% intervals"
    figure, axes = figures.canvas(title, subtitle, 220, _key(evaluated) if several else [], right=26)
    ends, told = [], []
    for training in evaluated:
        entries = training.evaluation["ahead"] if training.evaluation else []
        x, found = [e["ahead"] for e in entries], [share_right(e) for e in entries]
        y = [100 * (f.value or 0.0) for f in found]
        axes.plot(x, y, marker="o", ms=4.5, **_style(training.number - 1))
        for at, f in zip(x, found, strict=True):
            _whisker(axes, at, f, 100)
        ends.append((x[-1], y[-1], str(training.number), training.number - 1))
        told.append(f"{training.name}: " + ", ".join(f"{v:.1f}% at {at}" for at, v in zip(x, y, strict=True)))
    axes.set_ylim(0, 102)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.set_xlabel("tokens beyond the last one known")
    axes.set_ylabel("right, %")
    axes.grid(axis="y", color=RULE, lw=0.6)
    if several:
        _name_ends(axes, ends)
    drawing = figures.finish(
        figure,
        note,
        name="depth",
        title=title,
        caption="A prediction is right if its likeliest token is the text's. How far ahead counts from the last token "
        "the model was shown.",
        alt=f"Share of predictions that are right, by tokens ahead. {'; '.join(told)}.",
    )
    return [drawing]


def _reliability(training: Training, alone: bool, note: str) -> Drawing:
    """On the diagonal, a model is as right as it is sure."""
    assert training.evaluation is not None
    title = "Is it as right as it is sure?"
    figure, axes = figures.canvas(title, training.predictions if alone else _key([training])[0], 250)
    bins = training.evaluation["calibration"]
    whole = sum(entry["n"] for entry in bins)
    for entry in bins:
        width, height = entry["high"] - entry["low"], entry["n"] / whole
        axes.bar(entry["low"], height, width, align="edge", color=SHADES[1], edgecolor=RULE, lw=0.6, zorder=0)
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=(0, (4, 3)), zorder=1)
    x, found = [entry["confidence"] for entry in bins], [share_right(entry) for entry in bins]
    for at, share in zip(x, found, strict=True):
        _whisker(axes, at, share)
    axes.plot(x, [share.value or 0.0 for share in found], marker="o", ms=4.5, color=ACCENT, lw=1.3, zorder=3)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence p")
    axes.set_ylabel("share right")
    axes.grid(color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    told = ", ".join(f"{share.value:.2f} at {at:.2f}" for at, share in zip(x, found, strict=True))
    return figures.finish(
        figure,
        note,
        name=f"reliability-{training.number}",
        title=title,
        caption="Below the dashed line it is surer than it is right. Bars: the share of predictions in each bin, on "
        "the same scale.",
        alt=f"Share right over confidence, {training.name}: {told}.",
    )


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _style(index: int) -> dict[str, Any]:
    return {"color": _color(index), "ls": DASHES[index // len(COLORS) % len(DASHES)], "lw": 1.4, "zorder": 3}


def _whisker(axes: Axes, at: float, found: Proportion, times: float = 1.0) -> None:
    if found.ci_low is not None and found.ci_high is not None:
        axes.plot([at, at], [times * found.ci_low, times * found.ci_high], color=MUTED, lw=1.1, zorder=2)


def _key(trainings: Sequence[Training]) -> list[str]:
    return [f"{t.number}\u2002{t.name if len(t.name) <= 54 else f'{t.name[:53]}…'}" for t in trainings]


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, int]]) -> None:
    """Names where lines end, at (x, y), in their styles; at the same x pushed apart where they would touch."""
    scale = axes.figure.dpi / 72
    floor = axes.get_window_extent().y0 / scale
    height = axes.transData.transform([(x, y) for x, y, *_ in ends])[:, 1] / scale - floor
    columns = defaultdict(list)
    for index in sorted(range(len(ends)), key=lambda i: float(height[i])):
        columns[ends[index][0]].append(index)
    for indices in columns.values():
        placed: list[float] = []
        for index in indices:
            placed.append(max(height[index], placed[-1] + APART) if placed else height[index])
        pushed = min((sum(placed) - sum(height[indices])) / len(placed), max(0.0, placed[0] - APART / 2))
        for index, at in zip(indices, placed, strict=True):
            x, y, label, style = ends[index]
            axes.annotate(
                label,
                (x, y),
                xytext=(8, at - pushed - height[index]),
                textcoords="offset points",
                va="center_baseline",
                fontsize=10.5,
                fontweight="bold",
                color=_color(style),
                annotation_clip=False,
                zorder=5,
            )
