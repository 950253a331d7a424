"""The request of a gate: the options of a plan, and its own.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mtbench.options import common, texts
from mtbench.options.common import BUILDS, COMPARED, GATE
from mtbench.options.fields import option
from mtbench.plan.request import PlanRequest, Session

MOST_PAIRS = 1000
ENV = "the folder of a virtual environment, git:REV, or a release of the engine of --engine, pip:NAME==VERSION"


class GateOptions(PlanRequest):
    """The options of `mtbench gate`."""

    limit: Annotated[
        common.ItemLimit,
        Field(description="Items per suite, or per subtask of a suite with subtasks, or all."),
    ] = 100
    blocks: Annotated[int, option("Blocks of each group that are timed.", GATE, ge=1)] = 8
    interleave: Annotated[
        bool,
        option(
            "Both processes of a pair are alive and take turns, block by block: less noise, but both must "
            "fit into memory.",
            GATE,
        ),
    ] = False
    allow_dirty: Annotated[
        bool, option("A build may come from a checkout with changed files.", BUILDS, hidden=True)
    ] = False
    process_limit_s: Annotated[
        float,
        option(
            "Longest time of one process of a build, such as 90s, 30m or 2h; with --interleave, of one "
            "turn. A head that takes longer fails.",
            GATE,
            gt=0,
            flags=("--process-limit",),
            hidden=True,
            metavar="DURATION",
            parse=texts.seconds,
            show=texts.shown_seconds,
        ),
    ] = 7200.0
    base: Annotated[str | None, option(f"Build to compare with: {ENV}.", BUILDS)] = None
    head: Annotated[str | None, option("Build to judge; default: this environment.", BUILDS)] = None
    max_slowdown: Annotated[float, option("Slowdown that you accept, in percent.", GATE, gt=0, lt=100)] = 2.0
    pairs: Annotated[
        int | None,
        option(
            "Pairs of processes at the last look; default: by the noise in floor.json, at most 40; of a build with "
            "itself 10. Fresh pairs that test a FAIL once more come on top.",
            GATE,
            ge=2,
            le=MOST_PAIRS,
        ),
    ] = None
    counts_only: Annotated[bool, option("Compare tokens and work only; time nothing.", GATE)] = False
    allow_changed: Annotated[
        bool,
        option(
            "Head may emit other tokens. The builds are then compared by the time per token.",
            GATE,
        ),
    ] = False
    allow_torch: Annotated[bool, option("The builds may have different versions of torch.", BUILDS, hidden=True)] = (
        False
    )


class GateSession(Session):
    """How one call carries out a gate."""

    plugin: Annotated[
        Sequence[str],
        option(
            "Import a file that registers methods, suites or engines, in both builds. It is code: name only files you "
            "trust. Repeatable.",
            COMPARED,
            metavar="FILE.py",
        ),
    ] = ()
    time_budget_s: Annotated[
        common.TimeBudget, Field(description="Begin no pair after 90s, 30m or 2h; continue with --resume.")
    ] = None
