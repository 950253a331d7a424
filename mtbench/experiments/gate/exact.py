"""Stage `exact`: two builds emit the same tokens from the same work. It reads no times and has no chance in it.

Base decodes the plan twice and head once. If a cell's answers differ between base's two runs, only memory
is compared, since other tokens by chance take other work by chance. If only its work differs, its answers are compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtbench.document.formatting import counted
from mtbench.experiments.gate.format import Finding, Kind, Level
from mtbench.measure import cache_probe
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import FailureLine, GenerationLine, MemoryRecord, TimingLine

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
    """The stored data of one cell of a run."""

    answers: dict[str, GenerationLine]  # by item, in the order of the plan
    blocks: dict[int, TimingLine]  # of round 1, by block
    error: str | None
    memory_bytes: int | None
    cache: Sequence[str] = ()  # faults of its prefix cache


def read(run: RunDirectory, cell: str, items: Sequence[str]) -> Read:
    """Return the stored data of a cell. `items`: all that it decodes, in the order of the plan."""
    errors = {line.cell: line.error for line in run.read_lines("failures.jsonl", FailureLine) if line.stage is None}
    memory = run.read("memory.json", MemoryRecord).root if run.has("memory.json") else {}
    answers = {line.item: line for line in run.read_lines(f"generations/{cell}.jsonl", GenerationLine)}
    return Read(
        {item: answers[item] for item in items if item in answers},
        {line.block: line for line in run.read_lines(f"timings/{cell}.jsonl", TimingLine) if line.round == 1},
        errors.get(cell),
        memory.get(cell),
        cache_probe.faults(cache_probe.read(run, cell)),
    )


@dataclass(frozen=True, slots=True)
class ExactCell:
    """The findings of stage `exact` in one cell."""

    findings: list[Finding]
    changed: bool = False  # head has other tokens
    decoded: bool = True  # by both builds


def compare(
    cell: str, base: Read, again: Read, head: Read, *, allow_changed: bool, items: Sequence[str] = ()
) -> ExactCell:
    """Compare head's run of a cell with base's, except for what differs between base's two runs.

    `items`: all of the plan, in its order.
    """

    def finding(kind: Kind, level: Level, text: str) -> Finding:
        return Finding(stage="exact", kind=kind, level=level, cell=cell, text=text)

    sides: Sequence[tuple[str, Level, Read, Sequence[str]]] = (
        ("base", "inconclusive", base, items),
        ("base", "inconclusive", again, items),
        ("head", "fail", head, [*base.answers]),
    )
    if (failure := _failure(base.error or again.error, head.error)) is not None:
        return ExactCell([finding("failed", *failure)], decoded=False)
    for side, level, run, wanted in sides:
        if absent := [item for item in wanted if item not in run.answers]:
            text = f"{side} has no answer to {counted(len(absent), 'item')}, first to {absent[0]}"
            return ExactCell([finding("failed", level, text)], decoded=False)
    findings = []
    other_answers, other_work = _unstable(base, again)
    if unstable := [*other_answers, *other_work]:
        text = f"base disagrees with itself in: {', '.join(unstable)}; head is not compared in "
        text += "tokens and work" if other_answers else "work"
        findings.append(finding("unstable", "note", text))
    changed = [] if other_answers else [name for name in ANSWER if _differing(name, base, head)]
    for name in changed:
        differing = _differing(name, base, head)
        share = f"{len(differing)} of {counted(len(base.answers), 'item')}"
        text = f"head has other {ANSWER[name]} in {share}, first in {differing[0]}"
        findings.append(finding("changed", "note" if allow_changed else "fail", text))
    if not changed and not unstable:
        findings += [finding(*found) for found in _work(base, head)]
    findings += [finding(*found) for found in _memory(base, again, head)]
    also = "; so does base" if base.cache or again.cache else ""
    findings += [finding("prefix cache", "note" if also else "fail", f"{text}{also}") for text in head.cache]
    return ExactCell(findings, bool(changed))


def _failure(base: str | None, head: str | None) -> tuple[Level, str] | None:
    if head is None:
        return None if base is None else ("note", f"it fails in base only: {base}")
    return ("fail", f"it fails in head only: {head}") if base is None else ("inconclusive", f"it fails in both: {base}")


def _differing(name: str, base: Read, other: Read) -> list[str]:
    return [item for item, line in base.answers.items() if getattr(line, name) != getattr(other.answers[item], name)]


def _counts(run: Read) -> dict[str, dict[Any, int]]:
    """Return the counts of work: in words -> by item, or by block."""
    of_answers = {
        words: {item: getattr(line, name) or 0 for item, line in run.answers.items()} for name, words in WORK.items()
    }
    batches = {block: line.batch_forwards or 0 for block, line in run.blocks.items()}
    return {**of_answers, "forward passes of batches": batches}


def _unstable(base: Read, again: Read) -> tuple[list[str], list[str]]:
    repeated = _counts(again)
    return (
        [words for name, words in ANSWER.items() if _differing(name, base, again)],
        [words for words, counts in _counts(base).items() if counts != repeated[words]],
    )


def _work(base: Read, head: Read) -> Iterator[tuple[Kind, Level, str]]:
    """Yield how head's work differs where its tokens are the same. More of it in one item or block is more work."""
    more, less, of_head = list[str](), list[str](), _counts(head)
    for words, before in _counts(base).items():
        after = of_head[words]
        if after == before:
            continue
        growing = sum(after.get(place, count) > count for place, count in before.items())
        where = f", more in {growing} of {len(before)}" if growing else ""
        (more if growing else less).append(f"{words} {sum(before.values()):,} → {sum(after.values()):,}{where}")
    if more:
        yield "more work", "fail", f"the same tokens from more work: {', '.join([*more, *less])}"
    elif less:
        yield "less work", "note", f"the same tokens from less work: {', '.join(less)}"


def _memory(base: Read, again: Read, head: Read) -> Iterator[tuple[Kind, Level, str]]:
    by_name: Sequence[tuple[str, Callable[[Read], int | None]]] = (
        ("peak memory", lambda run: run.memory_bytes),
        ("keys and values", lambda run: max((line.kv_bytes or 0 for line in run.blocks.values()), default=0) or None),
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


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
