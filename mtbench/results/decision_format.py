"""Recommendations as records: one for each suite, batch size and way of batching; decision.json of a race.

mtbench/results/decision.py makes recommendations from the cells of results.json, experiments/choose the decision.
"""

from typing import Literal

from pydantic import Field

from mtbench.plan.plan import Batching
from mtbench.records import Count, Record, Seconds, Share, Size, Sparse
from mtbench.results.figure_formats import Estimate, Verdict

FILE = "decision.json"
SCHEMA_VERSION: Literal[2] = 2

Word = Literal["use", "plain", "cannot tell"]


class AccuracyCost(Record):
    """The accuracy of an arm less that of plain decoding, on the items that both answered."""

    difference: float = Field(description="accuracy of the arm less that of the baseline, as a share")
    ci_low: float | None = Field(description="lower bound of the 95 % interval; null: no interval")
    ci_high: float | None = Field(description="upper bound of the 95 % interval; null: no interval")
    n: Count = Field(description="items that both answered")
    batch_size: Size = Field(description="batch size at which it was measured: the one with the most items")


class Choice(Record):
    """An arm that can replace plain decoding: its gain and its cost."""

    arm: str = Field(description="arm: method:options@role/engine")
    speedup: Estimate = Field(description="wall time of the baseline over that of the arm; the interval has `level`")
    level: Share = Field(0.95, description="level of that interval; without a verdict, the level that verdicts use")
    kept: str | None = Field(
        None, description="what it keeps of the baseline's tokens: the tokens, or their distribution; null: neither"
    )
    accuracy: AccuracyCost | None = Field(description="what it costs in accuracy; null: not scored")


class Recommendation(Sparse):
    """The recommendation on a suite at a batch size, by its measurements."""

    suite: str = Field(description="suite as requested, name or name:rest")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    engine: str | None = Field(None, description="serving engine in which it holds; null: none, so not in a server")
    demonstration: bool = Field(description="true: the family shows the mechanics and is no evidence on real models")
    baseline: str | None = Field(
        description="plain decoding on the checkpoint that one would deploy, that all are compared with; null: none"
    )
    max_loss: float = Field(description="loss of accuracy that is accepted, in points")
    compared: Count = Field(description="arms compared with the baseline")
    allowed: list[str] = Field(
        description="arms that could be used if they were faster: with the baseline's tokens, or within the loss"
    )
    misses_slo: list[str] = Field(default_factory=list, description="arms of which a latency is over its limit")
    word: Word = Field(
        description="use: an arm is faster; plain: every arm is shown to be no faster, or to lose more accuracy than "
        "accepted; cannot tell: neither is shown"
    )
    same_tokens: Choice | None = Field(description="fastest arm with the baseline's tokens; null: none is faster")
    within_loss: Choice | None = Field(
        description="arm that is faster still, and whose accuracy is shown to lose no more than max_loss; null: none"
    )
    undecided: Choice | None = Field(
        description="fastest arm that is neither shown to be usable nor ruled out, and may be better; null: none"
    )
    also_open: list[str] = Field(
        default_factory=list, description="further arms like the undecided one, the fastest first"
    )
    as_good: list[str] = Field(
        description="arms of the same kind that are indistinguishable from the chosen ones: their intervals overlap"
    )
    collapsed: list[str] = Field(default_factory=list, description="arms whose acceptance has collapsed, each with how")
    doubt: str | None = Field(
        None, description="what is open about the undecided arm, and what would decide it; null: none"
    )
    prompts: Count = Field(0, description="of a race, prompts whose times it rests on: the others were not decoded")
    planned: Count = Field(0, description="of a race, prompts that were planned; 0: no race")
    by_value: str | None = Field(None, description="what it would be by accuracy by value; absent: the same")
    text: str = Field(description="the recommendation as a sentence")

    @property
    def is_open(self) -> bool:
        """Whether more blocks could change it: an arm has no verdict, or equals the chosen one."""
        return bool(self.word == "cannot tell" or self.undecided or self.as_good)


class Looks(Record):
    """The looks at a group of arms."""

    suite: str = Field(description="suite as requested")
    batch_size: Size = Field(description="requests decoded side by side")
    planned: list[Size] = Field(description="numbers of blocks after which arms may leave")
    made: list[Size] = Field(description="those of them that were reached")


class RaceCost(Record):
    """The cost of the race, and of its full grid: every arm on every block."""

    forwards: Count | None = Field(
        description="forwards of batches that were decoded, 0 for engines that hide them; null: all engines do"
    )
    forwards_full: Count | None = Field(
        description="forwards of the full grid, estimated from the blocks that were decoded; null as above"
    )
    decoding_s: Seconds = Field(description="time of the blocks that were decoded, in seconds")
    decoding_full_s: Seconds = Field(description="time of the full grid, in seconds, estimated in the same way")


class ScheduledSize(Record):
    """The speed of a schedule at one batch size."""

    batch_size: Size = Field(description="requests decoded side by side")
    arm: str = Field(description="arm that was chosen for this batch size, in a server of its own")
    ratio: Estimate = Field(description="wall time of that arm over that of the schedule")
    verdict: Verdict = Field(description="verdict on the ratio, adjusted for the batch sizes")


class Schedule(Record):
    """One server with the answers of all batch sizes, measured where they change and with one request fewer."""

    command: str | None = Field(description="command that started it; null: it was not started")
    sizes: list[ScheduledSize] = Field(description="its speed by batch size, the largest first")
    reason: str | None = Field(description="why it is not measured, or not at every batch size; null: it is")


class Decision(Record):
    """decision.json: the recommendation at each batch size."""

    schema_version: Literal[2] = Field(description="version of this format")
    run_id: str = Field(description="12 digits that name the run")
    headline: str = Field(description="the decision in a few words, first what to use")
    complete: bool = Field(description="false: the time budget ended the race before its decision was final")
    max_loss: float = Field(description="loss of accuracy that is accepted, in points")
    slo_s: dict[str, Seconds] = Field(description="limits of 95th percentiles, in seconds; empty: none")
    over_slo: list[str] = Field(description="cells over a limit, which are not recommended")
    recommendations: list[Recommendation] = Field(description="what to use for speed, at each batch size")
    looks: list[Looks] = Field(description="looks of each group")
    refused: dict[str, str] = Field(description="methods and arms that could not be raced, and why")
    spent: RaceCost = Field(description="what the race took, and its full grid")
    serving: dict[str, dict[str, str]] = Field(
        description="by recommended arm and engine, the command that starts a server with the same method: first that "
        "of the race's engine, as it was run; the others are not measured; empty: no engine has the method"
    )
    serving_notes: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="by arm and engine, what the engine does otherwise"
    )
    schedule: Schedule | None = Field(
        None, description="one server with the answers of all batch sizes; null: they agree, or the engine has none"
    )
