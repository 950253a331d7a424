"""The figures of a training page: loss over steps, accuracy by distance ahead, accuracy over confidence.

Reliability diagrams follow Guo et al. (arXiv 1706.04599). Lines differ in colour and dashes, and carry at their ends
the number of their training or the name of their part of the loss.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench import statistics
from mtbench.document import Figure, plots
from mtbench.document.formatting import bounds
from mtbench.document.plots import ACCENT, DASHES, INK, MUTED, PAPER, RULE, SHADES, WARN
from mtbench.statistics import Proportion

COLORS = (ACCENT, INK, WARN, MUTED)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Training:
    """One training: its record, and its number on a page of several trainings."""

    number: int
    name: str
    record: Record

    @property
    def evaluation(self) -> Record | None:
        """The evaluation on held-out conversations; None if there were none, or if they have nothing to predict."""
        evaluation: Record = self.record.get("evaluation") or {}
        return evaluation if evaluation.get("ahead") else None

    @property
    def parts(self) -> list[str]:
        """The parts of its loss."""
        return [name for name in self.record["curve"][0] if name not in ("step", "loss", "learning_rate")]

    @property
    def predictions(self) -> str:
        """Which predictions its calibration covers."""
        ahead = self.evaluation["ahead"] if self.evaluation else []
        return "predictions beyond the next token" if any(e["ahead"] > 1 for e in ahead) else "next-token predictions"


class Drawn(NamedTuple):
    """All figures of a page; reliability diagrams by the training's number."""

    losses: list[Figure]
    depths: list[Figure]
    reliability: dict[int, Figure]


class _Line(NamedTuple):
    label: str
    style: int
    x: list[float]
    y: list[float]
    held_out: float | None


def draw(trainings: Sequence[Training], note: str) -> Drawn:
    """Draw all plots. `note` is printed on each, for readers who see it without the page."""
    with plots.style():
        return Drawn(
            _losses(trainings, note),
            _depths(trainings, note),
            {t.number: _reliability(t, len(trainings) == 1, note) for t in trainings if t.evaluation},
        )


def share_right(entry: Record) -> Proportion:
    """Return an entry's `accuracy` over its `n` predictions, with its interval."""
    return statistics.wilson(round(entry["accuracy"] * entry["n"]), entry["n"])


def _losses(trainings: Sequence[Training], note: str) -> list[Figure]:
    """Draw a figure for each part that several trainings share, and one for the parts that only one training has."""
    by_step = len({t.record["settings"]["batch_size"] for t in trainings}) == 1
    unit = "step" if by_step else "conversation"
    trainings_of: dict[str, list[Training]] = defaultdict(list)
    for training in trainings:
        for part in training.parts:
            trainings_of[part].append(training)
    drawings = []
    for part, sharing in trainings_of.items():
        if len(sharing) > 1:
            lines = [_curve(t, part, str(t.number), t.number - 1, by_step) for t in sharing]
            drawings.append(_loss(f"Loss: {part}", f"loss-{part}", unit, lines, _key(sharing), note))
    for training in trainings:
        own = [part for part in training.parts if len(trainings_of[part]) == 1]
        if own:
            lines = [_curve(training, part, part, index, by_step) for index, part in enumerate(own)]
            title = f"Loss: {', '.join(own)}" if len(own) < 4 else f"Loss: {own[0]} to {own[-1]}"
            key = _key([training]) if len(trainings) > 1 else []
            drawings.append(_loss(title, f"loss-{training.number}", unit, lines, key, note))
    return drawings


def _curve(training: Training, part: str, label: str, style: int, by_step: bool) -> _Line:
    curve, evaluation = training.record["curve"], training.evaluation or {}
    scale = 1 if by_step else training.record["settings"]["batch_size"]
    return _Line(
        label, style, [scale * point["step"] for point in curve], [p[part] for p in curve], evaluation.get(part)
    )


def _loss(title: str, name: str, unit: str, lines: Sequence[_Line], key: Sequence[str], note: str) -> Figure:
    subtitle = "mean since the last point; hollow: on held-out conversations"
    figure, axes = plots.canvas(title, subtitle, 220, key, right=52)
    values = [value for line in lines for value in (*line.y, line.held_out) if value is not None]
    for line in lines:
        axes.plot(line.x, line.y, marker="" if len(line.x) > 1 else "o", ms=4, **_style(line.style))
        if line.held_out is not None:
            axes.plot(line.x[-1:], [line.held_out], "o", ms=6, mec=_color(line.style), mfc=PAPER, zorder=4)
    if min(values) > 0:
        axes.set_yscale("log")
        span = max(1.5, max(values) / min(values))
        axes.set_ylim(min(values) / span**0.1, min(values) * span**1.05)
        ticks = plots.log_ticks(*axes.get_ylim())
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel(f"{unit}s")
    axes.grid(axis="y")
    plots.label_ends(axes, [(line.x[-1], line.y[-1], line.label, _color(line.style)) for line in lines])
    text = "; ".join(f"{line.label}: {line.y[0]:.4g} to {line.y[-1]:.4g} at {unit} {line.x[-1]:,}" for line in lines)
    return plots.finish(
        figure,
        note,
        name=name,
        title=title,
        caption="Each part includes its weight in the whole loss.",
        alt=f"{title}, over {unit}s. {text}.",
    )


def _depths(trainings: Sequence[Training], note: str) -> list[Figure]:
    """Draw the accuracy by distance ahead; nothing if all trainings predict only next tokens."""
    evaluated = [(t, t.evaluation["ahead"]) for t in trainings if t.evaluation]
    if not any(len(entries) > 1 for _, entries in evaluated):
        return []
    title, several = "Accuracy by distance ahead", len(trainings) > 1
    subtitle = "1 is the next token; vertical lines: 95% intervals"
    key = _key([training for training, _ in evaluated]) if several else []
    figure, axes = plots.canvas(title, subtitle, 220, key, right=26)
    ends, texts = [], []
    for training, entries in evaluated:
        distances, shares = [entry["ahead"] for entry in entries], [share_right(entry) for entry in entries]
        percents = [100 * (share.value or 0.0) for share in shares]
        axes.plot(distances, percents, marker="o", ms=4.5, **_style(training.number - 1))
        for distance, share in zip(distances, shares, strict=True):
            plots.whisker(axes, distance, [100 * end for end in bounds(share) or ()])
        ends.append((distances[-1], percents[-1], str(training.number), _color(training.number - 1)))
        pairs = zip(percents, distances, strict=True)
        texts.append(f"{training.name}: " + ", ".join(f"{percent:.1f}% at {distance}" for percent, distance in pairs))
    axes.set_ylim(0, 102)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.set_xlabel("tokens after the last known one")
    axes.set_ylabel("right, %")
    axes.grid(axis="y")
    if several:
        plots.label_ends(axes, ends)
    drawing = plots.finish(
        figure,
        note,
        name="depth",
        title=title,
        caption="A prediction is right if its most likely token is that of the text. The distance is counted from the "
        "last token that the model was given.",
        alt=f"Share of predictions that are right, by tokens ahead. {'; '.join(texts)}.",
    )
    return [drawing]


def _reliability(training: Training, single: bool, note: str) -> Figure:
    """Draw accuracy over confidence, by bin. A calibrated model lies on the diagonal."""
    assert training.evaluation is not None
    title = "Is the confidence calibrated?"
    figure, axes = plots.canvas(title, training.predictions if single else _key([training])[0], 250)
    bins = training.evaluation["calibration"]
    total = sum(entry["n"] for entry in bins)
    for entry in bins:
        width, height = entry["high"] - entry["low"], entry["n"] / total
        axes.bar(entry["low"], height, width, align="edge", color=SHADES[1], edgecolor=RULE, lw=0.6, zorder=0)
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=(0, (4, 3)), zorder=1)
    confidences, shares = [entry["confidence"] for entry in bins], [share_right(entry) for entry in bins]
    for confidence, share in zip(confidences, shares, strict=True):
        plots.whisker(axes, confidence, bounds(share))
    axes.plot(confidences, [share.value or 0.0 for share in shares], marker="o", ms=4.5, color=ACCENT, lw=1.3, zorder=3)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence p")
    axes.set_ylabel("share right")
    axes.grid()
    pairs = zip(shares, confidences, strict=True)
    text = ", ".join(f"{share.value:.2f} at {confidence:.2f}" for share, confidence in pairs)
    return plots.finish(
        figure,
        note,
        name=f"reliability-{training.number}",
        title=title,
        caption="Below the dashed line the model is overconfident. Bars: each bin's share of all predictions, on the "
        "same scale.",
        alt=f"Share right over confidence, {training.name}: {text}.",
    )


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _style(index: int) -> dict[str, Any]:
    return {"color": _color(index), "ls": DASHES[index // len(COLORS) % len(DASHES)], "lw": 1.4, "zorder": 3}


def _key(trainings: Sequence[Training]) -> list[str]:
    """Return number and name of each training."""
    return [plots.label(training.number, training.name) for training in trainings]
