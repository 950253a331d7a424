"""Loads for tests: a server that knows the answers, a client that starts in milliseconds, and made-up lines."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import load_client

from mtbench.experiments.load import planning
from mtbench.experiments.load.aiperf import EXPORT, PROMPTS, Client, Sending, write_prompts
from mtbench.experiments.load.format import LoadPlan, LoadRequest, PointLine, RequestLine
from mtbench.experiments.load.runner import PLAN, LoadRun
from mtbench.plan.directory import RunDirectory
from mtbench.programs.environments import Note
from mtbench.records import dump

Reply = tuple[int, str]


class Answering(ThreadingHTTPServer):
    """A server that answers each prompt by a function. `asked`: the bodies that it got."""

    daemon_threads = True

    def __init__(self, reply: Callable[[str], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.asked = reply, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        code, text = self.server.reply(body["prompt"])
        tokens = len(text.split())
        told = {"mtbench": {"forwards": 2 * tokens}}
        usage = {"completion_tokens": tokens}
        choice = {"text": text, "finish_reason": "stop"}
        content = {"object": "text_completion", "choices": [choice], "usage": usage, "metrics": told}
        self._send(code, content, stream=body.get("stream", False))

    def _send(self, code: int, content: Any, *, stream: bool = False) -> None:
        text = json.dumps(content)
        data = f"data: {text}\n\ndata: [DONE]\n\n".encode() if stream else text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def answering(reply: Callable[[str], Reply]) -> Iterator[Answering]:
    server = Answering(reply)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FastClient(Client):
    """Starts in milliseconds, sends the prompts for real, and writes what aiperf writes."""

    def python(self, note: Note, *, offline: bool = False) -> Path:
        return PYTHON

    def command(self, python: Path, sending: Sending, folder: Path) -> list[str]:
        write_prompts(sending, folder)
        return [str(python), "-S", load_client.__file__, PROMPTS, EXPORT, sending.running.server.url]


CLIENT = FastClient()
PYTHON = Path(sys.executable)


def request(**given: Any) -> LoadRequest:
    values: dict[str, Any] = {
        "suite": "arithmetic",
        "request_rate": [1.0, 8.0],
        "requests": 3,
        "rounds": 2,
        "max_num_seqs": 2,
    }
    return LoadRequest(**values | given)


def begun(folder: Path, asked: LoadRequest) -> tuple[RunDirectory, LoadPlan]:
    run, planned = RunDirectory.create(folder), planning.plan(asked)
    run.write_json("environment.json", {"started": "2026-11-22T12:00:00Z", "processor": "a processor"})
    run.write_json(PLAN, dump(planned))
    return run, planned


def load_run(run: RunDirectory, planned: LoadPlan, notes: list[str] | None = None) -> LoadRun:
    return LoadRun(run, planned, CLIENT, ([] if notes is None else notes).append)


def line(position: int = 0, **given: Any) -> RequestLine:
    """An answered request: 11 tokens, first after 0.1 s, then one each 0.02 s."""
    values: dict[str, Any] = {
        "position": position,
        "item": f"made/{position}/0",
        "outcome": "ok",
        "error": None,
        "start_s": 0.0,
        "e2e_s": 0.3,
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "tokens": 11,
        "text": "a",
        "forwards": 5,
    }
    return RequestLine(**values | given)


def refused(position: int, outcome: str = "rejected") -> RequestLine:
    nothing = dict.fromkeys(("e2e_s", "ttft_s", "tpot_s", "tokens", "text", "forwards"))
    return line(position, outcome=outcome, error="503", **nothing)


def point(number: int, requests: list[RequestLine], **given: Any) -> PointLine:
    values: dict[str, Any] = {
        "point": f"{number}.{given.get('arm', 'a')}",
        "round": number,
        "arm": "a",
        "level": 2.0,
        "started": "2026-11-22T12:00:00Z",
        "window_s": 4.0,
        "energy_j": None,
        "requests": requests,
    }
    return PointLine(**values | given)
