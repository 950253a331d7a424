"""The server's pages: completions, models, health and metrics, with limits on a client's data and waiting time."""

import asyncio
import hmac
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mtbench.errors import first_line
from mtbench.serving import wire
from mtbench.serving.completions import DONE, Answer, sse
from mtbench.serving.wire import BadRequestError, Call
from mtbench.serving.worker import Outcome, TimedTicket, Worker

LARGEST_BODY = 4 << 20  # bytes
LAST_S = 1.0  # for a client to take the message that its time is over
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of requests."""

    max_new_tokens: int = 256  # of requests without a number
    max_queue: int = 64
    request_timeout_s: float = 300.0
    api_key: str | None = None  # None: none is needed


class Service:
    """Answers requests with the worker's tokens."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self.worker, self.served, self.limits = worker, worker.served, limits

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        kinds = (BadRequestError, HTTPException, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refused))

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"}) if self.worker.alive else JSONResponse({"status": "dead"}, 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self.worker.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: HttpRequest) -> Response:
        self._check_key(request)
        model = {
            "id": self.served.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "mtbench",
            "max_model_len": self.served.max_length,
            "mtbench": {"method": self.served.arm, "rows": self.served.rows, "options": dict(self.served.options)},
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, chat=True)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, chat=False)

    async def _complete(self, request: HttpRequest, *, chat: bool) -> Response:
        arrived_s = time.perf_counter()
        try:
            raw = await _body(request)  # before any refusal: a client that still sends would see a broken connection
            self._check_key(request)
            self._check_capacity()
            call = wire.parse(raw, self.served, chat=chat, max_new_tokens=self.limits.max_new_tokens)
        except BadRequestError:
            self.worker.metrics.requests.labels("rejected").inc()
            raise
        job = self.worker.submit(call.request)
        job.arrived_s = arrived_s
        return Completion(self, call, job)

    def _check_key(self, request: HttpRequest) -> None:
        if self.limits.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self.limits.api_key.encode()):
            raise BadRequestError("Incorrect API key provided.", None, "invalid_api_key", 401)

    def _check_capacity(self) -> None:
        if not self.worker.alive:
            raise BadRequestError("the thread that decodes has ended; see the server's log.", None, "dead", 503)
        if len(self.worker.queue) >= self.limits.max_queue:
            raise BadRequestError(f"{self.limits.max_queue} requests wait already.", None, "queue_full", 503)


class Completion(Response):
    """The answer to a request, written while it is decoded. It ends early if the client goes or time runs out."""

    def __init__(self, service: Service, call: Call, job: TimedTicket) -> None:
        super().__init__()
        self.service, self.call, self.job = service, call, job
        self.answer = Answer(call, service.served, job)
        self._started = False  # a stream's headers are sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "cancelled"
        limit_s = self.service.limits.request_timeout_s
        writing = asyncio.create_task(self._write(scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            left_s = self.job.arrived_s + limit_s - time.perf_counter()
            done, _ = await asyncio.wait({writing, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if writing in done:
                outcome = writing.result()
            elif not done:
                outcome = "timed_out"
                writing.cancel()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._fail(504, f"no answer within {limit_s:g} s.", "timeout", scope, receive, send)
        finally:
            writing.cancel()
            leaving.cancel()
            if self.job.outcome is None:
                self.service.worker.drop(self.job)
            self.service.worker.metrics.requests.labels(outcome).inc()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        while self.job.outcome is None:
            if self.call.stream and (message := self.answer.grow()) is not None:
                await self._send(send, message)
            await self.job.news.wait()
            self.job.news.clear()
        if (ended := self.job.ended) is None:
            assert isinstance(self.job.outcome, BaseException)
            reason = f"{self.service.served.arm} failed: {first_line(self.job.outcome)}."
            await self._fail(500, reason, "failed", scope, receive, send)
            return "failed"
        if self.call.stream:
            await self._send(send, *self.answer.end(ended), last=True)
        else:
            await JSONResponse(self.answer.whole(ended))(scope, receive, send)
        return "ok"

    async def _send(self, send: Send, *messages: bytes, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": b"".join(messages), "more_body": not last})

    async def _fail(self, status: int, message: str, code: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = _error_body(status, message, code=code)
        if self._started:
            await self._send(send, sse(body), DONE, last=True)
        else:
            await JSONResponse(body, status)(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: HttpRequest) -> bytes:
    """Return the body of a request. Raise BadRequestError if it is too large."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise BadRequestError(f"the body has over {LARGEST_BODY:,} bytes.", None, "body_too_large", 413)
    return body


def _error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _refused(request: HttpRequest, error: Exception) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException):
        error = BadRequestError(f"{request.method} {request.url.path:.100}: {error.detail}", status=error.status_code)
    elif not isinstance(error, BadRequestError):
        error = BadRequestError(f"the server failed: {first_line(error)}.", status=500)
    headers |= {"Retry-After": "1"} if error.status == 503 else {}
    body = _error_body(error.status, error.message, param=error.param, code=error.code)
    return JSONResponse(body, error.status, headers)
