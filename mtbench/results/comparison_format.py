"""The comparison of runs as records: what `mtbench compare --json` writes. mtbench/results/across_runs.py fills them.

The first run is the **base**; every other run is a **head** and is compared with it. A difference is head less base, a
ratio head over base. Only items that both runs answered count.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtbench.records import CellName, Count, NonNegative, Record, Sha256, Share, Size, VersionOne
from mtbench.runs.plan import CELL_ID, Batching

SCHEMA_VERSION: Literal[1] = 1


class ComparedRun(Record):
    """One of the runs."""

    directory: str = Field(description="run directory, as it was given")
    run_id: str = Field(description="12 digits that name the run")
    started: str | None = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ; null: not stored")
    plan_sha256: Sha256 = Field(description="SHA-256 of plan.json")


class Differs(Record):
    """A condition that differs between two runs."""

    name: str = Field(description="the condition, such as torch or max new tokens")
    base: str | None = Field(description="its value in the base run; null: not stored")
    head: str | None = Field(description="its value in the head run; null: not stored")


class PairedAccuracy(Record):
    """The accuracy of both runs on the same items, and the paired difference with its 95 % interval."""

    metric: str = Field(description="metric of the score")
    base: Share = Field(description="mean score in the base run")
    head: Share = Field(description="mean score in the head run")
    difference: float = Field(description="accuracy of head less that of base, as a share")
    ci_low: float | None = Field(description="lower bound of its 95 % interval")
    ci_high: float | None = Field(description="upper bound of its 95 % interval")
    gained: Count = Field(description="items that only head answers correctly")
    lost: Count = Field(description="items that only base answers correctly")
    n: Size = Field(description="items that are scored in both runs")


class PairedRatio(Record):
    """A figure of both runs on the same items, and its ratio with a 95 % interval over the base run's units."""

    base: NonNegative | None = Field(description="value in the base run; null: an engine hides it")
    head: NonNegative | None = Field(description="value in the head run; null: an engine hides it")
    ratio: NonNegative | None = Field(description="head over base; null: one of them is not known")
    ci_low: NonNegative | None = Field(description="lower bound; null: too few units")
    ci_high: NonNegative | None = Field(description="upper bound; null: too few units")
    units: Count = Field(description="blocks of the base run; the blocks of one conversation are one unit")


class BothRuns(Record):
    """A figure of both runs that is not compared by a test."""

    base: NonNegative | None = Field(description="value in the base run; null: not measured, or hidden")
    head: NonNegative | None = Field(description="value in the head run; null: not measured, or hidden")


class CellFigures(Record):
    """What a cell did in both runs. All but the times are over the items that both answered."""

    items: Size = Field(description="items that both runs answered")
    differing: Count = Field(description="items with other tokens")
    accuracy: PairedAccuracy | None = Field(description="accuracy; null: not compared")
    accuracy_reason: str | None = Field(description="why accuracy is null")
    tokens_per_forward: PairedRatio = Field(description="tokens per forward")
    acceptance_length: BothRuns = Field(description="tokens per forward, of the forwards that committed any")
    answer_length: PairedRatio = Field(description="tokens per answer")
    tokens_per_s: BothRuns = Field(
        description="tokens per second of wall time over each run's own items. The runs are other sessions, so no "
        "ratio and no verdict follows"
    )


class CellAcrossRuns(Record):
    """A cell that both runs planned."""

    cell: CellName = Field(description=CELL_ID)
    suite: str = Field(description="suite as it was asked for, name or name:rest")
    arm: str = Field(description="arm: method:options@role/engine")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    simulated: bool = Field(description="true: weights or acceptance are simulated in one of the runs")
    void_base: list[str] = Field(description="reasons not to trust the base run's cell; empty: none")
    void_head: list[str] = Field(description="reasons not to trust the head run's cell; empty: none")
    figures: CellFigures | None = Field(description="what it did in both runs; null: not compared")
    reason: str | None = Field(description="why it is not compared; null: it is")


class RunComparison(Record):
    """One head run against the base run."""

    head: str = Field(description="directory of the head run")
    differs: list[Differs] = Field(description="conditions that differ: machine, versions, options; empty: none")
    only_base: list[CellName] = Field(description="cells that only the base run planned")
    only_head: list[CellName] = Field(description="cells that only the head run planned")
    cells: list[CellAcrossRuns] = Field(description="cells that both planned, in the order of the base run")


class Comparison(Record):
    """Two or more runs side by side: the first one is the base, and every other run is compared with it."""

    schema_version: VersionOne = Field(description="version of this format")
    runs: Annotated[list[ComparedRun], Field(min_length=2)] = Field(description="the runs; the first one is the base")
    comparisons: Annotated[list[RunComparison], Field(min_length=1)] = Field(
        description="one entry for each run after the first"
    )
