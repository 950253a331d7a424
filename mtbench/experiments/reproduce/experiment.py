"""`mtbench reproduce`: a published table, run again and compared figure by figure."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from mtbench.document.console import Terminal
from mtbench.document.html_page import write
from mtbench.document.terminal import show
from mtbench.errors import FAILED, UserError
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.reproduce import rerun
from mtbench.experiments.reproduce.compare import compare
from mtbench.experiments.reproduce.document import document
from mtbench.experiments.reproduce.format import Published, Reproduction
from mtbench.experiments.reproduce.request import ReproduceRequest, ReproduceSession
from mtbench.experiments.reproduce.rerun import Part
from mtbench.experiments.run import show_estimate
from mtbench.measure.worker_counts import refuse
from mtbench.plan.directory import RunDirectory
from mtbench.report.terminal import plan_table


class ReproducePlan(NamedTuple):
    """The request, its table, and a run for each family."""

    request: ReproduceRequest
    table: Published
    parts: list[Part]


class ReproduceExperiment(Experiment[ReproduceRequest, ReproduceSession, ReproducePlan, Reproduction]):
    """One run for each family of a published table."""

    command, begun_by, result, page = "reproduce", rerun.ASKED, rerun.RESULT, "reproduction.html"
    request, session = ReproduceRequest, ReproduceSession

    def folder(self, request: ReproduceRequest) -> str:
        """Return the table's name."""
        return request.name

    def plan(self, request: ReproduceRequest, session: ReproduceSession) -> ReproducePlan:
        """Return the runs. A family or an arm that cannot be run does not stop the others."""
        refuse(session.workers, session.ray, request.device)
        table = rerun.published(request.name)
        return ReproducePlan(request, table, rerun.lay_out(table, request))

    def warnings(self, planned: ReproducePlan) -> list[str]:
        """Return what is not run, with the reasons."""
        reasons = [(part.family, *why) for part in planned.parts for why in (part.missing | part.closed).items()]
        return [f"not run: {family}, {what}: {why}" for family, what, why in reasons]

    def dry_run(self, planned: ReproducePlan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the plans and time estimates."""
        for part in planned.parts:
            if part.plan is not None:
                console.say(f"{planned.table.name}, {part.family}")
                console.print(plan_table(part.plan))
                show_estimate(part.plan, console, notes, f"{part.family}: ")
        for line in self.warnings(planned):
            notes.say(line)

    def begin(self, directory: RunDirectory, planned: ReproducePlan, argv: Sequence[str]) -> None:
        """Write the runs' plans, then the request."""
        rerun.begin(directory, planned.request, planned.parts, argv)

    def stored(self, directory: Path) -> ReproducePlan:
        """Return the request and the runs."""
        request, parts = rerun.reopen(directory)
        return ReproducePlan(request, rerun.published(request.name), parts)

    def run(self, job: Job[ReproduceRequest, ReproduceSession]) -> Reproduction:
        """Run what is missing, and compare. A family that cannot be run does not stop the others.

        Raises UserError if none can be run.
        """
        _, table, parts = job.plan
        errors: list[UserError] = []
        planned = [part for part in parts if part.plan is not None]
        for part in planned:
            try:
                with job.progress() as progress:
                    rerun.run(job.path, part, job.request, progress, job.session.workers, job.session.ray)
            except UserError as error:
                errors.append(error)
                job.note(f"{part.family} could not be run: {error}")
        if len(errors) == len(planned):
            raise errors[0]
        found = compare(table, job.request, parts, job.path)
        write(job.path, "reproduction", document(found))
        return found

    def show(self, job: Job[ReproduceRequest, ReproduceSession], found: Reproduction, console: Terminal) -> None:
        """Print every figure beside ours."""
        show(document(found), console)

    def exit_code(self, found: Reproduction, session: ReproduceSession) -> int:
        """Return 0 if nothing failed."""
        return FAILED if any(figure.why.startswith("failed: ") for figure in found.figures) else 0

    def listing(self, request: ReproduceRequest) -> list[RenderableType]:
        """Return the published tables if none is named."""
        return [] if request.name else [tables()]


def tables() -> Table:
    """Return the published tables: what they are, and whose checkpoints they run."""
    table = Table("name", "what it is", "families")
    for name in rerun.names():
        known = rerun.published(name)
        table.add_row(*map(escape, (name, known.what, "\n".join(known.families))))
        table.add_section()
    table.caption = "any table with a small model: mtbench reproduce NAME --family tiny --suite arithmetic --limit 8"
    return table


EXPERIMENT = ReproduceExperiment()
