"""What the page of trainings shows: loss, accuracy by distance ahead, and calibration of the confidence.

It is made from the training records of checkpoints (mtbench/training/checkpoint.py, mtbench/training/evaluation.py). It
needs no model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files, statistics
from mtbench.document import (
    SIGNS,
    Beside,
    Block,
    Document,
    Entry,
    Figure,
    Pairs,
    Part,
    Row,
    Section,
    Table,
    Text,
    Tone,
    Verdict,
    html,
)
from mtbench.document.formatting import NONE, bounds, interval, listed
from mtbench.errors import UserError, first_line
from mtbench.models.families import FAMILIES, RECORD
from mtbench.options import show
from mtbench.report.phrases import DEMONSTRATION
from mtbench.report.progress import clock
from mtbench.statistics import Proportion
from mtbench.training.checkpoint import read_record
from mtbench.training.figures import Record, Training, draw, share_right

TONES: Mapping[str, Tone] = {"yes": "good", "no": "bad"}
CONFIDENCE = (
    "Decoding with a threshold τ commits tokens whose probability is at least τ. The threshold is calibrated if at "
    "least a share τ of these tokens is right. Intervals assume independent predictions; predictions of one "
    "conversation are not fully independent, so the intervals are somewhat too narrow."
)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the confidence; each is the lower edge of a bin


class Passing(NamedTuple):
    """The predictions whose confidence reaches a threshold."""

    threshold: float
    share: float  # of all predictions
    confidence: float | None  # mean over these predictions
    right: Proportion

    @property
    def verdict(self) -> str:
        """Is the share of right predictions at least the threshold? Decided by the confidence interval."""
        if self.right.ci_low is None or self.right.ci_high is None:
            return "none pass"
        if self.right.ci_low >= self.threshold:
            return "yes"
        return "no" if self.right.ci_high < self.threshold else "cannot tell"

    @property
    def answer(self) -> Entry:
        tone = TONES.get(self.verdict, "plain")
        mean = f"mean p {100 * self.confidence:.1f}%" if self.confidence else None
        return Entry("", verdict=Verdict(self.verdict, tone=tone, sign=SIGNS[tone]), detail=mean)


def write_training_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these trained checkpoints to `out`, by default `<first folder>.training.html`.

    Raises UserError for a folder without a training record that has a loss curve.
    """
    trainings = [
        Training(n, _name(folder, folders), _record_with_curve(folder)) for n, folder in enumerate(folders, start=1)
    ]
    first = folders[0].resolve()
    out = out or first.with_name(f"{first.name}.training.html")
    try:
        page = html(document(trainings))
    except UserError:
        raise
    except Exception as error:  # an untrusted record may hold anything
        names = ", ".join(str(folder / RECORD) for folder in folders)
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{names}: no page can be made of it ({reason}); restore it, or train again.") from error
    files.write_text(out, page)
    return out


def _record_with_curve(folder: Path) -> Record:
    record = read_record(folder)
    if not record.get("curve"):
        raise UserError(
            f"{folder / RECORD} has no loss curve, so there is nothing to show; give a folder of a training"
        )
    return record


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """Return the folder's name, or its path if another folder has the same name."""
    name = folder.resolve().name
    return name if [other.resolve().name for other in folders].count(name) == 1 else str(folder)


def document(trainings: Sequence[Training]) -> Document:
    """Return what the page of these trainings shows."""
    single, demonstration = len(trainings) == 1, any(map(demonstrates, trainings))
    names = listed(training.name for training in trainings)
    marks = [DEMONSTRATION] if demonstration else []
    drawn = draw(trainings, "".join(marks) or "mtbench, training")
    evaluated = [training for training in trainings if training.evaluation]
    each = [f"{training.number} {training.name}" for training in trainings]
    how: list[Block] = [Pairs(_facts(training)) for training in trainings]
    made: list[Block] = [Pairs(_made_by(training), {"Command"}) for training in trainings]
    if not single:
        briefs = map(_brief, trainings)
        how = [Part(f"{name}: {brief}", [facts]) for name, brief, facts in zip(each, briefs, how, strict=True)]
        made = [Part(name, [facts], folded=False) for name, facts in zip(each, made, strict=True)]
    ahead: list[Block] = [
        Text(_why_missing(t) if single else f"{t.number} {_why_missing(t)}") for t in trainings if not t.evaluation
    ]
    if evaluated:
        ahead.append(Beside([*drawn.depths, _accuracies(evaluated, single)]))
    confidence = [Text(CONFIDENCE), *(part for t in evaluated for part in _confidence(t, drawn.reliability, single))]
    return Document(
        title=f"Training of {names}" if single else f"{len(trainings)} trainings: {names}",
        lead=_lead(trainings[0]) if single else "Figures and tables carry the numbers of the trainings below.",
        marks=marks,
        source=f"`{RECORD}`",
        sections=[
            Section(f"How {'it was' if single else 'they were'} trained", how),
            Section("Loss", [Beside([*drawn.losses, _final_losses(trainings, single)])]),
            Section("Accuracy by tokens ahead", ahead),
            *([Section("Confidence", confidence)] if evaluated else []),
            Section("Command and versions", made),
        ],
    )


def _final_losses(trainings: Sequence[Training], single: bool) -> Table:
    rows = [
        Row(part, [*map(Entry, _last_values(training, part))], None if single else training.number)
        for training in trainings
        for part in _loss_and_parts(training)
    ]
    columns = [("training, last point", ""), ("held-out conversations", "")]
    return Table(columns, rows, "loss", "Final losses; each part includes its weight in the total")


def _confidence(training: Training, figures: Mapping[int, Figure], single: bool) -> list[Block]:
    """Return how well the confidence of a training is calibrated: at each threshold, and bin by bin."""
    assert training.evaluation is not None
    bins, error = training.evaluation["calibration"], calibration_error(training.evaluation)
    who = "" if single else f"{training.number}: "
    thresholds = [
        Row(str(one.threshold), [Entry(f"{one.right.n:,}", f"{100 * one.share:.1f}%"), _share(one.right), one.answer])
        for one in passing(training.evaluation)
    ]
    caption = (
        f"{who}Of {sum(entry['n'] for entry in bins):,} {training.predictions}. Confidence and share right differ by "
        f"{100 * error:.1f} points on average."
    )
    columns = [(heading, "") for heading in ("pass", "right, %", "calibrated?")]
    by_bin = [
        Row(
            f"{entry['low']} to {entry['high']}",
            [Entry(f"{entry['n']:,}"), Entry(f"{100 * entry['confidence']:.1f}"), _share(share_right(entry))],
        )
        for entry in bins
    ]
    of_bins = [(heading, "") for heading in ("predictions", "mean p, %", "right, %")]
    every = Table(of_bins, by_bin, "p", f"{who}Predictions by confidence; empty bins are left out")
    return [
        Beside([figures[training.number], Table(columns, thresholds, "p at least", caption)]),
        Part(f"{who}Every bin of the confidence", [every]),
    ]


def demonstrates(training: Training) -> bool:
    """Return whether the training used only the data of a family that was made for one task."""
    domains = {family.domain for family in FAMILIES.values()}
    return all(name.partition(":")[0] in domains for name in training.record["data"]["data"])


def passing(evaluation: Record) -> list[Passing]:
    """Return, for each threshold, the predictions that reach it, and how many of those are right."""
    bins = evaluation["calibration"]
    total = sum(entry["n"] for entry in bins)
    found = []
    for threshold in THRESHOLDS:
        inside = [entry for entry in bins if entry["low"] >= threshold]
        n = sum(entry["n"] for entry in inside)
        right = sum(round(entry["accuracy"] * entry["n"]) for entry in inside)
        confidence = sum(entry["confidence"] * entry["n"] for entry in inside) / n if n else None
        found.append(Passing(threshold, n / total, confidence, statistics.wilson(right, n)))
    return found


def calibration_error(evaluation: Record) -> float:
    """Return the expected calibration error: |confidence - accuracy| of the bins, weighted by their predictions."""
    bins = evaluation["calibration"]
    error = sum(entry["n"] * abs(entry["confidence"] - entry["accuracy"]) for entry in bins)
    return float(error / sum(entry["n"] for entry in bins))


def percent(found: Proportion) -> tuple[str, str]:
    """Return a share in percent, and its interval, as text."""
    if found.value is None:
        return NONE, ""
    return f"{100 * found.value:.1f}", interval(bounds(found), 100, 1) or ""


def _share(found: Proportion, more: str = "") -> Entry:
    value, limits = percent(found)
    return Entry(value, f"{limits}{more}" or None)


def _lead(training: Training) -> str:
    """Return the main results in sentences."""
    if training.evaluation is None:
        return _why_missing(training)
    nearest, farthest = training.evaluation["ahead"][0], training.evaluation["ahead"][-1]
    last = passing(training.evaluation)[-1]
    kind = "next tokens" if nearest["ahead"] == 1 else f"tokens {nearest['ahead']} ahead"
    accuracy = f"{percent(share_right(nearest))[0]}% of {kind} are right"
    if farthest is not nearest:
        accuracy += f", and {percent(share_right(farthest))[0]}% of those {farthest['ahead']} ahead"
    text = (
        f"On {training.evaluation['conversations']:,} held-out conversations, {accuracy}. "
        f"Are {training.predictions} with p ≥ {last.threshold} right {100 * last.threshold:.0f}% of the time? "
    )
    if not last.right.n:
        return f"{text}There are none."
    value, interval = percent(last.right)
    verdict = {"yes": "Yes", "no": "No", "cannot tell": "Not decided"}[last.verdict]
    return f"{text}{verdict}: {value}% {interval} of {last.right.n:,}."


def _why_missing(training: Training) -> str:
    """Return why a training has no evaluation."""
    record = training.record
    if min(record["settings"]["held_out"], record["data"]["examples"] // 10) == 0:
        reason = "no conversations were held out (--held-out 0, or fewer than ten in all)"
    elif "evaluation" in record:
        reason = "the held-out conversations have nothing to predict"
    else:
        reason = "the training has not ended"
    return f"Accuracy and confidence were not measured: {reason}."


def _brief(training: Training) -> str:
    record = training.record
    data = ", ".join(record["data"]["data"])
    return (
        f"{record['objective']} from {record['base']} on {data}, {record['steps']:,} steps, {clock(record['train_s'])}"
    )


def _facts(training: Training) -> list[tuple[str, str]]:
    """Return how it was trained, as pairs of name and value."""
    record, data, tokens = training.record, training.record["data"], training.record["tokens"]
    held_out = training.evaluation["conversations"] if training.evaluation else 0
    pace = f", {record['tokens_per_s']:,.0f} tokens/s" if record["tokens_per_s"] else ""
    facts = [
        ("Objective", _with(record["objective"], _values(record["options"]))),
        ("From", _with(record["base"], _hash(record["base_sha256"]))),
    ]
    if record["teacher"]:
        facts.append(("Teacher", _with(record["teacher"], _hash(record["teacher_sha256"]))))
    return [
        *facts,
        (
            "Data",
            f"{', '.join(data['data'])}: {data['read']:,} conversations read, {data['dropped']:,} dropped, "
            f"{data['cut']:,} cut; {data['examples'] - held_out:,} to train on, {held_out:,} held out "
            f"({_hash(data['sha256'])})",
        ),
        (
            "Trained on",
            f"{tokens['conversations']:,} conversations, {tokens['fed']:,} tokens fed, "
            f"{tokens['predicted']:,} predicted",
        ),
        ("Took", f"{record['steps']:,} steps in {record['train_s']:,.1f} s ({clock(record['train_s'])}){pace}"),
        ("Settings", _values(record["settings"])),
    ]


def _made_by(training: Training) -> list[tuple[str, str]]:
    versions = training.record["versions"]
    text = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return [("Command", training.record["command"]), ("Versions", text)]


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={'auto' if value is None else show(value)}" for name, value in options.items())


def _with(name: str, more: str) -> str:
    return f"{name} ({more})" if more else name


def _hash(sha256: str | None) -> str:
    return f"sha256 {sha256[:12]}…" if sha256 else ""


def _loss_and_parts(training: Training) -> list[str]:
    return ["loss", *(training.parts if len(training.parts) > 1 else [])]


def _last_values(training: Training, part: str) -> tuple[str, str]:
    """Return the last point of a curve, and the value on held-out conversations."""
    held_out = (training.evaluation or {}).get(part)
    return f"{training.record['curve'][-1][part]:.4f}", NONE if held_out is None else f"{held_out:.4f}"


def _accuracies(trainings: Sequence[Training], single: bool) -> Table:
    """Return a row for each distance ahead, and a column for each evaluated training."""
    found = [{e["ahead"]: e for e in training.evaluation["ahead"]} for training in trainings if training.evaluation]
    rows = []
    for distance in sorted({distance for entries in found for distance in entries}):
        entries = [of_training.get(distance) for of_training in found]
        places = [_share(share_right(entry), f" of {entry['n']:,}") if entry else Entry() for entry in entries]
        rows.append(Row(str(distance), places))
    columns = [("right, %", "")] if single else [(f"{t.number} {t.name}", "") for t in trainings]
    caption = "Share of correct predictions, %, with 95% interval and number of predictions"
    return Table(columns, rows, "tokens ahead", caption)
