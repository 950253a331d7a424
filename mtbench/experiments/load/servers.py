"""Servers of a load: `mtbench serve` as a process of its own, or a given URL. A server is warm before it is loaded."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from mtbench import files, plugins
from mtbench.errors import UserError, first_line
from mtbench.experiments.load.format import ArmPlan, LoadPlan
from mtbench.programs import processes

READY_S = 1800.0  # time in which a server must answer: a large checkpoint is loaded, kernels are compiled
DRAIN_S = 30.0  # time in which it must end
ASK_S = 10.0  # time in which a given server must name its model
LOOK_S = 0.1
KEY = re.compile(r"[!#-\[\]-~]+")  # visible ASCII without quote and backslash, which JSON would escape


class Server(NamedTuple):
    """A server that answers."""

    url: str
    model: str
    command: list[str] | None  # arguments of mtbench; None: a given URL
    key_env: str | None = None  # environment variable with the key that it wants

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request needs."""
        return {} if self.key_env is None else {"Authorization": f"Bearer {key_in(self.key_env)}"}


def key_in(variable: str) -> str:
    """Return the key in an environment variable. Raises UserError, without it, if it is not set or cannot be sent."""
    key = os.environ.get(variable, "")
    if not KEY.fullmatch(key):
        fault = "has a space, a quote, or a character beyond ASCII" if key else "is not set"
        raise UserError(
            f"the environment variable {variable!r}, which --url names for a key, {fault}; set it to the key."
        )
    return key


def command(planned: LoadPlan, arm: ArmPlan, folder: Path) -> list[str]:
    """Return the arguments of mtbench that serve an arm."""
    request = planned.request
    assert arm.method is not None
    return [
        *("serve", "--method", arm.method, *_models(planned)),
        *(("--adaptive", arm.adaptive) if arm.adaptive else ()),
        *("--dtype", request.dtype, "--max-num-seqs", str(request.max_num_seqs), "--max-queue", str(request.max_queue)),
        *("--max-length", str(planned.room), "--max-new-tokens", str(planned.max_new_tokens)),
        *("--request-timeout", f"{request.request_timeout_s:f}s"),
        *("--port", "0", "--ready-file", str((folder / "ready.json").resolve())),
        *(("--offline",) if request.offline else ()),
        *(word for file in plugins.loaded() for word in ("--plugin", file.path)),
    ]


@contextmanager
def running(planned: LoadPlan, arm: ArmPlan, folder: Path) -> Iterator[Server]:
    """Yield the server of an arm; one of ours is started in `folder` and ended with the block.

    Raises UserError if it does not come up or does not answer.
    """
    if arm.url is not None:
        given = Server(arm.url, "", None, arm.key_env)
        yield given._replace(model=_model_at(arm.name, given))
        return
    shutil.rmtree(folder, ignore_errors=True)
    with files.write_errors(folder):
        folder.mkdir(parents=True)
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
        yield Server(told["url"], told["model"], arguments)


def warm_up(server: Server, prompts: Sequence[str], body: Mapping[str, Any], timeout_s: float) -> None:
    """Send prompts side by side and wait for their answers, so that nothing is compiled while it is measured.

    Raises UserError if the server does not answer.
    """

    headers = server.headers

    def ask(prompt: str) -> None:
        fields = {**body, "model": server.model, "prompt": prompt}
        answer = httpx.post(
            f"{server.url}/completions", json=fields, headers=headers, timeout=timeout_s, trust_env=False
        )
        answer.raise_for_status()

    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(ask, prompts))
    except httpx.HTTPStatusError as error:
        raise UserError(f"{server.url} refused a request: {error.response.text[:200].strip()}") from None
    except httpx.HTTPError as error:
        raise UserError(f"{server.url} does not answer: {first_line(error)}.") from None


def _models(planned: LoadPlan) -> list[str]:
    request = planned.request
    named = ["--model", request.model] if request.model else ["--family", planned.family]
    for role, path in request.checkpoint.items():
        named += ["--checkpoint", f"{role}={path}"]
    return named + (["--device", request.device] if request.device != "auto" else [])


def _model_at(name: str, server: Server) -> str:
    """Return the first model that a server names."""
    url, headers = server.url, server.headers
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=ASK_S, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"--url {name}: {url}/models does not name a model: {first_line(error)}.") from None
