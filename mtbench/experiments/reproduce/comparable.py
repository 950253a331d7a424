"""What we ran for each published figure, and why the two cannot be compared: machine, engine, protocol, a miniature."""

from dataclasses import dataclass
from pathlib import Path

from mtbench.evaluation.registry import SUITES
from mtbench.experiments.reproduce.format import FamilyRun, Published, PublishedRow, Quantity, ReproduceRequest
from mtbench.experiments.reproduce.rerun import EAGER, PAPER, Part, arm_of, suites_of
from mtbench.report.phrases import disclaimers
from mtbench.results import samples
from mtbench.results.format import ResultCell, Results
from mtbench.results.samples import CellData
from mtbench.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that ran: its stored lines, and its figures in results.json."""

    data: CellData
    result: ResultCell


class FamilyResults:
    """The results of one family's run."""

    def __init__(self, table: Published, asked: ReproduceRequest, part: Part, folder: Path) -> None:
        self.table, self.asked, self.part = table, asked, part
        self.suites = suites_of(table, asked)
        self.cells: dict[tuple[str, str, int], Ran] = {}  # by suite, arm and batch size
        run = RunDirectory(folder / part.folder)
        if part.plan is not None and run.has("results.json"):
            data = samples.read(run, part.plan)
            for result in run.read("results.json", Results).cells:
                self.cells[result.suite, result.arm, result.batch_size] = Ran(data[result.cell], result)

    def described(self) -> FamilyRun:
        """Return what reproduction.json stores about the run."""
        return FamilyRun(
            family=self.part.family,
            missing=self.part.missing,
            closed=self.part.closed,
            folder=None if self.part.plan is None else self.part.folder,
            disclaimers=disclaimers([ran.result for ran in self.cells.values()]),
        )

    def cell(self, spec: str, benchmark: str, batch_size: int | None) -> Ran | str:
        """Return the cell of an arm on a benchmark, or the reason why there is none."""
        if spec in self.part.missing:
            return self.part.missing[spec]
        if benchmark not in self.suites:
            return "left out by --suite"
        suite = self.suites[benchmark]
        if suite in self.part.closed:
            return self.part.closed[suite]
        assert self.part.plan is not None
        request = self.part.plan.request
        size = batch_size or max(request.batch_size)
        if size not in request.batch_size:
            return f"batch size {size} was not asked for; leave `--batch-size` out"
        ran = self.cells.get((suite, str(arm_of(spec, request.engine)), size))
        if ran is None:
            return "failed: the run has no results; `--resume` continues it"
        if ran.result.error:
            return f"failed: {ran.result.error}"
        if ran.result.status != "ok":
            return "not finished: `--resume` continues it"
        return ran


def stores_surplus(data: CellData) -> bool:
    """Return whether every answer stores how many tokens were accepted after its end."""
    return bool(data.lines) and all(line.surplus is not None for line in data.lines.values())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a published figure stands: its table, row and quantity, and our results of the family."""

    table: Published
    asked: ReproduceRequest
    row: PublishedRow
    quantity: Quantity
    family: FamilyResults | None  # None: the family was not run

    def benchmarks(self) -> list[str]:
        """Return the benchmarks of a mean. A suite that replaces several benchmarks counts once."""
        by_suite: dict[str, str] = {}
        for name in self.table.benchmarks:
            suite = self.family.suites.get(name, name) if self.family else name
            by_suite.setdefault(suite, name)
        return list(by_suite.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """A row's cell, and the cell of the arm that the figure is over."""

    benchmark: str
    ran: Ran
    baseline: Ran | None


def reasons_not_comparable(place: Place, pair: Pair) -> list[str]:
    """Return why our figure does not measure what the paper's does; empty if it does."""
    table, row, quantity = place.table, place.row, place.quantity
    if differences := _miniature(place, pair):
        return [f"a miniature: {', '.join(differences)}"]
    marked = row.not_comparable.get(quantity) or table.not_comparable.get(quantity)
    reasons = [marked] if marked else []
    for ran in (pair.ran, pair.baseline):
        if ran is not None:
            reasons += [f"void: {reason}" for reason in ran.result.void]
    if quantity == "speedup":
        reasons += _reasons_of_speed(pair.ran)
    if quantity in ("speedup", "tokens_per_forward") and place.asked.protocol != PAPER:
        reasons.append("--protocol own stops at stop strings, theirs does not")
    if quantity == "speedup" and row.arm == row.against[quantity]:
        reasons.append("it is its own baseline")
    if quantity == "wall_s":
        ours, theirs = pair.ran.result.items, table.benchmarks[pair.benchmark].items
        if ours != theirs:
            reasons.append(f"of {ours} items, theirs of {theirs}")
    if quantity == "tokens_per_forward" and not stores_surplus(pair.ran.data):
        reasons.append("tokens accepted after the end are not stored, theirs count them")
    return reasons


def _reasons_of_speed(ran: Ran) -> list[str]:
    """Return why a speedup is not measured as the paper's: device, engine or number type."""
    reasons = []
    device, engine, dtype = ran.result.device, ran.result.engine, ran.result.dtype
    if device != "cuda":
        reasons.append(f"measured on {device}, theirs on a GPU")
    if engine not in (None, EAGER):
        reasons.append(f"engine {engine}, theirs is eager")
    if dtype != "bfloat16":
        reasons.append(f"{dtype}, theirs is bfloat16")
    return reasons


def _miniature(place: Place, pair: Pair) -> list[str]:
    """Return in what our run is smaller than, or different from, the paper's."""
    family, row, result = place.family, place.row, pair.ran.result
    assert family is not None
    theirs, suite = place.table.benchmarks[pair.benchmark], family.suites[pair.benchmark]
    budget = place.table.setup.max_new_tokens
    differences = []
    if family.part.family != row.family:
        differences.append(f"family {family.part.family}")
    if suite != theirs.suite:
        differences.append(f"suite {suite}")
    if result.max_new_tokens != budget:
        differences.append(f"{result.max_new_tokens} new tokens, theirs {budget}")
    if pair.ran.data.cell.simulated is not None:
        differences.append("simulated")
    if suite == theirs.suite and row.batch_size is None:
        differences += _other_items(suite, result, theirs.items)
    return differences


def _other_items(suite: str, result: ResultCell, theirs: int) -> list[str]:
    """Return how our items differ from the paper's. Fewer of a suite without subtasks are no difference."""
    ours = result.items
    counts = f"{ours:,} items, theirs {theirs:,}"
    differences = []
    if SUITES[suite].subtasks and ours < theirs:
        differences.append(f"{counts}, so another mix of subtasks")
    if ours > theirs:
        differences.append(counts)
    left_out = result.task.get("left_out", {}).get("items", 0)
    if left_out:
        differences.append(f"{left_out} items left out, which cannot be scored here")
    return differences
