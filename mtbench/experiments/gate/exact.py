"""Stage `exact`: two builds emit the same tokens from the same work. No time is read and no chance is involved.

Base decodes the plan twice and head once. A cell whose answers differ between base's two runs is compared in memory
only, since other tokens by chance take other work by chance. If only its work differs, its answers are compared.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtbench.document.formatting import counted
from mtbench.experiments.gate.format import Finding, Kind, Level
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import FailureLine, GenerationLine, MemoryRecord, TimingLine

MEMORY_TOLERANCE = 0.01  # of the bytes of a cell

ANSWER: Mapping[str, str] = {  # fields of an answer that a user sees -> in words
    "token_ids": "tokens",
    "finish_reason": "reasons to finish",
}
WORK: Mapping[str, str] = {  # fields that count work -> in words; more of it makes an answer dearer
    "forwards": "forward passes",
    "positions_fed": "positions fed",
    "draft_forwards": "forward passes of draft models",
}


class Read(NamedTuple):
    """What a run stored of one cell."""

    answers: dict[str, GenerationLine]  # by item
    blocks: dict[int, TimingLine]  # of round 1, by block
    error: str | None
    memory_bytes: int | None


def read(run: RunDirectory, cell: str) -> Read:
    """Return what a run stored of a cell."""
    errors = {line.cell: line.error for line in run.read_lines("failures.jsonl", FailureLine) if line.stage is None}
    memory = run.read("memory.json", MemoryRecord).root if run.has("memory.json") else {}
    return Read(
        {line.item: line for line in run.read_lines(f"generations/{cell}.jsonl", GenerationLine)},
        {line.block: line for line in run.read_lines(f"timings/{cell}.jsonl", TimingLine) if line.round == 1},
        errors.get(cell),
        memory.get(cell),
    )


@dataclass(frozen=True, slots=True)
class ExactCell:
    """What stage `exact` found in one cell."""

    findings: list[Finding]
    changed: bool = False  # head has other tokens
    decoded: bool = True  # by both builds


def compare(
    cell: str, base: Read, again: Read, head: Read, *, allow_changed: bool, items: Collection[str] = ()
) -> ExactCell:
    """Compare head's run of a cell with base's, except for what differs between base's two runs.

    `items`: all that the plan asks for.
    """

    def finding(kind: Kind, level: Level, text: str) -> Finding:
        return Finding(stage="exact", kind=kind, level=level, cell=cell, text=text)

    failure = _failure(base.error or again.error, head.error)
    if failure is not None:
        return ExactCell([finding("failed", *failure)], decoded=False)
    if absent := set(items) - (base.answers.keys() & again.answers.keys()):
        text = f"base has no answer to {counted(len(absent), 'item')}, {min(absent)} among them"
        return ExactCell([finding("failed", "inconclusive", text)], decoded=False)
    missing = base.answers.keys() - head.answers.keys()
    if missing:
        text = f"head has no answer to {counted(len(missing), 'item')}, {min(missing)} among them"
        return ExactCell([finding("failed", "fail", text)], decoded=False)
    findings = []
    unstable = _unstable(base, again)
    if unstable:
        text = f"base disagrees with itself in: {', '.join(unstable.values())}; head is not compared in "
        text += "tokens and work" if unstable.keys() & ANSWER.keys() else "work"
        findings.append(finding("unstable", "note", text))
    changed = [name for name in ANSWER if _differing(name, base.answers, head.answers)]
    if unstable.keys() & ANSWER.keys():
        changed = []
    for name in changed:
        items = _differing(name, base.answers, head.answers)
        share = f"{len(items)} of {counted(len(base.answers), 'item')}"
        text = f"head has other {ANSWER[name]} in {share}, first in {items[0]}"
        if name == "token_ids":
            text += _first_difference(base.answers[items[0]].token_ids, head.answers[items[0]].token_ids)
        findings.append(finding("changed", "note" if allow_changed else "fail", text))
    if not changed and not unstable:
        findings += [finding(*found) for found in _work(base, head)]
    findings += [finding(*found) for found in _memory(base, again, head)]
    return ExactCell(findings, bool(changed))


def _first_difference(base: Sequence[int], head: Sequence[int]) -> str:
    """Return where two answers part, in words.

    >>> _first_difference([5, 6, 7], [5, 9]), _first_difference([5, 6], [5])
    (' at token 2: 6 → 9', ' at token 2: 6 → the end')
    """
    place = next(n for n, (a, b) in enumerate(zip([*base, None], [*head, None], strict=False)) if a != b)
    a, b = (str(ids[place]) if place < len(ids) else "the end" for ids in (base, head))
    return f" at token {place + 1}: {a} → {b}"


def _unstable(base: Read, again: Read) -> dict[str, str]:
    """Return the fields in which base's two runs differ, in words."""
    unstable = {
        name: words for name, words in {**ANSWER, **WORK}.items() if _differing(name, base.answers, again.answers)
    }
    if _batch_changes(base.blocks, again.blocks):
        unstable["batch_forwards"] = "forward passes of a batch"
    return unstable


def _failure(base: str | None, head: str | None) -> tuple[Level, str] | None:
    """Return the level and the text of a cell that failed in one of the builds or in both."""
    if head is None and base is None:
        return None
    if base is None:
        return "fail", f"it fails in head only: {head}"
    if head is None:
        return "note", f"it fails in base only: {base}"
    return "inconclusive", f"it fails in both builds: {head}"


def _differing(name: str, base: Mapping[str, GenerationLine], other: Mapping[str, GenerationLine]) -> list[str]:
    """Return the items whose field `name` differs."""
    return [item for item in base if item in other and getattr(base[item], name) != getattr(other[item], name)]


def _batch_changes(base: Mapping[int, TimingLine], other: Mapping[int, TimingLine]) -> list[int]:
    """Return how many more forward passes each block takes, without the blocks that take as many."""
    pairs = [(base[block].batch_forwards or 0, other[block].batch_forwards or 0) for block in base if block in other]
    return [b - a for a, b in pairs if a != b]


def _work(base: Read, head: Read) -> Iterator[tuple[Kind, Level, str]]:
    """Yield how head's work differs where its tokens are the same. More of it in one item or block is more work."""
    more: list[str] = []
    less: list[str] = []
    for name, words in WORK.items():
        items = _differing(name, base.answers, head.answers)
        if items:
            before, after = (
                {item: getattr(run.answers[item], name) or 0 for item in base.answers} for run in (base, head)
            )
            growing = sum(after[item] > before[item] for item in items)
            where = f", more in {counted(growing, 'item')}" if growing else ""
            (more if growing else less).append(f"{words} {sum(before.values()):,} → {sum(after.values()):,}{where}")
    batches = _batch_changes(base.blocks, head.blocks)
    growing = sum(change > 0 for change in batches)
    if growing or (batches and not more and not less):
        where = f", more in {counted(growing, 'block')}" if growing else ""
        (more if growing else less).append(f"forward passes of batches {sum(batches):+,}{where}")
    if more:
        yield "more work", "fail", f"the same tokens from more work: {', '.join([*more, *less])}"
    elif less:
        yield "less work", "note", f"the same tokens from less work: {', '.join(less)}"


def _memory(base: Read, again: Read, head: Read) -> Iterator[tuple[Kind, Level, str]]:
    """Yield how the bytes of a cell differ."""
    by_name: Sequence[tuple[str, Callable[[Read], int | None]]] = (
        ("peak memory", lambda run: run.memory_bytes),
        ("keys and values", _kv_bytes),
    )
    for words, of in by_name:
        a, repeated, b = of(base), of(again), of(head)
        if not a or b is None:  # nothing to divide by
            continue
        if repeated is not None and abs(repeated / a - 1) > MEMORY_TOLERANCE:
            yield "unstable", "note", f"base disagrees with itself in {words}: {_mib(a)}, then {_mib(repeated)}"
            continue
        least, most = sorted((a, a if repeated is None else repeated))
        if b > most * (1 + MEMORY_TOLERANCE):
            yield "memory", "fail", f"{words}: {_mib(most)} → {_mib(b)}, {b / most - 1:+.1%}"
        elif b < least * (1 - MEMORY_TOLERANCE):
            yield "memory", "note", f"{words}: {_mib(least)} → {_mib(b)}, {b / least - 1:+.1%}"


def _kv_bytes(run: Read) -> int | None:
    """Return the most bytes of keys and values that a block needs."""
    known: list[Any] = [line.kv_bytes for line in run.blocks.values() if line.kv_bytes]
    return max(known, default=None)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
