"""The page of trainings: loss, accuracy by distance ahead, and calibration of the confidence.

It is made from the training records of checkpoints (mtbench/training/checkpoint.py, mtbench/training/evaluation.py). It
needs no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mtbench import files, statistics
from mtbench.document import plots
from mtbench.document.formatting import NONE, bounds, interval, listed, percent
from mtbench.document.html_page import html
from mtbench.document.model import Beside, Block, Document, Entry, Figure, Pairs, Part, Row, Section, Table, Text
from mtbench.document.plots import ACCENT, DASHES, INK, MUTED, PAPER, WARN
from mtbench.errors import UserError, first_line
from mtbench.models.families import FAMILIES, RECORD
from mtbench.options.texts import shown
from mtbench.report.phrases import DEMONSTRATION
from mtbench.report.progress import clock
from mtbench.training.checkpoint import read_record

COLORS = (ACCENT, INK, WARN, MUTED)
CONFIDENCE = (
    "Decoding with a threshold τ commits tokens whose probability p is at least τ. The confidence is calibrated if of "
    "the predictions with about the same p a share p is right. Intervals assume independent predictions; those of one "
    "conversation are not fully independent, so the intervals are somewhat too narrow."
)
NOT_MEASURED = (
    "Accuracy and confidence were not measured: the training has not ended, or no conversations with something to "
    "predict were held out (`--held-out`, at most a tenth)."
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Training:
    """One training on the page: its record, and its number and name."""

    label: str
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


def write_training_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these trained checkpoints to `out`, by default `<first folder>.training.html`.

    Raises UserError for a folder without a training record that has a loss curve.
    """
    names = [folder.resolve().name for folder in folders]
    trainings = []
    for number, (folder, name) in enumerate(zip(folders, names, strict=True), start=1):
        unique, record = name if names.count(name) == 1 else str(folder), read_record(folder)
        if not record.get("curve"):
            raise UserError(
                f"{folder / RECORD} has no loss curve, so there is nothing to show; give a folder of a training"
            )
        trainings.append(Training(f"{number} {unique}", record))
    out = out or folders[0].resolve().with_name(f"{names[0]}.training.html")
    try:
        page = html(document(trainings))
    except Exception as error:  # an untrusted record may hold anything
        records = ", ".join(str(folder / RECORD) for folder in folders)
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{records}: no page can be made of it ({reason}); restore it, or train again.") from error
    files.write_text(out, page)
    return out


def document(trainings: Sequence[Training]) -> Document:
    """Return the document of these trainings."""
    single = len(trainings) == 1
    marks = [DEMONSTRATION] if any(map(demonstrates, trainings)) else []
    with plots.style():
        losses = [_loss(training, "".join(marks) or "mtbench, training") for training in trainings]
    evaluated = [training for training in trainings if training.evaluation]
    ahead: list[Block] = [Text(f"{t.label}: {NOT_MEASURED}") for t in trainings if not t.evaluation]
    if evaluated:
        ahead.append(_accuracies(evaluated))
    return Document(
        title=f"Training of {listed(training.label for training in trainings)}",
        lead=_lead(trainings[0]) if single else "The trainings are numbered in figures and tables.",
        marks=marks,
        source=f"`{RECORD}`",
        sections=[
            Section("How it was trained", [Part(t.label, [_facts(t)], folded=not single) for t in trainings]),
            Section("Loss", [Beside([*losses, _final_losses(trainings)])]),
            Section("Accuracy by tokens ahead", ahead),
            *([Section("Confidence", [Text(CONFIDENCE), *map(_confidence, evaluated)])] if evaluated else []),
        ],
    )


def _facts(training: Training) -> Pairs:
    """Return how it was trained, as pairs of name and value."""
    record, data, tokens = training.record, training.record["data"], training.record["tokens"]
    held_out = training.evaluation["conversations"] if training.evaluation else 0
    pace = f", {record['tokens_per_s']:,.0f} tokens/s" if record["tokens_per_s"] else ""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items() if version)
    facts = {
        "Objective": _with(record["objective"], _values(record["options"])),
        "From": _with(record["base"], _hash(record["base_sha256"])),
        "Teacher": _with(record["teacher"] or "", _hash(record["teacher_sha256"])),
        "Data": f"{', '.join(data['data'])}: {data['read']:,} conversations read, {data['dropped']:,} dropped, "
        f"{data['cut']:,} cut; {data['examples'] - held_out:,} to train on, {held_out:,} held out "
        f"({_hash(data['sha256'])})",
        "Trained on": f"{tokens['conversations']:,} conversations, {tokens['fed']:,} tokens fed, "
        f"{tokens['predicted']:,} predicted",
        "Took": f"{record['steps']:,} steps in {record['train_s']:,.1f} s ({clock(record['train_s'])}){pace}",
        "Settings": _values(record["settings"]),
        "Command": record["command"],
        "Versions": versions,
    }
    return Pairs([(name, text) for name, text in facts.items() if text], {"Command"})


def demonstrates(training: Training) -> bool:
    """Return whether the training used only the data of a family that was made for one task."""
    domains = {family.domain for family in FAMILIES.values()}
    return all(name.partition(":")[0] in domains for name in training.record["data"]["data"])


def _loss(training: Training, note: str) -> Figure:
    """Draw the parts of a training's loss. `note` is printed on it, for readers who see it without the page."""
    curve, evaluation = training.record["curve"], training.evaluation or {}
    steps = [point["step"] for point in curve]
    subtitle = "mean since the last point; hollow: on held-out conversations"
    figure, axes = plots.canvas("Loss", subtitle, 220, [training.label], right=52)
    ends, texts = [], []
    for index, part in enumerate(training.parts):
        values, color = [point[part] for point in curve], COLORS[index % len(COLORS)]
        dashes = DASHES[index // len(COLORS) % len(DASHES)]
        axes.plot(steps, values, marker="" if len(steps) > 1 else "o", ms=4, color=color, ls=dashes, lw=1.4, zorder=3)
        if part in evaluation:
            axes.plot(steps[-1:], [evaluation[part]], "o", ms=6, mec=color, mfc=PAPER, zorder=4)
        ends.append((steps[-1], values[-1], part, color))
        texts.append(f"{part}: {values[0]:.4g} to {values[-1]:.4g} at step {steps[-1]:,}")
    shown = [point[part] for point in [*curve, evaluation] for part in training.parts if part in point]
    if min(shown) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(shown) / 1.1, max(shown) * 1.1)
        ticks = plots.log_ticks(*axes.get_ylim())
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("steps")
    axes.grid(axis="y")
    plots.label_ends(axes, ends)
    return plots.finish(
        figure,
        note,
        name=f"loss-{training.label.partition(' ')[0]}",
        title=f"Loss of {training.label}",
        caption="Each part includes its weight in the whole loss.",
        alt=f"Loss of {training.label}, over steps. {'; '.join(texts)}.",
    )


def _final_losses(trainings: Sequence[Training]) -> Table:
    rows = []
    for training in trainings:
        last, evaluation = training.record["curve"][-1], training.evaluation or {}
        for part in ["loss", *(training.parts if len(training.parts) > 1 else [])]:
            held_out = evaluation.get(part)
            entries = [Entry(f"{last[part]:.4f}"), Entry(NONE if held_out is None else f"{held_out:.4f}")]
            rows.append(Row(part, entries, group=training.label))
    columns = [("training, last point", ""), ("held-out conversations", "")]
    return Table(columns, rows, "loss", "Final losses; each part includes its weight in the total")


def _accuracies(trainings: Sequence[Training]) -> Table:
    """Return a row for each distance ahead, and a column for each evaluated training."""
    found = [{e["ahead"]: e for e in training.evaluation["ahead"]} for training in trainings if training.evaluation]
    rows = []
    for distance in sorted({distance for entries in found for distance in entries}):
        entries = [of_training.get(distance) for of_training in found]
        rows.append(Row(str(distance), [_share_right(entry) if entry else Entry() for entry in entries]))
    caption = (
        "Share of right predictions, %, with 95% interval and number of predictions, by the distance from the last "
        "token that the model was given. A prediction is right if its most likely token is that of the text."
    )
    return Table([(training.label, "") for training in trainings], rows, "tokens ahead", caption)


def _confidence(training: Training) -> Table:
    """Return how well the confidence of a training is calibrated: in each bin."""
    assert training.evaluation is not None
    bins = training.evaluation["calibration"]
    total = sum(entry["n"] for entry in bins)
    rows = [
        Row(f"{entry['low']}–{entry['high']}", [Entry(percent(entry["confidence"])), _share_right(entry)])
        for entry in bins
    ]
    caption = (
        f"{training.label}: of {total:,} {training.predictions}. Confidence and share right differ by "
        f"{100 * calibration_error(training.evaluation):.1f} points on average."
    )
    return Table([(heading, "") for heading in ("mean p, %", "right, %")], rows, "p", caption)


def calibration_error(evaluation: Record) -> float:
    """Return the expected calibration error: |confidence - accuracy| of the bins, weighted by their predictions."""
    bins = evaluation["calibration"]
    error = sum(entry["n"] * abs(entry["confidence"] - entry["accuracy"]) for entry in bins)
    return float(error / sum(entry["n"] for entry in bins))


def _share_right(entry: Record) -> Entry:
    """Return an entry's `accuracy` over its `n` predictions, with its interval."""
    found = statistics.wilson(round(entry["accuracy"] * entry["n"]), entry["n"])
    return Entry(percent(found.value), f"{interval(bounds(found), 100, 1)} of {found.n:,}")


def _lead(training: Training) -> str:
    """Return the main results in a sentence."""
    if training.evaluation is None:
        return NOT_MEASURED
    nearest, farthest = training.evaluation["ahead"][0], training.evaluation["ahead"][-1]
    accuracy = f"{percent(nearest['accuracy'])}% of tokens {nearest['ahead']} ahead are right"
    if farthest is not nearest:
        accuracy += f", and {percent(farthest['accuracy'])}% of those {farthest['ahead']} ahead"
    return f"On {training.evaluation['conversations']:,} held-out conversations, {accuracy}."


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={'auto' if value is None else shown(value)}" for name, value in options.items())


def _with(name: str, more: str) -> str:
    return f"{name} ({more})" if more else name


def _hash(sha256: str | None) -> str:
    return f"sha256 {sha256[:12]}…" if sha256 else ""
