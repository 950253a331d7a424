"""Run a published table again: read its figures, lay out one run per family of checkpoints, and run them.

A reproduction is a directory. It holds an ordinary run for each family of the table, `DIR/<family>/`, and

    asked.json             the options of the command, and what cannot run here with the reasons
    reproduction.json      per figure: published, ours, interval, difference, verdict (experiments/reproduce/compare.py)
    reproduction.md, .html the same as pages (experiments/reproduce/document.py)

The published figures are in experiments/reproduce/published/, one file per table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtbench.decoding.arms import Arm, parse_arms, safe
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Suite
from mtbench.experiments import pipeline
from mtbench.experiments.reproduce.format import AskedFile, AskedPart, Published, PublishedRow, ReproduceRequest
from mtbench.lineup.lineup import Lineup
from mtbench.lineup.planner import begin_run, make_plan
from mtbench.measure.executor import Progress
from mtbench.models import families
from mtbench.plan.checks import read_plan
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan, RunRequest
from mtbench.plan.prompts import open_suite
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.records import dump, read_json

FOLDER = Path(__file__).parent / "published"
ASKED, RESULT = "asked.json", "reproduction.json"
PAPER = "paper"  # the protocol of papers
EAGER = "eager"  # the engine papers measure with


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The run of one family. `plan` is None if nothing of it can run."""

    family: str
    plan: Plan | None
    missing: dict[str, str]  # method, as the table names it -> why it does not run
    closed: dict[str, str]  # suite -> why it does not run

    @property
    def folder(self) -> str:
        return safe(self.family)


def names() -> list[str]:
    """Return the names of the published tables."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def published(name: str) -> Published:
    """Return a published table. Raises UserError with the choices for an unknown name."""
    if name not in names():
        raise unknown("reproduction", name, names(), "mtbench reproduce")
    return read_json(FOLDER / f"{name}.json", Published)


def lay_out(table: Published, request: ReproduceRequest) -> list[Part]:
    """Return a part with its plan for every family. Raises UserError if nothing can run or a name is unknown."""
    for suite in request.suite:
        SUITES[suite.partition(":")[0]]
    sizes = {row.batch_size for row in table.rows}
    if request.batch_size is not None and None not in sizes and sizes.isdisjoint(request.batch_size):
        given = ",".join(map(str, request.batch_size))
        known = ", ".join(map(str, sorted(filter(None, sizes))))
        raise UserError(f"--batch-size {given}: {table.name} has {known}; give one of them, or leave it out.")
    parts = [_part(table, request, family) for family in _families(table, request)]
    if any(part.plan for part in parts):
        return parts
    reasons = [why for part in parts for why in (*part.closed.values(), *part.missing.values())]
    raise UserError(f"nothing of {table.name} can be run here: {reasons[0]}")


def _families(table: Published, request: ReproduceRequest) -> list[str]:
    """Return the families to run: the table's, or the one given by --family, which may replace all of them."""
    chosen = list(table.families) if request.family is None else [request.family]
    if request.checkpoint and len(chosen) > 1:
        raise UserError(
            f"--checkpoint {next(iter(request.checkpoint))}=… does not say of which family; add `--family` "
            f"with one of {', '.join(chosen)}."
        )
    return chosen


def stands_in(table: Published, request: ReproduceRequest) -> bool:
    """Return whether --family names a family that is not the table's and so replaces all of them."""
    return request.family is not None and request.family not in table.families


def suites_of(table: Published, request: ReproduceRequest) -> dict[str, str]:
    """Return benchmark -> suite to run: the benchmark's own, or one of the suites that --suite gives instead."""
    own = {name: benchmark.suite for name, benchmark in table.benchmarks.items()}
    if not request.suite:
        return own
    if set(request.suite) <= set(own.values()):
        return {name: suite for name, suite in own.items() if suite in request.suite}
    return {name: request.suite[i % len(request.suite)] for i, name in enumerate(own)}


def _part(table: Published, reproduction: ReproduceRequest, family: str) -> Part:
    rows = [row for row in table.rows if row.family == family or stands_in(table, reproduction)]
    suites = list(dict.fromkeys(suites_of(table, reproduction).values()))
    own = {
        "engine": table.plan.engine,
        "batch_size": table.plan.batch_sizes,
        "limit": table.plan.limit,
        "rounds": table.plan.rounds,
        "max_new_tokens": table.setup.max_new_tokens,
        "temperature": table.plan.temperature,
        "chat_template_kwargs": table.plan.chat_template_kwargs,
    }
    given = {name: value for name, value in reproduction if value is not None and name in RunRequest.model_fields}
    checkpoint = {**table.families.get(family, {}), **reproduction.checkpoint}
    values = own | given | {"suite": suites, "family": family, "checkpoint": checkpoint}
    request = RunRequest(**values | {"engine": (values["engine"],), "batch_size": tuple(values["batch_size"])})
    lineup = Lineup(families.family(family, checkpoints=request.checkpoint), request)
    methods: dict[str, str] = {}  # arm -> as the table names it
    missing: dict[str, str] = {}
    for spec in [*table.plan.beside, *specs_of(rows)]:
        arm = arm_of(spec, request.engine)
        try:
            lineup.entrant(arm)
            methods.setdefault(str(arm), spec)
        except UserError as error:
            missing[spec] = str(error)
    opened: dict[str, Suite] = {}
    closed: dict[str, str] = {}
    for suite in suites if methods else ():
        try:
            opened[suite] = open_suite(suite, request)
        except UserError as error:
            closed[suite] = str(error)
    plan = None
    if opened:
        chosen = request.changed(method=[*methods.values()], suite=[*opened])
        plan = make_plan(chosen, opened, lineup.of(parse_arms(chosen.method, chosen.engine)))
    return Part(family=family, plan=plan, missing=missing, closed=closed)


def arm_of(spec: str, engines: Sequence[str]) -> Arm:
    """Return the arm that a row's method describes."""
    return parse_arms([spec], engines)[0]


def specs_of(rows: Sequence[PublishedRow]) -> list[str]:
    """Return the arms of the rows and their baselines, as `--method` takes them."""
    return list(dict.fromkeys(spec for row in rows for spec in (row.arm, *row.against.values())))


def begin(directory: RunDirectory, request: ReproduceRequest, parts: Sequence[Part], command: Sequence[str]) -> None:
    """Write the plan of every part, and last the request."""
    for part in parts:
        if part.plan is not None:
            begin_run(directory.path / part.folder, part.plan, command)
    kept = [AskedPart(family=part.family, missing=part.missing, closed=part.closed) for part in parts]
    directory.write_json(ASKED, dump(AskedFile(asked=request, parts=kept)))


def reopen(folder: Path) -> tuple[ReproduceRequest, list[Part]]:
    """Read a reproduction that was started."""
    stored = RunDirectory(folder).read(ASKED, AskedFile)
    parts = []
    for kept in stored.parts:
        run = RunDirectory(folder / safe(kept.family))
        plan = read_plan(run) if run.has("plan.json") else None
        parts.append(Part(family=kept.family, plan=plan, missing=kept.missing, closed=kept.closed))
    return stored.asked, parts


def run(
    folder: Path,
    part: Part,
    request: ReproduceRequest,
    progress: Progress,
    workers: int | None = None,
    ray: str | None = None,
    *,
    report: bool = True,
) -> None:
    """Run what is missing of a part and score it; with `report`, write its pages too."""
    execution = Execution.of(request, workers=workers, ray=ray)
    with Run.locked(RunDirectory.open(folder / part.folder)) as opened:
        pipeline.finish(opened, execution, progress, pages=report)
