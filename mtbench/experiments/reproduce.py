"""`mtbench reproduce`: a published table as a run. Its results compare every figure (results/publication.py)."""

from collections.abc import Collection

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from mtbench.decoding.arms import parse_arms
from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments.run import RunExperiment
from mtbench.lineup.lineup import Lineup, family_of
from mtbench.measure.worker_counts import refuse
from mtbench.plan.plan import Plan
from mtbench.plan.request import ReproduceRequest, RunRequest, RunSession
from mtbench.results.publication import PAPER, Published, names, published


class ReproduceExperiment(RunExperiment):
    """A run whose plan is a published table's, and names it. `mtbench run` resumes it."""

    command, request = "reproduce", ReproduceRequest

    def folder(self, request: RunRequest) -> str:
        """Return the table's name."""
        assert isinstance(request, ReproduceRequest)
        return request.name

    def plan(self, request: RunRequest, session: RunSession) -> Plan:
        """Return the plan of a family's rows. A row without a checkpoint does not stop the others."""
        assert isinstance(request, ReproduceRequest)
        refuse(session.workers, session.ray, request.device)
        table = published(request.name)
        settings = _settings(table, request)
        methods, missing = _entered(table, settings)
        if not (settings.method or methods):
            raise UserError(f"nothing of {table.name} can be run here: {next(iter(missing.values()))}")
        plan = super().plan(settings.changed(method=settings.method or methods), session)
        return plan.changed(publication=table.name)

    def warnings(self, planned: Plan) -> list[str]:
        """Return what a run's plan warns of, and the arms that are not run, with the reasons."""
        return [*super().warnings(planned), *_not_run(planned)]

    def dry_run(self, planned: Plan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the plan, the arms that are not run, and a time estimate."""
        for line in _not_run(planned):
            notes.say(line)
        super().dry_run(planned, given, console, notes)

    def listing(self, request: RunRequest) -> list[RenderableType]:
        """Return the published tables if none is named."""
        assert isinstance(request, ReproduceRequest)
        return [] if request.name else [_tables()]


def _settings(table: Published, request: ReproduceRequest) -> RunRequest:
    """Return the request of the run: the table's settings, and what this request gives in their place."""
    given = {name: getattr(request, name) for name in request.model_fields_set if name != "name"}
    if not {"family", "model", "weights"} & given.keys():
        if len(table.families) > 1:
            raise UserError(f"{table.name} has several families; give `--family` {' or '.join(table.families)}.")
        given["family"] = next(iter(table.families))
    of_family = table.families.get(given.get("family", ""), {})
    own = {
        "suite": tuple(dict.fromkeys(benchmark.suite for benchmark in table.benchmarks.values())),
        "engine": (table.plan.engine,),
        "batch_size": tuple(table.plan.batch_sizes),
        "limit": table.plan.limit,
        "rounds": table.plan.rounds,
        "max_new_tokens": table.setup.max_new_tokens,
        **({} if given.get("sampling_source") == "model" else table.plan.of_sampling),
        "chat_template_kwargs": table.plan.chat_template_kwargs,
        "protocol": PAPER,
    }
    return RunRequest(**own | given | {"checkpoint": {**of_family, **request.checkpoint}})


def _entered(table: Published, request: RunRequest) -> tuple[list[str], dict[str, str]]:
    lineup, methods, missing = Lineup(family_of(request, request.suite[0]), request), list[str](), dict[str, str]()
    for spec in table.specs(request.family):
        try:
            lineup.entrant(parse_arms([spec], request.engine)[0])
            methods.append(spec)
        except UserError as error:
            missing[spec] = str(error)
    return methods, missing


def _not_run(planned: Plan) -> list[str]:
    missing = _entered(published(planned.publication or ""), planned.request)[1]
    return [f"not run: {spec}: {why}" for spec, why in missing.items()]


def _tables() -> Table:
    """Return the published tables: what they are, and whose checkpoints they run."""
    table = Table("name", "what it is", "families")
    for name in names():
        known = published(name)
        table.add_row(*map(escape, (name, known.what, "\n".join(known.families))))
        table.add_section()
    table.caption = "any table with a small model: mtbench reproduce NAME --family tiny --suite arithmetic --limit 8"
    return table


EXPERIMENT = ReproduceExperiment()
