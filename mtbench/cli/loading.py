"""What `mtbench load` does with its options, and what it prints."""

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from mtbench import plugins, records
from mtbench.cli import session
from mtbench.cli.request_options import absolute, checkpoints
from mtbench.cli.session import warn
from mtbench.errors import UserError, unknown
from mtbench.experiments.load import arms, page, planning
from mtbench.experiments.load.format import CLIENTS as CLIENT_NAMES
from mtbench.experiments.load.format import Load, LoadPlan, LoadRequest, Slo
from mtbench.experiments.load.registry import CLIENTS
from mtbench.experiments.load.runner import PLAN, LoadRun
from mtbench.experiments.load.summary import summarise
from mtbench.hardware import machine
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory, new_directory, refuse_used
from mtbench.runs.run_request import latency_limits, seconds

HELP = "see `mtbench load --help`."
LIMITS = {"ttft": "ttft_s", "itl": "itl_s", "e2e": "e2e_s"}


def request_of(params: Mapping[str, Any]) -> LoadRequest:
    """Return the request that the options make. Raises UserError for a value that is not allowed."""
    if params["client"] not in CLIENT_NAMES:
        raise unknown("client", params["client"], CLIENT_NAMES, "mtbench load --help")
    urls, keys = arms.parse_urls(params["url"])
    fields = {name: params[name] for name in LoadRequest.model_fields if name in params} | {
        "url": urls,
        "key_env": keys,
        "checkpoint": checkpoints(params["checkpoint"]),
        "request_rate": numbers(params["request_rate"], "--request-rate", float),
        "concurrency": numbers(params["concurrency"], "--concurrency", int),
        "duration_s": seconds(params["duration"], "--duration"),
        "request_timeout_s": seconds(params["request_timeout"], "--request-timeout"),
        "slo": Slo(**{LIMITS[name]: s for name, s in latency_limits(params["slo"], LIMITS).items()}),
        "data_dir": absolute(params["data_dir"]),
    }
    return records.validate(fields, LoadRequest, "the options", HELP)


def numbers(text: str | None, name: str, kind: type[int] | type[float]) -> list[Any]:
    """Return the numbers in text such as 1,2,4. Raises UserError unless all are finite and positive."""
    if text is None:
        return []
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise UserError(f"{name} {text!r} is not allowed; give positive numbers, such as 1,2,4.")
    return values


def dry_run(request: LoadRequest, directory: Path | None) -> list[RenderableType]:
    """Return the plan as tables. Nothing is written."""
    if directory is not None:
        refuse_used(directory, "load")
    return page.plan_tables(planning.plan(request))


def begin(request: LoadRequest, directory: Path | None) -> RunDirectory:
    """Plan a load in a new directory. Raises UserError if something is in it, or for a request that cannot run."""
    path = directory or new_directory("load")
    refuse_used(path, "load")
    planned = planning.plan(request)
    run = RunDirectory.create(path)
    with run.locked():
        refuse_used(path, "load")
        run.write_json("environment.json", machine.environment(sys.argv))
        run.write_json(PLAN, dump(planned), indent=None)
    return run


def reopen(directory: Path) -> RunDirectory:
    """Return the load in a directory. Raises UserError if there is none."""
    if not os.path.isfile(directory / PLAN):
        raise UserError(f"{str(directory)!r} holds no load: it has no {PLAN}. Start one without --resume.")
    return RunDirectory.open(directory)


def run(opened: RunDirectory, client_python: Path | None, budget_s: float | None, urls: Sequence[str]) -> Load:
    """Run the points that are missing, score the answers, write load.json and the page.

    `urls`: servers that this command names. A key is sent to no other server: the plan is untrusted input.
    """
    deadline = float("inf") if budget_s is None else time.monotonic() + budget_s
    planned = opened.read(PLAN, LoadPlan)
    plugins.refuse_missing(planned.plugins)
    _refuse_other_keys(planned, urls)
    client = CLIENTS[planned.request.client]
    session.started.append(opened.path)
    with opened.locked():
        load = LoadRun(opened, planned, client, warn)
        if load.missing():
            load.send(client.python(client_python, warn, offline=planned.request.offline), deadline)
        load.score()
        found = summarise(opened, planned, client)
        page.write(opened, found)
    return found


def _refuse_other_keys(planned: LoadPlan, urls: Sequence[str]) -> None:
    named, keys = arms.parse_urls(urls)
    for name, url in named.items():
        if planned.request.url.get(name) != url:
            raise UserError(f"a load goes on as it began, and --url {name}={url} is no server of it; leave it out.")
    for arm in planned.arms:
        if arm.key_env is not None and (named.get(arm.name), keys.get(arm.name)) != (arm.url, arm.key_env):
            given = shlex.quote(f"{arm.name}={arm.url}={arm.key_env}")
            raise UserError(
                f"the plan sends the key in {arm.key_env!r} to {arm.url}, which this command does not name; if you "
                f"trust it, add `--url {given}`."
            )
