"""One process that serves: it loads, listens, prints its address, answers until a signal ends it, and drains.

SIGTERM or SIGINT lets open requests end and refuses new connections; a second SIGINT ends the process. If an error ends
the thread that decodes, all requests fail and the process ends.
"""

import asyncio
import contextlib
import math
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
CLOSING_S = 5  # for the thread that decodes to end
LOOK_S = 0.05  # between two looks whether it has ended


class Server(uvicorn.Server):
    """uvicorn, which raises no signal again after its end. It may run in any thread."""

    def __init__(self, service: Service) -> None:
        self.service = service
        super().__init__(
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
                timeout_graceful_shutdown=math.ceil(service.limits.request_timeout_s),
            )
        )

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
    server = Server(Service(Worker(served), limits))
    listening = listen(host, port)

    async def main() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        await serve(server, listening, say)

    try:
        asyncio.run(main())
    finally:
        listening.close()


async def serve(server: Server, listening: socket.socket, say: Callable[[str], None]) -> None:
    """Answer at a bound socket until the server is to exit and open requests have ended."""
    worker = server.service.worker
    worker.start(asyncio.get_running_loop())
    try:
        await worker.warm_up()
        await _answer(server, listening, say)
    finally:
        await worker.end(CLOSING_S)
    if (error := worker.error) is not None:
        raise DecodingError(f"{worker.served.arm} cannot be served any more: {first_line(error)}; start it again.")


async def _answer(server: Server, listening: socket.socket, say: Callable[[str], None]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listening.getsockname()[:2]
    say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    while not serving.done():
        await asyncio.wait({serving}, timeout=LOOK_S)
        server.should_exit |= not server.service.worker.alive
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
