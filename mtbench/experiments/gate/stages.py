"""Run a gate in its directory: stages `comparable`, `exact` and `timed`.

    gate.json                 the request, and what is decided so far; written before anything is decoded
    plans/{base,head}         the plan as each build makes it
    exact/{base,again,head}   stage `exact`: base twice, head once
    audits/CELL               why answers have changed
    pairs/0001/{base,head}    stage `timed`: a process of each build
    fresh/0001/{base,head}    pairs that test a FAIL once more

A folder gets its name when its processes have ended. The verdict depends on these files alone, so a killed gate
resumes where it stopped and gives the same one.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mtbench import files, records
from mtbench.document.formatting import counted
from mtbench.errors import UserError
from mtbench.experiments.diagnosis import FOLDER, why
from mtbench.experiments.gate import decision, exact, floor, plans
from mtbench.experiments.gate.builds import Build, describe, refuse_dirty, same_build
from mtbench.experiments.gate.format import (
    SCHEMA_VERSION,
    BuildRecord,
    Finding,
    Gate,
    GateRequest,
    Key,
    NoiseFloor,
    Verdict,
)
from mtbench.experiments.gate.pairs import PairRunner, differences, read_pairs
from mtbench.experiments.gate.plans import Planned
from mtbench.experiments.gate.processes import BuildFailed, generate, make_plan
from mtbench.experiments.gate.timed import TimedStage
from mtbench.hardware import machine
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Cell
from mtbench.records import dump

FILE = "gate.json"
UNFINISHED = "The gate is not finished."  # reason of a gate without a verdict yet


class Comparable(NamedTuple):
    """Two builds that can be compared."""

    builds: tuple[BuildRecord, BuildRecord]  # base, head
    planned: tuple[Planned, Planned]
    cells: list[Cell]  # that both builds plan
    key: Key
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class GateRun:
    """A gate in its directory. `deadline`: by time.monotonic; no pair begins later."""

    directory: Path
    request: GateRequest
    base: Build
    head: Build
    note: Callable[[str], None]
    deadline: float = float("inf")

    def run(self) -> Gate:
        """Run the missing stages; return the decision. gate.json has the beginning until then.

        A gate of a build with itself measures the machine's noise, which it adds to floor.json. Raises UserError if the
        builds cannot be compared or base cannot decode.
        """
        floor.read(self.directory.parent)  # a floor.json that cannot be written is refused before hours of pairs
        compared = self.comparable()
        gate = self._resumed(compared) if (self.directory / FILE).is_file() else self._begun(compared)
        if gate.word != "INCONCLUSIVE":
            return gate
        files.write_json(self.directory / FILE, dump(gate))
        gate, cells = self._exact(gate, compared)
        if cells and not self.request.counts_only and not _levels(gate, "fail"):
            runner = PairRunner(self.request, (self.base, self.head), compared.planned, self.note)
            gate = TimedStage(self.directory, runner, gate.looks, self.deadline).run(gate, cells)
        if self._is_calibration and (measured := self._noise(compared)):
            floor.add(self.directory.parent, measured)
            gate = gate.changed(floor=measured)
        return conclude(gate)

    @property
    def _is_calibration(self) -> bool:
        return self.base == self.head

    def _noise(self, compared: Comparable) -> NoiseFloor | None:
        pairs = read_pairs(self.directory / "pairs")
        found = differences(pairs, [cell.cell for cell in compared.cells])
        noise = [floor.noise_of(cell, d) for cell, d in found.items() if len(d) >= floor.FEWEST_PAIRS]
        if not noise:
            return None
        return NoiseFloor(
            key=compared.key,
            measured=time.strftime(floor.TIME, time.gmtime()),
            interleave=self.request.interleave,
            pairs=len(pairs),
            cells=noise,
        )

    def _begun(self, compared: Comparable) -> Gate:
        """Return the gate before its first process decodes. Raises UserError if --max-slowdown is below the floor."""
        found, findings = None, [*compared.findings]
        if not self.request.counts_only and not self._is_calibration:
            found, why = floor.find(floor.read(self.directory.parent), compared.key, interleave=self.request.interleave)
            if why is not None:
                build = self.request.base
                command = f"`mtbench gate --base {build} --head {build} -o {self.directory.parent / 'calibration'}`"
                findings.insert(0, _remark(f"{why}; {command} with the gate's other options measures its noise"))
        worst = None if found is None else max((cell.pair_sd for cell in found.cells), default=None)
        looks = decision.looks(worst, self.request.margin, self.request.pairs)
        if worst is not None and self.request.pairs is None and looks[-1] > decision.MOST_PAIRS:
            quieter = "" if self.request.interleave else "--interleave, "
            raise UserError(
                f"--max-slowdown {self.request.max_slowdown:g} takes --pairs {looks[-1]} by the noise in floor.json, "
                f"over the default of at most {decision.MOST_PAIRS}; give that, --max-slowdown "
                f"{100 * decision.smallest_detectable(worst):g}, {quieter}or --counts-only."
            )
        if self._is_calibration:
            looks = (self.request.pairs or floor.PAIRS,)
        return Gate(
            schema_version=SCHEMA_VERSION,
            word="INCONCLUSIVE",
            reason=UNFINISHED,
            started=time.strftime(floor.TIME, time.gmtime()),
            request=self.request,
            base=compared.builds[0],
            head=compared.builds[1],
            same_build=same_build(*compared.builds),
            key=compared.key,
            looks=list(looks),
            pairs=0,
            confirmation_pairs=0,
            floor=found,
            findings=findings,
            compared=[],
            timed=[],
            all_cells=None,
        )

    def _resumed(self, compared: Comparable) -> Gate:
        """Return the gate as it began, or with its verdict. Raises UserError if builds, machine or plan differ."""
        began = read_gate(self.directory)
        before, now = (began.base, began.head, began.key), (*compared.builds, compared.key)
        for what, a, b in zip(("base", "head", "machine or plan"), before, now, strict=True):
            if a != b:
                raise UserError(
                    f"the gate in {str(self.directory)!r} began with another {what}; start a new gate with another "
                    "`-o DIR`."
                )
        if began.word != "INCONCLUSIVE":
            return began
        first = [finding for finding in began.findings if finding.stage == "comparable"]
        return began.changed(reason=UNFINISHED, findings=first)

    # Stage comparable

    def comparable(self) -> Comparable:
        """Return both builds with their plans. Raises UserError if they cannot be compared."""
        one_build = self.head == self.base
        base_record = describe(self.base)
        builds = base_record, (base_record if one_build else describe(self.head))
        if not self.request.allow_dirty:
            for build in builds:
                refuse_dirty(build)
        findings = _compare_packages(*builds, other_torch=self.request.allow_torch)
        base = self._plan("base", self.base)
        # An older mtbench reads the clock: its prompts have today's date, and so have those of head.
        dated = replace(self.head, date=base.plan.request.chat_template_date or "")
        head = base if one_build else self._plan("head", dated)
        _refuse_other_gpu(base, head)
        refuse_busy_gpu(_gpu_of(base))
        findings += plans.compare(base, head)
        of_head = {cell.cell for cell in head.plan.cells}
        cells = [cell for cell in base.plan.cells if cell.cell in of_head]
        key = key_of(base, [cell.cell for cell in cells], self.request)
        return Comparable(builds, (base, head), cells, key, findings)

    def _plan(self, side: str, build: Build) -> Planned:
        """Return the plan as a build makes it. Raises UserError if it makes none, or one that cannot be read."""
        directory = self.directory / "plans" / side
        if not (directory / "plan.json").is_file():
            self.note(f"stage comparable: {side} plans, {build.label}")
            shutil.rmtree(directory, ignore_errors=True)
            try:
                make_plan(build, self.request.plan_arguments, directory, self.request.process_limit_s)
            except BuildFailed as failure:
                raise UserError(f"{side} makes no plan: {failure}.") from None
        return Planned.read(directory)

    # Stage exact

    def _exact(self, gate: Gate, compared: Comparable) -> tuple[Gate, list[Cell]]:
        """Decode with both builds; return the gate with the findings, and the cells that can be timed."""
        base, head = compared.planned
        sides = ("base", self.base, base), ("again", self.base, base), ("head", self.head, head)
        try:
            runs = [self._decode(*side, [cell.cell for cell in compared.cells]) for side in sides]
        except BuildFailed as failure:
            if failure.build is self.base:
                raise UserError(f"base cannot decode: {failure}.") from None
            crash = Finding(stage="exact", kind="failed", level="fail", cell=None, text=f"{failure}")
            return gate.changed(findings=[*gate.findings, crash]), []
        findings, decoded = list(gate.findings), []
        for cell in compared.cells:
            items = plans.items_of(base.plan, cell)
            read = (exact.read(run, cell.cell, items) for run in runs)
            outcome = exact.compare(cell.cell, *read, allow_changed=self.request.allow_changed, items=items)
            findings += outcome.findings
            if outcome.changed:
                findings.append(self._why(cell, runs[0], runs[-1], base.plan.request.device))
            if outcome.decoded:
                decoded.append(cell)
        if not decoded:
            text = "base and head share no cell that both decode, so nothing is compared"
            findings.append(Finding(stage="exact", kind="failed", level="inconclusive", cell=None, text=text))
        return gate.changed(findings=findings, compared=[cell.cell for cell in decoded]), decoded

    def _why(self, cell: Cell, base: RunDirectory, head: RunDirectory, device: str) -> Finding:
        self.note(f"stage exact: {cell.cell} has changed; `mtbench audit` looks for the reason")
        out = self.directory / FOLDER / cell.cell
        found = why(f"{base.path}:{cell.cell}", f"{head.path}:{cell.cell}", out, device=device)
        text = f"A is base, B is head: {found}"
        return Finding(stage="exact", kind="changed", level="note", cell=cell.cell, text=text)

    def _decode(self, side: str, build: Build, planned: Planned, cells: Sequence[str]) -> RunDirectory:
        directory = self.directory / "exact" / side
        if not directory.is_dir():
            self.note(f"stage exact: {build.label} decodes{' once more' if side == 'again' else ''}")
            partial = directory.with_name(f"{side}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            run = plans.write(partial, planned, plans.only(planned.stored, cells))
            generate(build, run, timed_only=False, limit_s=self.request.process_limit_s)
            with files.write_errors(directory):
                partial.rename(directory)
        return RunDirectory(directory)


def conclude(gate: Gate) -> Gate:
    """Return the gate with its verdict and reason, which follow from its findings."""
    levels: tuple[tuple[str, Verdict], ...] = (("fail", "FAIL"), ("inconclusive", "INCONCLUSIVE"))
    for level, word in levels:
        if findings := _levels(gate, level):
            first, others = findings[0], len(findings) - 1
            where = f"{first.cell}: " if first.cell else ""
            more = f"; {counted(others, 'more finding')}" if others else ""
            text = f"{where}{first.text}{more}."
            if first.kind == "undecided":
                text = f"Head has {_same(gate)}; its speed is not decided. {text[0].upper()}{text[1:]}"
            return gate.changed(word=word, reason=text)
    request, pairs = gate.request, counted(gate.pairs, "pair")
    passed = f"No cell is slower by {request.max_slowdown:.1f}% or more over {pairs}; {_same(gate)}."
    if request.counts_only:
        passed = f"Head has {_same(gate)}; nothing was timed."
    return gate.changed(word="PASS", reason=passed)


def read_gate(directory: Path) -> Gate:
    """Return the gate in a directory. Raises UserError if it is missing or malformed."""
    return records.read_json(directory / FILE, Gate, "start another gate with `mtbench gate --base ENV -o DIR`.")


def key_of(planned: Planned, cells: Sequence[str], request: GateRequest) -> Key:
    """Return the key of a floor of this machine and plan.

    The machine is read now: a plan on disk may have been made before the driver, the power cap or the kernel changed.
    """
    found, host = _gpu_of(planned), machine.host()
    gpu = found.describe() if found else {}
    timed = plans.only(planned.stored, cells, blocks=request.blocks, rounds=planned.plan.request.rounds)
    return Key(
        gpu_uuid=gpu.get("uuid"),
        driver=gpu.get("driver"),
        power_cap_w=gpu.get("power_cap_w"),
        processor=host["processor"],
        kernel=host["platform"],
        torch=planned.machine["packages"]["torch"],
        plan_sha256=plans.sha256(timed),
    )


def _gpu_of(planned: Planned) -> machine.Gpu | None:
    """Return the GPU that a build decodes on, as its plan names it; None if it decodes on a CPU."""
    gpu = None if planned.plan.request.device == "cpu" else planned.machine["gpu"]
    return machine.gpu_by_id(gpu["uuid"]) if gpu and gpu["uuid"] else None


def _levels(gate: Gate, level: str) -> list[Finding]:
    return [finding for finding in gate.findings if finding.level == level]


def _same(gate: Gate) -> str:
    """Return what head has in common with base, if no finding fails."""
    kinds = {kind: {f.cell for f in gate.findings if f.kind == kind} for kind in ("changed", "unstable")}
    same = "other tokens where this is allowed" if kinds["changed"] else "the same tokens from the same work"
    if unstable := kinds["unstable"]:
        same += f"; in {counted(len(unstable), 'cell')} base disagrees with itself, see the findings"
    return same


def _compare_packages(base: BuildRecord, head: BuildRecord, *, other_torch: bool) -> list[Finding]:
    """Return a remark for every package of which the builds have different versions, and for other releases.

    Raises UserError if they have different versions of torch, unless this is allowed.
    """
    names = sorted(base.packages.keys() | head.packages.keys())
    versions = {name: (base.packages.get(name), head.packages.get(name)) for name in names}
    differing = {name: (a, b) for name, (a, b) in versions.items() if a != b}
    if "torch" in differing and not other_torch:
        a, b = differing["torch"]
        raise UserError(
            f"base has torch {a} and head has torch {b}, so a difference may be torch's; give both the same, or add "
            "--allow-torch if torch is what changed."
        )
    if base.engine != head.engine:
        differing["serving engine"] = (base.engine or "as pinned", head.engine or "as pinned")
    return [_remark(f"{name} {a} → {b}") for name, (a, b) in differing.items()]


def _refuse_other_gpu(base: Planned, head: Planned) -> None:
    for name in ("uuid", "driver", "power_cap_w"):
        a, b = ((planned.machine["gpu"] or {}).get(name) for planned in (base, head))
        if a != b:
            raise UserError(f"the GPU's {name} is {a} for base and {b} for head; run both on one GPU, set up once.")


def refuse_busy_gpu(gpu: machine.Gpu | None) -> None:
    """Raise UserError if a process computes on the GPU. The gate's own process never does."""
    if gpu is not None and (busy := gpu.holders()):
        raise UserError(
            f"another process uses the GPU ({len(busy)} in all), so times would not count; end those that `nvidia-smi` "
            "lists, or choose another GPU by CUDA_VISIBLE_DEVICES."
        )


def _remark(text: str) -> Finding:
    return Finding(stage="comparable", kind="environment", level="note", cell=None, text=text)
