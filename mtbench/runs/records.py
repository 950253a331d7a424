"""What a run stores, as records: the plan, generation and timing lines, sessions, and the untimed passes.

A **cell** is suite × arm × batch size × batching. The cells that differ only in the arm form a **group**: they share
the same **blocks** (fixed lists of prompts) and run next to each other inside every block, in random order. A static
block is one batch; a block of refilled batches has at least eight prompts for every slot. Round 1 covers all blocks
and yields the generations that are scored; later rounds repeat the first blocks for timing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, RootModel, SerializerFunctionWrapHandler, model_serializer

from mtbench.decoding.arms import ENGINES
from mtbench.decoding.method import Claims
from mtbench.decoding.output import FinishReason
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.models.loading import DTYPES
from mtbench.options import options_of
from mtbench.records import ROOT, Count, NonNegative, NotNull, Record, Seconds, Share, Size, Sparse, VersionOne

Batching = Literal["static", "refill"]
Length = Literal["natural", "fixed"]
Protocol = Literal["own", "paper"]  # paper: stop strings cut the text when it is scored, and do not end the decoding
Grade = Literal["exact", "near-tie", "divergent", "inconclusive"]
BATCHINGS: tuple[Batching, ...] = get_args(Batching)
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
GRADES: tuple[Grade, ...] = get_args(Grade)

SCHEMA_VERSION = 1
MIN_BLOCKS = 6  # blocks that an interval needs
REFILLS = 8  # fewest prompts per slot of a refilled block: at its ends slots run dry, and that must weigh little
PLAN_ADVICE = "restore it, or start another run with `mtbench run -o DIR`."

CELL_ID = "name of the cell: suite.method[-optVALUE…].on.engine.[fixed.][refill.]bN"
CHECKPOINTS = "path or hub id of the checkpoint of each role"


class RunRequest(Record):
    """The options of `mtbench run` and `mtbench plan`. The planner checks the values; a record checks the types."""

    suite: Sequence[str] = Field(("arithmetic",), description="suites, each as name or name:rest")
    family: str | None = Field(None, description="family of checkpoints; null: the suite's own")
    model: str | None = Field(None, description="path or hub id of the only checkpoint; null: the family's checkpoints")
    checkpoint: Mapping[str, str] = Field(default_factory=dict, description=CHECKPOINTS)
    method: Sequence[str] = Field((), description="methods with their options; empty: the showcase of every method")
    engine: str = Field(ENGINES[0], description="engine of the methods whose loop is ours")
    batch_size: Sequence[int] = Field((1, 8), description="batch sizes, in requests")
    batching: Sequence[str] = Field(("static",), description="ways of batching: static, refill")
    limit: int | None = Field(None, description="most items per suite or subtask; null: all items")
    subtask: Sequence[str] = Field((), description="subtasks to ask; empty: all subtasks")
    rounds: int = Field(3, description="how many times the first blocks are timed")
    time_budget_s: float | None = Field(None, description="seconds of decoding before a session stops; null: no limit")
    max_new_tokens: int | None = Field(None, description="most tokens of an answer; null: the suite's own number")
    dtype: str = Field("auto", description="number type of the weights; auto: the device decides")
    device: str = Field("auto", description="cpu, cuda, or auto: a GPU if there is one")
    weights: str | None = Field(None, description="random:SHAPE for random weights; null: real checkpoints")
    accept: str | None = Field(None, description="run or probabilities that script the acceptance; null: no script")
    seed: int = Field(0, description="seed of blocks, orders and drawn data")
    temperature: float = Field(0.0, description="sampling temperature; 0: greedy decoding")
    data_dir: str | None = Field(None, description="directory of the suites' data; null: the usual place")
    offline: bool = Field(False, description="true: nothing is downloaded")
    skip_unscorable: bool = Field(False, description="true: items that cannot be scored here are left out")
    allow_unsandboxed_code: bool = Field(False, description="true: generated programs may run unconfined")
    protocol: str = Field("own", description="own: stop strings end the decoding; paper: they cut the scored text")
    fixed_length: bool = Field(False, description="true: every answer takes its whole budget of tokens")
    accuracy_margin: float = Field(0.02, description="margin of accuracy for `not worse`, as a share")


class Item(Record):
    """One tokenised prompt."""

    item: str = Field(description="name of the item: <task>/<doc id>/<turn>")
    prompt_ids: list[Count] = Field(
        description="token ids of the prompt; of a later turn, those that follow the previous answer. Empty in the "
        "file of a private suite, whose prompts are asked again when the run decodes"
    )
    stop: list[str] = Field(description="strings that end the decoding of the item")
    cut: list[str] = Field(default_factory=list, description="strings that cut the text when it is scored")
    follows: Count | None = Field(
        None, description="of a later turn, the index of the item whose answer comes before; null: first turn"
    )


class SuitePlan(Record):
    """A suite with its prompts. The prompts of a private suite are never written."""

    suite: str = Field(description="suite as it was asked for, name or name:rest")
    family: str = Field(description="family of checkpoints")
    task: dict[str, Any] = Field(description="the suite's own description of its task")
    metric: str | None = Field(description="metric of the score; null: the suite is not scored")
    max_new_tokens: Size = Field(description="most tokens of an answer")
    flags: list[str] = Field(description="remarks that hold for every cell of the suite")
    items: list[Item] = Field(min_length=1, description="items with their prompts")
    withheld: str | None = Field(
        None, description="of a private suite, the SHA-256 of the prompts that no file holds; null: not private"
    )

    @model_serializer(mode="wrap")
    def _without_private_prompts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stored: dict[str, Any] = handler(self)
        if self.withheld:
            stored["items"] = [item | {"prompt_ids": []} for item in stored["items"]]
        return stored

    def prompt(self, index: int, said: Mapping[str, Sequence[int]] = MappingProxyType({})) -> list[int]:
        """What is read for an item. `said`: answers to earlier turns, by item; one not there yet counts as empty."""
        item = self.items[index]
        if item.follows is None:
            return item.prompt_ids
        before = self.items[item.follows].item
        return [*self.prompt(item.follows, said), *said.get(before, ()), *item.prompt_ids]

    def positions(self, index: int) -> int:
        """Most positions an item can take, answers included."""
        item = self.items[index]
        before = 0 if item.follows is None else self.positions(item.follows)
        return before + len(item.prompt_ids) + self.max_new_tokens

    @property
    def room(self) -> int:
        """Positions that any item fits in: batches that have as many have one shape."""
        return max(map(self.positions, range(len(self.items))))

    def digest(self) -> str:
        """SHA-256 of all prompts."""
        return hashlib.sha256(json.dumps([[i.item, i.prompt_ids] for i in self.items]).encode()).hexdigest()


class Script(Record):
    """The acceptance that a simulated cell is made to have."""

    source: str = Field(description="run or probabilities that the acceptance comes from")
    lengths: list[Size] = Field(description="tokens of each item's answer")
    seed: int = Field(description="seed of drawn commits")
    scripts: list[list[Count]] | None = Field(
        description="per item, the tokens that each forward commits; null: they are drawn, or one per forward"
    )
    probabilities: list[Share] | None = Field(
        description="per depth, the probability that a mask is accepted once all before it were; null: not drawn"
    )


class Simulated(Record):
    """What is not real about a cell."""

    weights: str | None = Field(description="random:SHAPE of random weights; null: real weights")
    accept: str | None = Field(description="run or probabilities that script the acceptance; null: no script")
    note: str | None = Field(description="remark on the simulated acceptance; null: no remark")


class Cell(Record):
    """One arm on one suite at one batch size, with one way of batching."""

    cell: str = Field(description=CELL_ID)
    suite: str = Field(description="suite as it was asked for, name or name:rest")
    arm: str = Field(description="arm: method:options@role/engine")
    method: str = Field(description="name of the method")
    options: dict[str, Any] = Field(description="value of every option of the method, resolved for the checkpoint")
    on: str = Field(description="role of the checkpoint that decodes")
    engine: str | None = Field(description="engine; null: the method's loop is not ours")
    family: str = Field(description="family of checkpoints")
    checkpoints: dict[str, str] = Field(description=CHECKPOINTS)
    batch_size: Size = Field(description="requests decoded side by side")
    length: Length = Field(description="natural: answers end by themselves; fixed: end tokens are ignored")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    flags: list[str] = Field(description="remarks on the cell, known when it was planned")
    baselines: list[str] = Field(
        description="arms by the same engine that it is compared with: the reference on its own checkpoint and the "
        "reference on the family's own"
    )
    held_to: str | None = Field(description="arm whose tokens it promises; null: none")
    claims: Claims = Field(
        description="lossless: the reference's tokens; distribution: other tokens of the same distribution; lossy: "
        "neither"
    )
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    engine_baselines: list[str] = Field(
        description="references by another engine that it is compared with: the ratio contains the engine's part"
    )
    accept: Script | None = Field(description="acceptance that it is made to have; null: its own")
    simulated: Simulated | None = Field(description="what is not real about it; null: nothing")
    fault: str | None = Field(
        None, description="error of the method when the cell was planned, so that the cell is not run; null: none"
    )


class Group(Record):
    """The cells that share blocks."""

    suite: str = Field(description="suite as it was asked for")
    batch_size: Size = Field(description="requests decoded side by side")
    blocks: list[Annotated[list[Count], Field(min_length=1)]] = Field(
        min_length=1, description="per block, indices into the suite's items"
    )
    rounds: list[Count] = Field(min_length=1, description="per round, how many of the first blocks it runs")
    cells: list[str] = Field(description="names of the cells")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")


class Plan(Record):
    """plan.json: everything that generation needs. It holds prompts as token ids, cells, blocks and rounds."""

    schema_version: VersionOne = Field(description="version of this format")
    request: RunRequest = Field(description="options of `mtbench run` as asked for")
    suites: list[SuitePlan] = Field(description="suites with their prompts")
    cells: list[Cell] = Field(description="cells, group by group")
    groups: list[Group] = Field(description="groups of cells that share blocks")

    def refuse_unknown(self) -> None:
        """Raise UserError for a name that nothing here answers to."""
        if self.request.dtype not in ("auto", *DTYPES):
            raise unknown("dtype in plan.json", self.request.dtype, ("auto", *DTYPES), "mtbench run --help")
        for c in self.cells:
            if c.method not in list(METHODS):
                raise unknown("method in plan.json", c.method, METHODS, "mtbench ls methods")
            if c.engine not in (None, *ENGINES):
                raise unknown("engine in plan.json", c.engine, ENGINES, "mtbench run --help")
            options = [o.name for o in options_of(METHODS[c.method])]
            if odd := [name for name in c.options if name not in options]:
                raise unknown(f"option of {c.method} in plan.json", odd[0], options, "mtbench ls methods")
        cells, suites = {c.cell for c in self.cells}, {s.suite for s in self.suites}
        for g in self.groups:
            if lost := [name for name in [*g.cells, g.suite] if name not in cells | suites]:
                raise UserError(f"plan.json is not a plan (it has no {lost[0]!r}); {PLAN_ADVICE}")

    def cell(self, name: str) -> Cell:
        return next(c for c in self.cells if c.cell == name)

    def suite(self, name: str) -> SuitePlan:
        return next(s for s in self.suites if s.suite == name)

    def warnings(self) -> list[str]:
        """What is known beforehand to end without a verdict."""
        said = [
            f"{g.suite} at batch size {g.batch_size}{'' if g.batching == 'static' else f', {g.batching}'}: "
            f"inconclusive: {len(g.blocks)} block{'' if len(g.blocks) == 1 else 's'}, {MIN_BLOCKS} needed "
            f"for an interval, which takes {_items_needed(g)} items; raise `--limit`"
            for g in self.groups
            if len(g.blocks) < MIN_BLOCKS
        ]
        if asked := set(self.request.subtask):
            whole = [s.suite for s in self.suites if asked.isdisjoint(SUITES[s.suite.partition(":")[0]].subtasks)]
            said += [f"{suite}: asked whole, for --subtask names nothing of it" for suite in whole]
        if "refill" not in self.request.batching:
            return said
        if 1 in self.request.batch_size:
            said.append("batch size 1 has nothing to refill: it has no refilled cells")
        named = {spec.partition(":")[0] for spec in self.request.method} or set(METHODS)
        if static_only := sorted(name for name in named if METHODS[name].outside):
            said.append(f"{', '.join(static_only)}: static batches only, since the loop is not ours; no refill")
        return said


def _items_needed(group: Group) -> int:
    """Items for enough blocks of this kind."""
    return MIN_BLOCKS * group.batch_size * (1 if group.batching == "static" else REFILLS)


class GenerationLine(Record):
    """A line of generations/<cell>.jsonl: the answer to one item. null: an engine hides the value."""

    item: str = Field(description="name of the item: <task>/<doc id>/<turn>")
    prompt_ids: list[Count] | None = Field(
        description="token ids of the prompt; null for a private suite, whose authors ask that its questions are not "
        "spread: no file of the run holds their text or their tokens"
    )
    prompt_tokens: Size = Field(description="number of prompt tokens")
    token_ids: list[Count] = Field(
        description="token ids of the answer, including the end token and the token that completes a stop string"
    )
    text: str = Field(description="text of token_ids, cut before the end token or the stop string")
    forwards: Size | None = Field(description="forwards of the target that the answer took")
    commits: list[Count] | None = Field(
        description="tokens committed by each forward, zeros included: as many entries as forwards, which sum to the "
        "number of tokens"
    )
    positions_fed: Count | None = Field(description="positions fed to the target")
    draft_forwards: Count | None = Field(description="forwards of models other than the target")
    drafted: Count | None = Field(
        description="guesses offered beyond the first token of each forward, up to the last forward kept"
    )
    surplus: Count | None = Field(
        description="tokens that the last forward accepted after the end of the answer; papers count them"
    )
    finish_reason: FinishReason = Field(
        description="end: an end token; stop: a stop string; length: the budget of tokens"
    )
    block: Count = Field(description="index of the block")


class TimingLine(Record):
    """A line of timings/<cell>.jsonl: one block in one round, from an idle device to an idle device.

    Times are in seconds. null: the value was not measured, or an outside engine does not tell it.
    """

    session: Size = Field(description="number of the session, an entry of environment.json, from 1")
    round: Size = Field(description="number of the round, from 1")
    block: Count = Field(description="index of the block")
    order: Count = Field(description="place among the arms of the block, from 0")
    rows: Size = Field(description="slots: requests decoded side by side")
    items: Size = Field(description="requests; more than rows where finished rows are refilled")
    prompt_tokens: Count = Field(description="prompt tokens of all requests")
    tokens: Count = Field(description="tokens of all answers")
    row_forwards: Count | None = Field(description="forwards, counted once for every row that was still decoding")
    batch_forwards: Count | None = Field(description="forwards of the batch")
    wall_s: Seconds = Field(description="wall time of the block, in seconds")
    prefill_s: Seconds | None = Field(description="time of reading the prompts, in seconds")
    decode_s: Seconds | None = Field(description="time of decoding, in seconds")
    device_s: Seconds | None = Field(description="part of decode_s that the device computed, in seconds")
    ttft_s: Seconds | None = Field(description="time to the first token on the device, in seconds")
    step_s: list[float] | None = Field(
        description="per forward, the time on the device since the end of the previous one, in seconds"
    )
    draft_s: Seconds | None = Field(
        description="part of device_s in forwards of models other than the target, in seconds; null on a GPU"
    )
    head_s: Seconds | None = Field(
        description="part of device_s in what the method computes beside its models, in seconds; null on a GPU"
    )
    preparation_s: Seconds = Field(description="time of capture and compilation inside the block, in seconds")
    kv_bytes: Count | None = Field(description="bytes of the keys and values that these rows need")
    miscounted: int = Field(description="forwards that the models saw less forwards that were counted; 0 is right")
    counted: Count | None = Field(description="tokens by an outside engine's own count")
    drafts: Count | None = Field(description="times an outside engine drafted, by its own count")
    drafted: Count | None = Field(description="tokens of those drafts, by the engine's own count")
    accepted: Count | None = Field(description="accepted tokens of those drafts, by the engine's own count")
    clock_mhz: Count | None = Field(description="clock of the GPU at the end, in MHz")
    temperature_c: int | None = Field(description="temperature of the GPU at the end, in °C")
    power_w: NonNegative | None = Field(description="mean power of the GPU, in W")
    throttle: Count | None = Field(
        description="NVML's throttle reasons as bits: those at the end, slowdowns at the start and those between"
    )
    shared: bool | None = Field(description="true: another process computed on the GPU")
    dropped: str | None = Field(description="why this sample is not used; null: it is used")
    identical: Count | None = Field(description="requests with the tokens of round 1; null in round 1")


class PreparationLine(Record):
    """A line of preparation.jsonl: what capture and compilation of a cell cost a session."""

    session: Size = Field(description="number of the session, from 1")
    cell: str = Field(description="name of the cell")
    preparation_s: Seconds = Field(description="time of the first calls beyond that of the last, in seconds")


class FailureLine(Sparse):
    """A line of failures.jsonl: a cell that failed."""

    cell: str = Field(description="name of the cell")
    error: str = Field(description="why it failed")
    stage: Annotated[Literal["score"] | None, NotNull()] = Field(
        None, description="score: scoring failed and may be repeated; absent: decoding failed"
    )


class GpuInfo(Sparse):
    """A GPU as its driver describes it. null: the driver does not tell."""

    name: str | None = Field(None, description="name of the GPU")
    driver: str | None = Field(None, description="version of the driver")
    memory_bytes: Count | None = Field(None, description="memory of the GPU, in bytes")
    power_cap_w: NonNegative | None = Field(None, description="power cap, in W")
    max_clock_mhz: Count | None = Field(None, description="highest clock, in MHz")


class ProbeFigures(Record):
    """Speeds of a GPU measured by short kernels."""

    bandwidth_bytes_per_s: NonNegative = Field(description="bytes read and written by a copy, per second")
    matmul_flop_per_s: NonNegative = Field(description="floating-point operations of a square product, per second")
    copy_bytes: Count = Field(description="bytes copied")
    matmul_size: Count = Field(description="rows and columns of the square product")
    cache_bytes: Count = Field(description="bytes of the GPU's L2 cache")


class ShapeFigures(Sparse):
    """Sizes of a checkpoint that its cost depends on; or only the reason why they are not known."""

    body: Count | None = Field(None, description="parameters of all layers without the embeddings")
    head: Count | None = Field(None, description="parameters of the output embedding")
    body_bytes: Count | None = Field(None, description="bytes of the layers' parameters")
    head_bytes: Count | None = Field(None, description="bytes of the output embedding")
    vocabulary: Count | None = Field(None, description="rows of the output embedding")
    logit_bytes: Count | None = Field(None, description="bytes of one logit")
    kv_bytes_per_token: Count | None = Field(None, description="bytes of a token's keys and values over all layers")
    layers: Count | None = Field(None, description="layers")
    heads: Count | None = Field(None, description="attention heads")
    head_dim: Count | None = Field(None, description="dimensions of a head")
    sliding_layers: Count | None = Field(None, description="layers with sliding attention")
    sliding_window: Count | None = Field(None, description="positions that sliding attention sees")
    reason: str | None = Field(None, description="why the sizes are not known; absent: they are")


class Machine(Sparse):
    """The command, the versions and the machine of a process."""

    command: list[str] = Field(default_factory=list, description="command line")
    started: str | None = Field(None, description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    mtbench: str | None = Field(None, description="version of mtbench")
    git: str | None = Field(None, description="commit of mtbench, with -dirty for changed files; null: no checkout")
    python: str | None = Field(None, description="version of Python")
    packages: dict[str, str | None] | None = Field(None, description="package versions; null: not installed")
    platform: str | None = Field(None, description="operating system")
    processor: str | None = Field(None, description="name of the processor")
    cores: int | None = Field(None, description="processor cores that the process may use")
    gpu: GpuInfo | None = Field(None, description="GPU; null: none, or no driver answers")


class SessionRecord(Machine):
    """One process that decoded."""

    device: str | None = Field(None, description="cpu or cuda")
    dtype: str | None = Field(None, description="number type of the weights")
    threads: int | None = Field(None, description="threads of torch on the CPU")
    loading_s: Seconds | None = Field(None, description="time of loading the models, in seconds")
    synchronisation_s: Seconds | None = Field(None, description="time of one synchronisation, in seconds")
    layers: dict[str, str] | None = Field(None, description="who computes the layers, by `checkpoint by engine`")
    probe: ProbeFigures | None = Field(None, description="speeds of the GPU; null: not measured")
    probe_reason: str | None = Field(None, description="why probe is null")
    shapes: dict[str, ShapeFigures] | None = Field(None, description="sizes of each checkpoint, by its source")
    workers: int | None = Field(None, description="workers that decoded at the same time")


class Environment(Machine):
    """environment.json: the process that began the run, and every process that decoded."""

    sessions: list[SessionRecord] = Field(default_factory=list, description="sessions in order; absent: none yet")


class CellEnergy(Record):
    """Energy of one cell. Each value is null where it was not measured; energy_reason says why."""

    energy_j: NonNegative | None = Field(description="energy of the whole GPU over the window, in J")
    window_s: Seconds | None = Field(description="length of the window, in seconds")
    tokens: Count | None = Field(description="tokens decoded in the window")
    j_per_token: NonNegative | None = Field(description="energy per token, in J")
    mean_power_w: NonNegative | None = Field(description="mean power over the window, in W")
    energy_reason: str | None = Field(description="why energy_j is null")


class EnergyRecord(Sparse):
    """energy.json: the energy of every cell, or the reason why there is none."""

    idle_power_w: NonNegative | None = Field(None, description="power of the idle GPU with models loaded, in W")
    cells: dict[str, CellEnergy] = Field(default_factory=dict, description="energy by cell")
    reason: str | None = Field(None, description="why no cell has a figure; absent: cells have figures")


class RescoringRecord(Record):
    """lossless/<cell>.json: how far the emitted tokens lie below the judge's choice."""

    epsilon: NonNegative | None = Field(
        description="logit difference that still counts as a tie; null: too few positions to tell"
    )
    items: dict[str, dict[str, NonNegative]] = Field(
        description="by item and token index, how far the token's logit lies below the largest; 0 is left out"
    )


class MemoryRecord(RootModel[dict[str, Count | None]]):
    """memory.json: peak memory of every cell, in bytes; null where the pass failed or the models are elsewhere."""

    model_config = ROOT


class Scores(RootModel[dict[str, dict[str, Annotated[float, Field(ge=0, le=1, strict=False)]]]]):
    """scores.json: per cell and item, a score from 0 to 1. A suite may answer true and false for 1 and 0."""

    model_config = ROOT
