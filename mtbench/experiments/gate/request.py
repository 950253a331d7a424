"""What a gate or a calibration is asked for: the options of a plan, and their own.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mtbench.runs import options
from mtbench.runs.options import BUILDS, COMPARED, GATE, TIMING, Option
from mtbench.runs.run_request import PlanRequest, Session

MOST_PAIRS = 1000
ENV = "the folder of a virtual environment, git:REV, pip:REQUIREMENT or url:ADDRESS of a server"


class BuildsRequest(PlanRequest):
    """What processes of builds decode, and how long they may take."""

    limit: Annotated[
        options.ItemLimit,
        Field(description="Items per suite, or per subtask of a suite with subtasks, or all."),
    ] = 100
    blocks: Annotated[int, Field(ge=1, description="Blocks of each group that are timed."), Option(panel=GATE)] = 8
    interleave: Annotated[
        bool,
        Field(
            description="Both processes of a pair are alive and take turns, block by block: less noise, but both must "
            "fit into memory."
        ),
        Option(panel=GATE),
    ] = False
    allow_dirty: Annotated[
        bool, Field(description="A build may come from a checkout with changed files."), Option(panel=BUILDS)
    ] = False
    process_limit_s: Annotated[
        float,
        Field(
            gt=0,
            description="Longest time of one process of a build, such as 90s, 30m or 2h; with --interleave, of one "
            "turn. A head that takes longer fails.",
        ),
        Option(
            panel=GATE,
            flags=("--process-limit",),
            metavar="DURATION",
            parse=options.seconds,
            show=options.shown_seconds,
        ),
    ] = 7200.0


class GateOptions(BuildsRequest):
    """The options of `mtbench gate`."""

    base: Annotated[str | None, Field(description=f"Build to compare with: {ENV}."), Option(panel=BUILDS)] = None
    head: Annotated[
        str | None, Field(description="Build to judge; default: this environment."), Option(panel=BUILDS)
    ] = None
    base_plugin: Annotated[
        Sequence[str],
        Field(
            description="Base imports this file in place of that of --plugin, such as an older version of it. "
            "Repeatable."
        ),
        Option(panel=BUILDS, metavar="FILE.py"),
    ] = ()
    margin: Annotated[
        float, Field(gt=0, lt=1, description="Slowdown that matters, as a share: 0.02 is 2 %."), Option(panel=GATE)
    ] = 0.02
    pairs: Annotated[
        int | None,
        Field(
            ge=2,
            le=MOST_PAIRS,
            description="Pairs of processes at the last look; default: by the calibrated noise, at most 40. Fresh "
            "pairs that test a FAIL once more come on top.",
        ),
        Option(panel=GATE),
    ] = None
    counts_only: Annotated[
        bool, Field(description="Compare tokens and work only; time nothing."), Option(panel=GATE)
    ] = False
    allow_changed: Annotated[
        bool,
        Field(description="Head may emit other tokens. Both builds are then timed on base's commits."),
        Option(panel=GATE),
    ] = False
    allow_torch: Annotated[
        bool, Field(description="The builds may have different versions of torch."), Option(panel=BUILDS)
    ] = False


class CalibrationOptions(BuildsRequest):
    """The options of `mtbench gate calibrate`."""

    base: Annotated[
        str | None, Field(description=f"Build: {ENV}; default: this environment."), Option(panel=BUILDS)
    ] = None
    pairs: Annotated[int, Field(ge=3, le=MOST_PAIRS, description="Pairs of processes."), Option(panel=GATE)] = 10


class GateSession(Session):
    """How one call carries out a gate."""

    plugin: Annotated[
        Sequence[str],
        Field(
            description="Import a file that registers methods or suites. It is code: name only files you trust. "
            "Repeatable."
        ),
        Option(panel=COMPARED, metavar="FILE.py"),
    ] = ()
    time_budget_s: Annotated[
        float | None,
        Field(ge=0, description="Begin no pair after 90s, 30m or 2h; continue with --resume."),
        Option(
            panel=TIMING, flags=("--time-budget",), parse=options.seconds, show=options.shown_seconds, resumable=True
        ),
    ] = None
