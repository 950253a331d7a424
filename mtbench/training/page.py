"""What trainings came to, as one page: loss, accuracy by how far ahead, and whether confidence can be trusted.

Made from the records that trained checkpoints carry (mtbench/training/checkpoint.py, mtbench/training/evaluation.py),
in the look of the report. Needs no model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from mtbench import statistics
from mtbench.errors import UserError
from mtbench.models.families import FAMILIES, RECORD
from mtbench.options import show
from mtbench.report.figures import Drawing
from mtbench.report.formatting import NONE
from mtbench.report.progress import clock
from mtbench.report.tables import SIGNS
from mtbench.report.terminal import DEMONSTRATION
from mtbench.report.write import inline, template
from mtbench.statistics import Proportion
from mtbench.training.figures import Record, Training, draw, share_right

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the confidence; each begins a bin of the record


class Passing(NamedTuple):
    """The predictions that a threshold lets pass."""

    threshold: float
    share: float  # of all predictions
    confidence: float | None  # of these, on average
    right: Proportion

    @property
    def verdict(self) -> str:
        """Is at least that share of them right?"""
        if self.right.ci_low is None or self.right.ci_high is None:
            return "none pass"
        yes, no = self.right.ci_low >= self.threshold, self.right.ci_high < self.threshold
        return "yes" if yes else "no" if no else "cannot tell"

    @property
    def tone(self) -> str:
        return {"yes": "good", "no": "bad"}.get(self.verdict, "plain")


class Confidence(NamedTuple):
    """What is shown of one training's."""

    training: Training
    figure: tuple[Drawing, Markup]
    passing: list[Passing]
    error: float
    bins: list[Record]

    @property
    def predictions(self) -> int:
        return sum(entry["n"] for entry in self.bins)


def write_training_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these trained checkpoints to `out`, or beside the first of them as `<folder>.training.html`.

    Raises UserError for a folder without the record of a training.
    """
    trainings = [Training(n, _name(folder, folders), read_record(folder)) for n, folder in enumerate(folders, start=1)]
    first = folders[0].resolve()
    out = out or first.with_name(f"{first.name}.training.html")
    out.write_text(_page(trainings), encoding="utf-8")
    return out


def read_record(folder: Path) -> Record:
    """How the checkpoint in `folder` was trained. Raises UserError if that is not written there."""
    file = folder / RECORD
    try:
        record: Record = json.loads(file.read_text(encoding="utf-8"))
        if record.get("curve"):
            return record
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no {RECORD}; give a folder that `mtbench train` made") from None
    except (ValueError, AttributeError):
        raise UserError(f"{file} is not a training record; give another folder, or train again") from None
    raise UserError(f"{file} has no loss curve, so there is nothing to show; give a folder of a training")


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """As short as tells it from the others."""
    name = folder.resolve().name
    return name if [other.resolve().name for other in folders].count(name) == 1 else str(folder)


def _page(trainings: Sequence[Training]) -> str:
    alone, demonstration = len(trainings) == 1, any(map(demonstrates, trainings))
    subject = "Training of " if alone else f"{len(trainings)} trainings: "
    subject += ", ".join(t.name for t in trainings)
    drawn = draw(trainings, DEMONSTRATION if demonstration else "mtbench, training")
    confidences = [
        Confidence(
            t,
            _shown(drawn.reliability[t.number]),
            passing(t.evaluation),
            calibration_error(t.evaluation),
            t.evaluation["calibration"],
        )
        for t in trainings
        if t.evaluation
    ]
    return template("training.html.j2").render(
        title=DEMONSTRATION if demonstration else subject,
        subject=subject if demonstration else None,
        lead=_lead(trainings[0]) if alone else "Figures and tables carry the numbers of the trainings below.",
        alone=alone,
        trainings=[(t, _brief(t), _facts(t), _made_by(t)) for t in trainings],
        losses=[_shown(drawing) for drawing in drawn.losses],
        ends=[(t, part, *_ends(t, part)) for t in trainings for part in _whole_and_parts(t)],
        depths=[_shown(drawing) for drawing in drawn.depths],
        accuracies=_accuracies(trainings),
        missing=[(t, _why_missing(t)) for t in trainings if not t.evaluation],
        confidences=confidences,
        share_right=share_right,
        percent=percent,
        signs=SIGNS,
        dash=NONE,
    )


def demonstrates(training: Training) -> bool:
    """Whether all its data are what a family made for one task learns."""
    domains = {family.domain for family in FAMILIES.values()}
    return all(name.partition(":")[0] in domains for name in training.record["data"]["data"])


def _shown(drawing: Drawing) -> tuple[Drawing, Markup]:
    return drawing, inline(drawing, drawing.name)


def passing(evaluation: Record) -> list[Passing]:
    """For each threshold, how many predictions are at least that sure, and how many of those are right."""
    bins = evaluation["calibration"]
    whole = sum(entry["n"] for entry in bins)
    found = []
    for threshold in THRESHOLDS:
        inside = [entry for entry in bins if entry["low"] >= threshold]
        n = sum(entry["n"] for entry in inside)
        right = sum(round(entry["accuracy"] * entry["n"]) for entry in inside)
        confidence = sum(entry["confidence"] * entry["n"] for entry in inside) / n if n else None
        found.append(Passing(threshold, n / whole, confidence, statistics.wilson(right, n)))
    return found


def calibration_error(evaluation: Record) -> float:
    """How far confidence and share right lie apart in a bin, on average over predictions (ECE)."""
    bins = evaluation["calibration"]
    apart = sum(entry["n"] * abs(entry["confidence"] - entry["accuracy"]) for entry in bins)
    return float(apart / sum(entry["n"] for entry in bins))


def percent(found: Proportion) -> tuple[str, str]:
    """A share and its interval."""
    if found.value is None or found.ci_low is None or found.ci_high is None:
        return NONE, ""
    return f"{100 * found.value:.1f}", f"[{100 * found.ci_low:.1f}, {100 * found.ci_high:.1f}]"


def _lead(training: Training) -> str:
    """What to know first, in sentences."""
    if training.evaluation is None:
        return _why_missing(training)
    ahead, last = training.evaluation["ahead"], passing(training.evaluation)[-1]
    what = "next tokens" if ahead[0]["ahead"] == 1 else f"tokens {ahead[0]['ahead']} ahead"
    said = f"On {training.evaluation['conversations']:,} conversations kept apart, "
    said += f"{percent(share_right(ahead[0]))[0]}% of {what} are right"
    said += f", and {percent(share_right(ahead[-1]))[0]}% of those {ahead[-1]['ahead']} ahead" * (len(ahead) > 1)
    said += f". Are {training.predictions} with p ≥ {last.threshold} right {100 * last.threshold:.0f}% of the time? "
    if not last.right.n:
        return f"{said}There are none."
    value, interval = percent(last.right)
    verdict = {"yes": "Yes", "no": "No", "cannot tell": "That cannot be told"}[last.verdict]
    return f"{said}{verdict}: {value}% {interval} of {last.right.n:,}."


def _why_missing(training: Training) -> str:
    record = training.record
    if min(record["settings"]["held_out"], record["data"]["examples"] // 10) == 0:
        why = "no conversations were kept apart (--held-out 0, or fewer than ten in all)"
        return f"Accuracy and confidence were not measured: {why}."
    why = "what was kept apart held nothing to predict" if "evaluation" in record else "the training has not ended"
    return f"Accuracy and confidence were not measured: {why}."


def _brief(training: Training) -> str:
    record = training.record
    data = ", ".join(record["data"]["data"])
    return (
        f"{record['objective']} from {record['base']} on {data}, {record['steps']:,} steps, {clock(record['train_s'])}"
    )


def _facts(training: Training) -> list[tuple[str, str]]:
    """How it was trained, in pairs."""
    record, data, tokens = training.record, training.record["data"], training.record["tokens"]
    apart = training.evaluation["conversations"] if training.evaluation else 0
    pace = f", {record['tokens_per_s']:,.0f} tokens/s" if record["tokens_per_s"] else ""
    return [
        ("Objective", _with(record["objective"], _values(record["options"]))),
        ("From", _with(record["base"], _hash(record["base_sha256"]))),
        *([("Teacher", _with(record["teacher"], _hash(record["teacher_sha256"])))] if record["teacher"] else []),
        (
            "Data",
            f"{', '.join(data['data'])}: {data['read']:,} conversations read, {data['dropped']:,} dropped, "
            f"{data['cut']:,} cut; {data['examples'] - apart:,} to train on, {apart:,} kept apart "
            f"({_hash(data['sha256'])})",
        ),
        (
            "Seen",
            f"{tokens['conversations']:,} conversations, {tokens['fed']:,} tokens fed, "
            f"{tokens['predicted']:,} predicted",
        ),
        ("Took", f"{record['steps']:,} steps in {record['train_s']:,.1f} s ({clock(record['train_s'])}){pace}"),
        ("Settings", _values(record["settings"])),
    ]


def _made_by(training: Training) -> list[tuple[str, str]]:
    versions = training.record["versions"]
    said = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return [("Command", training.record["command"]), ("Versions", said)]


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={'auto' if value is None else show(value)}" for name, value in options.items())


def _with(name: str, more: str) -> str:
    return f"{name} ({more})" if more else name


def _hash(sha256: str | None) -> str:
    return f"sha256 {sha256[:12]}…" if sha256 else ""


def _whole_and_parts(training: Training) -> list[str]:
    return ["loss", *(training.parts if len(training.parts) > 1 else [])]


def _ends(training: Training, part: str) -> tuple[str, str]:
    """The last point of a curve, and what it is on held-out conversations."""
    held_out = (training.evaluation or {}).get(part)
    return f"{training.record['curve'][-1][part]:.4f}", NONE if held_out is None else f"{held_out:.4f}"


def _accuracies(trainings: Sequence[Training]) -> list[tuple[int, list[Record | None]]]:
    """How far ahead, and each evaluated training's entry for it."""
    found = [{e["ahead"]: e for e in t.evaluation["ahead"]} for t in trainings if t.evaluation]
    return [(n, [entries.get(n) for entries in found]) for n in sorted({n for entries in found for n in entries})]
