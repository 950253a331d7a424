"""Single figures of results.json as records: estimates, comparisons, acceptance, the parts of a speedup."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from mtbench.plan.formats import REPORTED_BY
from mtbench.plan.plan import Batching
from mtbench.records import Count, Interval, NonNegative, NotNull, Record, Seconds, Share, Size, Sparse
from mtbench.statistics import Proportion, Ratio, Word


class Reason(Record):
    """Why no test decided a verdict."""

    kind: Literal["void", "disturbed", "too short", "too few", "nothing measured", "same tokens"] = Field(
        description="void: the arm or its baseline; disturbed: the machine; too short: timed windows; too few: blocks, "
        "rounds; same tokens: on all items, so that nothing is left to test"
    )
    text: str = Field(description="the same in words, with numbers")


class Alone(Record):
    """The verdict without the adjustment for several arms, and the adjusted interval."""

    word: Word = Field(description="the word")
    level: Share = Field(description="level of the interval")
    low: float = Field(description="lower bound: of the ratio of speed, or of the difference of accuracy as a share")
    high: float = Field(description="upper bound")
    arms: Size = Field(description="arms that the adjustment is for")
    looks: Size = Field(description="looks that it is for; 1: the verdicts are looked at once")


class NeededItems(Record):
    """The items at which the arm is found `not worse` four times in five."""

    n: Size = Field(description="items")
    observed: bool = Field(description="true: at the observed difference; false: if the true difference is 0")


class Verdict(Sparse):
    """The verdict on a speed or an accuracy. mtbench/report/phrases.py makes its text."""

    word: Word = Field(
        description="speed: faster, slower, same or inconclusive; accuracy: not worse, worse by less than the margin, "
        "worse, worse than margin or inconclusive"
    )
    reason: Reason | None = Field(None, description="why no test decided it; absent: one did")
    alone: Alone | None = Field(None, description="what only the adjustment withholds; absent: nothing")
    needed: NeededItems | None = Field(None, description="items that would decide it; absent: decided, or enough items")


class Estimate(Record):
    """A value with its 95 % interval."""

    value: float | None = Field(description="the value; null: not measured")
    ci_low: float | None = Field(description="lower bound; null: too few units")
    ci_high: float | None = Field(description="upper bound; null: too few units")

    @classmethod
    def of(cls, found: Ratio | Proportion | None) -> "Estimate":
        """The record of a ratio or a share; all null if there is none."""
        return cls(**{name: getattr(found, name, None) for name in ("value", "ci_low", "ci_high")})


class Percentiles(Record):
    """The median and the 95th percentile of some times, in seconds."""

    p50: Seconds | None = Field(description="median, in seconds; null: not measured")
    p95: Seconds | None = Field(description="95th percentile, in seconds; null: not measured")


class RequestLatency(Record):
    """Times from the start of a request's batch to the forward that ended its answer, in seconds."""

    p50: Seconds = Field(description="median, in seconds")
    p95: Seconds = Field(description="95th percentile, in seconds")
    p99: Seconds = Field(description="99th percentile, in seconds")
    requests: Size = Field(description="requests of round 1 whose times are known")


class Samples(Record):
    """Timing lines of a cell."""

    used: Count = Field(description="lines that count")
    dropped: Count = Field(description="lines that do not count")


class Accuracy(Sparse):
    """The mean score of a cell's items, with its 95 % interval."""

    metric: str = Field(description="metric of the score")
    tasks: Annotated[Annotated[int, Field(ge=2)] | None, NotNull()] = Field(
        None, description="of an unweighted mean over tasks, the number of tasks; absent: a mean over items"
    )
    value: float | None = Field(description="mean score, as a share; null: no items")
    stderr: float | None = Field(description="standard error of the mean; null: too few items")
    ci_low: float | None = Field(description="lower bound; null: no items")
    ci_high: float | None = Field(description="upper bound; null: no items")
    n: Count = Field(description="scored items")


class ByValue(Accuracy):
    """The accuracy by the value of each answer's result, and how it differs from the score."""

    false_passes: Count = Field(description="answers whose score is higher than by value")
    missed: Count = Field(description="answers whose score is lower than by value")
    differs: bool = Field(description="true: it differs from the accuracy by more than chance, on the same answers")


class Unread(Record):
    """Answers in which the rule of the score finds no result. Their score is that rule's."""

    answers: Size = Field(description="unread answers")
    of: Size = Field(description="scored answers")
    reasons: dict[str, Size] = Field(description="unread answers by reason, the most frequent first")


class SameItems(Record):
    """The accuracy of a cell's arm at a larger batch size that has more items, on the items of this cell only."""

    batch_size: Size = Field(description="the larger batch size")
    batching: Batching = Field(description="its way of batching")
    items: Count = Field(description="scored items there")
    n: Size = Field(description="of these, the items that are scored here too")
    here: Share = Field(description="mean score here of these n items")
    there: Share = Field(description="mean score there of these n items")


class AccuracyComparison(Sparse):
    """The accuracy of the arm less that of a baseline, on the items that both answered."""

    baseline: str = Field(description="arm of the baseline")
    difference: float | None = Field(description="accuracy of the arm less that of the baseline, as a share")
    ci_low: float | None = Field(description="lower bound of the 95 % interval")
    ci_high: float | None = Field(description="upper bound of the 95 % interval")
    gained: Count = Field(description="items that only the arm answers correctly")
    lost: Count = Field(description="items that only the baseline answers correctly")
    n: Count = Field(description="items that both answered")
    p_mcnemar: float | None = Field(description="exact p-value of McNemar's test; it decides nothing")
    verdict: Verdict = Field(description="verdict on accuracy")


class Agreement(Record):
    """How many items have the same tokens as a baseline's."""

    baseline: str = Field(description="arm of the baseline")
    items: Count = Field(description="items that both answered")
    identical: Count = Field(description="items with the same tokens")


class SpeedFactors(Record):
    """The factors of rate_ratio, which is their product."""

    tokens_per_forward: NonNegative = Field(description="tokens per forward, arm over baseline")
    forward_time: NonNegative = Field(description="device time of a forward, baseline over arm")
    utilisation: NonNegative = Field(description="live rows per forward, arm over baseline")
    host: NonNegative = Field(description="device share of decoding time, arm over baseline")
    decode_share: NonNegative = Field(description="decoding share of wall time, arm over baseline")


class PlainSpeedup(Estimate):
    """The same ratio for the plain reference by the arm's own engine: the part of the engine alone."""

    arm: str = Field(description="arm of the plain reference")


class TaskValue(Record):
    """A figure of one task."""

    task: str = Field(description="name of the task")
    value: NonNegative = Field(description="its figure")
    ci_low: NonNegative = Field(description="lower bound")
    ci_high: NonNegative = Field(description="upper bound")


class Spread(Record):
    """The worst and the best task for a figure, of the tasks that were measured enough.

    Enough: for a verdict on a speedup, for an interval of tokens per forward.
    """

    worst: TaskValue = Field(description="task with the smallest figure")
    best: TaskValue = Field(description="task with the largest figure")
    compared: Annotated[int, Field(ge=2)] = Field(description="tasks that were measured enough")
    tasks: Annotated[int, Field(ge=2)] = Field(description="tasks of the cell")


class TaskSpeedup(Sparse):
    """The speed of the arm over one baseline."""

    baseline: str = Field(description="arm of the baseline")
    value: float | None = Field(description="wall time of the baseline over that of the arm")
    ci_low: float | None = Field(description="lower bound; null: too few blocks")
    ci_high: float | None = Field(description="upper bound; null: too few blocks")
    verdict: Verdict = Field(description="verdict on speed")


class Speedup(TaskSpeedup):
    """The speed of the arm over one baseline, on all items.

    With includes_engine the baseline ran by another engine, so that the engine's part is in the ratio.
    """

    ci_repeat: Interval | None = Field(description="interval over rounds in place of blocks; null: too few rounds")
    rate_ratio: float | None = Field(description="tokens per second, arm over baseline")
    rate_ratio_ci: Interval | None = Field(description="low and high of rate_ratio; null: too few blocks")
    length_ratio: float | None = Field(description="tokens of the arm over tokens of the baseline")
    factors: SpeedFactors | None = Field(
        description="factors of rate_ratio; null: nothing was measured, an engine hides its counters, or the machine "
        "was disturbed"
    )
    includes_engine: bool = Field(
        False, description="true: the baseline ran by another engine; absent: by the same engine"
    )
    plain: PlainSpeedup | None = Field(
        None,
        description="with includes_engine, the part of the engine alone; null: the arm is a reference itself or runs "
        "by no engine of ours, or the run has no such arm",
    )
    spread: Spread | None = Field(
        None, description="worst and best task; null: fewer than two tasks were measured enough, or all are equal"
    )
    decode: Estimate | None = Field(
        None,
        description="decoding time of the baseline over that of the arm, without the prompts; null: not measured, or "
        "an engine does not report it",
    )


Quantity = Literal[
    "accuracy", "accuracy_change", "tokens_per_forward", "acceptance_length", "tokens_per_s", "wall_s", "speedup"
]
Printed = Annotated[str, StringConstraints(pattern=r"^[+-]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?$")]


class PublishedFigure(Record):
    """A published figure and ours."""

    row: str = Field(description="row of the table")
    arm: str = Field(description="arm, as the table has it")
    benchmark: str = Field(description="benchmark, or `average`: the unweighted mean of all of them")
    quantity: Quantity = Field(description="what the figure is of; accuracies are in percent, their changes in points")
    published: Printed = Field(description="published figure as it is printed")
    ours: Estimate = Field(description="our figure in the same unit; null: not measured")
    inside: bool | None = Field(
        description="whether the published figure, which is rounded, lies in our interval; null: not compared"
    )
    why: str = Field(description="why it is not compared; empty: it is, or there is no interval")


class Publication(Record):
    """The published table that a plan names, beside our figures."""

    name: str = Field(description="name of the table, as `mtbench reproduce` takes it")
    figures: list[PublishedFigure] = Field(description="its figures in the order of the table")


class AcceptanceFigures(Sparse):
    """How many guesses the target accepted."""

    length: NonNegative | None = Field(description="tokens per forward, of the forwards that committed any")
    length_ci: Interval | None = Field(None, description="low and high; null: too few units")
    rate: NonNegative | None = Field(
        description="accepted guesses over guesses offered; null: none were offered, or the number is not stored"
    )
    per_position: list[Share] | None = Field(
        description="per number n = 1, 2, …, the share of the forwards that committed more than n tokens, of those "
        "that committed any"
    )
    offered: Count | None = Field(description="guesses offered; null: not stored")
    reported_by: str | None = Field(
        None,
        validation_alias=REPORTED_BY,
        description="who counted; null: mtbench, from the commits of each forward",
    )
    vllm: NonNegative | None = Field(
        description="length as vLLM counts: 1 + accepted / drafts, accepted after the answer's end included; null: "
        "nothing was drafted"
    )


class AcceptancePart(Estimate):
    """The acceptance length of a part of a cell's forwards: tokens per forward that committed any."""

    part: str = Field(description="tokens of prompt and answer before it; task; or thinking or answer")
    answers: Count = Field(description="answers that have such forwards")
    forwards: Count = Field(description="forwards that committed any")


class Summary(Sparse):
    """Quality, acceptance and speed of a cell, or of a part of it, without a comparison."""

    items: Count = Field(description="answered items")
    accuracy: Accuracy | None = Field(description="mean score of the items; null: not scored")
    accuracy_macro: Accuracy | None = Field(None, description="unweighted mean over tasks; null: one task")
    tokens_per_forward: NonNegative | None = Field(description="tokens per forward; null: an engine hides its forwards")
    tokens_per_forward_ci: Interval | None = Field(description="low and high; null: too few items")
    acceptance: AcceptanceFigures | None = Field(description="accepted guesses; null: an engine hides them")
    tokens_per_s: Estimate = Field(description="tokens per second of wall time")


class TaskName(Record):
    """The key that comes first in the figures of a task."""

    task: str = Field(description="name of the task")


class TaskFigures(Summary, TaskName):
    """One task of a suite that has several: its items, and the blocks that hold items of this task only."""

    speedup: list[TaskSpeedup] = Field(description="speed over each baseline by the same engine")


class RangeFigures(Summary):
    """Turns of conversations in a range. Intervals are over conversations, or over those side by side in a block."""

    part: str = Field(description="range of turn numbers, or of prompt tokens of a request, mean of a block")
    tokens: Count = Field(description="tokens of the answers")
    acceptance_rate: Estimate = Field(description="accepted guesses over guesses offered")
    ttft_s: Estimate = Field(description="time to the first token, in seconds, mean over blocks")
    tpot_s: Estimate = Field(description="time per token of a request after its first, in seconds")
    cached_share: Estimate = Field(description="share of the prompts that the engine had kept, by its own count")
    speedup: list[TaskSpeedup] = Field(description="speed over each baseline by the same engine")


class Finish(Record):
    """Why answers ended, in items."""

    end: Count = Field(description="answers that ended with an end token")
    stop: Count = Field(description="answers that ended with a stop string")
    length: Count = Field(description="answers that the budget of tokens cut")


class Degenerate(Record):
    """Answers that the budget cut and whose last 64 tokens repeat with a period of at most 16, and the other answers.

    mtbench/results/degenerate.py holds the rule.
    """

    answers: Count = Field(description="degenerate answers")
    share: Share = Field(description="their share of all answers")
    tokens_per_forward: NonNegative | None = Field(
        description="tokens per forward of the other answers; null: there are none, or an engine hides its forwards"
    )


class SpeedParts(Record):
    """The factors of tokens per second.

    tokens per second = tokens_per_forward · rows · utilisation · host · decode_share / forward_s.
    """

    tokens_per_forward: NonNegative = Field(description="tokens per forward of a row")
    rows: NonNegative = Field(description="mean rows of a forward of the batch")
    utilisation: NonNegative = Field(description="share of these rows that are still decoding")
    forward_s: Seconds = Field(description="device time of a forward of the batch, in seconds")
    host: NonNegative = Field(description="device share of decoding time")
    decode_share: NonNegative = Field(description="decoding share of wall time")
