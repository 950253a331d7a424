"""What `mtbench reproduce` does and prints."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from mtbench.cli import session
from mtbench.cli.request_options import absolute, checkpoints, whole_numbers
from mtbench.cli.session import err, out, say, warn
from mtbench.cli.stages import show_estimate
from mtbench.errors import UserError
from mtbench.experiments.reproduce import page, rerun
from mtbench.experiments.reproduce.compare import compare
from mtbench.experiments.reproduce.format import Published, ReproduceRequest
from mtbench.experiments.reproduce.rerun import Part
from mtbench.records import dump
from mtbench.report.progress import RunProgress
from mtbench.report.terminal import plan_table
from mtbench.runs.directory import RunDirectory, new_directory, refuse_used
from mtbench.runs.lifecycle import changed, check
from mtbench.runs.run_request import Execution

PER_EXECUTION = {"offline", "data_dir", "allow_unsandboxed_code"}  # `--resume` may change them


class Started(NamedTuple):
    """A reproduction on disk."""

    directory: Path
    asked: ReproduceRequest
    parts: list[Part]


def start(directory: Path | None, params: Mapping[str, Any]) -> Started:
    """Plan a reproduction and write its plans. Nothing is written if the options are wrong."""
    folder = directory or new_directory(params["name"])
    asked, _, parts = _plan(params, folder)
    rerun.begin(folder, asked, parts, sys.argv)
    session.started.append(folder)
    return Started(folder, asked, parts)


def dry_run(params: Mapping[str, Any]) -> None:
    """Print the plans and time estimates."""
    _, table, parts = _plan(params, params["directory"])
    for part in parts:
        if part.plan is not None:
            say(f"{table.name}, {part.family}")
            out.print(plan_table(part.plan))
            show_estimate(part.plan, f"{part.family}: ")
    _print_skipped(parts)


def _plan(params: Mapping[str, Any], folder: Path | None) -> tuple[ReproduceRequest, Published, list[Part]]:
    check(Execution(workers=params["workers"], ray=params["ray"]), params["device"])
    asked, table = _asked(params), rerun.published(params["name"])
    if folder is not None:
        refuse_used(folder, "reproduce")
    return asked, table, rerun.lay_out(table, asked)


def _asked(params: Mapping[str, Any]) -> ReproduceRequest:
    """Return the request that the options make. Raises UserError for text that cannot be read."""
    batch_size = params["batch_size"]
    values = {name: params[name] for name in ReproduceRequest.model_fields}
    values |= {
        "checkpoint": checkpoints(params["checkpoint"]),
        "batch_size": None if batch_size is None else whole_numbers(batch_size),
        "data_dir": absolute(params["data_dir"]),
    }
    if values["protocol"] is None:
        del values["protocol"]
    return ReproduceRequest(**values)


def resume(directory: Path, params: Mapping[str, Any], given: Collection[str]) -> Started:
    """Open the reproduction in `directory`; the `given` options must agree with its own."""
    if rerun.clear_unplanned(directory, params["name"] is not None):
        return start(directory, params)
    stored, parts = rerun.reopen(directory)
    if params["name"] not in (None, stored.name):
        raise UserError(f"{str(directory)!r} holds {stored.name!r}, not {params['name']!r}; leave out the name.")
    asked = _asked({**params, "name": stored.name})
    before, now = dump(stored), dump(asked)
    for name in changed(before, now, (before.keys() & set(given)) - PER_EXECUTION - {"name"}):
        raise UserError(
            f"the reproduction in {str(directory)!r} has {name}={before[name]!r}, not {now[name]!r}; resume it with "
            f"`mtbench reproduce -o {directory} --resume`, or start another one in a new directory."
        )
    session.started.append(directory)
    return Started(directory, stored.changed(**{name: getattr(asked, name) for name in PER_EXECUTION}), parts)


def finish(started: Started, workers: int | None, ray: str | None) -> bool:
    """Run what is missing; print the figures, then the page's path as the last line. Return whether nothing failed.

    A family that cannot be run does not stop the others. Raises UserError if none can be run.
    """
    with RunDirectory(started.directory).locked():
        return _finish(started, workers, ray)


def _finish(started: Started, workers: int | None, ray: str | None) -> bool:
    folder, asked, parts = started
    _print_skipped(parts)
    errors: list[UserError] = []
    planned = [part for part in parts if part.plan is not None]
    for part in planned:
        try:
            with RunProgress(err) as progress:
                rerun.run(folder, part, asked, progress, workers, ray)
        except UserError as error:
            errors.append(error)
            warn(f"{part.family} could not be run: {error}")
    if len(errors) == len(planned):
        raise errors[0]
    result = compare(rerun.published(asked.name), asked, parts, folder)
    written = page.write(folder, result)
    out.print(page.terminal_table(result))
    say(written)
    return not errors and not any("failed: " in figure.why for figure in result.figures)


def _print_skipped(parts: list[Part]) -> None:
    """Print the parts that are not run, with the reason."""
    for part in parts:
        for skipped, why in (*part.missing.items(), *part.closed.items()):
            warn(f"not run: {part.family}, {skipped}: {why}")


def list_tables() -> None:
    """Print the published tables: what they are, what they run and what they need."""
    table = Table("name", "what it is", "runs", "needs")
    for name in rerun.names():
        known = rerun.published(name)
        needs = ", ".join(_needs(known)) or "–"
        table.add_row(*map(escape, (name, known.what, "\n".join(_runs(known)), needs)))
        table.add_section()
    table.caption = "any table with a small model: mtbench reproduce NAME --family tiny --suite arithmetic --limit 8"
    out.print(table)


def _runs(table: Published) -> list[str]:
    lines = []
    for family in table.families:
        arms = rerun.specs_of([row for row in table.rows if row.family == family])
        lines.append(f"{family}: {len({*table.plan.beside, *arms})} arms")
    suites = [benchmark.suite for benchmark in table.benchmarks.values()]
    lines.append(f"{len(suites)} suites" if len(suites) > 1 else suites[0])
    return lines


def _needs(table: Published) -> list[str]:
    needs = [f"--checkpoint {role}=…" for role in rerun.not_released(table)]
    if any("speedup" in row.figures for row in table.rows):
        needs.append("a GPU, for times")
    return needs
