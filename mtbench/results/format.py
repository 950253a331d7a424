"""results.json as records: what the stored lines of a run add up to, cell by cell.

A value is never NaN; null is what was not measured. An interval is a 95 % interval unless its name says otherwise; its
bounds are null where there are too few units. mtbench/statistics.py holds every definition.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from mtbench.decoding.method import Claims
from mtbench.records import (
    CellName,
    Count,
    Interval,
    NonNegative,
    NotNull,
    Price,
    Record,
    Seconds,
    Sha256,
    Share,
    Size,
    Sparse,
    VersionOne,
)
from mtbench.runs.formats import REPORTED_BY, Environment, Grade
from mtbench.runs.plan import CELL_ID, Batching, Length, Simulated
from mtbench.runs.run_request import CHECKPOINTS

SCHEMA_VERSION: Literal[1] = 1

Status = Literal["ok", "left", "partial", "failed"]
SpeedWord = Literal["faster", "slower", "same", "inconclusive"]
AccuracyWord = Literal["not worse", "worse by less than the margin", "worse than margin", "worse", "inconclusive"]
SPEED_WORDS: tuple[SpeedWord, ...] = get_args(SpeedWord)
ACCURACY_WORDS: tuple[AccuracyWord, ...] = get_args(AccuracyWord)


def _one_of(words: tuple[str, ...]) -> StringConstraints:
    """Return the constraint of a verdict: one of the words; a detail may follow a colon or a comma."""
    return StringConstraints(pattern=f"^({'|'.join(words)})($|: |, )")


SpeedVerdict = Annotated[str, _one_of(SPEED_WORDS)]
AccuracyVerdict = Annotated[str, _one_of(ACCURACY_WORDS)]
SPEED_VERDICT = "faster, slower, same or inconclusive; a detail may follow"


def _named(task: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if a task has no name."""
    if not isinstance(task.get("name"), str):
        raise ValueError("a task must have a name")
    return task


TaskInfo = Annotated[
    dict[str, Any],
    AfterValidator(_named),
    Field(json_schema_extra={"properties": {"name": {"type": "string"}}, "required": ["name"]}),
]


class Estimate(Record):
    """A ratio of totals with its 95 % interval."""

    value: float | None = Field(description="the ratio; null: not measured")
    ci_low: float | None = Field(description="lower bound; null: too few units")
    ci_high: float | None = Field(description="upper bound; null: too few units")


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
    ci90_low: float | None = Field(description="lower bound of the 90 % interval")
    p_mcnemar: float | None = Field(description="exact p-value of McNemar's test; it decides nothing")
    margin: float = Field(description="margin for `not worse`, as a share")
    verdict: AccuracyVerdict = Field(
        description="not worse, worse by less than the margin, worse, worse than margin or inconclusive; a detail may "
        "follow"
    )
    n_needed: Count | None = Field(
        description="items at which the arm is found `not worse` four times in five; null: decided, or enough items"
    )
    n_needed_at: float | None = Field(
        None, description="true difference that n_needed assumes: the observed one if it lies inside the margin, else 0"
    )


class Agreement(Record):
    """How many items have the same tokens as a baseline's."""

    baseline: str = Field(description="arm of the baseline")
    items: Count = Field(description="items that both answered")
    identical: Count = Field(description="items with the same tokens")


class SpeedFactors(Record):
    """Where rate_ratio comes from: it is the product of these factors."""

    tokens_per_forward: NonNegative = Field(description="tokens per forward, arm over baseline")
    forward_time: NonNegative = Field(description="device time of a forward, baseline over arm")
    utilisation: NonNegative = Field(description="live rows per forward, arm over baseline")
    host: NonNegative = Field(description="device share of decoding time, arm over baseline")
    decode_share: NonNegative = Field(description="decoding share of wall time, arm over baseline")


class PlainSpeedup(Record):
    """The same ratio for the plain reference by the arm's own engine: the part of the engine alone."""

    arm: str = Field(description="arm of the plain reference")
    value: float | None = Field(description="wall time of the baseline over that of the plain reference")
    ci_low: float | None = Field(description="lower bound; null: too few blocks")
    ci_high: float | None = Field(description="upper bound; null: too few blocks")


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


class Speedup(Sparse):
    """The speed of the arm over one baseline.

    With includes_engine the baseline ran by another engine, so that the engine's part is in the ratio.
    """

    model_config = ConfigDict(
        json_schema_extra={"dependentRequired": {"includes_engine": ["plain"], "plain": ["includes_engine"]}}
    )

    baseline: str = Field(description="arm of the baseline")
    value: float | None = Field(description="wall time of the baseline over that of the arm")
    ci_low: float | None = Field(description="lower bound; null: too few blocks")
    ci_high: float | None = Field(description="upper bound; null: too few blocks")
    ci_repeat: Interval | None = Field(description="interval over rounds in place of blocks; null: too few rounds")
    rate_ratio: float | None = Field(description="tokens per second, arm over baseline")
    rate_ratio_ci: Interval | None = Field(description="low and high of rate_ratio; null: too few blocks")
    length_ratio: float | None = Field(description="tokens of the arm over tokens of the baseline")
    verdict: SpeedVerdict = Field(description=SPEED_VERDICT)
    factors: SpeedFactors | None = Field(
        description="factors of rate_ratio; null: nothing was measured, an engine hides its counters, or the machine "
        "was disturbed"
    )
    includes_engine: Annotated[bool | None, NotNull()] = Field(
        None,
        description="true: the baseline ran by another engine; absent: by the same engine",
        json_schema_extra={"const": True},
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
        "an engine does not tell it",
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if len(self.model_fields_set & {"includes_engine", "plain"}) == 1 or self.includes_engine is False:
            raise ValueError("includes_engine (true) and plain must be given together")
        return self


class TaskSpeedup(Record):
    """The speed of the arm over one baseline by the same engine, on one task."""

    baseline: str = Field(description="arm of the baseline")
    value: float | None = Field(description="wall time of the baseline over that of the arm")
    ci_low: float | None = Field(description="lower bound; null: too few blocks")
    ci_high: float | None = Field(description="upper bound; null: too few blocks")
    verdict: SpeedVerdict = Field(description=SPEED_VERDICT)


class DerivedAcceptance(Sparse):
    """Acceptance as other projects compute it, by owner. mtbench/results/acceptance.py holds the formulas.

    null: the figure cannot be computed from what the run stores.
    """

    vllm: NonNegative | None = Field(description="vLLM: 1 + accepted tokens / drafts, before the answer is cut")
    deepspec: NonNegative | None = Field(
        None, description="DeepSpec: 1 + accepted tokens / drafts, before the answer is cut at the budget"
    )
    sglang: NonNegative | None = Field(description="SGLang, SpecForge: completion tokens / verifications")
    specdec_bench: NonNegative | None = Field(description="specdec_bench: mean over answers of their mean chunk")
    spec_bench: NonNegative | None = Field(description="Spec-Bench: mean of all steps of all answers")
    aiperf: NonNegative | None = Field(description="aiperf: mean over answers of 1 + accepted / steps")
    aiperf_token_weighted: NonNegative | None = Field(description="aiperf, token-weighted: 1 + accepted / steps")
    mars: NonNegative | None = Field(description="MARS, Fast-dLLM: all tokens / all forwards of rows")
    mars_cached: NonNegative | None = Field(description="MARS, cached samplers: a batch's tokens / its forwards")


class AcceptanceFigures(Sparse):
    """How many guesses the target accepted."""

    length: NonNegative | None = Field(description="tokens per forward, of the forwards that committed any")
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
    derived: DerivedAcceptance = Field(description="acceptance as other projects compute it, by owner")


class TaskFigures(Sparse):
    """One task of a suite that has several: its items, and the blocks that hold items of this task only."""

    task: str = Field(description="name of the task")
    items: Count = Field(description="answered items")
    accuracy: Accuracy | None = Field(description="mean score of the items; null: not scored")
    accuracy_macro: Accuracy | None = Field(None, description="unweighted mean over tasks; null: one task")
    tokens_per_forward: NonNegative | None = Field(description="tokens per forward; null: an engine hides its forwards")
    tokens_per_forward_ci: Interval | None = Field(description="low and high; null: too few items")
    acceptance: AcceptanceFigures | None = Field(description="accepted guesses; null: an engine hides them")
    tokens_per_s: Estimate = Field(description="tokens per second of wall time")
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
    acceptance_length: NonNegative | None = Field(
        description="acceptance length of the other answers; null: there are none, or an engine hides it"
    )
    acceptance_rate: NonNegative | None = Field(
        description="acceptance rate of the other answers; null: no guesses were offered, or the number is not stored"
    )


class DecodeRate(Record):
    """Tokens per second of decoding."""

    value: NonNegative | None = Field(description="tokens per second of decode_s; null: not measured")


class SpeedParts(Record):
    """Where tokens per second come from.

    tokens per second = tokens_per_forward · rows · utilisation · host · decode_share / forward_s.
    """

    tokens_per_forward: NonNegative = Field(description="tokens per forward of a row")
    rows: NonNegative = Field(description="mean rows of a forward of the batch")
    utilisation: NonNegative = Field(description="share of these rows that are still decoding")
    forward_s: Seconds = Field(description="device time of a forward of the batch, in seconds")
    host: NonNegative = Field(description="device share of decoding time")
    decode_share: NonNegative = Field(description="decoding share of wall time")


class Floor(Record):
    """How far the arm that a promise is held to agrees with itself at two batch sizes: the effect of batching alone."""

    arm: str = Field(description="arm that the promise is held to")
    batch_sizes: Annotated[list[Size], Field(min_length=2, max_length=2)] = Field(
        description="smallest and largest batch size"
    )
    items: Size = Field(description="items that both batch sizes answered")
    identical: Count = Field(description="items with the same tokens")


class Lossless(Record):
    """How an arm keeps its promise of another arm's tokens."""

    against: str = Field(description="arm whose tokens it promises")
    grade: Grade = Field(
        description="exact: the same tokens; near-tie: other tokens, each within epsilon of the largest logit; "
        "divergent: a token that is no near tie; inconclusive: other tokens, and nothing to judge them by"
    )
    items: Count = Field(description="items that both answered")
    identical: Count = Field(description="items with the same tokens")
    first_divergence: Count | None = Field(description="earliest index of a token that differs; null: none differs")
    epsilon: float | None = Field(description="logit difference that still counts as a tie; null: not known")
    worst_margin: float | None = Field(description="largest distance of a token's logit below the largest logit")
    near_ties: float | None = Field(description="share of the tokens that are not the judge's choice")
    floor: Floor | None = Field(description="agreement of that arm with itself; null: one batch size")


class Eliminated(Record):
    """When a cell left a run in which cells leave, and why. It is compared on the blocks that it has."""

    block: Count = Field(description="blocks of its group, from the first on, that had ended")
    lost: bool = Field(description="true: it is surely not the one to choose; false: nothing about it was left to show")
    reason: str = Field(description="why it left")
    rival: CellName | None = Field(None, description="the cell that it lost to; null: none")


class ResultCell(Sparse):
    """One cell: what ran, what came out, how fast it was and how it compares. Times are in seconds."""

    cell: CellName = Field(description=CELL_ID)
    status: Status = Field(
        description="ok: every block of every round ran; left: some did, and the others were not needed; partial: some "
        "did; failed: an error"
    )
    left: Eliminated | None = Field(None, description="why the cell left before the last block; null: it did not")
    suite: str = Field(description="suite as it was asked for, name or name:rest")
    task: TaskInfo = Field(description="the suite's own description of its task, with its name")
    arm: str = Field(description="arm: method:options@role/engine")
    method: str = Field(description="name of the method")
    options: dict[str, Any] = Field(description="value of every option of the method")
    engine: str | None = Field(description="engine; null: the method's loop is not ours")
    family: str = Field(description="family of checkpoints")
    on: str = Field(description="role of the checkpoint that decodes")
    checkpoints: dict[str, str] = Field(description=CHECKPOINTS)
    dtype: str | None = Field(description="number type of the weights; null: nothing was decoded")
    device: str | None = Field(description="cpu or cuda; null: nothing was decoded")
    simulated: Simulated | None = Field(description="what is not real about it; null: nothing")
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    batch_size: Size = Field(description="requests decoded side by side")
    length: Length = Field(description="natural: answers end by themselves; fixed: end tokens are ignored")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    max_new_tokens: Size = Field(description="most tokens of an answer")
    blocks: Count = Field(description="blocks with a sample that counts")
    rounds: Count = Field(description="planned rounds")
    samples: Samples = Field(description="timing lines")
    items: Count = Field(description="answered items")
    accuracy: Accuracy | None = Field(description="mean score of the items; null: not scored")
    accuracy_macro: Accuracy | None = Field(
        None, description="unweighted mean over the suite's tasks; null: the suite has one task"
    )
    accuracy_same_items: SameItems | None = Field(
        None,
        description="accuracy of the arm at a larger batch size on the items of this cell; null: not scored, or no "
        "batch size has more items",
    )
    tokens_per_forward: NonNegative | None = Field(description="tokens per forward; null: an engine hides its forwards")
    tokens_per_forward_ci: Interval | None = Field(description="low and high; null: too few items")
    tokens_per_forward_spread: Spread | None = Field(
        None, description="worst and best task; null: fewer than two tasks were measured enough, or all are equal"
    )
    acceptance: AcceptanceFigures | None = Field(description="accepted guesses; null: an engine hides them")
    tokens_per_s: Estimate = Field(description="tokens per second of wall time")
    commit_histogram: dict[Annotated[str, StringConstraints(pattern="^[0-9]+$")], Count] = Field(
        description="per number of tokens committed in one forward, the number of such forwards"
    )
    tokens: Count | None = Field(description="tokens of all answers")
    finish: Finish = Field(description="why answers ended")
    degenerate: Degenerate | None = Field(
        None, description="answers that end in a loop; null: no answers, or the cell is simulated"
    )
    decode_tokens_per_s: DecodeRate = Field(description="tokens per second of decoding")
    wall_s: Seconds | None = Field(description="wall time of all blocks, in seconds; per block the mean over rounds")
    prefill_s: Seconds | None = Field(description="time of reading the prompts, in seconds")
    decode_s: Seconds | None = Field(description="time of decoding, in seconds")
    device_s: Seconds | None = Field(description="part of decode_s that the device computed, in seconds")
    host_gap_s: float | None = Field(description="decode_s less device_s, in seconds")
    preparation_s: Seconds | None = Field(
        description="time of capture and compilation, nearly all of it in the warm-up, in seconds"
    )
    ttft_s: Percentiles = Field(description="time to the first token")
    commit_latency_s: Percentiles = Field(description="time between two commits of the same row, in round 1")
    request_latency_s: RequestLatency | None = Field(
        None,
        description="end-to-end time of a request, in round 1; null: not measured, finished rows are refilled, or an "
        "engine hides its steps",
    )
    parts: SpeedParts | None = Field(description="parts of tokens per second; null: not measured, or hidden")
    positions_fed: Count | None = Field(description="positions fed to the target")
    positions_fed_per_token: NonNegative | None = Field(description="positions fed to the target per token")
    positions_fed_per_forward: NonNegative | None = Field(description="positions fed to the target per forward")
    draft_forwards: Count | None = Field(description="forwards of models other than the target")
    draft_forwards_per_token: NonNegative | None = Field(description="draft_forwards per token")
    draft_s: Seconds | None = Field(description="time in these forwards, in seconds; null on a GPU")
    head_s: Seconds | None = Field(
        description="time in what the method computes beside its models, in seconds; null on a GPU"
    )
    kv_bytes: Count | None = Field(description="most bytes of keys and values that a block needs")
    repeated_identical: Share | None = Field(
        description="share of the requests of later rounds with the tokens of round 1; null: one round"
    )
    claims: Claims = Field(description="lossless, distribution or lossy: what the method promises")
    reference: bool = Field(description="true: the plain loop, which commits one token per forward")
    lossless: Lossless | None = Field(description="how it keeps its promise of another arm's tokens; null: no promise")
    void: list[str] = Field(description="reasons not to trust the cell; empty: none")
    flags: list[str] = Field(description="remarks that a reader must know; empty: none")
    error: str | None = Field(description="why the cell failed; null: it did not")
    peak_memory_bytes: Count | None = Field(description="peak memory, in bytes")
    energy_j: NonNegative | None = Field(description="energy of the whole GPU over the cell's energy window, in J")
    j_per_token: NonNegative | None = Field(description="energy per token, in J")
    energy_reason: str | None = Field(description="why energy_j is null")
    roofline_fraction: NonNegative | None = Field(description="share of the measured roofline that decoding reaches")
    roofline_reason: str | None = Field(description="why roofline_fraction is null")
    speedup: list[Speedup] = Field(description="speed over each baseline, those by the same engine first")
    accuracy_vs: list[AccuracyComparison] = Field(description="accuracy against each baseline by the same engine")
    agreement: list[Agreement] = Field(description="agreement of tokens with each baseline by the same engine")
    tasks: list[TaskFigures] = Field(description="figures of each task; empty: all items are of one task")


class BreakEven(Record):
    """The batch size from which an arm is no longer faster than a baseline by the same engine."""

    suite: str = Field(description="suite as it was asked for")
    arm: str = Field(description="arm")
    baseline: str = Field(description="arm of the baseline")
    batching: Batching = Field(description="way of batching")
    swept: list[Size] = Field(min_length=2, description="batch sizes measured, ascending")
    verdicts: list[SpeedVerdict] = Field(min_length=2, description="verdict on speed at each of these sizes")
    batch_size: Size | None = Field(
        description="smallest size that is shown to be no faster, beyond the last faster size and all sizes with too "
        "few measurements; null: faster at the largest size, or not shown"
    )
    reason: str | None = Field(description="why it is not known where the arm stops paying; null: it is known")


class StatisticsInfo(Record):
    """How intervals and verdicts were computed."""

    method: str = Field(description="estimators, intervals and tests")
    level: Share = Field(description="level of the intervals")
    speed_margin: float = Field(description="margin for `same`, as a share of the speed")
    accuracy_margin: float = Field(description="margin for `not worse`, as a share")


class ResultEnvironment(Environment):
    """environment.json, and the power of the idle GPU."""

    command: list[str] = Field(description="command line")
    idle_power_w: NonNegative | None = Field(
        None, description="power of the idle GPU with models loaded, in W; null: not measured"
    )


class Results(Sparse):
    """results.json: what the stored lines of a run add up to, cell by cell.

    A value is never NaN; null is what was not measured. No key is renamed without a new schema_version.
    """

    schema_version: VersionOne = Field(description="version of this format")
    run_id: str = Field(description="12 digits that name the run; other runs of the same plan have other ones")
    command: list[str] = Field(description="command line that began the run")
    environment: ResultEnvironment = Field(description="machine and sessions of the run")
    seed: int = Field(description="seed of the run")
    temperature: NonNegative = Field(description="sampling temperature; 0: greedy decoding")
    plan_sha256: Sha256 = Field(description="SHA-256 of plan.json")
    statistics: StatisticsInfo = Field(description="how intervals and verdicts were computed")
    price_per_hour: Price | None = Field(
        None, description="price of the machine that one worker decodes on, per hour; null: not given"
    )
    cells: list[ResultCell] = Field(description="cells in the order of the plan")
    stops_paying: list[BreakEven] = Field(
        description="for every arm and baseline by the same engine at several batch sizes, where the arm stops paying"
    )
