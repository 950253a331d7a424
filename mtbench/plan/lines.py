"""The lines that a run stores: an answer in generations/<cell>.jsonl, a timed block in timings/<cell>.jsonl.

Their fields are described in mtbench/plan/formats.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.decoding.output import Generation, Timing
from mtbench.plan.formats import GenerationLine, TimingLine


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
