"""The files of a run besides its plan, as records: generation and timing lines, sessions, and the untimed passes.

The plan is in mtbench/plan/plan.py.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, RootModel, Strict

from mtbench.decoding.output import FinishReason
from mtbench.records import (
    ROOT,
    CellName,
    NotNull,
    Record,
    Sparse,
    StoredCount,
    StoredNumber,
    StoredQuantity,
    StoredSeconds,
    StoredSize,
    TokenId,
)

Grade = Literal["exact", "near-tie", "divergent", "inconclusive"]

Speed = Annotated[float, Field(ge=1, le=1e30)]  # divides
REPORTED_BY = AliasChoices("reported_by", "told_by")  # its name in runs until November 2026

MOST_COMMITTED = 1 << 16  # tokens of one forward
Committed = Annotated[int, Field(ge=0, le=MOST_COMMITTED)]


class GenerationLine(Record):
    """A line of generations/<cell>.jsonl: the answer to one item. null: an engine hides the value."""

    item: str = Field(description="name of the item: <task>/<doc id>/<turn>")
    prompt_ids: list[TokenId] | None = Field(
        description="token ids of the prompt; null for a later turn of a recorded conversation, which the plan holds, "
        "and for a private suite, whose authors ask that its questions are not spread: no file of the run holds their "
        "text or their tokens"
    )
    prompt_tokens: StoredSize = Field(description="number of prompt tokens")
    token_ids: list[TokenId] = Field(
        description="token ids of the answer, including the end token and the token that completes a stop string"
    )
    text: str = Field(description="text behind the prompt, without special tokens, end token, and stop string and on")
    forwards: StoredSize | None = Field(description="forwards of the target that the answer took")
    commits: list[Committed] | None = Field(
        description="tokens committed by each forward, zeros included: as many entries as forwards, which sum to the "
        "number of tokens"
    )
    positions_fed: StoredCount | None = Field(description="positions fed to the target")
    draft_forwards: StoredCount | None = Field(description="forwards of models other than the target")
    drafted: StoredCount | None = Field(
        description="guesses offered beyond the first token of each forward, up to the last forward kept"
    )
    surplus: StoredCount | None = Field(
        description="tokens that the last forward accepted after the end of the answer; papers count them"
    )
    cached_tokens: StoredCount | None = Field(
        None, description="tokens of the prompt that the engine had kept, by its own count"
    )
    reasoning: StoredCount | None = Field(
        None, description="letters at the beginning of the text that are reasoning; null: of an earlier mtbench"
    )
    special: list[Annotated[tuple[StoredCount, str], Strict(False)]] | None = Field(
        None, description="letters of the text before each special token inside it, and that token's; null: none"
    )
    finish_reason: FinishReason = Field(
        description="end: an end token; stop: a stop string; length: the budget of tokens"
    )
    block: StoredCount = Field(description="index of the block")

    @property
    def context(self) -> list[int]:
        """The answer as later turns see it: its tokens without the end token."""
        return self.token_ids[:-1] if self.finish_reason == "end" else self.token_ids


class Disturbed(Record):
    """A decoding that does not count."""

    wall_s: StoredSeconds = Field(description="wall time, in seconds")
    cpu_s: StoredSeconds = Field(description="processor time of the thread that decodes, in seconds")
    wanted_s: StoredSeconds | None = Field(None, description="of a server: as in a line of timings; else it is wall_s")
    reason: str = Field(description="why it does not count")


class TimingLine(Record):
    """A line of timings/<cell>.jsonl: one block in one round, from an idle device to an idle device.

    Times are in seconds. null: the value was not measured, or an external engine does not report it.
    """

    session: StoredSize = Field(description="number of the session, an entry of environment.json, from 1")
    round: StoredSize = Field(description="number of the round, from 1")
    block: StoredCount = Field(description="index of the block")
    order: StoredCount = Field(description="place among the arms of the block, from 0")
    rows: StoredSize = Field(description="slots: requests decoded side by side")
    items: StoredSize = Field(description="requests; more than rows where finished rows are refilled")
    prompt_tokens: StoredCount = Field(description="prompt tokens of all requests")
    tokens: StoredCount = Field(description="tokens of all answers")
    row_forwards: StoredCount | None = Field(description="forwards, counted once for every row that was still decoding")
    batch_forwards: StoredCount | None = Field(description="forwards of the batch")
    wall_s: Annotated[float, Field(ge=1e-9, le=1e9)] = Field(description="wall time of the block, in seconds")
    prefill_s: StoredSeconds | None = Field(description="time of reading the prompts, in seconds")
    decode_s: StoredSeconds | None = Field(description="time of decoding, in seconds")
    device_s: StoredSeconds | None = Field(description="part of decode_s that the device computed, in seconds")
    ttft_s: StoredSeconds | None = Field(description="time to the first token on the device, in seconds")
    step_s: list[Annotated[float, Field(ge=-1e9, le=1e9)]] | None = Field(
        description="per forward, the time on the device since the end of the previous one, in seconds"
    )
    draft_s: StoredSeconds | None = Field(
        description="part of device_s in forwards of models other than the target, in seconds; null on a GPU"
    )
    head_s: StoredSeconds | None = Field(
        description="part of device_s in what the method computes beside its models, in seconds; null on a GPU"
    )
    preparation_s: StoredSeconds = Field(description="time of capture and compilation inside the block, in seconds")
    kv_bytes: StoredCount | None = Field(description="bytes of the keys and values that these rows need")
    miscounted: StoredNumber = Field(
        description="forwards that the models saw less forwards that were counted; 0 is right"
    )
    counted: StoredCount | None = Field(description="tokens by an outside engine's own count")
    cached_tokens: StoredCount | None = Field(
        None, description="tokens of the prompts that an outside engine had kept, by its own count"
    )
    drafts: StoredCount | None = Field(description="times an outside engine drafted, by its own count")
    drafted: StoredCount | None = Field(description="tokens of those drafts, by the engine's own count")
    accepted: StoredCount | None = Field(description="accepted tokens of those drafts, by the engine's own count")
    histogram: list[StoredCount] | None = Field(
        None, description="entry n: those drafts of which n tokens were accepted, by the engine's own count"
    )
    reported_by: str | None = Field(
        None,
        validation_alias=REPORTED_BY,
        description="who reported drafts, drafted and accepted of each request; null: counters of the whole engine",
    )
    cpu_s: StoredSeconds | None = Field(
        None, description="processor time of the thread that decodes, or of server and client, in seconds"
    )
    wanted_s: StoredSeconds | None = Field(
        None, description="of a server: cpu_s, and the time in which others had the processor; else it is wall_s"
    )
    clock_mhz: StoredCount | None = Field(description="clock of the GPU at the end, in MHz")
    temperature_c: StoredNumber | None = Field(description="temperature of the GPU at the end, in °C")
    power_w: StoredQuantity | None = Field(description="mean power of the GPU, in W")
    throttle: Annotated[int, Field(ge=0, lt=1 << 64)] | None = Field(
        description="NVML's throttle reasons as bits: those at the end, slowdowns at the start and those between"
    )
    shared: bool | None = Field(description="true: another process computed on the GPU")
    dropped: str | None = Field(description="why this sample is not used; null: it is used")
    disturbed: list[Disturbed] | None = Field(
        None, description="earlier decodings of the block, which a disturbed machine made void; null: none"
    )
    identical: StoredCount | None = Field(description="requests with the tokens of round 1; null in round 1")


class PreparationLine(Sparse):
    """A line of preparation.jsonl: the cost of capture and compilation of a cell in a session."""

    session: StoredSize = Field(description="number of the session, from 1")
    cell: CellName = Field(description="name of the cell")
    preparation_s: StoredSeconds = Field(description="time of the first calls beyond that of the last, in seconds")
    server: Annotated[str | None, NotNull()] = Field(
        None, description="command that starts its server alone, on port 8000; absent: it has none"
    )
    unseen: list[Annotated[tuple[StoredCount, StoredSeconds], Strict(False)]] = Field(
        default_factory=list,
        description="prompt tokens and time to the first token of calls with prompts that no server has kept",
    )


class FailureLine(Sparse):
    """A line of failures.jsonl: a cell that failed."""

    cell: CellName = Field(description="name of the cell")
    error: str = Field(description="why it failed")
    stage: Annotated[Literal["score"] | None, NotNull()] = Field(
        None, description="score: scoring failed and may be repeated; absent: decoding failed"
    )
    again: Annotated[Literal[True] | None, NotNull()] = Field(
        None, description="true: the cause may pass, so the next session decodes the cell again; absent: it may not"
    )


LimitName = Literal["ttft", "itl"]
Slo = dict[LimitName, StoredSeconds]  # limits of 95th percentiles


class Race(Record):
    """race.json: cells may leave the run, at which looks. Groups are named by suite and batch size."""

    schema_version: Literal[2] = Field(description="version of this format")
    request: dict[str, Any] = Field(description="options of `mtbench choose`")
    slo_s: Slo = Field(
        description="limits of the 95th percentiles of the time to the first token and between commits, in seconds"
    )
    refused: dict[str, str] = Field(description="methods that could not be raced on these checkpoints, and why")
    looks: dict[str, list[StoredSize]] = Field(
        description="per group, `suite bN`, the numbers of blocks after which cells may leave; the error levels of its "
        "verdicts are shared by them and by one more, the end"
    )


class Elimination(Sparse):
    """A line of eliminated.jsonl: a cell that decodes no further blocks, because its result is known."""

    cell: CellName = Field(description="name of the cell")
    block: StoredCount = Field(description="blocks of its group, from the first on, that had ended")
    lost: bool = Field(description="true: it is surely not the one to choose; false: it needs no further measurement")
    reason: str = Field(description="why it left")
    rival: CellName | None = Field(None, description="the cell that it lost to; null: none")
    unraced: Annotated[Literal[True] | None, NotNull()] = Field(
        None, description="true: it decoded nothing, since the time budget had no room for it; absent: it was raced"
    )


class GpuInfo(Sparse):
    """A GPU as its driver describes it. null: not reported by the driver."""

    name: str | None = Field(None, description="name of the GPU")
    uuid: str | None = Field(None, description="id of the GPU")
    driver: str | None = Field(None, description="version of the driver")
    memory_bytes: StoredCount | None = Field(None, description="memory of the GPU, in bytes")
    power_cap_w: StoredQuantity | None = Field(None, description="power cap, in W")
    max_clock_mhz: StoredCount | None = Field(None, description="highest clock, in MHz")


class ProbeFigures(Record):
    """Speeds of a GPU measured by short kernels."""

    bandwidth_bytes_per_s: Speed = Field(description="bytes read and written by a copy, per second")
    read_bytes_per_s: Speed | None = Field(None, description="bytes read by a sum, per second; null: not measured")
    matmul_flop_per_s: Speed = Field(description="floating-point operations of a square product, per second")
    copy_bytes: StoredCount = Field(description="bytes copied")
    matmul_size: StoredCount = Field(description="rows and columns of the square product")
    cache_bytes: StoredCount = Field(description="bytes of the GPU's L2 cache")


class ShapeFigures(Sparse):
    """Sizes of a checkpoint that its cost depends on; or only the reason why they are not known."""

    body: StoredCount | None = Field(None, description="parameters of all layers without the embeddings")
    head: StoredCount | None = Field(None, description="parameters of the output embedding")
    body_bytes: StoredCount | None = Field(None, description="bytes of the layers' parameters")
    head_bytes: StoredCount | None = Field(None, description="bytes of the output embedding")
    vocabulary: StoredCount | None = Field(None, description="rows of the output embedding")
    logit_bytes: StoredCount | None = Field(None, description="bytes of one logit")
    kv_bytes_per_token: StoredCount | None = Field(
        None, description="bytes of a token's keys and values over all layers"
    )
    layers: StoredCount | None = Field(None, description="layers")
    heads: StoredCount | None = Field(None, description="attention heads")
    head_dim: StoredCount | None = Field(None, description="dimensions of a head")
    sliding_layers: StoredCount | None = Field(None, description="layers with sliding attention")
    sliding_window: StoredCount | None = Field(None, description="positions that sliding attention sees")
    reason: str | None = Field(None, description="why the sizes are not known; absent: they are")


class Machine(Sparse):
    """The command, the versions and the machine of a process."""

    command: list[str] = Field(default_factory=list, description="command line")
    started: str | None = Field(None, description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    since_import_s: StoredSeconds | None = Field(
        None, description="time since the process imported mtbench, in seconds; absent: not known"
    )
    mtbench: str | None = Field(None, description="version of mtbench")
    git: str | None = Field(None, description="commit of mtbench, with -dirty for changed files; null: no checkout")
    python: str | None = Field(None, description="version of Python")
    packages: dict[str, str | None] | None = Field(None, description="package versions; null: not installed")
    platform: str | None = Field(None, description="operating system")
    processor: str | None = Field(None, description="name of the processor")
    cores: StoredNumber | None = Field(None, description="processor cores that the process may use")
    cpu_quota: StoredQuantity | None = Field(None, description="cores that a quota allows; absent: no quota")
    load_of_others: StoredQuantity | None = Field(
        None, description="share of the cores that other programs used when the command began; absent: not known"
    )
    waiting: str | None = Field(
        None, description="variables by which OpenMP's threads wait; empty: none, they spin; absent: not known"
    )
    gpu: GpuInfo | None = Field(None, description="GPU; null: none, or no driver answers")


class SessionRecord(Machine):
    """One process that decoded."""

    device: str | None = Field(None, description="cpu or cuda")
    dtype: str | None = Field(None, description="number type of the weights")
    threads: StoredNumber | None = Field(None, description="threads of torch on the CPU")
    loading_s: StoredSeconds | None = Field(None, description="time of loading the models, in seconds")
    synchronisation_s: StoredSeconds | None = Field(None, description="time of one synchronisation, in seconds")
    layers: dict[str, str] | None = Field(None, description="who computes the layers, by `checkpoint by engine`")
    kernels_off: str | None = Field(None, description="why PyTorch's kernels ran and not mtbench's; null: no reason")
    converted: dict[str, str] | None = Field(
        None, description="checkpoints that were not stored as they ran, by source: from which file and type"
    )
    probe: ProbeFigures | None = Field(None, description="speeds of the GPU; null: not measured")
    probe_reason: str | None = Field(None, description="why probe is null")
    shapes: dict[str, ShapeFigures] | None = Field(None, description="sizes of each checkpoint, by its source")
    strangers_reason: str | None = Field(None, description="why others on the GPU are not seen; null: no reason")
    workers: StoredNumber | None = Field(None, description="workers that decoded at the same time")


class Environment(Machine):
    """environment.json: the process that began the run, and every process that decoded."""

    sessions: list[SessionRecord] = Field(default_factory=list, description="sessions in order; absent: none yet")
    scored_as: dict[str, dict[str, Any]] | None = Field(
        None, description="by suite, its description of its task when the answers were scored; absent: not scored"
    )


class CellEnergy(Record):
    """Energy of one cell. Each value is null where it was not measured; energy_reason says why."""

    energy_j: StoredQuantity | None = Field(None, description="energy of the whole GPU over the window, in J")
    window_s: StoredSeconds | None = Field(None, description="length of the window, in seconds")
    tokens: StoredCount | None = Field(None, description="tokens decoded in the window")
    j_per_token: StoredQuantity | None = Field(None, description="energy per token, in J")
    mean_power_w: StoredQuantity | None = Field(None, description="mean power over the window, in W")
    energy_reason: str | None = Field(None, description="why energy_j is null")


class EnergyRecord(Sparse):
    """energy.json: the energy of every cell, or the reason why there is none."""

    idle_power_w: StoredQuantity | None = Field(None, description="power of the idle GPU with models loaded, in W")
    cells: dict[str, CellEnergy] = Field(default_factory=dict, description="energy by cell")
    reason: str | None = Field(None, description="why no cell has a figure; absent: cells have figures")


class RescoringRecord(Record):
    """lossless/<cell>.json: how far the emitted tokens lie below the judge's choice."""

    epsilon: StoredQuantity | None = Field(
        description="logit difference that still counts as a tie; null: too few positions"
    )
    items: dict[str, dict[str, StoredQuantity]] = Field(
        description="by item and token index, how far the token's logit lies below the largest; 0 is left out"
    )
    why: str | None = Field(None, description="why it could not be re-scored, or what an audit found; null: neither")
    rounding: str | None = Field(
        None,
        description="number type whose rounding epsilon covers, of an engine with quantised weights; null: the run's",
    )


class ReadingLine(Record):
    """A line of lossless/readings.jsonl: an answer that a model read again, teacher-forced."""

    key: str = Field(description="SHA-256 of who read it and how, its prompt, its tokens and how they were sampled")
    item: str = Field(description="name of the item")
    short: dict[str, StoredQuantity] = Field(description="shortfalls, as in lossless/<cell>.json")
    logits: list[float] = Field(description="logit of each token; empty: epsilon is a constant")


class CacheCheck(Record):
    """A prompt that was asked with a prefix cache, and twice without: three answers in this order."""

    item: str = Field(description="name of the item")
    turn: StoredSize = Field(description="number of its turn in the conversation, from 1")
    prompt_ids: list[TokenId] = Field(min_length=1, description="token ids of the prompt")
    known: StoredCount = Field(description="most leading tokens of it that can be cached")
    answers: list[list[TokenId]] = Field(min_length=3, max_length=3, description="token ids of each answer")
    cached: list[StoredCount | None] = Field(min_length=3, max_length=3, description="cached tokens by its own counts")
    apart: StoredQuantity | None = Field(None, description="distance, in the judge's logits, of tokens that differ")

    @property
    def differs(self) -> bool:
        return self.answers[0] not in self.answers[1:]

    @property
    def is_noisy(self) -> bool:
        return self.answers[1] != self.answers[2]


class CacheRecord(Record):
    """prefix_cache/<cell>.json: whether the prefix cache of an arm's server changes answers."""

    checks: list[CacheCheck] = Field(description="the checks of each item; empty: none could be made")
    epsilon: StoredQuantity | None = Field(None, description="distance that rounding explains; null: not judged")
    why: str | None = Field(None, description="why there is no check, or no judge; null: there is, or none is needed")


class MemoryRecord(RootModel[dict[str, StoredCount | None]]):
    """memory.json: peak memory of every cell, in bytes; null where the pass failed or the models are elsewhere."""

    model_config = ROOT


Score = Annotated[float, Field(ge=0, le=1, strict=False)]


class Scores(RootModel[dict[str, dict[str, Score]]]):
    """scores.json: per cell and item, a score from 0 to 1. In valid.json: 1 for an answer in its format, else 0."""

    model_config = ROOT


class StoredReading(Sparse):
    """What a suite reads in an answer besides its score."""

    unread: str | None = Field(None, description="why the score's rule finds no result in it; absent: it finds one")
    by_value: Score | None = Field(None, description="score by the value of its result; absent: it is not read so")


class Readings(RootModel[dict[str, dict[str, StoredReading]]]):
    """readings.json: per cell and item, what the suite reads besides the score; items with nothing else are absent."""

    model_config = ROOT
