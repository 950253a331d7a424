"""The summary of a section, warnings, and remarks on single arms. Verdicts decide what a sentence says."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import counted, listed, number, percent, times
from mtbench.report.detail_tables import FACTORS, length_detail
from mtbench.report.phrases import breaks_promise, fewer_items
from mtbench.results import verdict_words
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import BreakEven, ResultCell

NOTED_BELOW = 0.95  # a factor of at least this is not named


class _Arm(NamedTuple):
    """An arm that is compared with a baseline; neither failed nor void."""

    cell: ResultCell
    speedup: Speedup
    baseline: ResultCell


def summary(cells: Sequence[ResultCell], own: Mapping[str, Speedup], place: str) -> list[str]:
    """Return how many arms are faster than their baseline, and the cells left out.

    own: arm -> its speedup of the main table. Both run by the same engine, so that the gain of an engine is not counted
    as a gain of the method.
    """
    arms = _compared(cells, own)
    sentence = f"On {place}, no arm can be compared with a baseline{_advice(cells, own)}."
    if arms:
        names = {arm.speedup.baseline for arm in arms}
        baseline = names.pop() if len(names) == 1 else "their baselines"
        verdicts = [arm.speedup.verdict for arm in arms]
        faster = f"{verdicts.count('faster')} of {counted(len(arms), 'arm')} faster than {baseline}"
        sentence = f"On {place}: {faster}, {verdicts.count('slower')} slower."
    failed, void = sum(cell.status == "failed" for cell in cells), sum(bool(cell.void) for cell in cells)
    left_out = [f"{n} {word}" for n, word in ((failed, "failed"), (void, "void")) if n]
    return [sentence, *([f"Left out: {listed(left_out)}."] if left_out else [])]


def warnings(cells: Sequence[ResultCell]) -> list[str]:
    """Return what a reader must know before any figure: an unfinished run, and arms that break their promise.

    cells: those of the whole run.
    """
    found = []
    unfinished = sum(cell.status == "partial" for cell in cells)
    if unfinished:
        of_all = f"{unfinished} of {counted(len(cells), 'cell')}"
        found.append(f"The run is not finished: blocks are missing in {of_all}; continue with `--resume`.")
    found += [
        f"{cell.arm} claims to be lossless and is not: its tokens are not those of {cell.lossless.against}."
        for cell in cells
        if cell.lossless is not None and breaks_promise(cell)
    ]
    found += [
        f"{flag.replace(statistics.DISTURBED, f'The machine was disturbed while {cell.arm} decoded')}."
        for cell in cells
        for flag in cell.flags
        if flag.startswith(statistics.DISTURBED)
    ]
    return list(dict.fromkeys(found))


def _compared(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> list[_Arm]:
    """Return the arms that can be compared with their baseline."""
    sound = {cell.arm: cell for cell in cells if cell.status != "failed" and not cell.void}
    return [
        _Arm(cell, own[arm], sound[own[arm].baseline])
        for arm, cell in sound.items()
        if arm in own and own[arm].baseline in sound and not cell.reference
    ]


def _advice(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> str:
    """Return which reference to add if an arm on our engine has none on its own checkpoint."""
    reference = next(name for name in METHODS if METHODS[name].reference and not METHODS[name].outside)
    roles = {cell.on for cell in cells if cell.method == reference}
    missing = [
        cell.on for cell in cells if not cell.reference and cell.engine and cell.arm not in own and cell.on not in roles
    ]
    specs = [reference if on == reference else f"{reference}:on={on}" for on in dict.fromkeys(missing)]
    return f"; add {' and '.join(f'`--method {spec}`' for spec in specs)}" if specs else ""


def remarks(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> list[str]:
    """Return what the table does not say: that other batch sizes have more items, and why arms are not faster."""
    fewer = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in fewer_items(cells)]
    return [*fewer, *filter(None, map(_unrewarded, _compared(cells, own)))]


def _unrewarded(arm: _Arm) -> str | None:
    """Return why an arm that commits more per forward than its baseline is not faster, or None."""
    cell, baseline, speedup = arm.cell, arm.baseline, arm.speedup
    gain, plain = number(cell.tokens_per_forward), number(baseline.tokens_per_forward)
    commits_more = (cell.tokens_per_forward or 0) > (baseline.tokens_per_forward or math.inf) and gain != plain
    if not commits_more or speedup.verdict.startswith("faster") or verdict_words.withheld(speedup.verdict):
        return None
    costs = [
        f"{FACTORS[name][0]} {times(factor)}"
        for name, factor in speedup.factors or ()
        if name != "tokens_per_forward" and factor < NOTED_BELOW
    ]
    costs += [
        f"{part} {percent(part_s / cell.decode_s, 0)}% of decoding"
        for part, part_s in (("drafting", cell.draft_s), ("heads", cell.head_s))
        if part_s and cell.decode_s
    ]
    costs += filter(None, [length_detail(speedup)])
    found = f"{cell.arm} commits {gain} tokens per forward (baseline: {plain}) and is not faster than "
    return f"{found}{speedup.baseline}: {listed(costs) or 'the reason was not measured'}."


def over_batch_sizes(entry: BreakEven) -> str:
    """Return the verdicts of an arm by batch size, and where it stops paying by them."""
    sizes: dict[str, list[int]] = {}
    for size, verdict in zip(entry.swept, entry.verdicts, strict=True):
        sizes.setdefault(verdict.partition(":")[0], []).append(size)
    verdicts = "; ".join(f"{word} at batch size {listed(of_word)}" for word, of_word in sizes.items())
    ending = f"it stops paying at {entry.batch_size}"
    if entry.reason:
        ending = f"it is not known where it stops paying: {entry.reason}"
    elif entry.batch_size is None:
        ending = "it still pays at the largest"
    return f"{entry.arm} over {entry.baseline}: {verdicts}; {ending}."
