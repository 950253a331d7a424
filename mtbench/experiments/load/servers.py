"""Servers of a load: `mtbench serve` or a serving engine as a process of its own, or a given URL.

A server is warm before it is loaded. A third-party client sends text, so the serving engine tokenizes it.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files, plugins
from mtbench.clients.engine_server import EngineServer
from mtbench.clients.openai_client import Server, ServerError
from mtbench.clients.openai_wire import caching
from mtbench.clients.serving_engine import Serving, ServingEngine, Setting
from mtbench.decoding.arms import is_served, parse_arms
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.experiments.load.format import ArmPlan, LoadPlan, LoadRequest
from mtbench.experiments.load.planning import run_request, sampling_fields
from mtbench.lineup.lineup import Lineup
from mtbench.measure.model_pool import threads_for
from mtbench.models import families
from mtbench.models.auto import parameters, resolve_device
from mtbench.options import AUTO
from mtbench.options.engine_options import PREFIX_CACHE, words_of
from mtbench.options.fields import as_words
from mtbench.serving.engine import MtbenchServe

OF_SERVERS = ("device", "max_queue", "request_timeout_s", "offline")  # options of a load that `mtbench serve` gets


class Running(NamedTuple):
    """A server that answers."""

    server: Server
    model: str
    command: list[str] | None  # that starts it; None: a given URL
    engine: str | None = None  # what serves, with its release; None: a given URL
    fields: Mapping[str, Any] = {}  # that a request needs, so that it is decoded as in a run
    prefix_cache: bool = False  # it keeps the prompts of a conversation


@contextmanager
def running(planned: LoadPlan, arm: ArmPlan, folder: Path) -> Iterator[Running]:
    """Yield the server of an arm; one that this command starts has its log in `folder` and is ended with the block.

    Raises UserError if it does not start or does not answer.
    """
    timeout_s = planned.request.request_timeout_s
    if arm.url is not None:
        with _server_errors(f"--url {arm.name}: "):
            server = Server(arm.url, arm.key_env, timeout_s, timeout_s)
            models = server.models()
        if not models:
            raise UserError(f"--url {arm.name}: {arm.url}/models does not name a model.")
        yield Running(server, models[0], None)
        return
    shutil.rmtree(folder, ignore_errors=True)
    with files.write_errors(folder):
        folder.mkdir(parents=True)
    engine, serving = _serving(planned, arm)
    log = (folder / "server.log").resolve()
    with closing(EngineServer(engine, engine.python(), serving, arm.name, log)) as started:
        with _server_errors(""):
            started.start()
        server = Server(started.url, None, timeout_s, timeout_s)
        command = [*engine.start, serving.model, *serving.setting.words, *engine.computing(serving.dtype)]
        release = f"{engine.title}, {engine.release()}"
        fields = caching(None, begins=True) if serving.prefix_cache else engine.fields
        yield Running(server, started.model, [*command, *serving.options], release, fields, serving.prefix_cache)


def _serving(planned: LoadPlan, arm: ArmPlan) -> tuple[ServingEngine, Serving]:
    request = planned.request
    [chosen] = parse_arms([str(arm.method)])
    family = families.family(planned.family, request.model, request.checkpoint)
    checkpoints = family.checkpoints(chosen.roles)
    asked = run_request(request)
    if (dtype := request.dtype) == AUTO:  # an earlier mtbench began the load
        raise UserError("the plan of this load has no dtype; start another load with `-o DIR`.")
    engine: ServingEngine
    if is_served(chosen.engine):
        engine = SERVING_ENGINES[chosen.engine]()
        method, _ = Lineup(family, asked).method(chosen)
        model, setting = engine.prepared_arm(method, checkpoints, chosen.on, dtype, offline=request.offline)
        more = words_of(arm.engine_options)
    else:
        engine = MtbenchServe("--family" if request.model is None else "--model")
        model = planned.family if request.model is None else families.absolute(request.model)
        given = {"checkpoint": {role: families.absolute(source) for role, source in request.checkpoint.items()}}
        setting = Setting(chosen.method, ("--method", str(arm.method), *as_words(given, LoadRequest)))
        more = as_words({name: getattr(request, name) for name in OF_SERVERS}, LoadRequest)
        more += ["--max-new-tokens", str(planned.max_new_tokens)]
        more += [word for file in plugins.loaded() for word in ("--plugin", file.path)]
    sizes = [parameters(source, request.offline) for source in checkpoints.values()]
    return engine, Serving(
        model=model,
        setting=setting,
        rows=request.max_num_seqs,
        positions=planned.room,
        dtype=dtype,
        threads=threads_for(resolve_device(request.device), sizes),
        options=more,
        prefix_cache=PREFIX_CACHE in arm.engine_options,
    )


def warm_up(running: Running, planned: LoadPlan) -> None:
    """Send first turns at once and wait for their answers: nothing is compiled later, and rows hold no later turns.

    Raises UserError if the server does not answer.
    """
    firsts = [item.prompt for item in planned.items if item.turn == 1]
    prompts = [firsts[place % len(firsts)] for place in range(planned.request.max_num_seqs)]
    common = {"max_tokens": planned.max_new_tokens, **running.fields, "model": running.model}
    common |= sampling_fields(planned.request, planned.request.seed)
    with _server_errors(""):
        running.server.complete([{**common, "prompt": prompt} for prompt in prompts])


@contextmanager
def _server_errors(place: str) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise UserError(f"{place}{error}.") from None
