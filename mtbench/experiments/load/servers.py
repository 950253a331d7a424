"""Servers of a load: `mtbench serve` or a serving engine as a process of its own, or a given URL.

A server is warm before it is loaded. A client of others sends text, so a serving engine makes tokens of it itself.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files, plugins
from mtbench.clients.engine_server import EngineServer
from mtbench.clients.openai_client import Server, ServerError
from mtbench.clients.serving_engine import Serving
from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.experiments.load.format import ArmPlan, LoadPlan, LoadRequest
from mtbench.experiments.load.planning import run_request
from mtbench.models import families
from mtbench.options import build
from mtbench.programs import processes
from mtbench.runs import options
from mtbench.runs.model_pool import fastest_dtype, parameters, resolve_device, threads_for

READY_S = 1800.0  # time in which a server must answer: a large checkpoint is loaded, kernels are compiled
DRAIN_S = 30.0  # time in which it must end
LOOK_S = 0.1
# Options of a load that its servers get.
OF_SERVERS = ("checkpoint", "dtype", "device", "max_num_seqs", "max_queue", "request_timeout_s", "offline")


class Running(NamedTuple):
    """A server that answers."""

    server: Server
    model: str
    command: list[str] | None  # arguments of mtbench, or the engine's own command; None: a given URL
    engine: str | None = None  # serving engine and its package
    fields: Mapping[str, Any] = {}  # that a request needs, so that it is decoded as in a run


def command(planned: LoadPlan, arm: ArmPlan, folder: Path) -> list[str]:
    """Return the arguments of mtbench that serve an arm."""
    assert arm.method is not None
    request = planned.request
    given: dict[str, Any] = {name: getattr(request, name) for name in OF_SERVERS}
    given |= {"model": request.model} if request.model else {"family": planned.family}
    return [
        *("serve", "--method", arm.method, *options.words(given, LoadRequest)),
        *("--max-length", str(planned.room), "--max-new-tokens", str(planned.max_new_tokens)),
        *("--port", "0", "--ready-file", str((folder / "ready.json").resolve())),
        *(word for file in plugins.loaded() for word in ("--plugin", file.path)),
    ]


@contextmanager
def running(planned: LoadPlan, arm: ArmPlan, folder: Path) -> Iterator[Running]:
    """Yield the server of an arm; one of ours is started in `folder` and ended with the block.

    Raises UserError if it does not come up or does not answer.
    """
    timeout_s = planned.request.request_timeout_s
    if arm.url is not None:
        with _said_of(f"--url {arm.name}: "):
            server = Server(arm.url, arm.key_env, timeout_s, timeout_s)
            models = server.models()
        if not models:
            raise UserError(f"--url {arm.name}: {arm.url}/models does not name a model.")
        yield Running(server, models[0], None)
        return
    shutil.rmtree(folder, ignore_errors=True)
    with files.write_errors(folder):
        folder.mkdir(parents=True)
    if arm.engine is not None:
        with _of_engine(planned, arm, folder / "server.log") as started:
            yield started
        return
    arguments, log, ready = command(planned, arm, folder), folder / "server.log", folder / "ready.json"
    called = [sys.executable, "-m", "mtbench", *arguments]
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    with processes.started(called, variables, log, Path.cwd(), grace_s=DRAIN_S) as process:
        deadline = time.monotonic() + READY_S
        while not ready.is_file():
            if processes.has_ended(process) or time.monotonic() > deadline:
                said = processes.last_line(log) or "it said nothing"
                raise UserError(f"the server of {arm.name!r} did not come up: {said}. See {log}.")
            time.sleep(LOOK_S)
        told = json.loads(files.read_bytes(ready))
        yield Running(Server(told["url"], None, timeout_s, timeout_s), told["model"], arguments)


@contextmanager
def _of_engine(planned: LoadPlan, arm: ArmPlan, log: Path) -> Iterator[Running]:
    """Yield the server of a serving engine; end it with the block."""
    request, engine = planned.request, SERVING_ENGINES[str(arm.engine)]()
    [chosen] = parse_arms([str(arm.method)])
    family = families.family(planned.family, request.model, request.checkpoint)
    method, _ = build(METHODS[chosen.method], chosen.options, family.training(chosen.on))
    checkpoints = family.checkpoints(chosen.roles)
    dtype = fastest_dtype(run_request(planned), checkpoints.values())
    model, setting = engine.prepared_arm(method, checkpoints, chosen.on, dtype, offline=request.offline)
    sizes = [parameters(source, request.offline) for source in checkpoints.values()]
    serving = Serving(
        model=model,
        setting=setting,
        rows=request.max_num_seqs,
        positions=planned.room,
        dtype=dtype,
        threads=threads_for(resolve_device(request.device), sizes),
        options=engine.own_options(request.engine_option),
    )
    with closing(EngineServer(engine, engine.python(), serving, arm.name, log.resolve())) as started:
        with _said_of(""):
            started.start()
        server = Server(started.url, None, request.request_timeout_s, request.request_timeout_s)
        words = [*engine.start, serving.model, *setting.words, *engine.computing(dtype), *serving.options]
        yield Running(server, started.model, words, f"{engine.title}, {engine.release()}", engine.fields)


def warm_up(running: Running, prompts: Sequence[str], body: Mapping[str, Any]) -> None:
    """Send prompts at once and wait for their answers, so that nothing is compiled while it is measured.

    Raises UserError if the server does not answer.
    """
    with _said_of(""):
        common = {**body, **running.fields, "model": running.model}
        running.server.complete([{**common, "prompt": prompt} for prompt in prompts])


@contextmanager
def _said_of(place: str) -> Iterator[None]:
    """Turn a ServerError into a UserError."""
    try:
        yield
    except ServerError as error:
        raise UserError(f"{place}{error}.") from None
