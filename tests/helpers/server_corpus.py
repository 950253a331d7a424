"""Servers that misbehave, and what the client says of each, in place of the network."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx

KEY = "sk-Very/Secret+0123456789"
KEY_ENV = "CORPUS_KEY"
ASKED = 4  # tokens
BROKEN = "sent no complete answer"
LATE = r"took longer than 0\.4 s for a request; if it may, raise total_s"
STRANGE = r"replied unexpectedly to \S+ \(.*\); check that it is OpenAI-compatible"
EVENTS = "text/event-stream"
NOWHERE = "http://127.0.0.1:9/v1"


@contextmanager
def answered(handler: Any) -> Iterator[None]:
    """Let a handler answer the requests of mtbench's client: httpx.Request -> httpx.Response."""
    with patch.object(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(handler))):
        yield


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a server answers to requests for `path`; those for the others it answers as it should."""

    name: str
    said: str | None  # by the error; None: the answer is good
    body: bytes = b""
    status: int = 200
    kind: str = EVENTS  # content type
    again: bool = False  # a later session tries the cell again
    path: str = "completions"
    drips: bytes = b""  # sent for ever behind the body
    fails: type[httpx.HTTPError] | None = None  # on the connection, behind the body

    async def _stream(self) -> AsyncIterator[bytes]:
        yield self.body
        if self.fails is not None:
            raise self.fails("the connection failed")
        while self.drips:
            await asyncio.sleep(0.05)
            yield self.drips

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Answer in place of the network; yield the url."""

        def answer(request: httpx.Request) -> httpx.Response:
            path = request.url.path.rpartition("/")[2]
            if path == self.path:
                return httpx.Response(self.status, headers={"content-type": self.kind}, content=self._stream())
            good = {"models": MODELS, "completions": GOOD}.get(path)
            return httpx.Response(200 if good else 404, headers={"content-type": EVENTS}, content=good or b"")

        with answered(answer):
            yield NOWHERE


def sse(*events: Any) -> bytes:
    """Return events as they are streamed; a string is data as it is."""
    return b"".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode() for e in events)


def choice(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "1", "token_ids": [1], "finish_reason": None, **changes}]}


FIRST, LAST = choice(), choice(finish_reason="length")
GOOD = sse(FIRST, LAST, {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]")
MODELS = json.dumps({"data": [{"id": "served"}]}).encode()
DELTA = {"choices": [{"index": 0, "delta": {"content": "1"}, "finish_reason": "length"}]}
CORPUS: list[Behaviour] = []


def sends(name: str, body: bytes, said: str | None, **how: Any) -> None:
    """Enter a server that answers so."""
    CORPUS.append(Behaviour(name=name, body=body, said=said, **how))


sends("closes the connection", sse(FIRST), BROKEN, fails=httpx.RemoteProtocolError, again=True)
sends("is silent", sse(FIRST), r"sent nothing for 5 s", fails=httpx.ReadTimeout, again=True)
sends("cannot be connected to", b"", r"cannot be reached \(.+\)", fails=httpx.ConnectError, again=True)
sends("drips comments", b"", LATE, drips=b": wait\n\n")
sends("sends tokens for ever", sse(FIRST) * 18, LATE + "|gives more tokens than the 4", drips=sse(FIRST))

for status, again in ((302, False), (401, False), (500, True)):
    said = f"answers {status} to completions: no; check url= and model="
    sends(f"status {status}", b"no", said, status=status, again=again)
sends("is busy", b'{"error": "full"}', "429 to completions: full; it is busy; try again later", status=429, again=True)
for error_body, said in (
    (b"<html>\nno</html>", "400 to completions: <html>; check"),
    (b'{"error": {"message": "bad \\u001b[2J\\u202e"}}', r"bad \\x1b\[2J\\u202e"),
    (b'{"object": "error", "message": "no model `x`"}', "400 to completions: no model `x`; check url= and model="),
    (b"\xff\xfe\x00", "400 to completions: "),
    (f"no access by {KEY}".encode(), r"400 to completions: no access by \[key\]"),
):
    sends(f"error {error_body[:24]!r}", error_body, said, status=400)

sends("a good answer", GOOD, None)
sends("CRLF", GOOD.replace(b"\n", b"\r\n"), None)
sends("comments and other fields", b": hi\n\nevent: x\nid: 1\nretry: soon\n" + GOOD, None)
sends("no end", GOOD.removesuffix(sse("[DONE]")), None)
sends("nulls and unknown fields", sse({"choices": None, "usage": None, "error": None, "b": [[]]}) + GOOD, None)
sends("no stream", b'{"error": "full"}', STRANGE, kind="application/json")
sends("a chat", sse(DELTA, "[DONE]"), "answers completions as a chat; give a url= whose /completions returns text")
sends("nothing", b"", BROKEN, again=True)
sends("no finish", sse(FIRST, "[DONE]"), BROKEN, again=True)
sends("an answer without a token", sse(choice(text="", token_ids=[], finish_reason="length")), "an empty answer")
sends("too many tokens at once", sse(choice(token_ids=[1] * 50, finish_reason="length")), "gives more tokens")
sends("the key as an answer", sse(choice(text=f"my {KEY}", finish_reason="length")), "repeats the key")
sends("an aborted answer", sse(FIRST, choice(finish_reason="abort")), "ended an answer by 'abort'")
DIED = {"error": {"message": f"died of {KEY}"}}
sends("an error in the stream", sse(FIRST, DIED), r"stopped with an error: died of \[key\]; see", again=True)
sends("a token that is none", sse(choice(token_ids=[10**6], finish_reason="length")), "gave the token 1000000")
for name, event in {
    "no JSON": "<html>",
    "two choices": {"choices": [{"index": i, "text": "x"} for i in range(2)]},
    "a wrong token": choice(token_ids=[-1]),
}.items():
    sends(name, sse(event) + GOOD, STRANGE)

sends("models: no JSON", b"<html>", STRANGE, path="models")
sends("models: none", b'{"data": []}', "names no model; give one with model=", path="models")
sends("models: an error", b"oh", "answers 500 to models: oh", status=500, again=True, path="models")
