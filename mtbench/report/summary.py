"""Recommendations, the summary of a section, warnings, and where arms stop paying. Sentences follow verdicts.

The recommendations are those of the race if the run is one, else those of its results.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtbench import statistics
from mtbench.decoding.registry import plain_decoding
from mtbench.document.formatting import counted, few, listed
from mtbench.plan.directory import RunDirectory
from mtbench.report.phrases import breaks_promise, grade_note, readings
from mtbench.results.comparisons import GroupKey
from mtbench.results.decision import headline, recommend
from mtbench.results.decision_format import FILE, Decision
from mtbench.results.decision_text import beside, with_engine
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import BreakEven, ResultCell, Results
from mtbench.results.lossless_format import JUDGE


class Decided(NamedTuple):
    """The recommendations as sentences with the ids of arms."""

    headline: str
    beside: dict[GroupKey, str]  # what it leaves out, by suite and batch size: arms that are as good, or that are open
    open: bool  # nothing is decided


def read_decision(run: RunDirectory) -> Decision | None:
    """Return the decision of a race; None if the run is no race, or one that is not decided yet."""
    return run.read(FILE, Decision) if run.has(FILE) else None


def decided(results: Results, decision: Decision | None) -> Decided:
    """Return what a race decided; without a decision, what the results recommend."""
    if decision is None:
        recommendations = recommend(results.cells, max_loss=results.statistics.max_loss)
        sentence = headline(recommendations)
    else:
        recommendations, sentence = decision.recommendations, decision.headline
    several = len({rec.engine for rec in recommendations}) > 1
    left_out: dict[GroupKey, list[str]] = {}
    for rec in recommendations:
        if text := " ".join(beside(rec)):
            of_group = left_out.setdefault(GroupKey(rec.suite, rec.batch_size, rec.batching), [])
            of_group.append(with_engine(rec.engine, text) if several else text)
    beside_ = {key: " ".join(texts) for key, texts in left_out.items()}
    return Decided(sentence, beside_, all(rec.word == "cannot tell" for rec in recommendations))


def summary(cells: Sequence[ResultCell], own: Mapping[str, Speedup], place: str) -> list[str]:
    """Return how many arms are faster than their baseline, the cells left out, and the two readings of the answers.

    own: arm -> its speedup of the main table. Both run by the same engine, so that the gain of an engine is not counted
    as a gain of the method.
    """
    sound = {cell.arm for cell in cells if cell.status != "failed" and not cell.void}
    compared = [own[c.arm] for c in cells if c.arm in own and not c.reference and {c.arm, own[c.arm].baseline} <= sound]
    sentence = f"On {place}, no arm can be compared with a baseline{_advice(cells, own)}."
    if compared:
        names = {speedup.baseline for speedup in compared}
        baseline = names.pop() if len(names) == 1 else "their baselines"
        words = [speedup.verdict.word for speedup in compared]
        faster = f"{words.count('faster')} of {counted(len(compared), 'arm')} faster than {baseline}"
        sentence = f"On {place}: {faster}, {words.count('slower')} slower."
    failed, void = sum(cell.status == "failed" for cell in cells), sum(bool(cell.void) for cell in cells)
    left_out = [f"{n} {word}" for n, word in ((failed, "failed"), (void, "void")) if n]
    return [sentence, *([f"Left out: {listed(left_out)}."] if left_out else []), *readings(cells)]


def warnings(cells: Sequence[ResultCell], decision: Decision | None = None) -> list[str]:
    """Return what a reader must know before any figure: an unfinished run, and arms that break their promise.

    cells: those of the whole run. decision: of a race, which says what to do if it is not final.
    """
    sentences = []
    unfinished = sum(cell.status == "partial" for cell in cells)
    if unfinished and decision is None:
        of_all = f"{unfinished} of {counted(len(cells), 'cell')}"
        sentences.append(f"The run is not finished: blocks are missing in {of_all}; continue with `--resume`.")
    sentences += [
        f"{cell.arm} claims to be lossless and is not: its tokens are not those of {cell.lossless.against}; "
        + (cell.lossless.why or f"`mtbench audit DIR:{cell.lossless.against} DIR:{cell.arm}` says why.")
        for cell in cells
        if cell.lossless is not None and breaks_promise(cell)
    ]
    sentences += [
        f"{cell.arm}: {grade_note(cell.lossless)}"
        for cell in cells
        if cell.lossless is not None and (cell.lossless.against, cell.lossless.grade) == (JUDGE, "divergent")
    ]
    disturbed = dict.fromkeys(c.arm for c in cells for flag in c.flags if flag.startswith(statistics.DISTURBED))
    if disturbed:
        sentences.append(f"The machine was disturbed while {few([*disturbed])} decoded; the notes say how.")
    sentences += [f"{cell.arm}: {cell.collapse}." for cell in cells if cell.collapse]
    return list(dict.fromkeys(sentences))


def _advice(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> str:
    """Return which reference to add if an arm on our engine has none on its own checkpoint."""
    reference = plain_decoding()[0]
    roles = {cell.on for cell in cells if cell.method == reference}
    missing = [
        cell.on for cell in cells if not cell.reference and cell.engine and cell.arm not in own and cell.on not in roles
    ]
    specs = [reference if on == reference else f"{reference}:on={on}" for on in dict.fromkeys(missing)]
    return f"; add {' and '.join(f'`--method {spec}`' for spec in specs)}" if specs else ""


def over_batch_sizes(entry: BreakEven) -> str:
    """Return the verdicts of an arm by batch size, and where it stops paying by them."""
    sizes: dict[str, list[int]] = {}
    for size, word in zip(entry.swept, entry.words, strict=True):
        sizes.setdefault(f"{word} (its table says why)" if word == statistics.INCONCLUSIVE else word, []).append(size)
    verdicts = "; ".join(f"{word} at batch size {listed(of_word)}" for word, of_word in sizes.items())
    ending = f"it stops paying at {entry.batch_size}"
    if entry.reason:
        ending = f"it is not known where it stops paying: {entry.reason}"
    elif entry.batch_size is None:
        ending = "it still pays at the largest"
    return f"{entry.arm} over {entry.baseline}: {verdicts}; {ending}."
