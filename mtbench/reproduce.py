"""`mtbench reproduce`: a published table as one command, with our figure beside each of the paper's and a verdict.

A reproduction is a file of published figures (mtbench/published/, one schema for all) and an ordinary run for each
family of checkpoints the table is about, `DIR/<family>/`, with all that runs have; beside them

    asked.json             what was asked for, and what cannot be run here and why
    reproduction.json      figure by figure: published, ours, interval, difference, verdict
    reproduction.md, .html the same to look at (mtbench/reproduction_page.py)

The words of a verdict are those of mtbench/agreement.py. A figure is **not comparable** where ours is of another thing:
a miniature (another family, benchmark or budget of tokens, a part of each subtask, simulated weights), an engine,
device or batch size that times depend on and that is not the paper's, an accounting that is not; what the published
file says cannot be compared at all (such as times on a GPU that is not stated) never is. A smaller number of questions
of the same benchmark is the same thing told less surely. A row whose checkpoint is not to be had is **not run**, says
what would run it, and costs nothing else; so does a benchmark whose data or sandbox is missing.

**The paper's accounting** of tokens per forward (arXiv 2604.07023, as its samplers count) differs from ours twice. It
counts what the last forward accepted behind the end of the answer, and it does not stop at stop strings; `--protocol
paper` decodes so, and stores those tokens (`surplus`). And its sampler has no forward that only reads the prompt: the
first one commits. Ours caches the prompt and feeds its last token again, so there are as many forwards that commit in
ours as there are forwards in theirs, and the prompt's own is counted in neither.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtbench import agreement, families, measured, statistics
from mtbench.agreement import WORDS, Estimate, Finding
from mtbench.arms import Arm, parse_arms, safe
from mtbench.errors import UserError, unknown
from mtbench.families import Family
from mtbench.generate import Progress, generate
from mtbench.measured import Measured
from mtbench.models import inspect
from mtbench.plan import PROTOCOLS, Plan, Request
from mtbench.planning import begin_run, make_plan
from mtbench.registry import METHODS, SUITES
from mtbench.report import write_report
from mtbench.results import assemble
from mtbench.rundir import Record, RunDirectory
from mtbench.score import due, score

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
    device: str = "auto"
    dtype: str = "auto"
    engine: str | None = None
    data_dir: str | None = None
    offline: bool = False
    protocol: str = PAPER
    seed: int = 0
    skip_unscorable: bool = False
    allow_unsandboxed_code: bool = False


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


def _stands_in(table: Published, asked: Asked) -> bool:
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
    rows = [row for row in table.rows if row.family == family or _stands_in(table, asked)]
    suites = list(dict.fromkeys(suites_of(table, asked).values()))
    request = Request(
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
    chosen = dataclasses.replace(request, method=[spec for spec in specs if spec in methods.values()])
    plans, closed = [], {}
    for suite in suites if chosen.method else ():
        try:
            plans.append(make_plan(dataclasses.replace(chosen, suite=[suite])))
        except UserError as error:
            closed[suite] = str(error)
    return Part(family=family, plan=_joined(plans, chosen), missing=missing, closed=closed)


def _said(asked: Any, own: Any) -> Any:
    """What was asked for, else the table's own."""
    return own if asked is None else asked


def _joined(plans: Sequence[Plan], request: Request) -> Plan | None:
    """One plan of those of single suites."""
    if not plans:
        return None
    suites = [suite for plan in plans for suite in plan.suites]
    return dataclasses.replace(
        plans[0],
        request=dataclasses.asdict(dataclasses.replace(request, suite=[suite.suite for suite in suites])),
        suites=suites,
        cells=[cell for plan in plans for cell in plan.cells],
        groups=[group for plan in plans for group in plan.groups],
    )


def arm_of(spec: str, engine: str) -> Arm:
    """The one arm that a row's method is."""
    return parse_arms([spec], engine)[0]


def _missing(specs: Sequence[str], request: Request) -> dict[str, str]:
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
    from mtbench.recipes import RECIPES

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
        plan = Plan.from_json(run.read_json("plan.json")) if run.has("plan.json") else None
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
    """Run what is missing of a part, score it, and write its report if there shall be one."""
    opened = RunDirectory.open(folder / part.folder)
    generate(opened, progress, workers=workers, ray=ray, data_dir=asked.data_dir)
    if due(opened):
        score(opened, asked.data_dir, unsandboxed=asked.allow_unsandboxed_code)
    results = assemble(opened)
    if report:
        write_report(opened, results)


def compare(table: Published, asked: Asked, parts: Sequence[Part], folder: Path) -> Record:
    """Every published figure beside ours, as reproduction.json holds it; written there and returned."""
    opened = {part.family: _Opened(table, asked, part, folder) for part in parts}
    found = []
    for row in table.rows:
        part = opened.get(asked.family if _stands_in(table, asked) and asked.family else row.family)
        for quantity, by_benchmark in row.figures.items():
            for benchmark, printed in by_benchmark.items():
                found.append(_figure(table, asked, row, quantity, benchmark, printed, part))
    result = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(table, name) for name in ("name", "title", "what", "source", "setup", "caveats", "also")},
        "asked": dataclasses.asdict(asked),
        "protocol": asked.protocol,
        "margins": {"accuracy": statistics.ACCURACY_MARGIN, "rates": statistics.SPEED_MARGIN, "level": 0.95},
        "runs": [one.described() for one in opened.values()],
        "verdicts": {word: sum(f["word"] == word for f in found) for word in WORDS},
        "figures": found,
        "accounting": [line for one in opened.values() for line in one.accounting()],
    }
    RunDirectory(folder).write_json(RESULT, result)
    return result


class _Opened:
    """The run of a part, read."""

    def __init__(self, table: Published, asked: Asked, part: Part, folder: Path) -> None:
        self.table, self.asked, self.part = table, asked, part
        self.suites = suites_of(table, asked)
        self.run = RunDirectory(folder / part.folder)
        self.cells: dict[tuple[str, str, int], tuple[Measured, Record]] = {}
        self.session: Record = {}
        if part.plan is not None and self.run.has("results.json"):
            self.session = (self.run.read_json("environment.json").get("sessions") or [{}])[-1]
            of_run = measured.read(self.run, part.plan)
            for record in self.run.read_json("results.json")["cells"]:
                place = record["suite"], record["arm"], record["batch_size"]
                self.cells[place] = of_run[record["cell"]], record

    def described(self) -> Record:
        """What is said of the run in reproduction.json."""
        gpu, ran = self.session.get("gpu"), self.part.plan is not None
        told = {name: self.session.get(name) for name in ("device", "dtype", "processor")}
        checkpoints = {role: where for one, _ in self.cells.values() for role, where in one.cell.checkpoints.items()}
        return {
            "family": self.part.family,
            "folder": self.part.folder if ran else None,
            "machine": {**told, "gpu": gpu and gpu["name"]},
            "engine": self.part.plan.request["engine"] if self.part.plan else None,
            "batch_sizes": list(self.part.plan.request["batch_size"]) if self.part.plan else [],
            "checkpoints": checkpoints,
            "demonstration": any(one.cell.demonstration for one, _ in self.cells.values()),
            "missing": [{"arm": arm, "why": why} for arm, why in self.part.missing.items()],
            "closed": [{"suite": suite, "why": why} for suite, why in self.part.closed.items()],
        }

    def cell(self, spec: str, benchmark: str, batch_size: int | None) -> tuple[Measured, Record] | str:
        """The cell of an arm on a benchmark, or why there is none."""
        if spec in self.part.missing:
            return self.part.missing[spec]
        if benchmark not in self.suites:
            return "left out by --suite"
        suite = self.suites[benchmark]
        if suite in self.part.closed:
            return self.part.closed[suite]
        assert self.part.plan is not None
        request = self.part.plan.request
        size = batch_size or max(request["batch_size"])
        if size not in request["batch_size"]:
            return f"batch size {size} was not asked for; leave `--batch-size` out"
        place = suite, str(arm_of(spec, request["engine"])), size
        if place not in self.cells:
            return "failed: its run did not come to results; `--resume` goes on"
        one, record = self.cells[place]
        if record["error"]:
            return f"failed: {record['error']}"
        if record["status"] != "ok":
            return "not finished: `--resume` goes on"
        return one, record

    def accounting(self) -> list[Record]:
        """Tokens per forward, ours and by the paper's accounting, of every cell that counts its forwards."""
        lines = []
        for (suite, arm, size), (one, _) in self.cells.items():
            forwards, tokens = one.counted("forwards"), sum(len(g["token_ids"]) for g in one.lines.values())
            if not forwards:
                continue
            surplus = one.counted("surplus") if self.asked.protocol == PAPER and _told(one) else None
            lines.append(
                {
                    "family": self.part.family,
                    "suite": suite,
                    "arm": arm,
                    "batch_size": size,
                    "items": len(one.lines),
                    "tokens_per_forward": tokens / forwards,
                    "tokens_after_the_end": surplus,
                    "paper_tokens_per_forward": None if surplus is None else (tokens + surplus) / forwards,
                    "tokens_per_forward_with_prompt_forward": tokens / (forwards + len(one.lines)),
                }
            )
        return lines


def _told(one: Measured) -> bool:
    """Whether every answer says how many tokens were accepted behind its end."""
    return bool(one.lines) and all(line.get("surplus") is not None for line in one.lines.values())


def _figure(
    table: Published, asked: Asked, row: PublishedRow, quantity: str, benchmark: str, printed: str, part: _Opened | None
) -> Record:
    """One figure of reproduction.json."""
    wanted = _means(table, part) if benchmark == AVERAGE else [benchmark]
    cells = [_pair(row, quantity, name, part) for name in wanted]
    absent = [(name, cell) for name, cell in zip(wanted, cells, strict=True) if isinstance(cell, str)]
    ours: list[_Ours] = []
    if absent:
        name, why = absent[0]
        finding = Finding("not run", why if len(absent) == len(wanted) else f"{name} was not run")
    else:
        assert part is not None
        pairs = [cell for cell in cells if not isinstance(cell, str)]
        measures = [_measure(quantity, *pair, asked.protocol) for pair in pairs]
        ours = [m for m in measures if isinstance(m, _Ours)]
        odd = [why for name, pair in zip(wanted, pairs, strict=True) for why in _odd(part, row, quantity, name, pair)]
        odd += [m for m in measures if isinstance(m, str)]
        if odd:
            finding = Finding("not comparable", odd[0])
        else:
            finding = _judge(quantity, printed, ours, [table.benchmarks[name]["items"] for name in wanted], row, table)
    value = agreement.mean([o.estimate for o in ours]) if len(ours) == len(wanted) else None
    return {
        "row": row.row,
        "note": row.note,
        "family": row.family,
        "arm": row.arm,
        "benchmark": benchmark,
        "suite": None if part is None or benchmark == AVERAGE else part.suites.get(benchmark),
        "batch_size": row.batch_size,
        "quantity": quantity,
        "unit": UNITS[quantity],
        "published": printed,
        "ours": None if value is None else {**_bounds(value, quantity), "n": sum(o.n for o in ours)},
        "difference": None if finding.difference is None else _bounds(finding.difference, quantity, difference=True),
        "word": finding.word,
        "why": finding.why,
    }


def _means(table: Published, part: _Opened | None) -> list[str]:
    """The benchmarks that a mean is over; a suite that stands in for several counts once."""
    suites = {name: part.suites.get(name, name) if part else name for name in table.benchmarks}
    return list({suite: name for name, suite in reversed(suites.items())}.values())[::-1]


Pair = tuple[tuple[Measured, Record], tuple[Measured, Record] | None]


def _pair(row: PublishedRow, quantity: str, benchmark: str, part: _Opened | None) -> Pair | str:
    """A row's cell and that of the arm it is over; or why there is none."""
    if part is None:
        return "left out by --family"
    cell = part.cell(row.arm, benchmark, row.batch_size)
    if isinstance(cell, str) or quantity not in row.against:
        return cell if isinstance(cell, str) else (cell, None)
    over = part.cell(row.against[quantity], benchmark, row.batch_size)
    return f"{row.against[quantity]}, which it is over: {over}" if isinstance(over, str) else (cell, over)


@dataclass(frozen=True, slots=True)
class _Ours:
    """A figure of ours; of shares as shares. `n` units: items, or for speedups blocks."""

    estimate: Estimate
    n: int
    discordant: float = 0.0


def _measure(
    quantity: str, cell: tuple[Measured, Record], over: tuple[Measured, Record] | None, protocol: str
) -> "_Ours | str":
    """Ours of a quantity, or why there is none."""
    one, record = cell
    if quantity == "accuracy":
        if not one.scores:
            return "nothing was scored"
        found = statistics.wilson(round(sum(one.scores.values())), len(one.scores))
        assert found.value is not None
        return _Ours(Estimate(found.value, found.ci_low, found.ci_high), found.n)
    if quantity == "tokens_per_forward":
        return _tokens_per_forward(one, protocol)
    if quantity == "tokens_per_s":
        rate = record["tokens_per_s"]
        return _plainly(rate["value"], record["blocks"], rate["ci_low"], rate["ci_high"])
    if quantity == "wall_s":
        return _plainly(record["wall_s"], record["blocks"])
    if quantity == "draft_forwards":
        return _plainly(record["draft_forwards"], record["items"])
    assert over is not None, f"{quantity} is over another arm"
    base, base_record = over
    if quantity == "draft_forwards_change":
        drafts, before = record["draft_forwards"], base_record["draft_forwards"]
        return _plainly(drafts / before - 1 if drafts is not None and before else None, record["items"])
    if quantity == "accuracy_change":
        common = one.scores.keys() & base.scores.keys()
        gained = sum(one.scores[i] > base.scores[i] for i in common)
        lost = sum(one.scores[i] < base.scores[i] for i in common)
        change = statistics.paired_difference(gained, lost, len(common))
        if change.difference is None:
            return "nothing was scored"
        discordant = (gained + lost + 2) / (len(common) + 2)
        return _Ours(Estimate(change.difference, change.ci_low, change.ci_high), len(common), discordant)
    assert quantity == "speedup", quantity
    ratio = statistics.ratio_of_totals([base.by_block("wall_s")], [one.by_block("wall_s")])
    return _plainly(ratio.value, ratio.units, ratio.ci_low, ratio.ci_high)


def _plainly(value: float | None, n: int, low: float | None = None, high: float | None = None) -> "_Ours | str":
    return "nothing was measured" if value is None else _Ours(Estimate(float(value), low, high), n)


def _tokens_per_forward(one: Measured, protocol: str) -> "_Ours | str":
    """By the paper's accounting where the run follows its protocol, else ours."""
    if one.counted("forwards") is None:
        return "its engine hides its forwards"
    counted = protocol == PAPER and _told(one)
    lines = one.lines.values()
    tokens = [len(g["token_ids"]) + (g["surplus"] if counted else 0) for g in lines]
    ratio = statistics.ratio_of_totals([tokens], [[g["forwards"] for g in lines]], unit="item")
    return _plainly(ratio.value, ratio.units, ratio.ci_low, ratio.ci_high)


def _odd(part: _Opened, row: PublishedRow, quantity: str, benchmark: str, pair: Pair) -> list[str]:
    """Why ours is not of the same thing as the paper's; none if it is."""
    table, (one, record) = part.table, pair[0]
    if small := _miniature(part, row, benchmark, one, record):
        return [f"a miniature: {', '.join(small)}"]
    void = [reason for _, of_cell in filter(None, pair) for reason in of_cell["void"]]
    said = [row.not_comparable.get(quantity) or table.not_comparable.get(quantity)]
    said += [f"void: {reason}" for reason in void]
    if quantity == "speedup":
        device = part.session.get("device")
        said += [f"measured on {device or 'no known device'}, theirs on a GPU"] * (device != "cuda")
        said += [f"engine {one.cell.engine}, theirs is eager"] * (one.cell.engine not in (None, EAGER))
        said += [f"{record['dtype']}, theirs is bfloat16"] * (record["dtype"] != "bfloat16")
        said += ["--protocol own stops at stop strings, theirs does not"] * (part.asked.protocol != PAPER)
        said += ["it is its own baseline"] * (row.arm == row.against[quantity])
    if quantity in ("wall_s", "draft_forwards"):
        theirs = table.benchmarks[benchmark]["items"]
        said += [f"of {record['items']} items, theirs of {theirs}"] * (record["items"] != theirs)
    if quantity == "tokens_per_forward":
        said += ["--protocol own stops at stop strings, theirs does not"] * (part.asked.protocol != PAPER)
        said += ["tokens accepted behind the end are not stored, theirs count them"] * (not _told(one))
    return [why for why in said if why]


def _miniature(part: _Opened, row: PublishedRow, benchmark: str, one: Measured, record: Record) -> list[str]:
    """In what ours is smaller than, or different from, what the paper ran."""
    own, suite = part.table.benchmarks[benchmark], part.suites[benchmark]
    tokens, items = part.table.setup["max_new_tokens"], record["items"]
    said = [f"family {part.part.family}"] * (part.part.family != row.family)
    said += [f"suite {suite}"] * (suite != own["suite"])
    said += [f"{record['max_new_tokens']} new tokens, theirs {tokens}"] * (record["max_new_tokens"] != tokens)
    said += ["simulated"] * (one.cell.simulated is not None)
    if suite == own["suite"] and row.batch_size is None:
        theirs = f"{items:,} items, theirs {own['items']:,}"
        said += [f"{theirs}, so another mix of subtasks"] * bool(SUITES[suite].subtasks and items < own["items"])
        said += [theirs] * (items > own["items"])
        left_out = record["task"].get("left_out", {}).get("items", 0)
        said += [f"{left_out} items left out, which cannot be scored here"] * bool(left_out)
    return said


def _judge(
    quantity: str, printed: str, ours: Sequence[_Ours], items: Sequence[int], row: PublishedRow, table: Published
) -> Finding:
    """Of figures that are of the same thing. items: theirs, by benchmark."""
    estimate, n = agreement.mean([o.estimate for o in ours]), sum(o.n for o in ours)
    value, rounding = agreement.number(printed), agreement.half_unit(printed)
    if quantity in SHARES:
        spread = agreement.mean(_parts_of_theirs(quantity, printed, ours, items, row, table))
        low, high = spread.span
        theirs = Estimate(value / 100, value / 100 - (spread.value - low), value / 100 + (high - spread.value))
        units = 2 if quantity == "accuracy_change" else 1
        return agreement.judge_points(estimate, theirs, units * rounding / 100, n=n)
    unit = "block" if quantity == "speedup" else "item"
    return agreement.judge_rate(estimate, value, rounding, n=n, unit=unit)


def _parts_of_theirs(
    quantity: str, printed: str, ours: Sequence[_Ours], items: Sequence[int], row: PublishedRow, table: Published
) -> list[Estimate]:
    """Their figure on each benchmark, with its interval. Where a mean's parts are not printed, ours stand for them."""
    by_benchmark = row.figures[quantity]
    texts = [printed] if len(ours) == 1 else [by_benchmark.get(name) for name in table.benchmarks]
    parts = []
    for text, own, n in zip(texts, ours, items, strict=True):
        value = own.estimate.value if text is None else agreement.number(text) / 100
        change = quantity == "accuracy_change"
        parts.append(agreement.change(value, own.discordant, n) if change else agreement.share(value, n))
    return parts


def _bounds(estimate: Estimate, quantity: str, *, difference: bool = False) -> Record:
    """As reproduction.json holds it, in the unit that is printed."""
    scale = 100 if UNITS[quantity] in ("%", "points") else 1  # stored as shares
    low, high = estimate.low, estimate.high
    return {
        "value": estimate.value * scale,
        "ci_low": None if low is None else low * scale,
        "ci_high": None if high is None else high * scale,
        **({"kind": "points" if quantity in SHARES else "ratio"} if difference else {}),
    }
