"""A server on loopback that speaks the completions protocol over real HTTP, streams token by token, and can fail."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SILENT_S = 3.0  # longer than any test waits
Answer = tuple[list[int], str, str | None]  # token ids, why it ended, the stop string if that was it


class Service(ThreadingHTTPServer):
    """`answer` says what is said to a request's body, `word` how a token reads. Everything else is how it behaves."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Mapping[str, Any]], Answer], word: Callable[[list[int]], str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.word = answer, word
        self.names: list[str] = ["served"]
        self.tells_ids = self.tells_usage = True
        self.delay_s = 0.0
        self.together: threading.Barrier | None = None  # nobody is answered before so many have asked
        self.counted_besides = 0  # tokens that its usage has and its text has not
        self.fault: str | None = None
        self.knows: set[str] | None = None  # fields of a request; others, and prompts of ids, are refused. None: all
        self.beside_usage: dict[str, Any] = {}  # members of the event with the usage
        self.counters: dict[str, float] | None = {}  # None: no /metrics
        self.seen: list[tuple[str, Mapping[str, str], dict[str, Any]]] = []  # path, headers, body

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:
        """Whoever asked has gone away."""

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers), {}))
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": name} for name in self.server.names]}))
        elif self.path == "/metrics" and self.server.counters is not None:
            lines = [
                f'{name}{{engine="{i}",note="a }} b"}} {value / 2}'
                for name, value in self.server.counters.items()
                for i in "01"
            ]
            self.reply(200, "# HELP of it\n# TYPE it counter\n" + "\n".join([*lines, "up 1 1700000000000", ""]))
        else:
            self.reply(404, "Not Found")

    def do_POST(self) -> None:
        service = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        service.seen.append((self.path, dict(self.headers), body))
        if service.fault == "overloaded":
            return self.reply(500, json.dumps({"error": {"message": "out of\nmemory", "code": 500}}))
        if service.fault == "page":
            return self.reply(200, "<html>hello</html>")
        if service.fault == "nonsense":
            return self.reply(200, "data: <html>\n\n", "text/event-stream")
        if service.knows is not None and (unknown := sorted(set(body) - service.knows)):
            return self.reply(422, json.dumps({"detail": f"Unexpected fields in the request: {unknown}"}))
        if service.knows is not None and not isinstance(body["prompt"], str):
            return self.reply(400, json.dumps({"detail": "prompt must be a string."}))
        if body["model"] not in service.names:
            return self.reply(
                404, json.dumps({"object": "error", "message": f"The model `{body['model']}` does not exist."})
            )
        if service.fault == "silent":
            time.sleep(SILENT_S)
        if service.together is not None:
            service.together.wait(SILENT_S)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.stream(body)
        return None

    def stream(self, body: Mapping[str, Any]) -> None:
        service = self.server
        ids, finish, said = service.answer(body)
        if service.counters:
            for name in service.counters:
                service.counters[name] += len(ids)
        whole = service.word(ids)
        shown = whole if said is None else whole[: whole.index(said)]
        self.event(": a comment, to keep the line open")
        for i, token in enumerate(ids):
            time.sleep(service.delay_s)
            text = shown[len(service.word(ids[:i])) : len(service.word(ids[: i + 1]))]
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
            if service.tells_ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if i == len(ids) // 2 and service.fault is not None:
                if service.fault == "says so":
                    self.event("data: " + json.dumps({"error": {"message": "the engine died"}}))
                elif service.fault == "ends":
                    self.event("data: [DONE]")
                    self.wfile.write(b"0\r\n\r\n")
                self.close_connection = True
                return
            if i == len(ids) - 1:
                choice["finish_reason"] = finish
                if said is not None:
                    choice["stop_reason"] = said
            self.event("data: " + json.dumps({"choices": [choice], "usage": None}))
        if service.tells_usage and body["stream_options"]["include_usage"]:
            usage = {"completion_tokens": len(ids) + service.counted_besides}
            self.event("data: " + json.dumps({"choices": [], "usage": usage, **service.beside_usage}))
        self.event("data: [DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, line: str) -> None:
        """One event as one chunk."""
        data = f"{line}\r\n\r\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def reply(self, status: int, text: str, kind: str | None = None) -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(service: Service) -> Iterator[Service]:
    """In a thread, until the test is done with it."""
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.shutdown()
        thread.join()
        service.server_close()
