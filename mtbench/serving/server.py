"""One process that serves: it loads, listens, says where, answers until it is asked to end, and drains.

The first SIGTERM or SIGINT lets open requests end and refuses new ones; a second one ends the process at once. If the
thread that decodes has ended by an error, all requests fail and the process ends.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtbench.errors import UserError, first_line
from mtbench.files import write_text
from mtbench.serving.adaptive import LoadPolicy, OptionRange
from mtbench.serving.app import Limits, Service
from mtbench.serving.served import Served
from mtbench.serving.worker import Worker

LARGEST_HEADERS = 64 << 10  # bytes
HEADERS_TOO_LARGE = 431  # HTTP status
MOST_UNREAD = 16 << 20  # bytes of a refused request that are taken in, so that its client reads the answer
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = (
    75  # of an idle connection: longer than clients keep it (httpx, openai: 5 s), or it closes under a request
)
CLOSING_S = 5  # for connections to close after the last answer


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, and who is told."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    ready_file: Path | None = None


class _Protocol(H11Protocol):
    """uvicorn's protocol, but it answers 431 to a header that is too large.

    uvicorn answers 400 and closes while the client still sends, which then sees a broken connection and no answer.
    """

    unread: int | None = None  # bytes that are still taken in before the connection is closed; None: it is not ending

    def data_received(self, data: bytes) -> None:
        if self.unread is None:
            super().data_received(data)
            return
        self.unread -= len(data)
        if self.unread < 0:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        if not isinstance(error, h11.RemoteProtocolError) or error.error_status_hint != HEADERS_TOO_LARGE:
            super().send_400_response(msg)
            return
        headers = [("content-type", "text/plain"), ("content-length", "0"), ("connection", "close")]
        response = h11.Response(status_code=HEADERS_TOO_LARGE, headers=headers, reason=b"Headers Too Large")
        for part in (response, h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.unread = MOST_UNREAD
        self.loop.call_later(CLOSING_S, self.transport.close)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DecodingError(RuntimeError):
    """The thread that decodes has ended, so that the server has too; the message is one line."""


def run(served: Served, limits: Limits, address: Address, span: OptionRange | None, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `say`: called with the URL once the server answers.

    Raises DecodingError if an error ends the thread that decodes, such as one after which the GPU computes no more.
    """
    _allow_connections()
    service = Service(Worker(served, None if span is None else lambda rows: LoadPolicy(span, rows)), limits)
    listening = listen(address)

    def told(url: str) -> None:
        if address.ready_file is not None:
            _write_ready_file(address.ready_file, url, served)
        say(url)

    async def main() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.end)
        await serve(service, listening, told)

    try:
        asyncio.run(main())
    finally:
        listening.close()


async def serve(service: Service, listening: socket.socket, say: Callable[[str], None]) -> None:
    """Answer at a bound socket until `service.end` was called and open requests have ended."""
    service.worker.start(asyncio.get_running_loop())
    await service.worker.warm_up()
    server = _Server(
        uvicorn.Config(
            service.app(),
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=LARGEST_HEADERS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    service.ready = True
    say(_url(listening))
    await service.drained()
    server.should_exit, server.force_exit = True, service.hurried
    await serving
    service.worker.close()
    if (error := service.worker.error) is not None:
        raise DecodingError(f"{service.served.arm} cannot be served any more: {first_line(error)}; start it again.")


def listen(address: Address) -> socket.socket:
    """Return a socket bound to an address. Raises UserError if it cannot be used."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(
            f"--host {address.host} --port {address.port} cannot be used: {error}; choose another port, or 0."
        ) from None
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _write_ready_file(path: Path, url: str, served: Served) -> None:
    told = {"url": url, "model": served.name, "method": served.arm, "rows": served.rows, "pid": os.getpid()}
    write_text(path, json.dumps(told) + "\n")


def _allow_connections() -> None:
    """Allow as many open files as the system lets the process have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
