"""One process that serves: it loads, listens, says where, answers until it is asked to end, and drains.

The first SIGTERM or SIGINT lets open requests end and refuses new ones; a second one ends the process at once.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from mtbench.errors import UserError
from mtbench.files import write_text
from mtbench.serving.adaptive import Governor, Span
from mtbench.serving.app import Limits, Service
from mtbench.serving.served import Served
from mtbench.serving.worker import Worker

LARGEST_HEADERS = 64 << 10  # bytes
BACKLOG = 2048  # connections that wait to be accepted


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, and who is told."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    ready_file: Path | None = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `_end_by_signals` has ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(served: Served, limits: Limits, address: Address, span: Span | None, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `say`: called with the URL once the server answers."""
    _allow_connections()
    listening = _listen(address)
    worker = Worker(served, None if span is None else lambda rows: Governor(span, rows))
    service = Service(worker, limits)
    try:
        asyncio.run(_serve(service, listening, address, say))
    finally:
        listening.close()


async def _serve(service: Service, listening: socket.socket, address: Address, say: Callable[[str], None]) -> None:
    worker, loop = service.worker, asyncio.get_running_loop()
    worker.start(loop)
    await worker.warm_up()
    config = uvicorn.Config(
        service.app(),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    _end_by_signals(loop, service, server)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        service.ready = True
        url = _url(listening)
        if address.ready_file is not None:
            _write_ready_file(address.ready_file, url, service.served)
        say(url)
    await serving
    worker.close()


def _end_by_signals(loop: asyncio.AbstractEventLoop, service: Service, server: uvicorn.Server) -> None:
    """Drain at the first SIGTERM or SIGINT, end at the second one."""
    tasks = set()

    async def drain() -> None:
        while service.open:
            await asyncio.sleep(0.02)
        server.should_exit = True

    def end() -> None:
        if service.draining:
            server.should_exit = server.force_exit = True
            return
        service.draining = True
        tasks.add(loop.create_task(drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(
            f"--host {address.host} --port {address.port} cannot be used: {error}; choose another port, or 0 for a free "
            "one."
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
