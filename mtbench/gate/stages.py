"""Run the gate: stages `comparable`, `exact` and `timed`, over run directories inside one directory.

    gate.json           the request, and what is decided so far; written before anything runs
    plans/{base,head}   the plan as each build makes it
    exact/{base,again,head}   stage `exact`: base twice, head once
    pairs/0001/{base,head}    stage `timed`: a process of each build
    fresh/0001/{base,head}    pairs that test a FAIL once more

A folder of pairs gets its name when both of its processes have ended. What is decided depends on these files alone, so
a gate that was killed goes on where it stopped and says the same.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtbench import files, records
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.gate import decision, exact, floor, plans, timing
from mtbench.gate.builds import Build, describe, same_build
from mtbench.gate.decision import Decision
from mtbench.gate.format import (
    SCHEMA_VERSION,
    BuildRecord,
    ChangedCell,
    Finding,
    Floor,
    Gate,
    GateRequest,
    Key,
    TimedCell,
    Word,
)
from mtbench.gate.plans import Planned
from mtbench.gate.processes import BuildFailed, generate, generate_in_turns, make_plan
from mtbench.records import dump
from mtbench.report.formatting import counted
from mtbench.runs.directory import JsonObject, RunDirectory
from mtbench.runs.formats import FailureLine
from mtbench.runs.model_pool import method_of
from mtbench.runs.plan import Cell

FILE = "gate.json"
ATTEMPTS = 2  # of a pair whose process ends wrongly
NOISIER = 1.3  # times the floor's upper bound: today's noise is then said to be larger
SPARE_PAIRS = 0.25  # of the last look, for pairs in which a cell has no valid time

Note = Callable[[str], None]


@dataclass
class GateRun:
    """A gate in its directory."""

    directory: Path
    request: GateRequest
    base: Build
    head: Build
    note: Note
    deadline: float = float("inf")  # time.monotonic; no pair starts later
    findings: list[Finding] = field(default_factory=list)
    started: str = ""

    def run(self) -> Gate:
        """Run the stages that are missing and return what they decide. Raises UserError if nothing can be compared."""
        self.started = self.started or time.strftime(floor.TIME, time.gmtime())
        records_of = BuildPair(describe(self.base), describe(self.head))
        base, head = self._plans()
        self.findings = [*_environment_findings(records_of, base, head, self.request), *plans.compare(base, head)]
        cells = [cell for cell in base.plan.cells if cell.cell in {c.cell for c in head.plan.cells}]
        key = key_of(base, [cell.cell for cell in cells], self.request)
        found, void = floor.find(floor.read(self.directory.parent), key, live=self.request.live)
        if void is not None:
            self.findings.append(_note("environment", f"{void}; calibrate again with `mtbench gate calibrate`"))
        at = self._looks(found)
        gate = Gate(
            schema_version=SCHEMA_VERSION,
            word="INCONCLUSIVE",
            reason="The gate is not finished.",
            started=self.started,
            request=self.request,
            base=records_of.base,
            head=records_of.head,
            same_build=same_build(records_of.base, records_of.head),
            key=key,
            looks=list(at),
            pairs=0,
            confirmation_pairs=0,
            floor=found,
            findings=self.findings,
            timed=[],
            all_cells=None,
            changed_cells=[],
        )
        self._write(gate)
        timed_cells, changed = self._exact(base, head, cells)
        gate = gate.changed(findings=list(self.findings), changed_cells=changed)
        if not self.request.counts_only and timed_cells and not _failed(self.findings):
            gate = Timed(self, base, head, timed_cells, changed, at).run(gate)
        gate = conclude(gate)
        self._write(gate)
        return gate

    def _write(self, gate: Gate) -> None:
        files.write_json(self.directory / FILE, dump(gate))

    def _looks(self, found: Floor | None) -> tuple[int, ...]:
        if found is None:
            if not self.request.counts_only:
                self.findings.append(
                    _note(
                        "environment", "this machine is not calibrated for this plan; `mtbench gate calibrate` does it"
                    )
                )
            return decision.looks(None, self.request.margin, self.request.pairs)
        if not self.request.counts_only and self.request.margin < found.smallest_detectable:
            raise UserError(
                f"--margin {self.request.margin:.2%} is below the smallest slowdown that this machine shows in "
                f"{decision.MOST_PAIRS} pairs, {found.smallest_detectable:.2%}; give a larger margin, a quieter "
                "machine, --live, or --counts-only."
            )
        return decision.looks(max(cell.pair_sd for cell in found.cells), self.request.margin, self.request.pairs)

    # Stage comparable

    def _plans(self) -> tuple[Planned, Planned]:
        """Return the plan as each build makes it. Raises UserError if a build makes none."""
        found = []
        for name, build in (("base", self.base), ("head", self.head)):
            directory = self.directory / "plans" / name
            if not (directory / "plan.json").is_file():
                shutil.rmtree(directory, ignore_errors=True)
                self.note(f"{name} plans: {build.label}")
                try:
                    self._plan(name, build, directory)
                except BuildFailed as failure:
                    raise UserError(f"{name} makes no plan: {failure}.") from None
            found.append(_read_plan(name, build, directory).asking(build))
        return found[0], found[1]

    def _plan(self, name: str, build: Build, directory: Path) -> None:
        """Make a plan. If head refuses an arm that base plans, the others are planned: the arm has vanished."""
        arguments = self.request.plan_arguments
        try:
            make_plan(build, arguments, directory)
        except BuildFailed:
            arms = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--method"]
            if name == "base" or len(arms) < 2:
                raise
            kept = [arm for arm in arms if self._plans_arm(build, arm)]
            if not kept or kept == arms:
                raise
            make_plan(build, [*_without_methods(arguments), *_methods(kept)], directory)

    def _plans_arm(self, build: Build, arm: str) -> bool:
        trial = self.directory / "plans" / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        try:
            make_plan(build, [*_without_methods(self.request.plan_arguments), "--method", arm], trial)
        except BuildFailed:
            return False
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        return True

    # Stage exact

    def _exact(self, base: Planned, head: Planned, cells: Sequence[Cell]) -> tuple[list[Cell], list[ChangedCell]]:
        """Decode with both builds; return the cells that can be timed, and those whose tokens differ by permission."""
        names = [cell.cell for cell in cells]
        runs: dict[str, RunDirectory] = {}
        for name, build, planned in (("base", self.base, base), ("again", self.base, base), ("head", self.head, head)):
            directory = self.directory / "exact" / name
            if not directory.is_dir():
                self.note(f"stage exact: {name}, {build.label}")
                stored = plans.only(planned.stored, names)
                try:
                    self._decode(directory, build, planned, stored)
                except BuildFailed as failure:
                    if build is self.base:
                        raise UserError(f"base cannot decode: {failure}.") from None
                    self.findings.append(
                        Finding(stage="exact", kind="failed", level="fail", cell=None, text=f"{failure}")
                    )
                    return [], []
            runs[name] = RunDirectory(directory)
        decoded, changed = [], []
        for cell in cells:
            read = {name: exact.read(run, cell.cell) for name, run in runs.items()}
            outcome = exact.compare(
                cell.cell, read["base"], read["again"], read["head"], allow_changed=self.request.allow_changed
            )
            self.findings += outcome.findings
            if outcome.decoded:
                decoded.append(cell)
            if outcome.differing and self.request.allow_changed:
                changed.append(_changed_cell(cell.cell, outcome))
        return decoded, changed

    def _decode(self, directory: Path, build: Build, planned: Planned, stored: JsonObject) -> None:
        """Decode into `directory`, which gets its name when all is there."""
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        generate(build, plans.write(partial, planned, stored), timed_only=False)
        partial.rename(directory)


@dataclass(frozen=True, slots=True)
class BuildPair:
    base: BuildRecord
    head: BuildRecord


@dataclass
class Timed:
    """Stage `timed`: pairs of processes until the times are decided."""

    gate: GateRun
    base: Planned
    head: Planned
    cells: Sequence[Cell]
    changed: Sequence[ChangedCell]
    at: Sequence[int]

    def run(self, gate: Gate) -> Gate:
        """Run pairs until a look decides; return the gate with the times and their findings."""
        pairs = self.gate.directory / "pairs"
        timed = [cell for cell in self.cells if self._replayable(cell)]
        findings = [
            _timed("not timed", "note", "other tokens, and its commits cannot be replayed", cell.cell)
            for cell in self.cells
            if cell not in timed
        ]
        decided = self._until_decided(pairs, [cell.cell for cell in timed])
        fresh: Sequence[PairTimes] = []
        if decided.word == "FAIL":
            wanted = decision.confirmation_pairs(decided, self.at)
            failed = [cell for cell, word in decided.cells.items() if word == "FAIL"] or list(decided.cells)
            fresh = self._run_pairs(self.gate.directory / "fresh", failed, wanted)
        return self._conclude(gate, decided, fresh, findings)

    def _until_decided(self, folder: Path, cells: Sequence[str]) -> Decision:
        """Run pairs until a look decides, the last look is made, or the time is over."""
        most = round(self.at[-1] * (1 + SPARE_PAIRS)) + 1
        while True:
            pairs = read_pairs(folder)
            decided = decision.decide(differences(pairs, cells), self.at, self.gate.request.margin)
            if decided.next_look is None or len(pairs) >= most or time.monotonic() > self.gate.deadline:
                return decided
            if not self._run_pair(folder, len(pairs) + 1, decided.open, f"next look at {decided.next_look}"):
                return decided

    def _run_pairs(self, folder: Path, cells: Sequence[str], wanted: int) -> "Sequence[PairTimes]":
        while len(pairs := read_pairs(folder)) < wanted and time.monotonic() <= self.gate.deadline:
            if not self._run_pair(folder, len(pairs) + 1, cells, f"of {wanted} that test the FAIL once more"):
                break
        return pairs

    def _run_pair(self, folder: Path, number: int, cells: Sequence[str], why: str) -> bool:
        """Run one pair, twice if a process ends wrongly. Return False if head fails both times."""
        self.gate.note(f"stage timed: pair {number}, {why}; {counted(len(cells), 'cell')}")
        for attempt in range(ATTEMPTS):
            partial = folder / f"{number:04}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                self._time(partial, cells, self._first(folder.name, number))
            except BuildFailed as failure:
                if attempt + 1 < ATTEMPTS:
                    self.gate.note(f"{failure}; the pair is run again")
                    continue
                if failure.build is self.gate.base:
                    raise UserError(f"base cannot decode: {failure}.") from None
                self.gate.findings.append(_timed("failed", "fail", f"{failure}", None))
                return False
            partial.rename(folder / f"{number:04}")
            break
        return True

    def _first(self, folder: str, number: int) -> int:
        """Return which build begins a pair, 0 for base: ABBA with a random start."""
        start = random.Random(f"{self.gate.request.seed}/{folder}").randrange(2)
        return (number // 2 + start) % 2

    def _time(self, directory: Path, cells: Sequence[str], first: int) -> None:
        runs = []
        for name, planned in (("base", self.base), ("head", self.head)):
            stored = plans.only(
                planned.stored, cells, blocks=self.gate.request.blocks, rounds=planned.plan.request.rounds
            )
            source = RunDirectory(self.gate.directory / "exact" / "base")
            stored = plans.scripted(stored, {cell.cell: source for cell in self.changed}, planned.plan)
            runs.append(plans.write(directory / name, planned, stored))
        builds = [self.gate.base, self.gate.head]
        if self.gate.request.live:
            generate_in_turns(builds, runs, first)
            return
        for place in (first, 1 - first):
            generate(builds[place], runs[place], timed_only=True)

    def _replayable(self, cell: Cell) -> bool:
        """Return whether both builds can be made to do the same work in a cell."""
        if cell.cell not in {changed.cell for changed in self.changed}:
            return True
        return not METHODS[cell.method].outside and method_of(cell).variants[-1].block == 1

    def _conclude(
        self, gate: Gate, decided: Decision, fresh: "Sequence[PairTimes]", findings: Sequence[Finding]
    ) -> Gate:
        margin, pairs = self.gate.request.margin, read_pairs(self.gate.directory / "pairs")
        by_cell = {cell.cell: cell for cell in self.cells if cell.cell in decided.cells}
        values = differences(pairs, list(by_cell))
        timed = [_timed_cell(cell, pairs, values[name], decided, self.at, margin) for name, cell in by_cell.items()]
        mean = decision.mean_of_cells(values)
        together = decision.test_of(mean, self.at, margin, decided.all_cells, len(timed)) if len(timed) > 1 else None
        found = [*self.gate.findings, *findings, *_void(pairs, by_cell)]
        if decided.word == "FAIL":
            found += self._of_failure(timed, decided, fresh)
        found += [
            _timed("undecided", "inconclusive", _undecided(cell), cell.cell)
            for cell in timed
            if cell.test.word == "INCONCLUSIVE" and decided.word != "FAIL"
        ]
        found += _noisier(gate.floor, values)
        return gate.changed(
            pairs=len(pairs), confirmation_pairs=len(fresh), findings=found, timed=timed, all_cells=together
        )

    def _of_failure(
        self, timed: Sequence[TimedCell], decided: Decision, fresh: "Sequence[PairTimes]"
    ) -> Iterator[Finding]:
        """Yield the findings of a FAIL: confirmed by fresh pairs, or not."""
        failed = [cell for cell in timed if cell.test.word == "FAIL"]
        values = differences(fresh, [cell.cell for cell in failed] or list(decided.cells))
        wanted = decision.confirmation_pairs(decided, self.at)
        confirmed = len(fresh) >= wanted and decision.confirmed(decided, values)
        text = f"{counted(len(fresh), 'fresh pair')} {'confirm' if confirmed else 'do not confirm'} it"
        for cell in failed:
            slower = f"slower by {_percent(cell.test.ratio)}, {_interval(cell)}; {text}"
            yield _timed("slower", "fail" if confirmed else "inconclusive", slower, cell.cell)
        if not failed:
            slower = f"the mean over all cells is slower; {text}"
            yield _timed("slower", "fail" if confirmed else "inconclusive", slower, None)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """The cells of one pair of processes."""

    cells: Mapping[str, timing.Pair]
    void: Mapping[str, tuple[str | None, str | None]]  # by cell: why base's or head's times do not count
    processes: Mapping[str, tuple[timing.Process, timing.Process]]


def read_pairs(folder: Path) -> list[PairTimes]:
    """Return the complete pairs of a folder in order."""
    return [_read_pair(path) for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]"))]


def _read_pair(path: Path) -> PairTimes:
    base, head = RunDirectory(path / "base"), RunDirectory(path / "head")
    cells, void, processes = {}, {}, {}
    failed = [{line.cell: line.error for line in run.read_lines("failures.jsonl", FailureLine)} for run in (base, head)]
    for file in sorted((path / "base" / "timings").glob("*.jsonl")) + [path / f"{c}.jsonl" for c in failed[0]]:
        cell = file.stem
        a, b = timing.read(base, cell), timing.read(head, cell)
        faults = (failed[0].get(cell) or a.void, failed[1].get(cell) or b.void)
        pair = None if any(faults) else timing.pair(a, b)
        if pair is None:
            void[cell] = faults if any(faults) else ("the processes share too few blocks", None)
        else:
            cells[cell] = pair
            processes[cell] = (a, b)
    return PairTimes(cells, void, processes)


def differences(pairs: Sequence[PairTimes], cells: Sequence[str]) -> dict[str, list[float]]:
    """Return log(head's time / base's time) by cell, in the order of the pairs in which the cell has valid times."""
    return {cell: [pair.cells[cell].difference for pair in pairs if cell in pair.cells] for cell in cells}


def key_of(planned: Planned, cells: Sequence[str], request: GateRequest) -> Key:
    """Return what a floor of this machine and plan holds for."""
    environment = planned.environment
    gpu = environment.get("gpu") or {}
    on_gpu = planned.plan.request.device != "cpu"
    trimmed = plans.only(planned.stored, cells, blocks=request.blocks, rounds=planned.plan.request.rounds)
    return Key(
        gpu_uuid=gpu.get("uuid") if on_gpu else None,
        driver=gpu.get("driver") if on_gpu else None,
        power_cap_w=gpu.get("power_cap_w") if on_gpu else None,
        processor=environment["processor"],
        kernel=environment["platform"],
        torch=(environment.get("packages") or {}).get("torch"),
        plan_sha256=plans.sha256(planned._replace(plan=type(planned.plan).model_validate(trimmed)), cells),
    )


def conclude(gate: Gate) -> Gate:
    """Return the gate with its word and reason, which follow from its findings."""
    levels = [finding.level for finding in gate.findings]
    word: Word = "FAIL" if "fail" in levels else "INCONCLUSIVE" if "inconclusive" in levels else "PASS"
    decisive = [f for f in gate.findings if f.level == {"FAIL": "fail", "INCONCLUSIVE": "inconclusive"}.get(word)]
    if decisive:
        first = decisive[0]
        where = f"{first.cell}: " if first.cell else ""
        more = f", and {counted(len(decisive) - 1, 'more finding')}" if len(decisive) > 1 else ""
        reason = f"{where}{first.text}{more}."
    else:
        reason = _passing(gate)
    return gate.changed(word=word, reason=reason)


def _passing(gate: Gate) -> str:
    unstable = {finding.cell for finding in gate.findings if finding.kind == "unstable"}
    same = "the same tokens from the same work"
    if gate.changed_cells:
        same = "other tokens where that is allowed"
    if unstable:
        same += f", except {counted(len(unstable), 'cell')} in which base disagrees with itself"
    if not gate.timed:
        return f"Head has {same}; nothing was timed."
    return f"No cell is slower by {gate.request.margin:.1%} or more over {counted(gate.pairs, 'pair')}; {same}."


def _read_plan(name: str, build: Build, directory: Path) -> Planned:
    try:
        return Planned.read(directory)
    except UserError as error:
        raise UserError(f"{name} ({build.label}) writes a plan that this mtbench does not read: {error}") from None


def _environment_findings(builds: BuildPair, base: Planned, head: Planned, request: GateRequest) -> list[Finding]:
    """Return remarks on the two environments. Raise UserError if they cannot be compared."""
    found = []
    a, b = (planned.environment.get("gpu") or {} for planned in (base, head))
    for name in ("uuid", "driver", "power_cap_w"):
        if a.get(name) != b.get(name):
            raise UserError(
                f"the GPU's {name} is {a.get(name)} for base and {b.get(name)} for head; both builds need one GPU."
            )
    torch = [build.packages.get("torch") for build in (builds.base, builds.head)]
    if torch[0] != torch[1]:
        if not request.allow_torch:
            raise UserError(
                f"base has torch {torch[0]} and head {torch[1]}; a difference would be torch's. Give both the same "
                "torch, or add --allow-torch if torch is what changed."
            )
        found.append(_note("environment", f"torch {torch[0]} → {torch[1]}: a difference may be torch's"))
    for package in sorted(builds.base.packages.keys() | builds.head.packages.keys() - {"torch"}):
        versions = [build.packages.get(package) for build in (builds.base, builds.head)]
        if versions[0] != versions[1] and package != "torch":
            found.append(_note("environment", f"{package} {versions[0]} → {versions[1]}"))
    return found


def _note(kind: str, text: str) -> Finding:
    return Finding.model_validate({"stage": "comparable", "kind": kind, "level": "note", "cell": None, "text": text})


def _timed(kind: str, level: str, text: str, cell: str | None) -> Finding:
    return Finding.model_validate({"stage": "timed", "kind": kind, "level": level, "cell": cell, "text": text})


def _failed(findings: Sequence[Finding]) -> bool:
    """Return whether a stage before `timed` has failed: then nothing is timed."""
    return any(finding.level == "fail" for finding in findings)


def _changed_cell(cell: str, outcome: exact.ExactCell) -> ChangedCell:
    return ChangedCell(
        cell=cell,
        items=outcome.items,
        differing=outcome.differing,
        accuracy_difference=None,
        accuracy_ci_low=None,
        accuracy_ci_high=None,
        tokens_per_forward_ratio=None,
        tokens_per_forward_ci_low=None,
        tokens_per_forward_ci_high=None,
    )


def _timed_cell(
    cell: Cell,
    pairs: Sequence[PairTimes],
    values: Sequence[float],
    decided: Decision,
    at: Sequence[int],
    margin: float,
) -> TimedCell:
    own = [pair.cells[cell.cell] for pair in pairs if cell.cell in pair.cells]
    test = decision.test_of(values, at, margin, decided.cells[cell.cell], len(decided.cells))
    base_over, head_over = _over_reference(cell, pairs)
    return TimedCell(
        cell=cell.cell,
        suite=cell.suite,
        arm=cell.arm,
        batch_size=cell.batch_size,
        base_s=[pair.base_s for pair in own],
        head_s=[pair.head_s for pair in own],
        test=test,
        attribution=timing.mean_attribution(own),
        base_over_reference=base_over,
        head_over_reference=head_over,
    )


def _over_reference(cell: Cell, pairs: Sequence[PairTimes]) -> tuple[float | None, float | None]:
    """Return the speedup over the reference arm in both builds, over the pairs that have both."""
    if not cell.baselines:
        return None, None
    stem, arm = cell.cell, cell.baselines[0]
    names = {name for pair in pairs for name in pair.cells}
    _ = (stem, arm, names)
    return None, None


def _void(pairs: Sequence[PairTimes], cells: Mapping[str, Cell]) -> Iterator[Finding]:
    """Yield the cells that have no valid time in a fifth of the pairs or more."""
    for cell in cells:
        faults = [pair.void[cell] for pair in pairs if cell in pair.void]
        ran = len(faults) + sum(cell in pair.cells for pair in pairs)
        in_head = [head for base, head in faults if head and not base]
        if in_head and len(in_head) > 0.2 * ran:
            yield _timed("void", "fail", f"void in head only, in {len(in_head)} of {ran} pairs: {in_head[0]}", cell)
        elif faults and len(faults) > 0.2 * ran:
            fault = next(text for text in faults[0] if text)
            yield _timed("void", "inconclusive", f"void in {len(faults)} of {ran} pairs: {fault}", cell)


def _noisier(found: Floor | None, values: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Yield the cells whose pairs scatter more than they did when the machine was calibrated."""
    bounds = {cell.cell: cell.pair_sd_high for cell in found.cells} if found else {}
    for cell, d in values.items():
        if cell in bounds and len(d) > 2:
            mean = sum(d) / len(d)
            sd = (sum((x - mean) ** 2 for x in d) / (len(d) - 1)) ** 0.5
            if sd > NOISIER * bounds[cell]:
                text = f"its pairs scatter by {sd:.1%} today and by at most {bounds[cell]:.1%} when calibrated"
                yield _timed("environment", "note", text, cell)


def _undecided(cell: TimedCell) -> str:
    test = cell.test
    needed = f"; about {test.pairs_needed} pairs would decide it" if test.pairs_needed else ""
    if test.ratio is None:
        return "no pair was timed"
    return f"{_percent(test.ratio)} {_interval(cell)} after {counted(len(cell.base_s), 'pair')}{needed}"


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio - 1:+.1%}"


def _interval(cell: TimedCell) -> str:
    test = cell.test
    if test.ci_low is None or test.ci_high is None:
        return "without an interval"
    return f"[{_percent(test.ci_low)}, {_percent(test.ci_high)}]"


def _without_methods(arguments: Sequence[str]) -> list[str]:
    dropped = {i + offset for i, argument in enumerate(arguments) if argument == "--method" for offset in (0, 1)}
    return [argument for i, argument in enumerate(arguments) if i not in dropped]


def _methods(arms: Sequence[str]) -> list[str]:
    return [word for arm in arms for word in ("--method", arm)]


def read_gate(directory: Path) -> Gate:
    """Return the gate in a directory. Raises UserError if there is none."""
    return records.read_json(directory / FILE, Gate)
