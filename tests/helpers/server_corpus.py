"""Servers that misbehave, and what comes of each: answers in place of the network, and raw bytes on a connection."""

import asyncio
import gzip
import itertools
import json
import operator
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx

KEY = "sk-Very/Secret+0123456789"
KEY_ENV = "CORPUS_KEY"
ASKED = 4  # tokens
DIED = "stopped with an error: died; see"
BROKEN = "sent no complete answer"
SILENT = r"sent nothing for 0\.15 s"
LATE = r"took longer than 0\.4 s for a request; if it may, raise total_s"
STRANGE = r"replied unexpectedly to \S+ \(.*\); check that it is OpenAI-compatible"
EVENTS = "text/event-stream"
NOWHERE = "http://127.0.0.1:9/v1"


@contextmanager
def answered(handler: Any) -> Iterator[None]:
    """Let a handler answer the requests of mtbench's client: httpx.Request -> httpx.Response."""
    with patch.object(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(handler))):
        yield


def pause_s(then: bytes) -> float:
    """Return the time between two parts of an endless answer."""
    return 0.05 if len(then) < 1000 else 0.0


def response(status: int, headers: Mapping[str, str], *parts: bytes, then: bytes = b"") -> httpx.Response:
    """Return an answer that is streamed: some parts, and then another one for ever."""

    async def stream() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        while then:
            await asyncio.sleep(pause_s(then))
            yield then

    return httpx.Response(status, headers=headers, content=stream())


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """`said`: what the error says, None if the answer is good. `again`: a later session tries the cell again."""

    name: str
    said: str | None
    again: bool = False
    scheme: str = "http"
    path: str = "completions"  # that it answers so; the others are answered as they should
    timeout_s: float = 5.0
    total_s: float = 10.0
    dropped: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": EVENTS})
    body: bytes = b""
    then: bytes = b""  # sent for ever behind the body; a short text drips
    when: Callable[[int], bool] = lambda number: True  # which requests for the path it answers so, from 0

    @property
    def raw(self) -> bytes:
        """The beginning of the answer as bytes on a connection, which ends it."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return f"HTTP/1.1 {self.status} X\r\n{headers}\r\n".encode() + self.body

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Answer in place of the network; yield the url."""
        seen = itertools.count()

        def answer(request: httpx.Request) -> httpx.Response:
            path = request.url.path.rpartition("/")[2]
            if path == self.path and self.when(next(seen)):
                return response(self.status, self.headers, self.body, then=self.then)
            good = {"models": MODELS, "completions": GOOD}.get(path)
            return response(200 if good else 404, {"content-type": EVENTS}, good or b"")

        with answered(answer):
            yield NOWHERE


@dataclass(frozen=True, kw_only=True)
class Connection(Behaviour):
    """A server that reads a request, writes raw bytes, and closes, resets or hangs."""

    data: bytes = b""
    ends: str = "closes"

    @property
    def raw(self) -> bytes:
        return self.data

    @contextmanager
    def serving(self) -> Iterator[str]:
        if self.ends == "is not there":
            yield NOWHERE
            return
        with listening(self) as port:
            yield f"{self.scheme}://127.0.0.1:{port}/v1"


CORPUS: list[Behaviour] = []


def sends(name: str, body: bytes, said: str | None, status: int = 200, kind: str | None = EVENTS, **how: Any) -> None:
    """Enter a server that answers so. `kind`: content type."""
    headers = {**({} if kind is None else {"content-type": kind}), **how.pop("headers", {})}
    CORPUS.append(Behaviour(name=name, said=said, body=body, status=status, headers=headers, **how))


def connects(name: str, data: bytes, said: str, **how: Any) -> None:
    """Enter a server that writes these bytes."""
    CORPUS.append(Connection(name=name, said=said, data=data, **{"again": True, **how}))


def sse(*events: Any) -> bytes:
    """Events as they are streamed; a string is data as it is."""
    return b"".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode() for e in events)


def choice(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "1", "token_ids": [1], "finish_reason": None, **changes}]}


FIRST, LAST = choice(), choice(finish_reason="length")
GOOD = sse(FIRST, LAST, {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]")
MODELS = json.dumps({"data": [{"id": "served"}]}).encode()


# What only a connection shows


NOBODY = r"cannot be reached \(.+\)"
OPEN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = OPEN + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(GOOD), GOOD)
connects("nothing listens", b"", NOBODY, ends="is not there")
connects("plain http where https is asked", OPEN + b"\r\n" + GOOD, r"cannot be reached \(\[SSL", scheme="https")
connects("hangs in the handshake", b"", NOBODY, scheme="https", ends="hangs", timeout_s=0.15)
connects("closes without a byte", b"", BROKEN)
connects("resets in the middle", OPEN + b"\r\n" + sse(FIRST), BROKEN, ends="resets")
for name, data in (
    ("before the head", b""),
    ("in the head", OPEN[:30]),
    ("in the middle", OPEN + b"\r\n" + sse(FIRST)),
):
    connects(f"hangs {name}", data, SILENT, ends="hangs", timeout_s=0.15)
connects("drips headers", OPEN, LATE, then=b"X: y\r\n", total_s=0.4, again=False)
connects("sends headers for ever", OPEN, BROKEN, then=b"X: " + b"y" * 1000 + b"\r\n")
connects("the status line is a control", b"\x1b]0;owned\x07 200\r\n\r\n" + GOOD, BROKEN)
connects("echoes the key in its first line", f"{KEY}\r\n\r\n".encode(), BROKEN)
connects("echoes the key in a header", b"HTTP/1.1 200 OK\r\n" + KEY.encode() + b"\r\n\r\n", BROKEN)
connects("a chunk size that is none", CHUNKED + b"zz\r\nx\r\n0\r\n\r\n", BROKEN)
connects("a body shorter than its length", OPEN + b"Content-Length: 999\r\n\r\n" + GOOD, BROKEN)


# Status, redirects, errors


for status in (204, 401, 418):
    sends(f"status {status}", b"no", f"answers {status} to completions: .*; check url= and model=", status)
for status in (500, 599):
    sends(f"status {status}", b"no", f"answers {status} to completions: no", status, again=True)
for place in (NOWHERE, "file:///etc/passwd", "/v1/completions"):
    said = "answers 302 to completions: nothing more"
    sends(f"redirect to {place}", b"", said, 302, headers={"location": place})

sends("sends an error for ever", b"", "answers 500 to completions: xxx", 500, then=b"x" * 65536, again=True)
sends("drips an error", b"", LATE, 400, then=b"x", total_s=0.4)
for error_body, said in (
    (b"<html>\nno</html>", "400 to completions: <html>; check"),
    (b'{"error": {"message": "bad \\u001b[2J\\u202e"}}', r"bad \\x1b\[2J\\u202e"),
    (b'{"error": {"message": 7}}', "400 to completions"),
    (b'{"error": [1, 2]}', "400 to completions"),
    (b'{"object": "error", "message": "no model `x`"}', "400 to completions: no model `x`; check url= and model="),
    (b"[" * 50_000, r"400 to completions: \[\["),
    (b'{"error": "\\ud800"}', "400 to completions"),
    (b"\xff\xfe\x00", "400 to completions: \ufffd"),
    (b"\x1b]52;c;aGk=\x07\x9b31m", r"400 to completions: \\x1b\]52"),
    (b"x" * 10_000_000, "400 to completions: x{100}; check"),
):
    sends(f"error {error_body[:24]!r}", error_body, said, 400, None)
for echoed in (f"Bearer {KEY}", KEY.upper(), "x" * 90 + KEY, KEY * 2000):
    for text in (echoed, json.dumps({"error": {"message": echoed}})):
        sends(f"echoes the key as {text[-99:]!r}", text.encode(), "answers 401 to completions: ", 401)
sends("echoes the key in its type", GOOD, r"with \[key\], not a stream", kind=KEY)


# Busy


AGAIN = "a request was sent again, because the server was busy"
for status, retry, times, late in (
    (429, "0", 1, 10.0),
    (503, "0", 2, 10.0),
    (429, "Wed, 21 Oct 2015 07:28:00 GMT", 1, 0.9),
    (429, "0.1", 1, 0.9),
):
    until = partial(operator.gt, times)
    more: dict[str, Any] = {"dropped": AGAIN, "total_s": late, "headers": {"retry-after": retry}, "when": until}
    sends(f"{status} until {retry}", b"busy", None, status, **more)
for retry in ("0", "3600", "9" * 5000, "Wed, 21 Oct 2115 07:28:00 GMT"):
    said = r"429 to completions: busy; it is busy \(Retry-After: .{0,40}\); try again later"
    sends(f"429 with {retry[:9]}", b'{"error": "busy"}', said, 429, again=True, headers={"retry-after": retry})
for retry in ("soon", "-1", "2"):
    sends(f"429 with {retry!r}", b"busy", LATE, 429, total_s=0.4, headers={"retry-after": retry})


# The body of an answer


BOMB = gzip.compress(GOOD + b"\n" * 50_000_000, 9)
sends("a bomb", BOMB, BROKEN, again=True, headers={"content-encoding": "gzip"})
sends("another charset", GOOD, None, kind=f"{EVENTS}; charset=utf-16")
sends("no content type", GOOD, "with no type, not a stream", kind=None)
sends("an error as 200", b'{"error": "full"}', r"not a stream \(full\)", kind="application/json")
sends("a good answer", GOOD, None)
sends("a byte order mark", b"\xef\xbb\xbf" + GOOD, None)
DELTA = {"choices": [{"index": 0, "delta": {"content": "1"}, "finish_reason": "length"}]}
sends("a chat", sse(DELTA, "[DONE]"), "answers completions as a chat; give a url= whose /completions returns text")
sends("drips comments", b"", LATE, then=b": wait\n\n", total_s=0.4)
sends("drips tokens", b"", LATE, then=sse(FIRST), total_s=0.4)
for name, then in (("tokens", sse(FIRST)), ("text", sse(choice(token_ids=None)))):
    sends(f"sends {name} for ever", b"", "gives more tokens than the 4 that were asked", then=then * 20)
sends("sends a line for ever", b"data: ", r"with more than [\d,]+ bytes", then=b"x" * 65536)
sends("sends comments for ever", b"", r"with more than [\d,]+ bytes", then=(b":" + b"x" * 999 + b"\n") * 64)

sends("CRLF", GOOD.replace(b"\n", b"\r\n"), None)
sends("comments and other fields", b": hi\n\nevent: x\nid: 1\nretry: soon\n" + GOOD, None)
sends("data of two lines", GOOD.replace(b'{"choices"', b'{\ndata: "choices"'), None)
sends("no end", GOOD.removesuffix(sse("[DONE]")), None)
sends("garbage behind the end", GOOD + b"data: {\n\n\n", None)
sends("null for everything", sse({"choices": None, "usage": None, "error": None}) + GOOD, None)
sends("unknown fields", sse({"a": 1, "choices": [], "b": [[]]}) + GOOD, None)
sends("nothing", b"", BROKEN, again=True)
sends("no finish", sse(FIRST, "[DONE]"), BROKEN, again=True)
sends("an answer without a token", sse(choice(text="", token_ids=[], finish_reason="length")), "an empty answer")
sends("too many tokens at once", sse(choice(token_ids=[1] * 50, finish_reason="length")), "gives more tokens")
sends("an aborted answer", sse(FIRST, choice(finish_reason="abort")), "ended an answer by 'abort'")
sends("an error in the stream", sse(FIRST, {"error": {"message": "died"}}), DIED, again=True)
sends("the key in a stream's error", sse({"error": KEY}), r"stopped with an error: \[key\]; see", again=True)
sends("a token that is none", sse(choice(token_ids=[10**6], finish_reason="length")), "gave the token 1000000")
sends("the key as an answer", sse(choice(text=f"my {KEY}", finish_reason="length")), "repeats the key")
WRONG: dict[str, tuple[Any, ...]] = {
    "index": (1, "0", True, None),
    "text": (7, {}),
    "token_ids": ("1", [-1], [1.0], [True], [2**31], [None]),
    "finish_reason": (7,),
    "stop_reason": (1.5, -1, {}),
    "matched_stop": (1.5,),
}
MALFORMED: dict[str, Any] = {
    **{f"event {text[:12]!r}": text for text in ("<html>", "[]", "null", "{}}", "[" * 100_000, "NaN", "\x1b[2J")},
    **{
        f"usage {usage[:9]}": f'{{"usage": {{"completion_tokens": {usage}}}}}'
        for usage in ("NaN", "-1", "4.0", "9" * 5000, '"4"', "true", "{}")
    },
    **{f"choices {choices}": f'{{"choices": {choices}}}' for choices in ('"x"', "{}", "[7]", "[null]")},
    "five choices": {"choices": [{"index": i, "text": "x"} for i in range(5)]},
    **{f"{name} {value!r}": choice(**{name: value}) for name, values in WRONG.items() for value in values},
    "a surrogate": '{"choices": [{"text": "\\ud800"}]}',
}
for name, event in MALFORMED.items():
    sends(name, sse(event) + GOOD, STRANGE)


# /models and /metrics


for listed in (b"<html>", b'{"data": 7}', b'{"data": [{"id": ""}]}', b'{"data": [{"id": "' + b"x" * 2000 + b'"}]}'):
    sends(f"models: {listed[:22]!r}", listed, STRANGE, path="models")
sends("models: none", b'{"data": []}', "names no model; give one with model=", path="models")
sends("models: an error", b"oh", "answers 500 to models: oh", 500, again=True, path="models")
sends("models: the key as a wrong value", json.dumps({"data": KEY}).encode(), STRANGE, path="models")
sends("sends models for ever", b"", "answers models with more than 16,777,216 bytes", then=b"[" * 65536, path="models")

COUNTER = "vllm:spec_decode_num_drafts_total"
for value in ("NaN", "-1", "1e400"):
    said = f"{COUNTER} is .*; leave its counters unread by metrics=false"
    sends(f"metrics: {value}", f"{COUNTER} {value}\n".encode(), said, path="metrics")
for name, page, wrong in (
    ("a word", f"{COUNTER} many\n".encode(), STRANGE),
    ("another one is NaN", f"other NaN\nbad {{\n{COUNTER} 3\n".encode(), None),
    ("binary", b"\xff\xfe\x00", STRANGE),
    ("braces", COUNTER.encode() + b"{" + b"} " * 500_000 + b"\n", STRANGE),
):
    sends(f"metrics: {name}", page, wrong, path="metrics")
sends("metrics: an error", b"oh", None, 500, path="metrics")
sends("metrics for ever", b"", "unread by metrics=false", then=b"a 1\n" * 16384, path="metrics")


def as_connection(how: Behaviour) -> Connection:
    """Return a server that answers the same to other processes."""
    if isinstance(how, Connection):
        return how
    same = {name: getattr(how, name) for name in ("name", "said", "again", "path", "total_s", "then", "when")}
    return Connection(data=how.raw, **same)


@contextmanager
def listening(how: Connection) -> Iterator[int]:
    """Serve a behaviour on loopback; the other paths answer as they should. Yield the port."""
    over, seen, threads = threading.Event(), itertools.count(), list[threading.Thread]()
    bodies = {"models": MODELS, "completions": GOOD}
    good = {path: Behaviour(name=path, said=None, body=body).raw for path, body in bodies.items()}

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            path = how.path if how.scheme == "https" else _read_request(connection)
            if path == how.path and how.when(next(seen)):
                connection.sendall(how.raw)
                while how.then and not over.wait(pause_s(how.then)):
                    connection.sendall(how.then)
                over.wait({"hangs": 60.0, "resets": 0.05}.get(how.ends, 0.0))
                if how.ends == "resets":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
            else:
                connection.sendall(good.get(path, b"HTTP/1.1 404 No\r\n\r\n"))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # a close with unread bytes would be a reset
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.settimeout(5)
                threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                threads[-1].start()

    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(5)


def _read_request(connection: socket.socket) -> str:
    """Read one request; return the last part of its path."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += connection.recv(65536)
    return head.split(b" ")[1].decode().rpartition("/")[2]
