"""A server with OpenAI's protocol, in place of the network: what it answers and how it behaves are attributes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from server_corpus import NOWHERE, answered

Answer = tuple[list[int], str, str | None]  # token ids, why it ended, the stop string if that was it


class Service:
    """`answer` says what is said to a request's body, `word` how a token reads. Everything else is how it behaves."""

    url = "http://127.0.0.1:10/v1"

    def __init__(self, answer: Callable[[Mapping[str, Any]], Answer], word: Callable[[list[int]], str]) -> None:
        self.answer, self.word = answer, word
        self.tells_ids = True
        self.delay_s = 0.0
        self.together: asyncio.Barrier | None = None  # nobody is answered before so many have asked
        self.counted_besides = 0  # tokens that its usage has and its text has not
        self.fault: str | None = None
        self.knows: set[str] | None = None  # fields of a request; others, and prompts of ids, are refused. None: all
        self.cached: Callable[[list[int]], int | None] = lambda prompt: None  # of these, that its usage says were kept
        self.beside_usage: dict[str, Any] = {}  # members of the event with the usage
        self.seen: list[tuple[str, Mapping[str, str], dict[str, Any]]] = []  # path, headers, body

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if NOWHERE in str(request.url):
            raise httpx.ConnectError("Connection refused")
        path, body = request.url.path, json.loads(request.content or "{}")
        self.seen.append((path, request.headers, body))
        if path == "/v1/models":
            return reply(200, json.dumps({"data": [{"id": "served"}]}))
        return await self.complete(body) if path == "/v1/completions" else reply(404, "Not Found")

    async def complete(self, body: Mapping[str, Any]) -> httpx.Response:
        if self.knows is not None and (unknown := sorted(set(body) - self.knows)):
            return reply(422, json.dumps({"detail": f"Unexpected fields in the request: {unknown}"}))
        if self.knows is not None and not isinstance(body["prompt"], str):
            return reply(400, json.dumps({"detail": "prompt must be a string."}))
        if self.together is not None:
            await self.together.wait()
        events = ["data: <html>"] if self.fault == "nonsense" else self.events(body)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=self.stream(events))

    async def stream(self, events: Iterator[str] | list[str]) -> AsyncIterator[bytes]:
        for event in events:
            await asyncio.sleep(self.delay_s)
            yield f"{event}\r\n\r\n".encode()

    def events(self, body: Mapping[str, Any]) -> Iterator[str]:
        ids, finish, said = self.answer(body)
        whole = self.word(ids)
        shown = whole if said is None else whole[: whole.index(said)]
        yield ": a comment, to keep the line open"
        for i, token in enumerate(ids):
            text = shown[len(self.word(ids[:i])) : len(self.word(ids[: i + 1]))]
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
            if self.tells_ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if i == len(ids) // 2 and self.fault is not None:
                yield "data: [DONE]"
                return
            if i == len(ids) - 1:
                choice |= {"finish_reason": finish, "stop_reason": said}
            yield "data: " + json.dumps({"choices": [choice], "usage": None})
        if body["stream_options"]["include_usage"]:
            usage: dict[str, Any] = {"completion_tokens": len(ids) + self.counted_besides}
            if (cached := self.cached(body["prompt"])) is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            yield "data: " + json.dumps({"choices": [], "usage": usage, **self.beside_usage})
        yield "data: [DONE]"


def reply(status: int, text: str) -> httpx.Response:
    async def stream() -> AsyncIterator[bytes]:
        yield text.encode()

    return httpx.Response(status, content=stream())


@contextmanager
def serving(service: Service) -> Iterator[Service]:
    """Let the service answer all requests, until the test is done with it."""
    with answered(service):
        yield service
