"""The lines that a run stores: an answer in generations/<cell>.jsonl, a timed block in timings/<cell>.jsonl.

Their fields are described in mtbench/runs/formats.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.decoding.output import Generation, Timing
from mtbench.runs.directory import JsonObject


def generation_line(
    item: str, prompt: Sequence[int], generation: Generation, block: int, *, public: bool
) -> JsonObject:
    """Return the stored line of an answer. Of a private suite's prompt only the length is stored."""
    return {
        "item": item,
        "prompt_ids": list(prompt) if public else None,
        "prompt_tokens": len(prompt),
        "token_ids": generation.token_ids,
        "text": generation.text,
        "forwards": generation.forwards,
        "commits": generation.commits,
        "positions_fed": generation.positions_fed,
        "draft_forwards": generation.draft_forwards,
        "drafted": generation.drafted,
        "surplus": generation.surplus,
        "finish_reason": generation.finish_reason,
        "block": block,
    }


def timing_line(
    session: int,
    round_: int,
    block: int,
    order: int,
    timing: Timing,
    conditions: Mapping[str, Any],
    identical: int | None,
) -> JsonObject:
    """Return the stored line of one block in one round.

    `order`: its place among the arms of the block. `conditions`: the state of the machine meanwhile. `identical`:
    requests with the tokens of round 1; None in round 1. A sample is dropped by what the machine or the engine says of
    it, or because its window contains a capture or compilation.
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
    line["dropped"] = conditions["dropped"] or timing.dropped or prepared
    return line
