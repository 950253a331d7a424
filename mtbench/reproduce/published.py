"""`mtbench reproduce`: a published table as one command, with our figure beside each of the paper's and a verdict.

A reproduction is a file of published figures (mtbench/reproduce/published/, one schema for all) and an ordinary run
for each family of checkpoints the table is about, `DIR/<family>/`, with all that runs have; beside them

    asked.json             what was asked for, and what cannot be run here and why
    reproduction.json      figure by figure: published, ours, interval, difference, verdict
    reproduction.md, .html the same to look at (mtbench/reproduce/page.py)

How figures are compared is in mtbench/reproduce/beside.py.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtbench.decoding.arms import Arm, parse_arms, safe
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.models.loading import inspect
from mtbench.report import pipeline
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import Progress
from mtbench.runs.plan import PROTOCOLS, Plan, RunRequest, read_plan
from mtbench.runs.planner import begin_run, make_plan
from mtbench.runs.run_request import DEFAULTS, Execution
from mtbench.training.recipes import RECIPES

FOLDER = Path(__file__).parent / "published"
SCHEMA_VERSION = 1
ASKED, RESULT = "asked.json", "reproduction.json"
AVERAGE = "average"  # in place of a benchmark: the unweighted mean of all of them
EAGER = "eager"  # the engine papers measure with
PAPER = PROTOCOLS[1]
PASSED_ON = (  # to the runs, as they were asked for
    "device",
    "dtype",
    "data_dir",
    "offline",
    "protocol",
    "seed",
    "skip_unscorable",
    "allow_unsandboxed_code",
)
UNITS = {  # of the quantities a table may have; a share's margin is in points, a rate's in percent
    "accuracy": "%",
    "accuracy_change": "points",
    "tokens_per_forward": "",
    "tokens_per_s": "",
    "wall_s": "s",
    "speedup": "",
    "draft_forwards": "",
    "draft_forwards_change": "%",
}
SHARES = ("accuracy", "accuracy_change")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One row of a table. `figures`: quantity -> benchmark, or `average` -> the figure as it is printed."""

    row: str
    family: str
    arm: str  # as `mtbench run --method` takes it
    figures: Mapping[str, Mapping[str, str]]
    batch_size: int | None = None  # None: it does not matter to what the row says
    against: Mapping[str, str] = field(default_factory=dict)  # quantity -> the arm it is over
    not_comparable: Mapping[str, str] = field(default_factory=dict)  # quantity -> why
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published table: mtbench/schemas/published.schema.json says what is in it."""

    name: str
    title: str
    what: str
    source: Mapping[str, Any]
    setup: Mapping[str, Any]
    caveats: Sequence[str]
    also: Sequence[Mapping[str, str]]
    benchmarks: Mapping[str, Mapping[str, Any]]
    plan: Mapping[str, Any]
    families: Mapping[str, Mapping[str, str]]  # family -> role -> checkpoint, beyond those the family has
    not_comparable: Mapping[str, str]
    rows: Sequence[PublishedRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for: the options of `mtbench reproduce`. None: the table's own."""

    name: str
    family: str | None = None
    suite: Sequence[str] = ()
    checkpoint: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    batch_size: Sequence[int] | None = None
    rounds: int | None = None
    max_new_tokens: int | None = None
    device: str = DEFAULTS.device
    dtype: str = DEFAULTS.dtype
    engine: str | None = None
    data_dir: str | None = None
    offline: bool = DEFAULTS.offline
    protocol: str = PAPER
    seed: int = DEFAULTS.seed
    skip_unscorable: bool = DEFAULTS.skip_unscorable
    allow_unsandboxed_code: bool = DEFAULTS.allow_unsandboxed_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The run of one family. `plan` is None where nothing of it can be run."""

    family: str
    plan: Plan | None
    missing: dict[str, str]  # method, as the table has it -> why it is not run
    closed: dict[str, str]  # suite -> why it is not run

    @property
    def folder(self) -> str:
        return safe(self.family)


def names() -> list[str]:
    """Of the reproductions there are."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def published(name: str) -> Published:
    """Raises UserError with the choices."""
    if name not in names():
        raise unknown("reproduction", name, names(), "mtbench reproduce")
    stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Published(**{**stored, "rows": [PublishedRow(**row) for row in stored["rows"]]})


def lay_out(table: Published, asked: Asked) -> list[Part]:
    """A part for every family, with its plan. Raises UserError if nothing at all can be run, or a name is not known."""
    for suite in asked.suite:
        SUITES[suite.partition(":")[0]]
    sizes = {row.batch_size for row in table.rows}
    if asked.batch_size is not None and None not in sizes and sizes.isdisjoint(asked.batch_size):
        said = ",".join(map(str, asked.batch_size))
        known = ", ".join(map(str, sorted(filter(None, sizes))))
        raise UserError(f"--batch-size {said}: {table.name} is at {known}; take one of them, or leave it out.")
    parts = [_part(table, asked, family) for family in _families(table, asked)]
    if any(part.plan for part in parts):
        return parts
    reasons = [why for part in parts for why in (*part.closed.values(), *part.missing.values())]
    raise UserError(f"nothing of {table.name} can be run here: {reasons[0]}")


def _families(table: Published, asked: Asked) -> list[str]:
    """Those to run: the table's, the one of them that was asked for, or one that stands in for all."""
    chosen = list(table.families) if asked.family is None else [asked.family]
    if asked.checkpoint and len(chosen) > 1:
        raise UserError(
            f"--checkpoint {next(iter(asked.checkpoint))}=… does not say of which family; add `--family` "
            f"with one of {', '.join(chosen)}."
        )
    return chosen


def stands_in(table: Published, asked: Asked) -> bool:
    """Whether a family that is not the table's takes the place of all."""
    return asked.family is not None and asked.family not in table.families


def suites_of(table: Published, asked: Asked) -> dict[str, str]:
    """benchmark -> the suite it is run as: its own, if it was not left out; else one of those that stand in."""
    own = {name: benchmark["suite"] for name, benchmark in table.benchmarks.items()}
    if not asked.suite:
        return own
    if set(asked.suite) <= set(own.values()):
        return {name: suite for name, suite in own.items() if suite in asked.suite}
    return {name: asked.suite[i % len(asked.suite)] for i, name in enumerate(own)}


def _part(table: Published, asked: Asked, family: str) -> Part:
    rows = [row for row in table.rows if row.family == family or stands_in(table, asked)]
    suites = list(dict.fromkeys(suites_of(table, asked).values()))
    request = RunRequest(
        suite=suites,
        family=family,
        checkpoint={**table.families.get(family, {}), **asked.checkpoint},
        engine=_said(asked.engine, table.plan["engine"]),
        batch_size=tuple(_said(asked.batch_size, table.plan["batch_sizes"])),
        limit=_said(asked.limit, table.plan["limit"]),
        rounds=_said(asked.rounds, table.plan["rounds"]),
        max_new_tokens=_said(asked.max_new_tokens, table.setup["max_new_tokens"]),
        **{name: getattr(asked, name) for name in PASSED_ON},
    )
    specs = specs_of(rows)
    missing = _missing(specs, request)
    methods = {str(arm_of(spec, request.engine)): spec for spec in reversed(specs) if spec not in missing}
    chosen = request.changed(method=[spec for spec in specs if spec in methods.values()])
    plans, closed = [], {}
    for suite in suites if chosen.method else ():
        try:
            plans.append(make_plan(chosen.changed(suite=[suite])))
        except UserError as error:
            closed[suite] = str(error)
    return Part(family=family, plan=_joined(plans, chosen), missing=missing, closed=closed)


def _said(asked: Any, own: Any) -> Any:
    """What was asked for, else the table's own."""
    return own if asked is None else asked


def _joined(plans: Sequence[Plan], request: RunRequest) -> Plan | None:
    """One plan of those of single suites."""
    if not plans:
        return None
    suites = [suite for plan in plans for suite in plan.suites]
    return plans[0].changed(
        request=request.changed(suite=[suite.suite for suite in suites]),
        suites=suites,
        cells=[cell for plan in plans for cell in plan.cells],
        groups=[group for plan in plans for group in plan.groups],
    )


def arm_of(spec: str, engine: str) -> Arm:
    """The one arm that a row's method is."""
    return parse_arms([spec], engine)[0]


def _missing(specs: Sequence[str], request: RunRequest) -> dict[str, str]:
    """Which arms cannot be run for want of a checkpoint, and why."""
    assert request.family is not None
    family = families.family(request.family, checkpoints=request.checkpoint)
    unfit: dict[tuple[str, bool], str | None] = {}
    missing = {}
    for spec in specs:
        arm = arm_of(spec, request.engine)
        absent = [role for role in arm.roles if role not in family.roles]
        if absent:
            missing[spec] = _how_to_get(family, absent[0])
            continue
        for role in arm.roles:
            key = family.roles[role], METHODS[arm.method].needs_mask and role == arm.on
            if key not in unfit:
                unfit[key] = _unfit(*key, offline=request.offline)
            if (why := unfit[key]) is not None:
                missing.setdefault(spec, why)
    return missing


def _how_to_get(family: Family, role: str) -> str:
    """Why a role has no checkpoint, and the command that gives it one."""
    said = f"family {family.name!r} has no checkpoint in the role {role!r}: add `--checkpoint {role}=PATH_OR_ID`"
    for recipe, stages in RECIPES.items():
        if recipe.endswith(family.name) and role in [stage.name for stage in stages]:
            said += f", or train it with `mtbench train --recipe {recipe} --only {role}`"
    return said


def _unfit(source: str, needs_mask: bool, *, offline: bool) -> str | None:
    """Why a checkpoint cannot be used; None if it can."""
    try:
        inspect(source, offline=offline, needs_mask=needs_mask)
    except UserError as error:
        return str(error)
    return None


def specs_of(rows: Sequence[PublishedRow]) -> list[str]:
    """The arms that rows are of and over, as methods of `mtbench run`."""
    return list(dict.fromkeys(spec for row in rows for spec in (row.arm, *row.against.values())))


def not_released(table: Published) -> list[str]:
    """The roles that neither a family of the table nor its file has a checkpoint for."""
    roles = {
        role: None
        for family, given in table.families.items()
        for spec in specs_of([row for row in table.rows if row.family == family])
        for role in arm_of(spec, EAGER).roles
        if role not in given and role not in families.FAMILIES[family].roles
    }
    return list(roles)


def refuse_existing(folder: Path) -> None:
    """Raise UserError if something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{str(folder)!r} exists and is never overwritten; choose another `-o DIR`, or go on with "
            f"`mtbench reproduce -o {folder} --resume`."
        )


def begin(folder: Path, asked: Asked, parts: Sequence[Part], command: Sequence[str]) -> None:
    """Write a reproduction that has not run yet. Raises UserError if something is there already."""
    refuse_existing(folder)
    kept = [{name: getattr(part, name) for name in ("family", "missing", "closed")} for part in parts]
    try:
        for part in parts:
            if part.plan is not None:
                begin_run(folder / part.folder, part.plan, command)
        RunDirectory(folder).write_json(ASKED, {"asked": dataclasses.asdict(asked), "parts": kept})
    except BaseException:  # half a beginning could not be gone on with
        shutil.rmtree(folder, ignore_errors=True)
        raise


def reopen(folder: Path) -> tuple[Asked, list[Part]]:
    """A reproduction that was begun. Raises UserError if there is none."""
    if not (folder / ASKED).is_file():
        raise UserError(f"{str(folder)!r} holds no {ASKED}; begin anew with `mtbench reproduce NAME -o DIR`.")
    stored = RunDirectory(folder).read_json(ASKED)
    parts = []
    for kept in stored["parts"]:
        run = RunDirectory(folder / safe(kept["family"]))
        plan = read_plan(run) if run.has("plan.json") else None
        parts.append(Part(plan=plan, **kept))
    return Asked(**stored["asked"]), parts


def run(
    folder: Path,
    part: Part,
    asked: Asked,
    progress: Progress,
    workers: int | None = None,
    ray: str | None = None,
    *,
    report: bool = True,
) -> None:
    """Run what is missing of a part and score it; with `report`, write its pages too."""
    execution = Execution(
        workers=workers, ray=ray, data_dir=asked.data_dir, allow_unsandboxed_code=asked.allow_unsandboxed_code
    )
    pipeline.finish(RunDirectory.open(folder / part.folder), execution, progress, pages=report)
