"""The server's pages: completions, models, health and metrics, with limits on what a client may send or wait for."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mtbench.decoding.live import Ended
from mtbench.errors import first_line
from mtbench.serving import wire
from mtbench.serving.answers import DONE, Answer, sse
from mtbench.serving.metrics import Outcome
from mtbench.serving.wire import Asked, BadRequestError
from mtbench.serving.worker import Job, Worker

LARGEST_BODY = 4 << 20  # bytes
BODY_S = 30.0  # for the body to arrive
DRAIN_S = 0.05  # between two looks whether to end
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What clients may ask for."""

    max_new_tokens: int = 256  # of requests that do not say how many
    max_queue: int = 64
    request_timeout_s: float = 300.0
    api_key: str | None = None  # None: none is needed
    log: Path | None = None  # a line for each request


class GoneError(Exception):
    """The client has closed its connection."""


class Service:
    """Answers requests with what the worker decodes."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self.worker, self.served, self.limits = worker, worker.served, limits
        self.ready = self.draining = self.hurried = False
        self.open = 0  # completions that are not answered yet
        self._created = int(time.time())

    def end(self) -> None:
        """Refuse new requests; at the second call, do not wait for the open ones either."""
        self.draining, self.hurried = True, self.draining

    async def drained(self) -> None:
        """Wait until the server may end: it was asked to, or nothing decodes any more."""
        while not self.hurried and not (self.draining and not self.open):
            await asyncio.sleep(DRAIN_S)
            self.draining |= not self.worker.alive

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/ready", self.readiness),
            Route("/metrics", self.metrics),
        ]
        handlers = {HTTPException: _http_error, BadRequestError: _bad_request, Exception: _own_error}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, _: HttpRequest) -> Response:
        status = "draining" if self.draining else "ok" if self.worker.alive else "dead"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def readiness(self, _: HttpRequest) -> Response:
        ready = self.ready and self.worker.alive and not self.draining
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.worker.metrics.text(self.worker.options), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: HttpRequest) -> Response:
        self._check_key(request)
        model = {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "mtbench",
            "max_model_len": self.served.max_length,
            "mtbench": {"method": self.served.arm, "rows": self.served.rows, "options": dict(self.served.options)},
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self.served.name:
            raise BadRequestError(f"The model {name!r:.100} does not exist.", "model", "model_not_found", 404)
        return JSONResponse(model)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, chat=True)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, chat=False)

    async def _complete(self, request: HttpRequest, *, chat: bool) -> Response:
        arrived_s = time.perf_counter()
        try:
            try:
                self._check_key(request)
                self._check_capacity()
            except BadRequestError:
                await _body(request, keep=False)  # a client that still sends would see a broken connection, no answer
                raise
            raw = await _body(request)
            asked = wire.parse(raw, self.served, chat=chat, max_new_tokens=self.limits.max_new_tokens)
            self._check_capacity()
        except BadRequestError:
            self.worker.metrics.requests.labels("rejected").inc()
            raise
        job = self.worker.submit(asked.request)
        job.arrived_s = arrived_s
        return Completion(self, asked, job)

    def _check_key(self, request: HttpRequest) -> None:
        if self.limits.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self.limits.api_key.encode()):
            raise BadRequestError("Incorrect API key provided.", None, "invalid_api_key", 401)

    def _check_capacity(self) -> None:
        if self.draining:
            raise BadRequestError("the server is ending.", None, "draining", 503)
        if not self.worker.alive:
            raise BadRequestError("the thread that decodes has ended; see the server's log.", None, "dead", 503)
        if len(self.worker.queue) >= self.limits.max_queue:
            raise BadRequestError(f"{self.limits.max_queue} requests wait already.", None, "queue_full", 503)

    def close(self, job: Job, asked: Asked, answer_id: str, outcome: Outcome) -> None:
        """Take note of how a request ended. Free its row if it is not complete."""
        if job.outcome is None:
            self.worker.drop(job)
        self.worker.metrics.requests.labels(outcome).inc()
        if self.limits.log is not None:
            with suppress(OSError), self.limits.log.open("a") as file:  # a full disk costs the line, not the answer
                file.write(json.dumps(_log_line(job, asked, answer_id, outcome)) + "\n")


class Completion(Response):
    """The answer to a request, written while it is decoded. It ends early if the client goes or time runs out."""

    def __init__(self, service: Service, asked: Asked, job: Job) -> None:
        super().__init__()
        self.service, self.asked, self.job = service, asked, job
        self.answer = Answer(asked, service.served, job)
        self._gone = self._started = False  # the client; a stream's headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "cancelled"
        deadline = self.job.arrived_s - time.perf_counter() + self.service.limits.request_timeout_s
        self.service.open += 1
        try:
            async with self._watching(receive), asyncio.timeout(deadline):
                write = self._stream if self.asked.stream else self._whole
                outcome = await write(scope, receive, send)
        except GoneError:
            pass
        except TimeoutError:
            outcome = "timed_out"
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._late(scope, receive, send)
        finally:
            self.service.open -= 1
            self.service.close(self.job, self.asked, self.answer.id, outcome)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        while self.job.outcome is None:
            await self._news()
        if (ended := self.job.ended) is None:
            await _error(500, self._failure(), code="failed")(scope, receive, send)
            return "failed"
        await Response(self.answer.whole(ended), media_type="application/json")(scope, receive, send)
        return "ok"

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        while self.job.outcome is None and not self.job.token_ids:
            await self._news()
        if self.job.outcome is not None and self.job.ended is None:
            await _error(500, self._failure(), code="failed")(scope, receive, send)
            return "failed"
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self._started = True
        while self.job.outcome is None:
            if (message := self.answer.grow()) is not None:
                await _write(send, message)
            await self._news()
        ended = self.job.ended
        if ended is None:
            await _write(send, sse(_error_body(500, self._failure(), code="failed")), DONE, last=True)
            return "failed"
        await _write(send, *self.answer.end(ended), last=True)
        return "ok"

    async def _late(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say that the time is over."""
        message = f"no answer within {self.service.limits.request_timeout_s:g} s."
        if self._started:
            await _write(send, sse(_error_body(504, message, code="timeout")), DONE, last=True)
        else:
            await _error(504, message, code="timeout")(scope, receive, send)

    def _failure(self) -> str:
        assert isinstance(self.job.outcome, BaseException)
        return f"{self.service.served.arm} failed: {first_line(self.job.outcome)}."

    async def _news(self) -> None:
        """Wait until the worker has decoded more. Raise GoneError if the client has gone."""
        await self.job.news.wait()
        self.job.news.clear()
        if self._gone:
            raise GoneError

    @asynccontextmanager
    async def _watching(self, receive: Receive) -> AsyncIterator[None]:
        """Take note of a client that closes its connection meanwhile."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            self.job.news.set()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()


STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _write(send: Send, *messages: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": b"".join(messages), "more_body": not last})


async def _body(request: HttpRequest, *, keep: bool = True) -> bytes:
    """Return the body of a request; without `keep` only read it. Raise BadRequestError if it is too large or slow."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise BadRequestError(f"the body has over {LARGEST_BODY:,} bytes.", None, "body_too_large", 413)
                parts += [part] if keep else []
    except TimeoutError:
        raise BadRequestError(f"the body did not arrive within {BODY_S:g} s.", None, "timeout", 408) from None
    return b"".join(parts)


def _error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": TYPES.get(status, "server_error"), "param": param, "code": code}}


def _error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return JSONResponse(_error_body(status, message, param=param, code=code), status, headers)


async def _bad_request(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequestError)
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    if error.status in (408, 413):
        headers["Connection"] = "close"  # what is left of the body is not read
    return _error(error.status, error.message, param=error.param, code=error.code, headers=headers)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, headers=error.headers)


async def _own_error(_: HttpRequest, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {first_line(error)}")


def _log_line(job: Job, asked: Asked, answer_id: str, outcome: Outcome) -> dict[str, Any]:
    """Return a request's line of the log. Times are seconds; `arrival_s` is the time of day, others are from then."""
    now = time.perf_counter()
    ended: Ended | None = job.ended
    return {
        "id": answer_id,
        "arrival_s": time.time() - (now - job.arrived_s),
        "queued_s": None if job.joined_s is None else job.joined_s - job.arrived_s,
        "first_token_s": None if job.first_s is None else job.first_s - job.arrived_s,
        "end_s": now - job.arrived_s,
        "prompt_tokens": len(asked.request.prompt_ids),
        "tokens": len(job.token_ids if ended is None else ended.generation.token_ids),
        "forwards": None if ended is None else ended.generation.forwards,
        "outcome": outcome,
        "options": [] if ended is None else [{"tokens": s.tokens, **s.options} for s in ended.segments],
    }
