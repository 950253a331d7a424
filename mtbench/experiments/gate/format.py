"""gate.json and floor.json as records: the findings of a gate, and the noise of a machine.

A gate compares two builds, **base** and **head**, in three stages: `comparable` (same plan, same machine), `exact`
(same tokens and counts) and `timed` (same time). A **pair** is one process of each build. The unit of every interval is
the pair: two processes of one build differ by more than the blocks inside a process.
"""

from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, StringConstraints

from mtbench.experiments.gate.request import GateOptions
from mtbench.records import CellName, Count, NonNegative, Record, Seconds, Sha256, Size, VersionOne

SCHEMA_VERSION: Literal[2] = 2  # of gate.json and request.json
UtcTime = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
LARGER = ConfigDict(extra="ignore")  # of a record that had more keys in earlier files

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
StageName = Literal["comparable", "exact", "timed"]
Level = Literal["fail", "inconclusive", "note"]
Kind = Literal[
    "changed",  # other tokens
    "more work",  # the same tokens from more forwards or positions
    "less work",  # the same tokens from fewer forwards or positions
    "prefix cache",  # it changes answers, or counts what cannot be
    "memory",  # peak memory, or the bytes of the keys and values
    "unstable",  # base disagrees with itself
    "vanished",  # head plans no such cell
    "failed",
    "void",
    "new",  # base plans no such cell
    "slower",
    "undecided",  # neither slower nor shown to be as fast
    "not timed",  # in earlier files
    "environment",
]
STAGES: tuple[StageName, ...] = get_args(StageName)
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


class BuildRecord(Record):
    """One build: an environment with mtbench installed, and a release of a serving engine."""

    env: str = Field(description="the build as requested: a path, git:REV or pip:NAME==VERSION")
    label: str = Field(description="short name of the build for reports")
    python: str = Field(description="its Python executable")
    mtbench: str | None = Field(description="version of mtbench")
    git: str | None = Field(description="commit of mtbench, with -dirty for changed files; null: no checkout")
    packages: dict[str, str | None] = Field(description="package versions; null: not installed")
    code_sha256: Sha256 | None = Field(
        description="SHA-256 of the Python files of mtbench, its methods, its suites and plugins; null: not reported"
    )
    plugins: dict[str, Sha256] = Field(default_factory=dict, description="files of `--plugin`: path -> SHA-256")
    engine: str | None = Field(
        None, description="serving engine and its release, ENGINE=NAME==VERSION; null: the one that its mtbench runs"
    )


class Key(Record):
    """The key of a floor. If one of these changes, the floor is void."""

    gpu_uuid: str | None = Field(description="id of the GPU; null: it decodes on a CPU")
    driver: str | None = Field(description="version of the GPU's driver")
    power_cap_w: NonNegative | None = Field(description="power cap of the GPU, in W")
    processor: str = Field(description="name of the processor")
    kernel: str = Field(description="operating system and kernel")
    torch: str | None = Field(description="version of torch")
    plan_sha256: Sha256 = Field(description="SHA-256 of the plan: prompts, cells, blocks, rounds")


class CellFloor(Record):
    """How two processes of one build differ in one cell."""

    model_config = LARGER

    cell: CellName = Field(description="name of the cell")
    pair_sd: NonNegative = Field(description="standard deviation of log(time / time) over pairs of processes")
    pair_sd_high: NonNegative = Field(description="its upper bound, one-sided, 80 %")


class NoiseFloor(Record):
    """An entry of floor.json: the noise of one machine on one plan, from pairs of processes of one build."""

    model_config = LARGER

    key: Key = Field(description="what it holds for")
    measured: UtcTime = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    interleave: bool = Field(description="true: the processes of a pair took turns, block by block")
    pairs: Size = Field(description="pairs of processes")
    cells: list[CellFloor] = Field(description="noise by cell")


class FloorFile(Record):
    """floor.json: the floors of the machines and plans that were measured."""

    schema_version: VersionOne = Field(description="version of this format")
    floors: list[NoiseFloor] = Field(description="one entry per key")


class GateRequest(Record):
    """The request of a gate."""

    model_config = LARGER

    base: str | None = Field(description="environment of the base build; null: that of the gate itself")
    head: str | None = Field(description="environment of the head build; null: that of the gate itself")
    plan_arguments: list[str] = Field(description="options of `mtbench plan`, as both builds get them")
    engine: str | None = Field(None, description="serving engine whose releases pip: names; null: none")
    max_slowdown: Annotated[float, Field(gt=0, lt=100)] = Field(description="slowdown that is accepted, in percent")
    blocks: Size = Field(description="blocks of each group that are timed")
    pairs: Size | None = Field(description="pairs at the last look; null: by the noise in floor.json, at most 40")
    interleave: bool = Field(description="true: the processes of a pair take turns, block by block")
    counts_only: bool = Field(description="true: nothing is timed")
    allow_changed: bool = Field(description="true: head may emit other tokens")
    allow_torch: bool = Field(description="true: the builds may have different versions of torch")
    allow_dirty: bool = Field(description="true: a build may come from a checkout with changed files")
    seed: int = Field(description="seed of the order of the processes")
    plugins: list[str] = Field(default_factory=list, description="files of `--plugin` that both builds import")
    process_limit_s: Annotated[float, Field(gt=0)] = Field(
        description="seconds after which a process of a build has failed; by turns, those of one turn"
    )

    @property
    def margin(self) -> float:
        """The accepted slowdown as a share, as the tests take it."""
        return self.max_slowdown / 100


class GatePlan(Record):
    """request.json: the options of `mtbench gate`, and what follows from them."""

    schema_version: Literal[2] = Field(description="version of this format")
    request: GateOptions = Field(description="the options")
    resolved: GateRequest = Field(description="what both builds get")


class Finding(Record):
    """One thing that the gate found."""

    stage: StageName = Field(description="comparable, exact or timed")
    kind: Kind = Field(description="what was found")
    level: Level = Field(description="fail: the gate fails; inconclusive: it cannot pass; note: it decides nothing")
    cell: CellName | None = Field(description="cell that it concerns; null: the build or all cells")
    text: str = Field(description="the finding as a sentence")


class TimeTest(Record):
    """Head's time over base's, with what decides. A ratio over 1 means that head is slower."""

    ratio: NonNegative | None = Field(description="geometric mean over pairs of head's time over base's; null: no pair")
    ci_low: NonNegative | None = Field(description="lower bound of its 95 % interval; null: under 2 pairs")
    ci_high: NonNegative | None = Field(description="upper bound of its 95 % interval")
    fail_low: NonNegative | None = Field(
        description="lower bound at the level of FAIL: 1 % over all looks, adjusted for the number of cells"
    )
    pass_high: NonNegative | None = Field(description="upper bound at the level of PASS: 2.5 % over all looks")
    word: Verdict = Field(description="word on it, after fresh pairs have tested a FAIL once more")
    pairs_needed: Size | None = Field(
        description="pairs at which it would be decided if its ratio and noise stayed; null: decided, too few pairs to "
        "tell, or no such number"
    )


class TimedCell(Record):
    """The times of one cell in both builds."""

    model_config = LARGER

    cell: CellName = Field(description="name of the cell")
    suite: str = Field(description="suite of the cell")
    arm: str = Field(description="arm of the cell")
    batch_size: Size = Field(description="requests decoded side by side")
    base_s: list[Seconds] = Field(description="per pair, base's seconds: sum over blocks of the median over rounds")
    head_s: list[Seconds] = Field(description="per pair, head's seconds for as many tokens as base's")
    test: TimeTest = Field(description="head's time over base's")


class Gate(Record):
    """gate.json: the verdict, its reason and its data."""

    model_config = LARGER

    schema_version: Literal[2] = Field(description="version of this format")
    word: Verdict = Field(description="PASS, FAIL or INCONCLUSIVE")
    reason: str = Field(description="why, as one sentence")
    started: str = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ")
    request: GateRequest = Field(description="the request")
    base: BuildRecord = Field(description="the build that is compared with")
    head: BuildRecord = Field(description="the build that is judged")
    same_build: bool = Field(description="true: base and head are one build; a FAIL is a false alarm")
    key: Key = Field(description="machine and plan")
    looks: list[Size] = Field(description="numbers of pairs at which the times are tested")
    pairs: Count = Field(description="pairs of processes that were timed")
    confirmation_pairs: Count = Field(description="fresh pairs that tested a FAIL once more; 0: none")
    smallest_detectable: NonNegative | None = Field(
        None, description="smallest slowdown that the gate finds in 40 pairs, by the noise of these, as a share"
    )
    floor: NoiseFloor | None = Field(description="noise of this machine on this plan; null: not measured")
    findings: list[Finding] = Field(description="what was found, in the order of the stages")
    compared: list[CellName] = Field(description="cells whose tokens and counts were compared")
    timed: list[TimedCell] = Field(description="times by cell; empty: nothing was timed")
    all_cells: TimeTest | None = Field(description="the mean over all cells, tested like a cell; null: under 2 cells")
