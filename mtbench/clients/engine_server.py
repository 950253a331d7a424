"""A running server of a serving engine, for one arm. In a run it is paused while other arms decode.

It ends with this command, however that ends (mtbench/programs/processes.py).
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from mtbench.clients.openai_client import Server, ServerError
from mtbench.clients.openai_data import Reply
from mtbench.clients.serving_engine import HOST, Serving, ServingEngine
from mtbench.decoding.external import Answers, Speculation
from mtbench.decoding.request import Request
from mtbench.programs import environments, processes, supervise
from mtbench.programs.machine_share import available_memory_bytes

READY_S = 1800.0  # time in which a server must be ready: a large checkpoint is loaded, kernels are compiled
SILENCE_S = 600.0  # longest silence of a request
TOTAL_S = 3600.0  # longest request
DRAIN_S = 10.0  # time in which a server must end
LOOK_S = 0.1
GIB = 1 << 30


class LateError(ServerError):
    """A server was not ready within the time that its caller had for it."""


class EngineServer:
    """A server of one arm. It starts at the first request, and runs only while it has requests.

    Once it is started, `url` is that of its OpenAI endpoint, `model` is its name for the model, and `command` starts
    it in a shell, on a fixed port, with the whole device.
    """

    def __init__(self, engine: ServingEngine, python: Path, serving: Serving, arm: str, log: Path) -> None:
        self.engine, self.python, self.serving, self.arm, self.log = engine, python, serving, arm, log
        self.within_s = READY_S  # time in which it must be ready; less: raises LateError if it is not
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None  # of the server's processes, once it is ready

    @property
    def groups(self) -> list[int]:
        """The groups of the server's processes: one, or none while it does not run."""
        return [] if self._group is None else [self._group]

    def start(self) -> None:
        """Start the server and wait until it is ready. Raises ServerError with the end of its log."""
        self._refuse_too_large()
        port = _free_port()
        command = self.engine.started(self.python, self.serving, port)
        # The server that is deployed has the device for itself.
        self.command = shlex.join(self.engine.started(self.python, replace(self.serving, share=None)))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        group = self.log.with_suffix(f".{os.getpid()}.group")  # another command may run the same cell
        group.unlink(missing_ok=True)
        supervised = [sys.executable, "-I", "-S", supervise.__file__, str(os.getpid()), str(group), *command]
        inherited = environments.variables(self.python)
        self._process = self._stack.enter_context(
            processes.started(supervised, inherited, self.log, self.log.parent, grace_s=DRAIN_S)
        )
        self.url = f"http://{HOST}:{port}/v1"
        self._server = Server(self.url, None, SILENCE_S, TOTAL_S)
        try:
            self._wait(port, group)
            self.model = self.engine.served(self._server)
        except BaseException:
            self.close()
            raise
        finally:
            group.unlink(missing_ok=True)

    def _refuse_too_large(self) -> None:
        path, free = Path(self.serving.model), available_memory_bytes()
        weights = sum(file.stat().st_size for file in (path, *path.glob("*.safetensors")) if file.is_file())
        if self.serving.share is None and weights > free:
            raise ServerError(
                f"the server of {self.arm!r} needs {weights / GIB:.1f} GiB for its weights, and {free / GIB:.1f} GiB "
                "are free beside the servers of the other arms; run fewer arms at a time"
            )

    def close(self) -> None:
        """End the server and all its processes."""
        if self._group is not None:
            self._send(signal.SIGCONT)  # a stopped process ignores SIGTERM
            self._send(signal.SIGTERM)
            self._ended(DRAIN_S)
        self._stack.close()
        self._process = self._group = None

    def generate(self, requests: Sequence[Request], *, ignore_eos: bool) -> Answers:
        """Send requests side by side; return their answers. Raises ServerError, also if the server has ended."""
        first = self._process is None
        if first:
            self.start()
        self._send(signal.SIGCONT)
        started_at = time.perf_counter()
        try:
            replies = self.engine.complete(self._server, requests, self.model, ignore_eos=ignore_eos)
        except ServerError as error:
            if self._ended(LOOK_S):
                reason = self._last_line()
                self.close()
                raise ServerError(f"the server of {self.arm!r} ended: {reason}. See {self.log}", again=True) from None
            raise ServerError(f"{error}; its log is {self.log}", again=error.again) from None
        finally:
            self._send(signal.SIGSTOP)
        counts = [reply.counted for reply in replies]
        return Answers(
            [reply.token_ids for reply in replies],
            ttft_s=max(reply.first_s or started_at for reply in replies) - started_at,
            counted=None if None in counts else sum(filter(None, counts)),
            speculation=Speculation.total([reply.speculation for reply in replies]),
            prepared=first,
            forwards=self._forwards(replies),
            cached_tokens=[reply.cached for reply in replies],
        )

    def _forwards(self, replies: Sequence[Reply]) -> list[int] | None:
        """Return the forwards of each request; None if the engine does not count them, or if a count cannot be."""
        if not self.serving.setting.name:  # plain decoding
            return [len(reply.token_ids) for reply in replies]
        known = [count for reply in replies if (count := forwards_of(reply)) is not None and count > 0]
        return known if len(known) == len(replies) else None

    def _ended(self, within_s: float = 0.0) -> bool:
        return self._process is None or processes.has_ended(self._process, within_s)

    def _wait(self, port: int, group: Path) -> None:
        """Wait until this server answers on its port. Another program's server there does not count."""
        limit_s, error = (self.within_s, LateError) if self.within_s < READY_S else (READY_S, ServerError)
        url, deadline = f"http://{HOST}:{port}{self.engine.health}", time.monotonic() + limit_s
        while self._group is None:
            answered = _answers(url)
            if self._ended():
                raise ServerError(f"the server of {self.arm!r} did not start: {self._last_line()}. See {self.log}")
            if time.monotonic() > deadline:
                raise error(f"the server of {self.arm!r} was not ready after {limit_s:,.0f} s. See {self.log}")
            number = int(group.read_text(encoding="ascii")) if answered and group.is_file() else None
            if number is not None and processes.listens(number, port):
                self._group = number
            else:
                time.sleep(LOOK_S)

    def _last_line(self) -> str:
        return processes.last_line(self.log) or "it said nothing"

    def _send(self, sent: signal.Signals) -> None:
        if self._group is not None and not self._ended():
            with suppress(ProcessLookupError):
                os.killpg(self._group, sent)


def forwards_of(reply: Reply) -> int | None:
    """Return the target's forwards for a request that drafts: each gives one token of its own, the others are accepted.

    An engine may also count drafts that it accepts behind the end token. So there are at least the prefill and one
    forward for each verified draft. None if the engine does not count.
    """
    reported = reply.speculation
    if reported is None or reply.counted is None:
        return None
    own = reply.counted - reported.accepted
    return max(own, 1 + reported.drafts) if reported.drafts else own


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
