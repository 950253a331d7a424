"""What a run recommends, as records: one recommendation per suite, batch size and way of batching.

mtbench/results/decision.py makes them from the cells of results.json.
"""

from typing import Literal

from pydantic import Field

from mtbench.records import Count, NonNegative, Record, Share, Size
from mtbench.results.format import Estimate
from mtbench.runs.plan import Batching

Word = Literal["use", "plain", "cannot tell"]


class AccuracyCost(Record):
    """The accuracy of an arm less that of plain decoding, on the items that both answered."""

    difference: float = Field(description="accuracy of the arm less that of the baseline, as a share")
    ci_low: float | None = Field(description="lower bound of the 95 % interval; null: no interval")
    ci_high: float | None = Field(description="upper bound of the 95 % interval; null: no interval")
    n: Count = Field(description="items that both answered")
    batch_size: Size = Field(description="batch size at which it was measured: the one with the most items")


class Choice(Record):
    """An arm that can be used in place of plain decoding: what it gains and what it costs."""

    arm: str = Field(description="arm: method:options@role/engine")
    speedup: Estimate = Field(description="wall time of the baseline over that of the arm")
    tokens_per_forward: NonNegative | None = Field(description="tokens per forward; null: an engine hides its forwards")
    same_tokens: bool = Field(
        description="true: the baseline's tokens, as graded, or the same distribution; false: other tokens"
    )
    accuracy: AccuracyCost | None = Field(description="what it costs in accuracy; null: not scored")


class Recommendation(Record):
    """What to use on a suite at a batch size, by what was measured there."""

    suite: str = Field(description="suite as it was asked for, name or name:rest")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    baseline: str | None = Field(
        description="plain decoding on the checkpoint that one would deploy, that all are compared with; null: none"
    )
    max_loss: Share = Field(description="loss of accuracy that is accepted, as a share")
    compared: Count = Field(description="arms compared with the baseline")
    allowed: list[str] = Field(
        description="arms that could be used if they were faster: with the baseline's tokens, or within the loss"
    )
    word: Word = Field(
        description="use: an arm is faster; plain: every arm is shown to be no faster, or to lose more accuracy than "
        "accepted; cannot tell: neither is shown"
    )
    same_tokens: Choice | None = Field(description="fastest arm with the baseline's tokens; null: none is faster")
    within_loss: Choice | None = Field(
        description="arm that is faster still, and whose accuracy is shown to lose no more than max_loss; null: none"
    )
    runner_up: Choice | None = Field(description="next fastest arm that could be used; null: none")
    undecided: Choice | None = Field(
        description="fastest arm that is neither shown to be usable nor ruled out, if it may be faster; null: none"
    )
    as_good: list[str] = Field(
        description="arms of the same kind that are not told apart from the chosen ones: their intervals overlap"
    )
    blocks_needed: Size | None = Field(
        description="blocks that the undecided arm is expected to need for a word on its speed; null: none, or unknown"
    )
    items_needed: Size | None = Field(
        description="items that it is expected to need for a word on its accuracy; null: none, or unknown"
    )
    text: str = Field(description="the recommendation as a sentence")
