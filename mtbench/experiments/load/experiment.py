"""`mtbench load`: servers under load by a third-party client."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from mtbench import plugins, records
from mtbench.document.console import Terminal
from mtbench.document.html_page import write
from mtbench.document.terminal import show
from mtbench.errors import INCOMPLETE, UserError
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.load import planning
from mtbench.experiments.load.aiperf import Client
from mtbench.experiments.load.document import document, plan_document
from mtbench.experiments.load.format import Load, LoadPlan
from mtbench.experiments.load.request import LoadRequest, LoadSession
from mtbench.experiments.load.runner import ADVICE, PLAN, LoadRun
from mtbench.experiments.load.summary import summarise
from mtbench.hardware import machine
from mtbench.options.engine_options import refuse_engine_options
from mtbench.plan.directory import RunDirectory
from mtbench.records import dump


class LoadExperiment(Experiment[LoadRequest, LoadSession, LoadPlan, Load]):
    """Points of a client against servers, run and scored."""

    command, begun_by, result, page = "load", PLAN, "load.json", "load.html"
    request, session = LoadRequest, LoadSession

    def plan(self, request: LoadRequest, session: LoadSession) -> LoadPlan:
        """Return prompts, arms and points."""
        return planning.plan(request)

    def dry_run(self, planned: LoadPlan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the arms and the points."""
        show(plan_document(planned), console)

    def begin(self, directory: RunDirectory, planned: LoadPlan, argv: Sequence[str]) -> None:
        """Write the environment, then the plan."""
        directory.write_json("environment.json", machine.environment(argv))
        directory.write_json(PLAN, dump(planned), indent=None)

    def stored(self, directory: Path) -> LoadPlan:
        """Return the plan."""
        run = RunDirectory.open(directory, self.command)
        return records.read_json(run.path / PLAN, LoadPlan, ADVICE)

    def run(self, job: Job[LoadRequest, LoadSession]) -> Load:
        """Run the points that are missing, score the answers, write load.json and the page."""
        stored: LoadPlan = job.plan
        plugins.refuse_missing(stored.plugins)
        refuse_other_servers(stored, job.requested)
        same = {"url": stored.request.url, "key_env": stored.request.key_env}
        planned = stored.changed(request=job.request.changed(**same))
        client = Client()
        load = LoadRun(job.directory, planned, client, job.note)
        if load.missing():
            load.send(client.python(job.note, offline=planned.request.offline), job.deadline)
        load.score()
        load_results = summarise(job.directory, planned)
        job.directory.write_json(self.result, dump(load_results))
        write(job.path, "load", document(load_results))
        return load_results

    def show(self, job: Job[LoadRequest, LoadSession], load: Load, console: Terminal) -> None:
        """Print a table for each level."""
        show(document(load, drawn=False), console)

    def exit_code(self, load: Load, session: LoadSession) -> int:
        """Return 0 if every point has ended."""
        return 0 if load.complete else INCOMPLETE


def refuse_other_servers(planned: LoadPlan, named: LoadRequest) -> None:
    """Raise UserError for a server that the load does not have, or what this command does not name.

    A key is sent to no other server than this command names, and no engine gets other options: the plan is untrusted
    input.
    """
    used = {(arm.engine, option) for arm in planned.arms for option in arm.engine_options}
    refuse_engine_options(used, planned.request.engine_option, named.engine_option)
    for name, url in named.url.items():
        if planned.request.url.get(name) != url:
            raise UserError(f"a resumed load keeps its servers, and --url {name}={url} is not one; leave it out.")
    for arm in planned.arms:
        if arm.key_env is not None and (named.url.get(arm.name), named.key_env.get(arm.name)) != (arm.url, arm.key_env):
            given = shlex.quote(f"{arm.name}={arm.url}={arm.key_env}")
            raise UserError(
                f"the plan sends the key in {arm.key_env!r} to {arm.url}, which this command does not name; if you "
                f"trust it, add `--url {given}`."
            )


EXPERIMENT = LoadExperiment()
