"""`mtbench gate`: two builds on one machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mtbench import files, plugins, records
from mtbench.decoding.arms import is_served
from mtbench.document import html_page
from mtbench.document.console import Terminal
from mtbench.document.terminal import show
from mtbench.errors import UserError
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.gate.builds import Build, resolve
from mtbench.experiments.gate.document import document
from mtbench.experiments.gate.format import EXIT_CODES, SCHEMA_VERSION, Gate, GatePlan, GateRequest
from mtbench.experiments.gate.request import ENV, GateOptions, GateSession
from mtbench.experiments.gate.stages import FILE, GateRun
from mtbench.options import texts
from mtbench.options.fields import as_words
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import PlanRequest
from mtbench.records import dump

PLANNED = PlanRequest.model_fields.keys()


class GateExperiment(Experiment[GateOptions, GateSession, GatePlan, Gate]):
    """Stages `comparable`, `exact` and `timed` of two builds."""

    command, begun_by, result, page = "gate", "request.json", FILE, "gate.html"
    request, session = GateOptions, GateSession

    def plan(self, request: GateOptions, session: GateSession) -> GatePlan:
        """Return the options, and what both builds get."""
        if request.base is None:
            raise UserError(f"--base is missing; give {ENV}, such as `mtbench gate --base git:main`.")
        same = {name: getattr(request, name) for name in GateRequest.model_fields if name in GateOptions.model_fields}
        same["engine"] = next(filter(is_served, request.engine), None)
        resolved = GateRequest(**same, plan_arguments=_plan_arguments(request), plugins=[*session.plugin])
        return GatePlan(schema_version=SCHEMA_VERSION, request=request, resolved=resolved)

    def begin(self, directory: RunDirectory, planned: GatePlan, argv: Sequence[str]) -> None:
        """Write the request."""
        directory.write_json(self.begun_by, dump(planned))

    def stored(self, directory: Path) -> GatePlan:
        """Return the request."""
        return records.read_json(directory / self.begun_by, GatePlan, "start another gate with `mtbench gate -o DIR`.")

    def decided(self, directory: Path) -> bool:
        """Return whether anything was decoded or decided."""
        return any((directory / name).exists() for name in (FILE, "pairs"))

    def run(self, job: Job[GateOptions, GateSession]) -> Gate:
        """Run the rest of the gate, and write its findings."""
        request = job.plan.resolved
        base, head = _builds(request, job.note)
        gate = GateRun(job.path, request, base, head, job.note, job.deadline).run()
        write(job.path, gate)
        return gate

    def show(self, job: Job[GateOptions, GateSession], found: Gate, console: Terminal) -> None:
        """Print the verdict and its reasons."""
        show(document(found), console)

    def exit_code(self, found: Gate, session: GateSession) -> int:
        """Return that of the verdict."""
        return EXIT_CODES[found.word]


def _plan_arguments(request: GateOptions) -> list[str]:
    given = {name: getattr(request, name) for name in PLANNED if name in request.model_fields_set}
    named = as_words(given, PlanRequest)
    return [*named, "--limit", texts.ALL if request.limit is None else str(request.limit)]


def _builds(request: GateRequest, note: Callable[[str], None]) -> tuple[Build, Build]:
    """Return base and head. Plugin files are imported here as well: this process reads their methods."""
    for file in request.plugins:
        plugins.load_file(file)
    named = dict.fromkeys((request.base, request.head))  # once, if they are one
    of = {env: replace(resolve(env, note, request.engine), plugins=tuple(request.plugins)) for env in named}
    return of[request.base], of[request.head]


def write(directory: Path, gate: Gate) -> Path:
    """Write all files of the gate into `directory` and return the path of the page."""
    files.write_json(directory / "gate.json", dump(gate))
    return html_page.write(directory, "gate", document(gate))


EXPERIMENT = GateExperiment()
