"""results.json as records: the totals of a run's stored lines, cell by cell.

A value is never NaN; null: not measured. An interval is a 95 % interval unless a `level` stands beside it;
its bounds are null where there are too few units. mtbench/statistics.py holds every definition.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from mtbench.decoding.method import Claims
from mtbench.options.engine_options import ServerOption
from mtbench.plan.formats import Elimination, Environment
from mtbench.plan.plan import CELL_ID, ENGINE_OPTIONS, OTHER_TOKENS, Batching, Length, OptionValues, Simulated
from mtbench.plan.request import CHECKPOINTS, SamplingOptions
from mtbench.records import CellName, Count, Interval, NonNegative, Price, Record, Seconds, Sha256, Share, Size, Sparse
from mtbench.results.figure_formats import (
    AcceptanceFigures,
    AcceptancePart,
    Accuracy,
    AccuracyComparison,
    Agreement,
    ByValue,
    Degenerate,
    Estimate,
    Finish,
    Percentiles,
    Publication,
    RangeFigures,
    RequestLatency,
    SameItems,
    Samples,
    SpeedParts,
    Speedup,
    Spread,
    TaskFigures,
    Unread,
)
from mtbench.results.lossless_format import Lossless, PrefixCache
from mtbench.statistics import Word

SCHEMA_VERSION: Literal[3] = 3

Status = Literal["ok", "left", "partial", "failed"]


class ResultCell(Sparse):
    """One cell: its arm, output, speed and comparisons. Times are in seconds."""

    cell: CellName = Field(description=CELL_ID)
    status: Status = Field(
        description="ok: every block of every round ran; left: some did, and the others were not needed; partial: some "
        "did; failed: an error"
    )
    left: Elimination | None = Field(
        None, description="why the cell left, which is compared on the blocks that it has; null: it did not leave"
    )
    suite: str = Field(description="suite as requested, name or name:rest")
    task: dict[str, Any] = Field(description="the suite's own description of its task, with its name")
    arm: str = Field(description="arm: method:options@role/engine")
    method: str = Field(description="name of the method")
    options: OptionValues = Field(description="value of every option of the method")
    engine: str | None = Field(description="engine; null: the method's loop is not ours")
    engine_options: list[ServerOption] = ENGINE_OPTIONS
    other_tokens: list[ServerOption] = OTHER_TOKENS
    family: str = Field(description="family of checkpoints")
    on: str = Field(description="role of the checkpoint that decodes")
    checkpoints: dict[str, str] = Field(description=CHECKPOINTS)
    dtype: str | None = Field(description="number type of the weights; null: nothing was decoded")
    device: str | None = Field(description="cpu or cuda; null: nothing was decoded")
    simulated: Simulated | None = Field(description="what is not real about it; null: nothing")
    demonstration: bool = Field(description="true: the family shows the mechanics and is no evidence on real models")
    batch_size: Size = Field(description="requests decoded side by side")
    length: Length = Field(description="natural: answers end by themselves; fixed: end tokens are ignored")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    max_new_tokens: Size = Field(description="most tokens of an answer")
    blocks: Count = Field(description="blocks with a sample that counts")
    rounds: Count = Field(description="planned rounds")
    samples: Samples = Field(description="timing lines")
    items: Count = Field(description="answered items")
    accuracy: Accuracy | None = Field(description="mean score of the items; null: not scored")
    unread: Unread | None = Field(None, description="answers in which the score finds no result; absent: none")
    by_value: ByValue | None = Field(None, description="accuracy by value; absent: no answer has such a reading")
    accuracy_macro: Accuracy | None = Field(
        None, description="unweighted mean over the suite's tasks; null: the suite has one task"
    )
    valid: Accuracy | None = Field(None, description="share of valid answers; absent: all may be any text")
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
    acceptance_by: dict[str, list[AcceptancePart]] = Field(
        default_factory=dict, description="by a forward's context, category and thinking; absent: one part, or hidden"
    )
    tokens_per_s: Estimate = Field(description="tokens per second of wall time")
    cost_per_million: NonNegative | None = Field(
        None, description="price of a million tokens, prefill included; absent: no price_per_hour, or no rate"
    )
    commit_histogram: dict[Annotated[str, StringConstraints(pattern="^[0-9]+$")], Count] = Field(
        description="per number of tokens committed in one forward, the number of such forwards"
    )
    tokens: Count | None = Field(description="tokens of all answers")
    finish: Finish = Field(description="why answers ended")
    degenerate: Degenerate | None = Field(
        None, description="answers that end in a loop; null: no answers, or the cell is simulated"
    )
    wall_s: Seconds | None = Field(description="wall time of all blocks, in seconds; per block the mean over rounds")
    prefill_s: Seconds | None = Field(description="time of reading the prompts, in seconds")
    decode_s: Seconds | None = Field(description="time of decoding, in seconds")
    device_s: Seconds | None = Field(description="part of decode_s that the device computed, in seconds")
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
    prefix_cache: PrefixCache | None = Field(None, description="probes of its prefix cache; absent: it has none")
    collapse: str | None = Field(
        None, description="how the acceptance of its drafts has collapsed; absent: it has not, or it is not known"
    )
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
    valid_vs: list[AccuracyComparison] = Field(default_factory=list, description="the same of valid answers")
    by_value_vs: list[AccuracyComparison] = Field(default_factory=list, description="the same by value")
    agreement: list[Agreement] = Field(description="agreement of tokens with each baseline by the same engine")
    tasks: list[TaskFigures] = Field(description="figures of each task; empty: all items are of one task")
    turns: list[RangeFigures] = Field(default_factory=list, description="figures by turn; absent: no later turns")
    contexts: list[RangeFigures] = Field(default_factory=list, description="figures by length of the prompts; the same")


class BreakEven(Record):
    """The batch size from which an arm is no longer faster than a baseline by the same engine."""

    suite: str = Field(description="suite as requested")
    arm: str = Field(description="arm")
    baseline: str = Field(description="arm of the baseline")
    batching: Batching = Field(description="way of batching")
    swept: list[Size] = Field(min_length=2, description="batch sizes measured, ascending")
    words: list[Word] = Field(min_length=2, description="word of the verdict on speed at each of these sizes")
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
    max_loss: float = Field(description="loss of accuracy within which an arm is `not worse`, in points")


class ResultEnvironment(Environment):
    """environment.json, and the power of the idle GPU."""

    command: list[str] = Field(description="command line")
    idle_power_w: NonNegative | None = Field(
        None, description="power of the idle GPU with models loaded, in W; null: not measured"
    )


class Results(Sparse):
    """results.json: the totals of a run's stored lines, cell by cell.

    A value is never NaN; null: not measured.
    """

    schema_version: Literal[3] = Field(description="version of this format")
    run_id: str = Field(description="12 digits that name the run; other runs of the same plan have other ones")
    command: list[str] = Field(description="command line that began the run")
    environment: ResultEnvironment = Field(description="machine and sessions of the run")
    seed: int = Field(description="seed of the run")
    temperature: NonNegative = Field(description="sampling temperature; 0: greedy decoding")
    sampling: SamplingOptions | None = Field(None, description="how tokens were drawn; absent: greedily")
    plan_sha256: Sha256 = Field(description="SHA-256 of plan.json")
    statistics: StatisticsInfo = Field(description="how intervals and verdicts were computed")
    price_per_hour: Price | None = Field(
        None, description="price of the machine that one worker decodes on, per hour; null: not given"
    )
    cells: list[ResultCell] = Field(description="cells in the order of the plan")
    stops_paying: list[BreakEven] = Field(
        description="for every arm and baseline by the same engine at several batch sizes, where the arm stops paying"
    )
    publication: Publication | None = Field(
        None, description="published figures beside ours; absent: the plan names no published table"
    )
