"""The client: a program of others that sends the requests, in an environment of its own (ai-dynamo/aiperf).

The environment is made once in the cache folder. The version is pinned, because exports and formulas change.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.load.format import ClientFacts, ClientName, RequestLine
from mtbench.files import cache_home
from mtbench.programs import environments, processes
from mtbench.programs.environments import Note, Pip, installed

BEYOND_S = 300.0  # time that a client may take beyond the requests: to start, to end, to write
KEY = "<key>"  # stands for the server's key in a command
# The key is put in after the start: other users of the machine see the command line of a process.
WITH_KEY = f"""
import os, runpy, sys
variable, module, *arguments = sys.argv[1:]
sys.argv = [module, *(argument.replace({KEY!r}, os.environ[variable]) for argument in arguments)]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Sending(NamedTuple):
    """What a client is asked to send: the prompts of a point, in order."""

    url: str  # of the server, ending in /v1
    model: str
    prompts: Sequence[str]
    items: Sequence[str]
    rate: float | None  # requests per second; None: `concurrency` requests at a time
    concurrency: int | None
    poisson: bool
    seed: int
    max_new_tokens: int
    stop: Sequence[str]
    timeout_s: float
    tokenizer: Path
    key_env: str | None = None  # environment variable with the server's key
    fields: Mapping[str, Any] = {}  # of every request, for this server

    @property
    def duration_s(self) -> float:
        """The planned time of sending; 0 with a concurrency."""
        return len(self.prompts) / self.rate if self.rate else 0.0

    @property
    def body(self) -> dict[str, Any]:
        """What every request asks for."""
        stop = {"stop": list(self.stop)} if self.stop else {}
        return {"temperature": 0, "max_tokens": self.max_new_tokens, **stop, **self.fields}


@dataclass(frozen=True)
class Client:
    """A program that sends requests. `command` writes its input into a folder; `read` reads its export there."""

    name: ClientName
    version: str
    formulas: Mapping[str, str]
    command: Callable[[Path, Sending, Path], list[str]]  # its Python, what to send, folder
    read: Callable[[Sending, Path], list[RequestLine]]
    variables: Mapping[str, str]

    @property
    def label(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"

    @property
    def facts(self) -> ClientFacts:
        """What load.json says about it."""
        return ClientFacts(name=self.name, version=self.version, formulas=dict(self.formulas))

    def python(self, note: Note, *, offline: bool = False) -> Path:
        """Return a Python that has the client, which is installed if it is not there. Raises UserError if it cannot."""
        folder = cache_home() / "clients" / f"{self.name}-{self.version}-{sys.implementation.cache_tag}"
        python, marker = folder / "bin" / "python", folder / environments.MARKER
        if marker.is_file() and python.exists():
            return python
        if offline:
            raise UserError(
                f"{self.label} is not installed in {folder} and --offline forbids to download it; run the command once "
                "without --offline."
            )
        return installed(folder, self.label, "", self._install, note)

    def _install(self, pip: Pip) -> None:
        pip("install", f"{self.name}=={self.version}")

    def send(self, python: Path, sending: Sending, folder: Path) -> list[RequestLine]:
        """Run the client to its end in a folder of its own; return its requests in the order of the prompts.

        Raises UserError if it fails, or takes much longer than the requests may.
        """
        with files.write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        log = folder / "client.log"
        command = self.command(python, sending, folder)
        if sending.key_env is not None:
            command = with_key(command, sending.key_env)
        variables = environments.variables(python) | dict(self.variables)
        limit_s = sending.duration_s + sending.timeout_s * (1 + len(sending.prompts) / 8) + BEYOND_S
        with processes.started(command, variables, log, folder, grace_s=5.0) as process:
            over = not processes.has_ended(process, limit_s)
        said = processes.last_line(log)
        if over:
            raise UserError(f"{self.label} did not end within {limit_s:,.0f} s: {said}. See {log}.")
        try:
            return self.read(sending, folder)
        except UserError as error:
            code = process.returncode
            reason = f"ended with exit code {code}: {said}" if code else f"{error}".rstrip(".")
            raise UserError(f"{self.label} {reason}. See {log}.") from None


def with_key(command: Sequence[str], variable: str) -> list[str]:
    """Return a command `python -m MODULE …` in which the process itself puts a variable's value in place of KEY."""
    python, _, module, *arguments = command
    return [python, "-c", WITH_KEY, variable, module, *arguments]


def outcome_of(code: Any, message: str | None) -> str:
    """Return `rejected` for an error of a full server, else `failed`."""
    full = code in (429, 503) or (code is None and any(word in (message or "") for word in ("'503 ", "'429 ")))
    return "rejected" if full else "failed"


def forwards_of(metrics: Any) -> int | None:
    """Return the forward passes that a server of mtbench says a request took; None of another server."""
    try:
        told = metrics["mtbench"]["forwards"]
    except (LookupError, TypeError):
        return None
    return told if type(told) is int and told >= 0 else None


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    files.write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
