"""Which answers are due to be judged, and how long that takes, by the run's own blocks."""

import itertools
from collections.abc import Sequence

from mtbench.decoding.arms import is_served
from mtbench.plan.formats import GenerationLine, RescoringRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.run import Run
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, EXACT_EPSILON

RECORD = "lossless/{}.json"  # of a cell


def answers_due(run: Run, plan: Plan, cell: Cell) -> list[GenerationLine]:
    """Return the answers that a cell's grade needs judged: in an engine no repetition of plain decoding.

    None if its record has all of them.
    """
    if cell.claims != "lossless":
        return []
    lines, plain = run.answers[cell.cell], plain_answers(run, plan, cell)
    if cell.lossless_reference is None:  # an arm of an engine is held to the judge itself
        lines = enough(lines) if is_served(cell.engine) and cell.simulated is None else []
    repeated = {(line.item, *line.token_ids) for line in plain}
    forced = plan.suite(cell.suite).constrained(cell.engine) - {line.item for line in plain}
    due = [line for line in lines if line.item not in forced and (line.item, *line.token_ids) not in repeated]
    name = RECORD.format(cell.cell)
    judged = run.directory.read(name, RescoringRecord).items if due and run.directory.has(name) else {}
    return [] if judged.keys() >= {line.item for line in due} else due


def plain_answers(run: Run, plan: Plan, cell: Cell) -> list[GenerationLine]:
    """Return the answers of plain decoding in a cell's serving engine, at its batch size."""
    there = [c for c in references(plan, cell) if is_served(c.engine) and c.engine == cell.engine]
    return [line for c in there if c.batch_size == cell.batch_size for line in run.answers[c.cell]]


def references(plan: Plan, cell: Cell) -> list[Cell]:
    """Return the cells of the arm whose tokens a cell promises."""
    return [c for c in plan.cells if (c.suite, c.arm) == (cell.suite, cell.lossless_reference)]


def enough(lines: Sequence[GenerationLine], *, prompts: bool = False) -> list[GenerationLine]:
    """Return the first answers that have as many tokens as ε needs; all, if they have fewer.

    `prompts`: with those of their prompts, but for the first.
    """
    sizes = (len(line.token_ids) + prompts * (line.prompt_tokens - 1) for line in lines)
    before = itertools.accumulate(sizes, initial=0)
    return [line for n, line in zip(before, lines, strict=False) if n < EPSILON_POSITIONS_NEEDED]


def has_enough(lines: Sequence[GenerationLine]) -> bool:
    """Return whether answers have as many tokens as ε needs."""
    return sum(len(line.token_ids) for line in lines) >= EPSILON_POSITIONS_NEEDED


def expected_judging_s(run: Run, plan: Plan, rest: float = 0.0) -> float:
    """Return the expected seconds of judging the stored answers and this share of those that are yet to be decoded.

    The tokens that are read, at the pace of prefill in this run's blocks, or of the blocks where an engine hides it; 0
    before the first block. It is cheap enough to be called after each block.
    """
    fed, exact = dict[tuple[object, ...], float](), run.sessions and run.sessions[-1].dtype in EXACT_EPSILON
    gone = {line.cell for line in run.left} | {line.cell for line in run.failures if line.stage is None}
    for cell in plan.cells:
        lines, read = answers_due(run, plan, cell), (cell.suite, cell.checkpoints[cell.on])
        if not lines:
            continue
        planned, stored = sum(map(len, plan.group(cell.cell).blocks)), len(run.answers[cell.cell])
        more = 1.0 if cell.cell in gone else 1.0 + rest * (planned / stored - 1.0)
        for line in lines:
            fed.setdefault((*read, line.item), more * line.prompt_tokens)
            fed.setdefault((*read, line.item, *line.token_ids), more * len(line.token_ids))
        by = [] if exact else enough(max((run.answers[c.cell] for c in references(plan, cell)), key=len, default=lines))
        if has_enough(by):
            fed[(*read, cell.lossless_reference, cell.engine, None)] = sum(
                of.prompt_tokens + len(of.token_ids) for of in by
            )
    token_s = (
        sum(of.prefill_s or of.wall_s for of in lines)
        / sum(of.prompt_tokens + of.tokens * (not of.prefill_s) for of in lines)
        for lines in run.timings.values()
        if lines
    )
    return sum(fed.values()) * min(token_s, default=0.0)
