"""The lines that a run stores: an answer in generations/<cell>.jsonl, a timed block in timings/<cell>.jsonl.

Their fields are described in mtbench/plan/formats.py. Here they are made, and checked against the plan when they are
read: a line that is not in the plan, or that is there twice, is an error that names the file, line and field.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench import records
from mtbench.decoding.output import Generation, Timing
from mtbench.errors import UserError
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine, SessionRecord, TimingLine
from mtbench.plan.plan import Group, SuitePlan


def generation_line(
    item: str, prompt: Sequence[int], generation: Generation, block: int, *, public: bool
) -> GenerationLine:
    """Return the stored line of an answer. Of a prompt that is not `public` only the length is stored."""
    fields = dataclasses.asdict(generation)
    return GenerationLine(
        item=item,
        prompt_ids=list(prompt) if public else None,
        prompt_tokens=len(prompt),
        **{name: value for name, value in fields.items() if name in GenerationLine.model_fields},
        forwards=generation.forwards,
        block=block,
    )


def timing_line(
    session: int,
    round_: int,
    block: int,
    order: int,
    timing: Timing,
    conditions: Mapping[str, Any],
    identical: int | None,
) -> TimingLine:
    """Return the stored line of one block in one round.

    `order`: its place among the arms of the block. `conditions`: the machine's state at that time. `identical`:
    requests with the tokens of round 1; None in round 1. A sample is dropped for a remark of the machine on it, or
    because its window contains a capture or compilation.
    """
    line = {
        "session": session,
        "round": round_,
        "block": block,
        "order": order,
        **{name: value for name, value in dataclasses.asdict(timing).items() if name not in conditions},
        **conditions,
        "identical": identical,
    }
    prepared = "a shape was prepared inside the window" if timing.preparation_s else None
    line["dropped"] = conditions["dropped"] or prepared
    return TimingLine.model_validate(line)


def read_answers(run: RunDirectory, group: Group, suite: SuitePlan, cell: str) -> list[GenerationLine]:
    """Return the answers of a cell in the order of the file. Raise UserError for one that is not in the plan."""
    index = {item.item: number for number, item in enumerate(suite.items)}
    seen: set[str] = set()
    lines = []
    for where, line in records.iterate_lines(run.path / f"generations/{cell}.jsonl", GenerationLine):
        number = index.get(line.item)
        if number is None:
            raise unplanned(where, f"item is {line.item!r:.60}, which the plan does not have")
        if line.item in seen:
            raise unplanned(where, f"item {line.item!r:.60} is there twice")
        seen.add(line.item)
        if line.block >= len(group.blocks) or number not in group.blocks[line.block]:
            raise unplanned(where, f"block is {line.block}, in which the plan does not have {line.item!r:.60}")
        known = line.prompt_ids is not None and suite.is_fixed(number) and suite.withheld is None
        if known and line.prompt_ids != suite.prompt(number):
            raise unplanned(where, "prompt_ids is not the prompt of the plan")
        lines.append(line)
    return lines


def read_timings(run: RunDirectory, group: Group, cell: str, sessions: Sequence[SessionRecord]) -> list[TimingLine]:
    """Return the timings of a cell in the order of the file. Raise UserError for one that is not in the plan."""
    seen: set[tuple[int, int]] = set()
    lines = []
    for where, line in records.iterate_lines(run.path / f"timings/{cell}.jsonl", TimingLine):
        if line.session > len(sessions):
            raise unplanned(where, f"session is {line.session}, and environment.json has {len(sessions)}")
        if line.round > len(group.rounds) or line.block >= group.rounds[line.round - 1]:
            raise unplanned(where, f"round is {line.round} and block is {line.block}, which the plan does not have")
        if (line.round, line.block) in seen:
            raise unplanned(
                where, f"round {line.round} of block {line.block} is there twice: two commands decoded at once"
            )
        seen.add((line.round, line.block))
        lines.append(line)
    return lines


def unplanned(where: str, finding: str) -> UserError:
    """Return the error of a line that is not in the plan."""
    return UserError(f"{where}: {finding}; {records.APPEND_ONLY}")
