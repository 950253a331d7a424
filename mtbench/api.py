"""The library: `mtbench.run` and `mtbench.choose` do what the commands do, `mtbench.read` reads what they left.

import mtbench

results = mtbench.run(method=["ar", "ar:on=mars", "mars:tau=0.9"], limit=100, batch_size=8)
results.to_frame()[["arm", "tokens_per_s", "speedup.value", "speedup.baseline"]]
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mtbench import plugins, records
from mtbench.errors import UserError, unknown
from mtbench.experiments.choose import pipeline as race
from mtbench.experiments.choose.request import RACE_DEFAULTS, RaceRequest
from mtbench.report import pipeline
from mtbench.report.console import Terminal
from mtbench.report.progress import RunProgress
from mtbench.results.format import Results as ResultsRecord
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory
from mtbench.runs.run_request import ALL, DEFAULTS, Execution, RunRequest, default_limit, seconds

NESTED = ("options", "checkpoints", "task", "simulated", "commit_histogram")  # cell keys that stay objects in a frame
NO_COLUMN = ("prompt_ids",)


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
        """Return one row per item and arm: what was generated, its counts and its score (NaN: not scored)."""
        run = RunDirectory(self.directory)
        scores = run.read_json("scores.json") if run.has("scores.json") else {}
        rows = []
        for cell in self.record["cells"]:
            of_cell = {name: cell[name] for name in ("cell", "suite", "arm", "batch_size", "batching")}
            for line in run.lines(f"generations/{cell['cell']}.jsonl"):
                generated = {name: value for name, value in line.items() if name not in NO_COLUMN}
                score = scores.get(cell["cell"], {}).get(line["item"])
                rows.append({**of_cell, **generated, "tokens": len(line["token_ids"]), "score": score})
        frame = pd.DataFrame(rows)
        return frame.astype({"score": float}) if rows else frame


@dataclass(frozen=True)
class Chosen:
    """What a race has decided.

    `decision` is decision.json: its `headline` says what to use. `results` are those of the run that the race is.
    """

    decision: Mapping[str, Any]
    results: Results


def run(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    peak_memory: bool = False,
    server: Collection[str] = (),
    plugin: str | Path | Collection[str | Path] = (),
    progress: bool = False,
    **options: Any,
) -> Results:
    """Compare arms as `mtbench run` does: plan, generate, score and report. Return the results.

    `options` are the options of the command, with underscores: `method`, `suite`, `limit`, `batch_size`, … A single
    value may stand for a list; `checkpoint` maps roles to paths; the time budget is `time_budget_s`, in seconds.
    Without `limit`, a suite or subtask has the items of a few blocks, as for the command; `limit=None` runs all.
    `out` is the run directory, by default runs/<suite>-<time>; with `resume`, what is missing there is run. `server`
    names servers that the stored plan may ask, as URL or URL=VARIABLE; those of `method` need no naming.
    `plugin` names files that register methods or suites, as `--plugin` does; one that changed is imported again.
    `progress` shows progress on standard error. What limits the verdicts (too few blocks) is a Python warning.

    Raises UserError for a mistake. A cell that fails is no error: its `status` says so.
    """
    _load_plugins(plugin)
    request = _request(options)
    servers = {*server, *lifecycle.servers_of(request)}
    settings = Execution.of(request, workers=workers, ray=ray, peak_memory=peak_memory, servers=servers)
    lifecycle.check(settings, request.device)
    if resume and out is None:
        raise UserError("resume=True needs the run directory: mtbench.run(out=DIR, resume=True).")
    directory = lifecycle.default_directory(request) if out is None else Path(out)
    if resume and not lifecycle.clear_unplanned(directory, options):
        opened = lifecycle.reopen(directory, request, options)
    else:
        opened, plan = lifecycle.start(directory, request, sys.argv)
        for warning in plan.warnings():
            warnings.warn(warning, stacklevel=2)
    with RunProgress(Terminal(stderr=True, quiet=not progress)) as shown:
        results = pipeline.finish(opened, settings, shown)
    return Results(directory, records.dump(results))


def choose(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    time_budget: str | float | None = None,
    plugin: str | Path | Collection[str | Path] = (),
    progress: bool = False,
    **options: Any,
) -> Chosen:
    """Say which method to use, by a race, as `mtbench choose` does. Return its decision and its results.

    `options` are the options of the command, with underscores: `method`, `suite`, `batch_size`, `max_loss`, … A
    single value may stand for a list; `checkpoint` maps roles to paths. `time_budget` is "30m" or seconds.
    `out` is the run directory, by default runs/<suite>-<time>; with `resume`, the race in it goes on with its options.
    `plugin` names files that register methods or suites, as `--plugin` does; one that changed is imported again.
    `progress` shows progress on standard error. What limits the verdicts (too few blocks) is a Python warning.

    Raises UserError for a mistake. A race that the time budget ended is no error: `decision["complete"]` is false.
    """
    files = _load_plugins(plugin)
    values = _values(options, RACE_DEFAULTS, "mtbench.choose")
    request = records.validate(values, RaceRequest, "mtbench.choose", "see help(mtbench.choose).")
    budget_s = seconds(None if time_budget is None else str(time_budget))
    execution = replace(Execution.of(request.run_request(), workers=workers), time_budget_s=budget_s)
    directory = None if out is None else Path(out)
    opened = race.resume(directory, values.keys() - lifecycle.PER_EXECUTION) if resume else None
    if opened is None:
        opened, plan = race.begin(request, directory, execution, _command("choose", values | {"plugin": files}))
        for warning in race.warnings(plan):
            warnings.warn(warning, stacklevel=2)
    with RunProgress(Terminal(stderr=True, quiet=not progress)) as shown:
        results, decision = race.finish(opened, execution, shown)
    return Chosen(records.dump(decision), Results(opened.path, records.dump(results)))


def read(directory: str | Path) -> Results:
    """Return the results in a run directory. Raises UserError if it has none."""
    run_directory = RunDirectory(Path(directory))
    run_directory.refuse_links()
    if not run_directory.has("results.json"):
        RunDirectory.open(run_directory.path, "run")  # raises if it is no run directory
        command = "choose" if run_directory.has("race.json") else "run"
        raise UserError(
            f"{str(directory)!r} holds no results.json; finish it with `mtbench {command} -o {directory} --resume`."
        )
    return Results(Path(directory), records.dump(run_directory.read("results.json", ResultsRecord)))


def _load_plugins(plugin: str | Path | Collection[str | Path]) -> tuple[str, ...]:
    """Import files that register methods or suites; return their absolute paths."""
    named = (plugin,) if isinstance(plugin, str | Path) else plugin
    return tuple(plugins.load_file(file).path for file in named)


def _values(options: Mapping[str, Any], defaults: records.Record, function: str) -> dict[str, Any]:
    """Return options as the record of `defaults` takes them. Raises UserError for an unknown name."""
    known, values = type(defaults).model_fields, dict[str, Any]()
    for name, value in options.items():
        if (former := getattr(type(defaults), "FORMER", {}).get(name)) is not None:
            today = f"{former.now!r}, {former.unit}" if former.unit else repr(former.now)
            raise UserError(f"option {name!r} of {function} is now {today}; see help({function}).")
        if name not in known:
            raise unknown(f"option of {function}", name, known, f"help({function})")
        if isinstance(getattr(defaults, name), tuple) and isinstance(value, str | int):
            value = (value,)
        if isinstance(value, Path):
            value = str(value)
        values[name] = value
    return values


def _request(options: Mapping[str, Any]) -> RunRequest:
    values = _values(options, DEFAULTS, "mtbench.run")
    if values.get("limit") == ALL:
        values["limit"] = None
    request = records.validate(values, RunRequest, "mtbench.run", "see help(mtbench.run).")
    if "limit" in values:
        return request
    return request.changed(limit=default_limit(request.batch_size, request.batching))


def _command(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the command line with the same options.

    >>> _command("choose", {"batch_size": (1, 8), "method": ("a", "b"), "checkpoint": {"ar": "x"}, "offline": True})
    ['mtbench', 'choose', '--batch-size', '1,8', '--method', 'a', '--method', 'b', '--checkpoint', 'ar=x', \
'--offline']
    """
    words = ["mtbench", name]
    for option, value in values.items():
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, Mapping):
            value = tuple(f"{role}={source}" for role, source in value.items())
        if option == "batch_size":
            value = ",".join(map(str, value))
        if isinstance(value, bool | None):
            words += [flag] if value else []
        else:
            for one in value if isinstance(value, Collection) and not isinstance(value, str) else [value]:
                words += [flag, str(one)]
    return words


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell as one row. Of the lists, only the first speedup has columns."""
    row: dict[str, Any] = {}
    for name, value in cell.items():
        if name == "speedup":
            row |= _columns(name, value[0] if value else {"value": None, "baseline": None})
        elif isinstance(value, dict) and name not in NESTED:
            row |= _columns(name, value)
        else:
            row[name] = value
    return row


def _columns(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _with_options(function: Callable[..., Any], request: type[records.Record]) -> inspect.Signature:
    """Return the signature of a function with every option and its default, for `help`."""
    shown = inspect.signature(function)
    own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    return shown.replace(parameters=[*own, *inspect.signature(request).parameters.values()])


run.__signature__ = _with_options(run, RunRequest)  # type: ignore[attr-defined]
choose.__signature__ = _with_options(choose, RaceRequest)  # type: ignore[attr-defined]
