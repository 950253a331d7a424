"""Phrases that the page, the tables and the terminal share: names, disclaimers, and why a value is missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from mtbench import statistics
from mtbench.document import model
from mtbench.document.formatting import NONE, bounds, counted, interval, listed, number, percent, times
from mtbench.lineup.simulation import KINDS, flags_of
from mtbench.models.families import FAMILIES, PART, RANDOM, short_name
from mtbench.plan.plan import OTHER_RULE
from mtbench.results.comparisons import by_reading
from mtbench.results.decision_text import EPSILON_NEEDS, TOO_CLOSE
from mtbench.results.figure_formats import Alone, NeededItems, SameItems, Spread, TaskSpeedup, Verdict
from mtbench.results.format import ResultCell
from mtbench.results.lossless_format import JUDGE, Lossless

DEMONSTRATION = "Demonstration of how mtbench works: small model, CPU, synthetic task"
SMALL_MODEL = "Demonstration: small model"
REPEATED_FLAG = "accuracy inconclusive"  # a row has it in its verdict
DIVISIONS = {"context": "tokens before the forward", "category": "category", "thinking": "thinking or answer"}
ADJUSTED = "not clear once adjusted for all comparisons"
READINGS = "Accuracy is by the rule of the benchmark's owner, the score; by value, a right result counts in any form."
SIMULATED = "Simulated {kinds}: speed only, not the speed of a trained model"


def suite_name(spec: str) -> str:
    """Return the name of a suite without the folder of its file: `prompts:mine.jsonl`."""
    name, colon, rest = spec.partition(":")
    return f"{name}{colon}{Path(rest).name}"


def batches(size: int, batching: str) -> str:
    """Return how a group is batched."""
    return f"batch size {size}" if batching == "static" else f"batch size {size}, {batching}"


def disclaimers(cells: Sequence[ResultCell]) -> list[str]:
    """Return the disclaimers that every page, table and figure of these cells must state first."""
    sentences = []
    simulated = [cell.simulated for cell in cells if cell.simulated]
    kinds = [word for kind, word in KINDS.items() if any(getattr(s, kind) for s in simulated)]
    if kinds:
        sentences.append(SIMULATED.format(kinds=" and ".join(kinds)))
    demonstrations = [cell for cell in cells if cell.demonstration]
    if demonstrations:
        synthetic = all(is_synthetic(cell.family, cell.suite, cell.device) for cell in demonstrations)
        sentences.append(DEMONSTRATION if synthetic else SMALL_MODEL)
    return sentences


def is_synthetic(family: str, suite: str, device: str | None) -> bool:
    """Return whether this is the synthetic suite that the family was trained for, run on a CPU."""
    return family in FAMILIES and FAMILIES[family].domain == suite.partition(":")[0] and device != "cuda"


def checkpoint_names(cells: Sequence[ResultCell]) -> str:
    """Return the families of the cells. A cell whose own role is overridden is named by the checkpoint there."""
    names = []
    for cell in cells:
        source = cell.checkpoints.get(cell.on)
        if source is not None and is_overridden(cell.family, cell.on, source):
            names.append(short_name(source))
        else:
            names.append(cell.family)
    return listed(dict.fromkeys(names))


def is_overridden(family: str, role: str, source: str) -> bool:
    """Return whether `--checkpoint` put another checkpoint in this role of the family."""
    if role.startswith(PART):
        return False  # it is the target's
    if family in FAMILIES:
        return FAMILIES[family].roles.get(role) != source
    return not source.startswith(RANDOM) and Path(source).name != family  # a family of --model has its name


def simulations(cells: Sequence[ResultCell]) -> list[str]:
    """Return what is simulated in the cells of a group. References accept no drafts."""
    sentences, accepted = [], dict[str, list[str]]()
    for cell, mark in ((cell, cell.simulated) for cell in cells if cell.simulated):
        if mark.weights:
            sentences.append(f"Simulated weights: {mark.weights}.")
        if mark.accept and not cell.reference:
            note = mark.note or ""
            if cell.batching == "refill":
                note = note.partition(":")[0]  # the rest applies to static batches
            accepted.setdefault(note, []).append(mark.accept)
    for note, texts in accepted.items():
        sentences.append(f"Simulated acceptance: {'; '.join(dict.fromkeys(texts))}{f' ({note})' if note else ''}.")
    return list(dict.fromkeys(sentences))


def flags_of_measurement(cell: ResultCell) -> list[str]:
    """Return the flags of a cell without the flags for simulation."""
    return [flag for flag in cell.flags if flag not in flags_of(cell.simulated)]


def spread_over_tasks(spread: Spread | None) -> str | None:
    """Return the worst and the best task of a figure; None if there is none, or if both figures are written alike."""
    if spread is None:
        return None
    low, high = number(spread.worst.value, 2), number(spread.best.value, 2)
    if low == high:
        return None
    words = f"from {low} on {spread.worst.task} to {high} on {spread.best.task}"
    left_out = spread.tasks - spread.compared
    return f"{words}, {left_out} of {spread.tasks} tasks measured too little" if left_out else words


def shown_verdict(verdict: Verdict, ends: Sequence[float] | None = None, *, brief: bool = False) -> model.Verdict:
    """Return a verdict with what it lacks or rests on. ends: of a speedup, its interval, which is of one arm alone.

    brief: only if it is open, in a few words.
    """
    why, (low, high) = "", ends or (1.0, 1.0)
    if verdict.word == statistics.INCONCLUSIVE:
        is_clear = low > 1 + statistics.SPEED_MARGIN or high < 1 - statistics.SPEED_MARGIN
        why = ADJUSTED if is_clear or verdict.alone else "too few items" if verdict.needed else TOO_CLOSE
    if verdict.reason is not None and (why or not brief):
        why = verdict.reason.text
        if brief and verdict.reason.kind == "disturbed":
            return model.Verdict.of(statistics.DISTURBED)
    elif not brief:
        why = _adjusted(verdict.alone) if verdict.alone else _needs(verdict.needed) if verdict.needed else why
    return model.Verdict.of(verdict.word, why)


def _adjusted(alone: Alone) -> str:
    number_ = f"{alone.arms} arms" if alone.looks == 1 else f"{alone.arms} arms and {alone.looks} looks"
    ends = f"[{100 * alone.low:+.1f}, {100 * alone.high:+.1f}] points"
    if alone.word in get_args(statistics.SpeedWord):
        ends = f"[{alone.low:.2f}, {alone.high:.2f}]"
    adjusted = f"adjusted for {number_}, the {100 * alone.level:.4g}% interval is {ends}"
    return f"{alone.word} if it were the only arm; {adjusted}"


def _needs(needed: NeededItems) -> str:
    return f"needs n ≈ {needed.n} {'at the observed difference' if needed.observed else 'if the true difference is 0'}"


def speed_entry(speedup: TaskSpeedup, *, brief: bool = False, judged: bool = True, **given: Any) -> model.Entry:
    """Return a speedup, its interval and, if `judged`, its verdict; without an interval what it lacks.

    given: the rest of the entry.
    """
    ends, reason = bounds(speedup), speedup.verdict.reason
    if ends is None:
        return model.Entry(NONE if reason is None else reason.text, against=given.get("against"))
    verdict = shown_verdict(speedup.verdict, ends, brief=brief) if judged else None
    return model.Entry(times(speedup.value), interval(ends), verdict, **given)


def falling_acceptance(cell: ResultCell) -> list[str]:
    """Return how an arm's acceptance falls from the shortest contexts to the longest; none: not, by their intervals."""
    known = [(part, ends) for part in cell.acceptance_by.get("context", ()) if (ends := bounds(part))]
    if not known or known[-1][1][1] >= known[0][1][0]:
        return []
    first, last = (f"{number(part.value)} at {part.part}" for part, _ in (known[0], known[-1]))
    return [f"acceptance falls from {first} to {last} tokens of context"]


def breaks_promise(cell: ResultCell) -> bool:
    """Return whether an arm claims to have another arm's tokens and emits others."""
    graded = cell.lossless
    return cell.claims == "lossless" and graded is not None and graded.grade == "divergent" and graded.against != JUDGE


def grade_note(graded: Lossless) -> str | None:
    """Return what a reader must know of a grade: that tokens were not judged, or are not the judge's."""
    differ = f"in {graded.items - graded.identical:,} of {counted(graded.items, 'answer')}, the first at token "
    differ += f"{graded.first_divergence}"
    if graded.against == JUDGE and graded.grade == "divergent":
        return f"Its tokens are not the choices of {JUDGE} {differ}: the engine computes otherwise, or another model."
    if graded.grade == "near-tie" and graded.why is not None:  # audited, since an answer is not valid
        return graded.why
    if graded.grade != "inconclusive":
        return None
    what = (
        "No token was judged" if graded.against == JUDGE else f"Other tokens than {graded.against} {differ}, not judged"
    )
    return f"{what}: {graded.why or EPSILON_NEEDS}."


def ungraded(cell: ResultCell) -> str:
    """Return why an arm has no grade."""
    if cell.simulated:
        return "not graded"
    if cell.other_tokens:
        return f"other tokens by {listed(cell.other_tokens)}"
    if cell.reference:
        return "baseline"
    lossy = OTHER_RULE if OTHER_RULE in cell.flags else "lossy by design"
    return {"lossless": "not checked", "distribution": "same distribution (promised)", "lossy": lossy}[cell.claims]


def fewer_items(cells: Sequence[ResultCell]) -> list[str]:
    """Return a remark if a batch size has accuracies of fewer items, with the accuracies elsewhere on these items.

    cells: those of one group. Without it, accuracies at two batch sizes differ by their items and read as an effect of
    batching.
    """
    arms: dict[str, list[tuple[str, SameItems]]] = {}  # remark -> its arms
    for cell in cells:
        same = cell.accuracy_same_items
        if same is not None:
            where = batches(same.batch_size, same.batching)
            fact = f"accuracy is over {same.n:,} of {same.items:,} items; on the same items, {where} has"
            arms.setdefault(fact, []).append((cell.arm, same))
    return [f"{fact} {_elsewhere(of_arms)}" for fact, of_arms in arms.items()]


def readings(cells: Sequence[ResultCell]) -> list[str]:
    """Return what the two readings of a group's answers are, and the verdicts that depend on the reading."""
    if not any(cell.by_value for cell in cells):
        return []
    verdicts = [(f"{cell.arm} against {baseline}", *words) for cell in cells for baseline, *words in by_reading(cell)]
    other = [f"{pair}: {by_score} by the score, {by_value} by value" for pair, by_score, by_value in verdicts]
    return [READINGS, *([f"Verdicts on accuracy depend on the reading: {'; '.join(other)}."] if other else [])]


def _elsewhere(arms: Sequence[tuple[str, SameItems]]) -> str:
    values = [(arm, percent(same.here), percent(same.there)) for arm, same in arms]
    changed = [f"{there}% in {arm} (here {here}%)" for arm, here, there in values if here != there]
    return listed(changed) or "the same accuracies"
