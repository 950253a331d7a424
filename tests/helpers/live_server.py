"""A server in this process, on a small model: real HTTP, real connections, no start-up time."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import EventSource
from small import CHAT, beginning_tokenizer

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.models.runner import ModelRunner
from mtbench.serving.app import Limits, Service
from mtbench.serving.served import Served
from mtbench.serving.server import Server, listen, serve
from mtbench.serving.worker import Worker

WAIT_S = 30.0  # longer than any test waits


def small_served(
    method: Method, runner: ModelRunner, *, rows: int = 4, max_length: int = 96, template: str | None = CHAT
) -> Served:
    runners = ModelRunners("any", {"any": runner})
    return Served(
        name="small",
        arm=method.name,
        method=method,
        rows=rows,
        max_length=max_length,
        vocabulary=runner.checkpoint.vocabulary,
        end_ids=runner.checkpoint.end_ids,
        tokenizer=beginning_tokenizer(template),
        make=lambda: Batch(method, runners, rows, max_length),
    )


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").removesuffix("/v1").split(":")
        return host, int(port)

    def client(self, **how: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, verify=False, **how)  # certificates take time to read

    def complete(self, **body: Any) -> dict[str, Any]:
        """Ask for a completion and return the answer."""
        with self.client() as client:
            answer: dict[str, Any] = client.post("/completions", json=body).raise_for_status().json()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.worker.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value

    @property
    def service(self) -> Service:
        return self.server.service

    def end(self) -> None:
        """As a Ctrl-C: the first lets open requests end, the second does not."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGINT, None)


@contextmanager
def serving(served: Served, **limits: Any) -> Iterator[Running]:
    """Serve until the block ends."""
    worker = Worker(served)
    server = Server(Service(worker, Limits(**limits)))
    listening, started = listen("127.0.0.1", 0), threading.Event()
    told: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        def say(url: str) -> None:
            told.append((url, asyncio.get_running_loop()))
            started.set()

        await serve(server, listening, say)

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            listening.close()
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    assert told, "the server has not started"
    running = Running(told[0][0], server, told[0][1], thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.end()
            running.end()
            thread.join(WAIT_S)
        assert not thread.is_alive()
        assert not worker.alive  # a process that ends while it decodes aborts


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the messages of a stream; the last one must be [DONE]."""
    found = [event.data for event in EventSource(response).iter_sse()]
    assert found.pop() == "[DONE]"
    return [json.loads(data) for data in found]


def text_of_events(messages: list[dict[str, Any]], *, chat: bool = False) -> str:
    choices = [choice for message in messages for choice in message["choices"]]
    return "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)


def spec(answer: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["metrics"]["mtbench"]
    return found
