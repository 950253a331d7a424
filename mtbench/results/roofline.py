"""The share of the roofline: the least time of a cell's forwards (mtbench/hardware/probe.py) over its decode time."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mtbench.hardware.probe import Probe, Shape, floor_s
from mtbench.plan.formats import GenerationLine, SessionRecord, TimingLine
from mtbench.plan.plan import Cell
from mtbench.records import dump


class Fraction(NamedTuple):
    """The share of the roofline; if it is None, `reason` says why."""

    value: float | None
    reason: str | None = None


class _Unknown(Exception):
    """Why a cell has no fraction."""


def fraction(
    cell: Cell,
    judged: int,
    lines: Iterable[GenerationLine],
    samples: Sequence[TimingLine],
    sessions: Sequence[SessionRecord],
) -> Fraction:
    """Return the least time of a cell's forwards over its decode time.

    lines: all generation lines. samples: the timing lines that count; a block has the mean over its rounds. Every
    sample is compared with the probe of its own session. `judged` positions per row and forward pass the head.

    All forwards of a block are taken as its mean forward. Weights are read once per forward of the batch. A forward
    has row-forwards / batch forwards live rows, and only those count. A row feeds positions_fed / forwards positions
    and has on average prompt + tokens / 2 tokens behind it, those it feeds included. The least time of the mean
    forward is at most the mean least time, so the fraction is never too large. A forward of a draft model feeds one
    position.
    """
    answers: defaultdict[int, list[GenerationLine]] = defaultdict(list)
    for line in lines:
        answers[line.block].append(line)
    rounds = Counter(sample.block for sample in samples)
    least_s = decode_s = 0.0
    try:
        for sample in samples:
            block_s = _block_floor_s(cell, judged, answers[sample.block], sample, sessions[sample.session - 1])
            least_s += block_s / rounds[sample.block]
            if sample.decode_s is None:
                raise _Unknown("this engine does not reveal its decode time")
            decode_s += sample.decode_s / rounds[sample.block]
    except _Unknown as reason:
        return Fraction(None, str(reason))
    return Fraction(least_s / decode_s) if decode_s else Fraction(None, "no clean sample")


def _block_floor_s(
    cell: Cell, judged: int, answers: Sequence[GenerationLine], sample: TimingLine, session: SessionRecord
) -> float:
    """Return the least time of a block's forwards. Raises _Unknown with the reason if it is not known."""
    forwards = positions_fed = draft_forwards = 0
    for line in answers:
        if line.forwards is None:
            raise _Unknown("this engine does not reveal its forwards")
        forwards += line.forwards
        positions_fed += line.positions_fed or 0
        draft_forwards += line.draft_forwards or 0
    if sample.batch_forwards is None:
        raise _Unknown("this engine does not reveal its forwards")
    if session.probe is None:
        raise _Unknown(session.probe_reason or "the GPU was not probed")
    probe = Probe(**dump(session.probe))
    shapes = _shapes(cell.checkpoints, session)
    if shapes[cell.on].bytes < 2 * probe.cache_bytes:
        raise _Unknown("the weights stay in the GPU's cache, so memory bandwidth is no bound")
    rows = forwards / sample.batch_forwards  # live rows of the mean forward
    positions = positions_fed / forwards
    known = sum((g.forwards or 0) * (g.prompt_tokens + len(g.token_ids) / 2) for g in answers) / forwards
    pending = positions - (judged - 1)  # positions fed that are not guesses: not in the KV cache yet
    context = max(0.0, known - pending)
    once = floor_s(shapes[cell.on], probe, rows=rows, positions=positions, judged=judged, context=context)
    drafts = [shape for role, shape in shapes.items() if role != cell.on]
    drafted = draft_forwards / forwards  # draft forwards per forward of the target
    for draft in drafts:
        once += drafted / len(drafts) * floor_s(draft, probe, rows=rows, positions=1, judged=1, context=known)
    return sample.batch_forwards * once


def _shapes(checkpoints: Mapping[str, str], session: SessionRecord) -> dict[str, Shape]:
    """Return the sizes of each checkpoint, by role. Raises _Unknown if one was not counted."""
    shapes = {}
    for role, source in checkpoints.items():
        counted = (session.shapes or {}).get(source)
        if counted is None:
            raise _Unknown(f"the {role} checkpoint was not counted")
        if counted.reason is not None:
            raise _Unknown(counted.reason)
        shapes[role] = Shape(**dump(counted))
    return shapes
