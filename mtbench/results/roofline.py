"""The share of the roofline: the floor of a cell's forwards (mtbench/hardware/probe.py) over its decode time."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mtbench.hardware.probe import Probe, Shape, floor_s
from mtbench.runs.directory import Record
from mtbench.runs.plan import Cell


def fraction(
    cell: Cell, judged: int, lines: Iterable[Record], samples: Sequence[Record], sessions: Sequence[Record]
) -> tuple[float | None, str | None]:
    """The floor of a cell's forwards over its decode time, from stored lines; None, and why, where it has none.

    lines: all generation lines. samples: the timing lines that count; per block the mean over its rounds, as
    everywhere. Every sample is held against the probe of its own session. `judged` positions per row and forward pass
    the head.

    A block's forwards are taken as its mean forward times their number. Weights are read once per forward of the batch;
    a forward has row-forwards / batch forwards live rows, and only those count; a row feeds positions_fed / forwards
    and has on average prompt + tokens / 2 tokens behind it, those it feeds itself included. (The mean forward's floor
    is at most the mean floor, so the fraction is never flattered by this.) Forwards of a draft model feed one position.
    """
    of_block = defaultdict(list)
    for line in lines:
        of_block[line["block"]].append(line)
    rounds = Counter(sample["block"] for sample in samples)
    floor = decode_s = 0.0
    for sample in samples:
        answers, session = of_block[sample["block"]], sessions[sample["session"] - 1]
        if sample["batch_forwards"] is None or any(g["forwards"] is None for g in answers):
            return None, "this engine does not reveal its forwards"
        if not session.get("probe"):
            return None, session.get("probe_reason") or "the GPU was not probed"
        probe = Probe(**session["probe"])
        shapes: dict[str, Shape] = {}
        for role, source in cell.checkpoints.items():
            counted = session["shapes"].get(source) or {"reason": f"the {role} checkpoint was not counted"}
            if "reason" in counted:
                return None, counted["reason"]
            shapes[role] = Shape(**counted)
        if shapes[cell.on].bytes < 2 * probe.cache_bytes:
            return None, "the weights stay in the GPU's cache, so memory bandwidth is no bound"
        drafts = [shape for role, shape in shapes.items() if role != cell.on]
        floor += _block_floor_s(shapes[cell.on], drafts, probe, judged, answers, sample) / rounds[sample["block"]]
        decode_s += sample["decode_s"] / rounds[sample["block"]]
    return (floor / decode_s, None) if decode_s else (None, "no clean sample")


def _block_floor_s(
    shape: Shape, drafts: Sequence[Shape], probe: Probe, judged: int, answers: Sequence[Record], sample: Record
) -> float:
    forwards = sum(g["forwards"] for g in answers)
    rows = forwards / sample["batch_forwards"]  # live in the mean forward
    positions = sum(g["positions_fed"] for g in answers) / forwards
    prompts = [g["prompt_tokens"] if "prompt_tokens" in g else len(g["prompt_ids"]) for g in answers]  # older lines
    known = sum(g["forwards"] * (n + len(g["token_ids"]) / 2) for g, n in zip(answers, prompts, strict=True)) / forwards
    pending = positions - (judged - 1)  # those fed are no guesses, and not yet cached
    once = floor_s(shape, probe, rows=rows, positions=positions, judged=judged, context=max(0.0, known - pending))
    drafted = sum(g["draft_forwards"] for g in answers) / forwards  # forwards of drafts for one of the target's
    for draft in drafts:
        once += drafted / len(drafts) * floor_s(draft, probe, rows=rows, positions=1, judged=1, context=known)
    batch_forwards: int = sample["batch_forwards"]
    return batch_forwards * once
