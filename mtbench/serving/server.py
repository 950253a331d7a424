"""One process that serves: it loads, listens, prints its address, answers until a signal ends it, and drains.

The first SIGTERM or SIGINT lets open requests end and refuses new ones; a second one ends the process. If an error
ends the thread that decodes, all requests fail and the process ends.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from mtbench.errors import UserError, first_line
from mtbench.serving.app import Limits, Service
from mtbench.serving.served import Served
from mtbench.serving.worker import Worker

BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 75  # of an idle connection: longer than clients keep it, or it closes under a request
CLOSING_S = 5  # for connections to close after the last answer, and for the thread that decodes to end


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DecodingError(RuntimeError):
    """The thread that decodes has ended, so that the server has too; the message is one line."""


def run(
    served: Served,
    limits: Limits,
    say: Callable[[str], None],
    *,
    host: str,
    port: int,
) -> None:
    """Serve until a signal ends it. `say`: called with the URL once the server answers. `port`: 0: a free one.

    Raises DecodingError if an error ends the thread that decodes, such as one after which the GPU computes no more.
    """
    service = Service(Worker(served), limits)
    listening = listen(host, port)

    async def main() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.end)
        await serve(service, listening, say)

    try:
        asyncio.run(main())
    finally:
        listening.close()


async def serve(service: Service, listening: socket.socket, say: Callable[[str], None]) -> None:
    """Answer at a bound socket until `service.end` was called and open requests have ended."""
    service.worker.start(asyncio.get_running_loop())
    try:
        await service.worker.warm_up()
        await _answer(service, listening, say)
    finally:
        await service.worker.end(CLOSING_S)
    if (error := service.worker.error) is not None:
        raise DecodingError(f"{service.served.arm} cannot be served any more: {first_line(error)}; start it again.")


async def _answer(service: Service, listening: socket.socket, say: Callable[[str], None]) -> None:
    server = _Server(
        uvicorn.Config(
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
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listening.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    await service.drained()
    server.should_exit, server.force_exit = True, service.hurried
    await serving


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises UserError if it cannot be used."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise UserError(f"--host {host} --port {port} cannot be used: {error}; choose another port, or 0.") from None
    return listening
