"""decision.json as records: what to use, what it rests on, and how the race went."""

from typing import Literal

from pydantic import Field

from mtbench.records import Count, NonNegative, Record, Seconds, Share, Size, VersionOne
from mtbench.results.decision_format import Recommendation
from mtbench.runs.formats import Objective
from mtbench.runs.plan import Batching

SCHEMA_VERSION: Literal[1] = 1


class Gone(Record):
    """A cell that left the race."""

    suite: str = Field(description="suite as it was asked for")
    batch_size: Size = Field(description="requests decoded side by side")
    arm: str = Field(description="arm: method:options@role/engine")
    block: Count = Field(description="blocks that had ended; 0: it did not start")
    lost: bool = Field(description="true: it is surely not the one to choose; false: nothing about it was left to show")
    reason: str = Field(description="why it left")


class Looks(Record):
    """When a group of arms was looked at."""

    suite: str = Field(description="suite as it was asked for")
    batch_size: Size = Field(description="requests decoded side by side")
    planned: list[Size] = Field(description="numbers of blocks after which arms may leave")
    made: list[Size] = Field(description="those of them that were reached")


class Levels(Record):
    """Probabilities of error of one group, over all looks and arms."""

    between_arms: Share = Field(description="that any bound on the times of two arms fails")
    accuracy_worse: Share = Field(description="that any arm is wrongly said to be worse than accepted")
    accuracy_not_worse: Share = Field(description="that any arm is wrongly said to be not worse than accepted")
    close: Share = Field(description="arms within this share of the leader's time are as good")


class Spent(Record):
    """What the race took, and what its full grid would have taken: every arm on every block."""

    forwards: Count = Field(description="forwards of batches that were decoded; engines that hide them count as 0")
    forwards_full: Count = Field(description="forwards of the full grid, estimated from the blocks that were decoded")
    decoding_s: Seconds = Field(description="time of the blocks that were decoded, in seconds")
    decoding_full_s: Seconds = Field(description="time of the full grid, in seconds, estimated in the same way")


class Least(Record):
    """The allowed arm with the least energy or memory. One measurement: it has no interval."""

    suite: str = Field(description="suite as it was asked for")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    arm: str | None = Field(description="the arm; null: nothing was measured")
    value: NonNegative | None = Field(description="J per token, or bytes")
    baseline: NonNegative | None = Field(description="the same of plain decoding")
    text: str = Field(description="the choice as a sentence")


class Decision(Record):
    """decision.json: what to use at each batch size."""

    schema_version: VersionOne = Field(description="version of this format")
    run_id: str = Field(description="12 digits that name the run")
    headline: str = Field(description="the decision in a few words, first what to use")
    complete: bool = Field(description="false: the time budget ended the race; `--resume` goes on")
    objective: Objective = Field(description="what the chosen arm has the least of")
    max_loss: Share = Field(description="loss of accuracy that is accepted, as a share")
    slo_s: dict[str, Seconds] = Field(description="limits of 95th percentiles, in seconds; empty: none")
    over_slo: list[str] = Field(description="cells over a limit, which are not recommended")
    recommendations: list[Recommendation] = Field(description="what to use for speed, at each batch size")
    least: list[Least] = Field(description="what to use for energy or memory; empty for other objectives")
    levels: Levels = Field(description="probabilities of error")
    looks: list[Looks] = Field(description="looks of each group")
    left: list[Gone] = Field(description="cells that left, in order")
    refused: dict[str, str] = Field(description="methods that could not be raced on these checkpoints, and why")
    spent: Spent = Field(description="what the race took, and its full grid")
    command: list[str] = Field(description="command line that repeats the race")
    serving: dict[str, dict[str, str]] = Field(
        description="by recommended arm and serving engine, its options for the same method; not measured by mtbench"
    )
