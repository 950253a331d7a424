"""Servers that misbehave: each writes raw bytes to one connection after the other. The table says what comes of it."""

import gzip
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

KEY = "sk-Very/Secret+0123456789"
KEY_ENV = "CORPUS_KEY"
ASKED = 4  # tokens
# Longest silence and longest request, in seconds: of a server that hangs, of one that is never silent, of all others.
HANGS, ENDLESS, PATIENT = (0.15, 10.0), (5.0, 0.4), (5.0, 10.0)
DIED = "stopped with an error: died; see"
BROKEN = "sent no complete answer"
SILENT = r"sent nothing for 0\.15 s"
LATE = r"took longer than 0\.4 s for a request; if it may, raise total_s"
STRANGE = r"replied unexpectedly to \S+ \(.*\); check that it is OpenAI-compatible"


class Gone(Exception):
    """The client, or the test, has ended the connection."""


@dataclass
class Talk:
    """One connection, after its request was read."""

    socket: socket.socket
    over: threading.Event
    number: int  # of requests for this path before

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            raise Gone from None

    def wait(self, seconds: float = 60.0) -> None:
        if self.over.wait(seconds):
            raise Gone

    def repeat(self, data: bytes, every_s: float = 0.0) -> None:
        """Send it until the client has gone."""
        while True:
            self.send(data)
            if every_s or self.over.is_set():
                self.wait(every_s)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Gone


Acts = Callable[[Talk], None]


@dataclass(frozen=True)
class Behaviour:
    """`said`: what the error says, None if the answer is good. `again`: a later session tries the cell again."""

    name: str
    acts: Acts
    said: str | None
    again: bool = False
    path: str = "completions"
    bounds: tuple[float, float] = PATIENT
    scheme: str = "http"
    dropped: str | None = None
    listens: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CORPUS: list[Behaviour] = []


def behaviour(said: str | None, **how: Any) -> Callable[[Acts], Acts]:
    """Enter a function into the corpus by its name."""

    def enter(acts: Acts) -> Acts:
        CORPUS.append(Behaviour(acts.__name__.replace("_", " "), acts, said, **how))
        return acts

    return enter


def sends(name: str, data: bytes, said: str | None, **how: Any) -> None:
    """Enter a server that sends these bytes and closes the connection."""
    CORPUS.append(Behaviour(name, lambda talk: talk.send(data), said, **how))


def hangs(name: str, data: bytes, said: str, **how: Any) -> None:
    """Enter a server that sends these bytes and then nothing."""

    def acts(talk: Talk) -> None:
        talk.send(data)
        talk.wait()

    CORPUS.append(Behaviour(name, acts, said, **how))


def repeats(name: str, first: bytes, then: bytes, said: str, every_s: float = 0.0, **how: Any) -> None:
    """Enter a server that sends some bytes, then others for ever."""

    def acts(talk: Talk) -> None:
        talk.send(first)
        talk.repeat(then, every_s)

    CORPUS.append(Behaviour(name, acts, said, **how))


def http(body: bytes, status: str = "200 OK", kind: str | None = "text/event-stream", more: bytes = b"") -> bytes:
    named = b"" if kind is None else f"Content-Type: {kind}\r\n".encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n".encode() + named + more + b"\r\n" + body


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def sse(*events: Any) -> bytes:
    """Events as they are streamed; a string is data as it is."""
    return b"".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode() for e in events)


def choice(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "1", "token_ids": [1], "finish_reason": None, **changes}]}


FIRST, LAST = choice(), choice(finish_reason="length")
GOOD = sse(FIRST, LAST, {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]")
OPEN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # the answer ends with the connection
MODELS = http(json.dumps({"data": [{"id": "served"}]}).encode(), kind="application/json")


# The connection


NOBODY = r"cannot be reached \(.+\)"
CORPUS.append(Behaviour("nothing listens", lambda _: None, NOBODY, again=True, listens=False))
sends("plain http where https is asked", http(GOOD), r"cannot be reached \(\[SSL", again=True, scheme="https")
hangs("hangs in the handshake", b"", NOBODY, again=True, scheme="https", bounds=HANGS)
repeats(
    "drips in the handshake",
    b"\x16\x03\x03\x40\x00",
    b"\x02",
    NOBODY,
    every_s=0.05,
    again=True,
    scheme="https",
    bounds=HANGS,
)


@behaviour(BROKEN, again=True)
def closes_without_a_byte(talk: Talk) -> None:
    pass


@behaviour(BROKEN, again=True)
def resets_without_a_byte(talk: Talk) -> None:
    talk.reset()


# The head


hangs("hangs before the head", b"", SILENT, again=True, bounds=HANGS)
hangs("hangs in the head", b"HTTP/1.1 200 OK\r\nContent-", SILENT, again=True, bounds=HANGS)
repeats("drips headers", b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", LATE, every_s=0.05, bounds=ENDLESS)
repeats("sends headers for ever", b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 1000 + b"\r\n", BROKEN, again=True)
repeats("says continue for ever", b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, LATE, bounds=ENDLESS)
sends("the status line is a control", b"\x1b]0;owned\x07 200\r\n\r\n" + GOOD, BROKEN, again=True)
sends("the stream without a head", GOOD, BROKEN, again=True)
sends("closes in the head", b"HTTP/1.1 200 OK\r\nContent-Ty", BROKEN, again=True)
for header in (b"Content-Length: -1", b"Content-Length: 5\r\nContent-Length: 6", b"no colon", b"X\x1b[2J: y"):
    sends(f"header {header!r}", b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n" + GOOD, BROKEN, again=True)
sends("upgrade", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", BROKEN, again=True)
for status in ("204 No Content", "401 Unauthorized", "418 Teapot"):
    said = f"answers {status[:3]} to completions: .*; check url= and model="
    sends(f"status {status}", http(b"" if status[:3] == "204" else b"no", status), said)
for status in ("500 Oh", "599 Own"):
    sends(f"status {status}", http(b"no", status), f"answers {status[:3]} to completions: no", again=True)
for place in (b"http://127.0.0.1:9/", b"file:///etc/passwd", b"/v1/completions"):
    redirect = http(b"", "302 Found", more=b"Location: " + place + b"\r\n")
    sends(f"redirect to {place.decode()}", redirect, "answers 302 to completions: nothing more")


# Busy


AGAIN = "a request was sent again, because the server was busy"


def busy(status: str, retry: str | None, times: int) -> Acts:
    def acts(talk: Talk) -> None:
        more = b"" if retry is None else f"Retry-After: {retry}\r\n".encode()
        talk.send(http(b'{"error": "busy"}', status, more=more) if talk.number < times else http(GOOD))

    return acts


BUSY_SERVERS: list[tuple[str, Acts, str | None, str | None, tuple[float, float]]] = [
    ("429 once", busy("429 Too Many", "0", 1), None, AGAIN, PATIENT),
    ("503 twice", busy("503 Unavailable", "0", 2), None, AGAIN, PATIENT),
    ("429 until a date", busy("429 Too Many", "Wed, 21 Oct 2015 07:28:00 GMT", 1), None, AGAIN, (5.0, 0.9)),
    ("429 for a part of a second", busy("429 Too Many", "0.1", 1), None, AGAIN, (5.0, 0.9)),
    (
        "429 for ever",
        busy("429 No", "0", 99),
        r"429 to completions: busy; it is busy \(Retry-After: 0\); try",
        None,
        PATIENT,
    ),
    *(
        (f"429 with {text[:9]!r}", busy("429 No", text, 99), "answers 429 to completions: busy", None, PATIENT)
        for text in ("3600", "9" * 5000, "Wed, 21 Oct 2115 07:28:00 GMT")
    ),
    *((f"429 with {text!r}", busy("429 No", text, 99), LATE, None, ENDLESS) for text in ("soon", "-1", "2")),
]
for name, acts, refusal, dropped, bounds in BUSY_SERVERS:
    again = refusal is not None and refusal != LATE
    CORPUS.append(Behaviour(name, acts, refusal, again=again, dropped=dropped, bounds=bounds))


# The body of an error


repeats(
    "sends an error for ever", b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536, "answers 500 to completions: xxx", again=True
)
repeats("drips an error", b"HTTP/1.1 400 No\r\n\r\n", b"x", LATE, every_s=0.05, bounds=ENDLESS)
hangs("hangs in an error", b"HTTP/1.1 400 No\r\nContent-Length: 99\r\n\r\nwhat", SILENT, again=True, bounds=HANGS)
for error_body, said in (
    (b"<html>\nno</html>", "400 to completions: <html>; check"),
    (b'{"error": {"message": "bad \\u001b[2J\\u202e"}}', r"bad \\x1b\[2J\\u202e"),
    (b'{"error": {"message": 7}}', "400 to completions"),
    (b'{"error": [1, 2]}', "400 to completions"),
    (b"[" * 50_000, r"400 to completions: \[\["),
    (b'{"error": "\\ud800"}', "400 to completions"),
    (b"\xff\xfe\x00", "400 to completions: \ufffd"),
    (b"\x1b]52;c;aGk=\x07\x9b31m", r"400 to completions: \\x1b\]52"),
    (b"x" * 10_000_000, "400 to completions: x{100}; check"),
):
    sends(f"error {error_body[:24]!r}", http(error_body, "400 No", None), said)

for echoed in (KEY, f"Bearer {KEY}", KEY.upper(), "x" * 90 + KEY, KEY * 2000):
    for body in (echoed, json.dumps({"error": {"message": echoed}})):
        sends(f"echoes the key as {body[-99:]!r}", http(body.encode(), "401 No"), "answers 401 to completions: ")
sends("echoes the key in its first line", f"{KEY}\r\n\r\n".encode(), BROKEN, again=True)
sends("echoes the key in a header", b"HTTP/1.1 200 OK\r\n" + KEY.encode() + b"\r\n\r\n", BROKEN, again=True)
sends("echoes the key in its type", http(GOOD, kind=KEY), r"with \[key\], not a stream")


# The body of an answer: transport


NOT_TEXT = http(gzip.compress(GOOD + b"\n" * 50_000_000, 9), more=b"Content-Encoding: gzip\r\n")
sends("a bomb", NOT_TEXT, BROKEN, again=True)
sends("another charset", http(GOOD, kind="text/event-stream; charset=utf-16"), None)
sends("no content type", http(GOOD, kind=None), "with no type, not a stream")
sends("an error as 200", http(b'{"error": "full"}', kind="application/json"), r"not a stream \(full\)")
sends("a good answer", http(GOOD), None)
sends("a byte order mark", http(b"\xef\xbb\xbf" + GOOD), None)
DELTA = {"choices": [{"index": 0, "delta": {"content": "1"}, "finish_reason": "length"}]}
sends(
    "a chat", http(sse(DELTA, "[DONE]")), "answers completions as a chat; give a url= whose /completions returns text"
)
sends("a good answer in chunks", chunked(GOOD[:50], GOOD[50:], b""), None)
sends("a good answer that ends with the connection", OPEN + GOOD, None)
sends("a chunk size that is none", chunked(GOOD) + b"zz\r\nx\r\n0\r\n\r\n", BROKEN, again=True)
sends("a chunk that is cut off", chunked(GOOD) + b"ffff\r\nx", BROKEN, again=True)
sends("a body shorter than its length", http(GOOD)[:-80], BROKEN, again=True)
sends("a length shorter than the body", http(sse(FIRST)) + GOOD, BROKEN, again=True)
repeats("sends trailers for ever", chunked(GOOD) + b"0\r\n", b"X: " + b"y" * 1000 + b"\r\n", BROKEN, again=True)


@behaviour(BROKEN, again=True)
def resets_in_the_middle(talk: Talk) -> None:
    talk.send(OPEN + sse(FIRST))
    talk.wait(0.05)
    talk.reset()


hangs("hangs in the middle", OPEN + sse(FIRST), SILENT, again=True, bounds=HANGS)
hangs("never ends after the end", OPEN + GOOD, SILENT, again=True, bounds=HANGS)
repeats("drips comments", OPEN, b": wait\n\n", LATE, every_s=0.05, bounds=ENDLESS)
repeats("drips tokens", OPEN, sse(FIRST), LATE, every_s=0.05, bounds=ENDLESS)
repeats("sends tokens for ever", OPEN, sse(FIRST), "gives more tokens than the 4 that were asked")
repeats("sends text for ever", OPEN, sse(choice(token_ids=None)), "gives more tokens than the 4 that were asked")
repeats("sends a line for ever", OPEN + b"data: ", b"x" * 65536, r"with more than [\d,]+ bytes")
repeats("sends comments for ever", OPEN, (b":" + b"x" * 999 + b"\n") * 64, r"with more than [\d,]+ bytes")


# The body of an answer: events


sends("CRLF", http(GOOD.replace(b"\n", b"\r\n")), None)
sends("comments and other fields", http(b": hi\n\nevent: x\nid: 1\nretry: soon\n" + GOOD), None)
sends("data of two lines", http(GOOD.replace(b'{"choices"', b'{\ndata: "choices"')), None)
sends("no end", http(GOOD.removesuffix(sse("[DONE]"))), None)
sends("garbage behind the end", http(GOOD + b"data: {\n\n\n"), None)
sends("null for everything", http(sse({"choices": None, "usage": None, "error": None}) + GOOD), None)
sends("unknown fields", http(sse({"a": 1, "choices": [], "b": [[]]}) + GOOD), None)
sends("nothing", http(b""), BROKEN, again=True)
sends("no finish", http(sse(FIRST, "[DONE]")), BROKEN, again=True)
sends(
    "an answer without a token",
    http(sse(choice(text="", token_ids=[], finish_reason="length"))),
    "returned an empty answer",
)
sends("too many tokens at once", http(sse(choice(token_ids=[1] * 50, finish_reason="length"))), "gives more tokens")
sends("an aborted answer", http(sse(FIRST, choice(finish_reason="abort"))), "ended an answer by 'abort'")
sends("an error in the stream", http(sse(FIRST, {"error": {"message": "died"}})), DIED, again=True)
sends("the key in a stream's error", http(sse({"error": KEY})), r"stopped with an error: \[key\]; see", again=True)
for text in ("<html>", "[]", "null", "{}}", "[" * 100_000, "NaN", "\x1b[2J"):
    sends(f"event {text[:12]!r}", http(sse(text)), STRANGE)
for usage in ("NaN", "-1", "4.0", "9" * 5000, '"4"', "true", "{}"):
    sends(f"usage {usage[:9]}", http(sse('{"usage": {"completion_tokens": ' + usage + "}}") + GOOD), STRANGE)
for choices in ('"x"', "{}", "[7]", "[null]"):
    sends(f"choices {choices}", http(sse('{"choices": ' + choices + "}") + GOOD), STRANGE)
sends("five choices", http(sse({"choices": [{"index": i, "text": "x"} for i in range(5)]}) + GOOD), STRANGE)
WRONG: dict[str, tuple[Any, ...]] = {
    "index": (1, "0", True, None),
    "text": (7, {}),
    "token_ids": ("1", [-1], [1.0], [True], [2**31], [None]),
    "finish_reason": (7,),
    "stop_reason": (1.5, -1, {}),
    "matched_stop": (1.5,),
}
for name, values in WRONG.items():
    for value in values:
        sends(f"{name} {value!r}", http(sse(choice(**{name: value})) + GOOD), STRANGE)
sends("a surrogate", http(sse('{"choices": [{"text": "\\ud800"}]}') + GOOD), STRANGE)
sends("a token that is none", http(sse(choice(token_ids=[10**6], finish_reason="length"))), "gave the token 1000000")
sends("the key as an answer", http(sse(choice(text=f"my {KEY}", finish_reason="length"))), "repeats the key")


# /models


for listed in (b"<html>", b'{"data": 7}', b'{"data": [{"id": ""}]}', b'{"data": [{"id": "' + b"x" * 2000 + b'"}]}'):
    sends(f"models: {listed[:22]!r}", http(listed), STRANGE, path="models")
sends("models: none", http(b'{"data": []}'), "names no model; give one with model=", path="models")
sends("models: an error", http(b"oh", "500 Oh"), "answers 500 to models: oh", again=True, path="models")
sends("models: the key as a wrong value", http(json.dumps({"data": KEY}).encode()), STRANGE, path="models")
repeats("sends models for ever", OPEN, b"[" * 65536, r"answers models with more than 16,777,216 bytes", path="models")
repeats("drips models", OPEN, b" ", LATE, every_s=0.05, path="models", bounds=ENDLESS)


# /metrics


def of_metrics(name: str, text: str, said: str | None) -> None:
    sends(f"metrics: {name}", http(text.encode("latin-1"), kind="text/plain"), said, path="metrics")


COUNTER = "vllm:spec_decode_num_drafts_total"
for value in ("NaN", "-1", "1e400"):
    of_metrics(value, f"{COUNTER} {value}\n", f"{COUNTER} is .*; leave its counters unread by metrics=false")
of_metrics("a word", f"{COUNTER} many\n", STRANGE)
of_metrics("another one is NaN", f"other NaN\nbad {{\n{COUNTER} 3\n", None)
of_metrics("binary", "\xff\xfe\x00", STRANGE)
of_metrics("braces", COUNTER + "{" + "} " * 500_000 + "\n", STRANGE)
sends("metrics: an error", http(b"oh", "500 Oh"), None, path="metrics")
repeats("sends metrics for ever", OPEN, b"a 1\n" * 16384, "unread by metrics=false", path="metrics")


@behaviour(None, path="metrics")
def counts_backwards(talk: Talk) -> None:
    talk.send(http(f"{COUNTER} {100 - talk.number}\n".encode(), kind="text/plain"))


@contextmanager
def misbehaving(how: Behaviour) -> Iterator[str]:
    """Serve one behaviour on loopback; the other paths answer as they should. Yield the url."""
    over, listener, counts = threading.Event(), socket.create_server(("127.0.0.1", 0), backlog=64), [0]
    url = f"{how.scheme}://127.0.0.1:{listener.getsockname()[1]}/v1"
    if not how.listens:
        listener.close()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                path = "" if how.scheme == "https" else _read_request(connection)
                if not path.endswith(how.path) and how.scheme == "http":
                    connection.sendall({"models": MODELS, "completions": http(GOOD)}.get(path, http(b"", "404 No")))
                    return
                counts[0] += 1
                how.acts(Talk(connection, over, counts[0] - 1))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # a close with unread bytes would be a reset
                    pass
            except (Gone, OSError):
                pass

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    threads = [threading.Thread(target=accept, daemon=True)]
    threads[0].start()
    try:
        yield url
    finally:
        over.set()
        if how.listens:
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
