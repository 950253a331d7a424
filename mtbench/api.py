"""The library: the functions do what the commands do, `mtbench.read` reads a run's results.

import mtbench

results = mtbench.run(method=["ar", "ar:on=mars", "mars:tau=0.9"], limit=100, batch_size=8)
results.to_frame()[["arm", "tokens_per_s", "speedup.value", "speedup.baseline"]]
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mtbench import plugins, records
from mtbench.document.console import Terminal
from mtbench.errors import UserError, unknown
from mtbench.experiments import experiment as frame
from mtbench.experiments.experiment import Job
from mtbench.experiments.registry import experiment_of, records_of
from mtbench.hardware.machine import choose_waiting
from mtbench.options.fields import argument_of, as_words, fields_of, read_options
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine, Readings, Scores, StoredReading
from mtbench.plan.run import Run
from mtbench.programs import processes
from mtbench.records import dump, flat
from mtbench.results.format import Results as ResultsRecord

NESTED = ("options", "checkpoints", "task", "simulated", "commit_histogram", "unread")  # cell keys that stay objects
NO_COLUMN = ("prompt_ids",)
OF_COMMANDS = {"json_to", "dry_run", "fail_on"}  # options that print, or end a process


@dataclass(frozen=True)
class Results:
    """The results of a run.

    `directory` has its files, `report.html` among them; `record` is results.json.
    """

    directory: Path
    record: Mapping[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per cell. Columns of nested values have dots: `accuracy.value`, `accuracy.ci_low`.

        `speedup.*` is the speedup over `speedup.baseline`, the first baseline: `ar` on the same checkpoint if the run
        has it. `record` has the other baselines.
        """
        return pd.DataFrame([_row(cell) for cell in self.record["cells"]])

    def items(self) -> pd.DataFrame:
        """Return one row per item and arm: the answer, its counts and its score (NaN: not scored), in both readings."""
        run = RunDirectory(self.directory)
        scores = run.read("scores.json", Scores).root if run.has("scores.json") else {}
        readings = run.read("readings.json", Readings).root if run.has("readings.json") else {}
        rows = []
        for cell in self.record["cells"]:
            of_cell = {name: cell[name] for name in ("cell", "suite", "arm", "batch_size", "batching")}
            for line in run.read_lines(f"generations/{cell['cell']}.jsonl", GenerationLine):
                generated = {name: value for name, value in dump(line).items() if name not in NO_COLUMN}
                score = scores.get(cell["cell"], {}).get(line.item)
                read = readings.get(cell["cell"], {}).get(line.item, StoredReading())
                other = {"score": score, "unread": read.unread, "by_value": read.by_value}
                rows.append({**of_cell, **generated, "tokens": len(line.token_ids), **other})
        frame = pd.DataFrame(rows)
        return frame.astype({"score": float, "by_value": float}) if rows else frame


@dataclass(frozen=True)
class Chosen:
    """The decision of a race.

    `decision` is decision.json: its `headline` says what to use. `results` are those of the run that the race is.
    """

    decision: Mapping[str, Any]
    results: Results


@dataclass(frozen=True)
class Found:
    """The findings of a gate, load or audit. `record` is its JSON file; `directory` has its page."""

    directory: Path
    record: Mapping[str, Any]


def run(*, progress: bool = False, **given: Any) -> Results:
    """Compare arms as `mtbench run` does: plan, generate, score and report. Return the results.

    The arguments of this and the other functions are the options of the command, with underscores: `method`, `suite`,
    `limit`, `batch_size`, … A single value may stand for a list, a text for a value as on the command line: "30m" is a
    time, a number is in seconds; `limit="all"` runs all items. `checkpoint` maps roles to paths. `out` is the
    directory; `resume` runs its missing parts. `plugin` names files that register methods, suites or
    engines; one that changed is imported again. `progress` shows progress on standard error. Limits of the verdicts
    (too few blocks) are Python warnings.

    Raises UserError for a mistake. A failed cell is no error: its `status` is `failed`.
    """
    job, results = _carry_out("run", given, progress=progress)
    return Results(job.path, records.dump(results))


def choose(*, progress: bool = False, **given: Any) -> Chosen:
    """Choose a method by a race, as `mtbench choose` does. Return its decision and its results.

    A race that the time budget ended is no error: `decision["complete"]` is false.
    """
    job, decided = _carry_out("choose", given, progress=progress)
    return Chosen(records.dump(decided.decision), Results(job.path, records.dump(decided.results)))


def gate(*, progress: bool = False, **given: Any) -> Found:
    """Compare two builds as `mtbench gate` does. Return gate.json; its `word` is PASS, FAIL or INCONCLUSIVE."""
    job, gate = _carry_out("gate", given, progress=progress)
    return Found(job.path, records.dump(gate))


def load(*, progress: bool = False, **given: Any) -> Found:
    """Load servers as `mtbench load` does. Return load.json; `complete` is false if the time budget ended it."""
    job, load = _carry_out("load", given, progress=progress)
    return Found(job.path, records.dump(load))


def reproduce(name: str, *, progress: bool = False, **given: Any) -> Results:
    """Run a published table as `mtbench reproduce` does. `record["publication"]` has every figure beside ours."""
    job, reproduction = _carry_out("reproduce", {"name": name} | given, progress=progress)
    return Results(job.path, records.dump(reproduction))


def audit(a: str | Path, b: str | Path, *, progress: bool = False, **given: Any) -> Found:
    """Explain why the answers of B differ from those of A, as `mtbench audit` does. Return audit.json.

    `explained` is true if every difference is explained and none is a fault.
    """
    job, audit = _carry_out("audit", {"a": str(a), "b": str(b)} | given, progress=progress)
    return Found(job.path, records.dump(audit))


def read(directory: str | Path) -> Results:
    """Return the results in a run directory. Raises UserError if it has none."""
    run_directory = RunDirectory(Path(directory))
    if not run_directory.has("results.json"):
        command = "run" if Run.open(RunDirectory.open(run_directory.path, "run")).race is None else "choose"
        raise UserError(
            f"{str(directory)!r} holds no results.json; finish it with `mtbench {command} -o {directory} --resume`."
        )
    advice = f"make it again with `mtbench report {directory}`."
    try:
        results = records.read_json(run_directory.path / "results.json", ResultsRecord, advice)
    except UserError:
        Run.open(RunDirectory.open(run_directory.path))  # what this raises, `mtbench report` would raise
        raise
    return Results(Path(directory), records.dump(results))


def _carry_out(name: str, given: Mapping[str, Any], *, progress: bool) -> tuple[Job[Any, Any], Any]:
    choose_waiting()
    processes.name_command()
    request, session = records_of(name)
    options, of_call = _sorted_out(name, given, request, session)
    this_call = read_options(of_call, session, f"mtbench {name} --help")
    files = tuple(plugins.load_file(file).path for file in this_call.plugin)
    this_call = this_call.changed(plugin=files) if files else this_call
    experiment, console = experiment_of(name), Terminal(stderr=True, quiet=not progress)
    read = read_options(options, request, f"mtbench {name} --help")
    words = as_words({field: getattr(read, field) for field in options}, request)
    argv = ["mtbench", name, *words, *as_words({"plugin": files}, session)]
    job = frame.begin(experiment, options, this_call, console, lambda text: warnings.warn(text, stacklevel=5), argv)
    return job, frame.carry_out(experiment, job)


def _sorted_out(
    name: str, given: Mapping[str, Any], request: type[records.Record], session: type[records.Record]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given options by the fields of the request and of the session. Raises UserError for others."""
    fields = {argument: (kind, field) for kind in (session, request) for argument, field in _arguments(kind).items()}
    options: dict[str, Any] = {}
    of_call: dict[str, Any] = {}
    for argument, value in given.items():
        if argument not in fields:
            raise unknown(f"option of mtbench.{name}", argument, fields, f"help(mtbench.{name})")
        kind, field = fields[argument]
        (options if kind is request else of_call)[field] = value
    return options, of_call


def _arguments(kind: type[records.Record]) -> dict[str, str]:
    fields = fields_of(kind).items()
    return {argument_of(name, field): name for name, field in fields if name not in OF_COMMANDS}


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell as one row. Only the first speedup of the lists has columns. `unread`: the number of answers."""
    row: dict[str, Any] = {}
    for name, value in cell.items():
        if name == "speedup":
            row |= flat({name: value[0] if value else {"value": None, "baseline": None}})
        elif isinstance(value, dict) and name not in NESTED:
            row |= flat({name: value})
        else:
            row[name] = value
    return row | {"unread": cell.get("unread", {"answers": 0})["answers"] if cell["accuracy"] else None}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with every option and its default, for `help`."""
    shown = inspect.signature(function)
    own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    for kind in records_of(function.__name__):
        for argument, field in _arguments(kind).items():
            default = kind.model_fields[field].get_default(call_default_factory=True)
            if argument not in names:
                own.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, default=default))
    return shown.replace(parameters=own)


_functions: list[Callable[..., Any]] = [run, choose, gate, load, reproduce, audit]
for _function in _functions:
    _function.__signature__ = _signature(_function)  # type: ignore[attr-defined]
