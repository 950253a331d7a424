"""`mtbench gate` and `mtbench gate calibrate`: two builds on one machine, and the machine's noise."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtbench import files, plugins, records
from mtbench.decoding.arms import is_served
from mtbench.document import html_page
from mtbench.document.console import Terminal
from mtbench.document.formatting import listed
from mtbench.document.markdown_text import markdown
from mtbench.document.model import Document, Section
from mtbench.document.terminal import show
from mtbench.errors import UserError, printable
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.gate import floor
from mtbench.experiments.gate.builds import Build, resolve
from mtbench.experiments.gate.document import document, noise
from mtbench.experiments.gate.format import EXIT_CODES, Gate, GateRequest, NoiseFloor
from mtbench.experiments.gate.request import ENV, BuildsRequest, CalibrationOptions, GateOptions, GateSession
from mtbench.experiments.gate.stages import FILE, GateRun
from mtbench.plugins import read_file
from mtbench.records import dump
from mtbench.runs import option_texts as texts
from mtbench.runs import options
from mtbench.runs.directory import RunDirectory
from mtbench.runs.run_request import PlanRequest

GATE, CALIBRATION = "request.json", "calibration.json"  # what was asked; the name says which of the two it is
COMMANDS = {"fail": "error", "inconclusive": "warning"}  # of GitHub, by the level of a finding
LARGEST_SUMMARY = 1_000_000  # bytes: GitHub refuses a step summary of over 1 MiB
PLANNED = PlanRequest.model_fields.keys()


class _BuildsExperiment(Experiment[Any, GateSession, GateRequest, Any]):
    """What a gate and a calibration have in common: a request, and processes of builds."""

    session = GateSession

    def begin(self, directory: RunDirectory, planned: GateRequest, argv: Sequence[str]) -> None:
        """Write what was asked."""
        directory.write_json(self.begun_by, dump(planned))

    def stored(self, directory: Path) -> None:
        """Return None: the request has the options as the builds get them."""

    def decided(self, directory: Path) -> bool:
        """Return whether anything was decoded or decided."""
        return any((directory / name).exists() for name in (FILE, "pairs"))

    def _working(self, job: Job[Any, GateSession]) -> GateRun:
        """Return the gate with its builds."""
        request = records.read_json(job.path / self.begun_by, GateRequest, "start anew, without --resume.")
        base, head = _builds(request, job.note)
        return GateRun(job.path, request, base, head, job.note, job.deadline)


class GateExperiment(_BuildsExperiment):
    """Stages `comparable`, `exact` and `timed` of two builds."""

    command, begun_by, result, page = "gate", GATE, FILE, "gate.html"
    request = GateOptions

    def plan(self, request: GateOptions, session: GateSession) -> GateRequest:
        """Return what is asked of the gate."""
        if request.base is None and not request.base_plugin:
            raise UserError(f"--base is missing; give {ENV}, such as `mtbench gate --base git:main`, or --base-plugin.")
        same = {name: getattr(request, name) for name in GateRequest.model_fields if name in GateOptions.model_fields}
        of_base = [read_file(file).path for file in request.base_plugin] or [*session.plugin]
        same["engine"] = _serving_engine(request)
        return GateRequest(
            **same, plan_arguments=_plan_arguments(request), plugins=[*session.plugin], base_plugins=of_base
        )

    def run(self, job: Job[Any, GateSession]) -> Gate:
        """Run what is missing of the gate, and write what it found."""
        gate = self._working(job).run()
        write(job.path, gate)
        return gate

    def show(self, job: Job[Any, GateSession], found: Gate, console: Terminal) -> None:
        """Print the verdict and its reasons; in a GitHub workflow, also the lines that mark the findings."""
        show(document(found, drawn=False), console)
        for line in _tell_github(found):
            console.say(line)

    def exit_code(self, found: Gate, session: GateSession) -> int:
        """Return that of the verdict."""
        return EXIT_CODES[found.word]


class CalibrateExperiment(_BuildsExperiment):
    """Pairs of processes of one build."""

    command, begun_by, result, page = "gate calibrate", CALIBRATION, floor.FILE, floor.FILE
    request = CalibrationOptions

    def folder(self, request: CalibrationOptions) -> str:
        """Return the name that begins the default directory."""
        return "calibration"

    def plan(self, request: CalibrationOptions, session: GateSession) -> GateRequest:
        """Return what is asked: a gate of one build with itself."""
        fixed: dict[str, Any] = {"margin": 0.02, "counts_only": False, "allow_changed": False, "allow_torch": False}
        fixed |= {name: getattr(request, name) for name in GateRequest.model_fields if hasattr(request, name)}
        fixed |= {"head": request.base, "plan_arguments": _plan_arguments(request), "engine": _serving_engine(request)}
        return GateRequest(**fixed, plugins=[*session.plugin], base_plugins=[*session.plugin])

    def run(self, job: Job[Any, GateSession]) -> NoiseFloor:
        """Run the pairs that are missing, and add the floor to the file beside the directory."""
        floor.read(job.path.parent)  # a floor.json that cannot be kept is refused before hours of pairs
        measured = self._working(job).calibrate()
        floor.add(job.path.parent, measured)
        return measured

    def page_of(self, job: Job[Any, GateSession]) -> Path:
        """Return floor.json, beside the directory."""
        return job.path.parent / floor.FILE

    def show(self, job: Job[Any, GateSession], found: NoiseFloor, console: Terminal) -> None:
        """Print the noise of every cell."""
        lead = f"The smallest slowdown that a gate finds is {found.smallest_detectable:.1%}."
        title = "Two processes of one build"
        show(Document(title, lead, sections=[Section("Noise", [noise(found)])]), console)


def _serving_engine(request: BuildsRequest) -> str | None:
    """Return the serving engine of --engine; None if it names engines of ours only."""
    return next((engine for engine in request.engine if is_served(engine)), None)


def _plan_arguments(request: BuildsRequest) -> list[str]:
    """Return the options of `mtbench plan` that both builds get."""
    given = {name: getattr(request, name) for name in PLANNED if name in request.model_fields_set}
    named = options.words(given, PlanRequest)
    return [*named, "--limit", texts.ALL if request.limit is None else str(request.limit)]


def _builds(request: GateRequest, note: Callable[[str], None]) -> tuple[Build, Build]:
    """Return base and head. Head's plugin files are imported here as well: this process asks what their methods do."""
    for file in request.plugins:
        plugins.load_file(file)
    base = resolve(request.base, note, request.engine)
    head = base if request.head == request.base else resolve(request.head, note, request.engine)
    return base.importing(request.base_plugins), head.importing(request.plugins)


def _tell_github(gate: Gate) -> list[str]:
    """Add the gate to the summary of the GitHub step, and return the lines that mark its findings; none elsewhere."""
    if not os.environ.get("GITHUB_ACTIONS"):
        return []
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with files.write_errors(Path(summary)), open(summary, "a", encoding="utf-8") as file:
            file.write(step_summary(gate))
    return workflow_commands(gate)


def write(directory: Path, gate: Gate) -> Path:
    """Write all files of the gate into `directory` and return the path of the page."""
    files.write_json(directory / "gate.json", dump(gate))
    return html_page.write(directory, "gate", document(gate))


def step_summary(gate: Gate) -> str:
    """Return the summary of a GitHub step: what gate.md says, as far as GitHub takes it."""
    text = markdown(document(gate, drawn=False))
    return text.encode()[:LARGEST_SUMMARY].decode(errors="ignore")


def workflow_commands(gate: Gate) -> list[str]:
    """Return `::error` and `::warning`, one for each finding that fails or is inconclusive.

    See docs.github.com, "Workflow commands for GitHub Actions". GitHub shows ten of each kind per step.
    """
    lines = []
    for finding in gate.findings:
        if finding.level in COMMANDS:
            title = _property(listed(filter(None, (f"mtbench gate: {finding.kind}", finding.cell))))
            lines.append(printable(f"::{COMMANDS[finding.level]} title={title}::{_data(finding.text)}"))
    return lines


def _data(text: str) -> str:
    """Return the message of a workflow command (escapeData of actions/toolkit, packages/core/src/command.ts)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return a property of a workflow command (escapeProperty, ibid.)."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


EXPERIMENT = GateExperiment()
CALIBRATE = CalibrateExperiment()
