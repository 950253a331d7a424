"""Client of a server with OpenAI's completions protocol: requests, streamed replies, counters.

Replies are server-sent events (WHATWG, HTML, section 9.2), counters Prometheus' text format 0.0.4. A server's data
is validated once, here, and bounded: in bytes, in silence and in total time. Any fault of it becomes one
ServerError, whose text holds no key and no control character. A request to a busy server (HTTP 429 or 503) is repeated
after the time that it names. Proxies and credentials of the environment are ignored; redirects are not followed.
"""

import asyncio
import ipaddress
import math
import os
import re
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Annotated, Any, TypeVar

import httpx
from httpx_sse import EventSource
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from mtbench.decoding.external import Speculation
from mtbench.errors import UserError, first_line, printable
from mtbench.records import finding

MIB = 1024 * 1024
ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN = 16 * MIB, 4096  # of an answer's stream
BODY_BYTES = 16 * MIB  # of /models and /metrics
ERROR_BYTES = 64 * 1024  # of an error's body; the rest is not read
SPARE_TOKENS = 16  # an answer may have so many more than were requested
SHOWN = 100  # characters of a server's text that an error repeats
CONNECT_S = 10.0  # longest time to connect
BUSY = (429, 503)
TRIES = 5  # of a request to a busy server
LONGEST_WAIT_S = 60.0  # before one of them
FIRST_WAIT_S = 1.0  # if the server names no number of seconds; doubled each time
SECRET = 8  # characters that make a secret: a shorter key is a placeholder
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")  # name, labels, value, time
METRICS = "/metrics"
COMPATIBLE = "check that it is OpenAI-compatible"
T = TypeVar("T")


class ServerError(RuntimeError):
    """A failed request: one line with the server's address, the cause and what to do. `again`: it may pass."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(printable(message))
        self.again = again


class TooMuch(Exception):
    """A server sent more bytes than allowed."""


class Received(BaseModel):
    """Data of a server: other fields are ignored, but nothing is converted."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Number = Annotated[int, Field(ge=0, lt=2**31)]  # a token id, or a number of tokens


# Fields of a request's speculation: verified drafts, their tokens, accepted ones, and how many of each draft. Only
# vLLM's object has the last field; TensorRT-LLM's has other numbers.
VLLM = (  # docs, features/speculative_decoding/acceptance_metrics.md
    *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram"),
    "mean_acceptance_length",
)
# srt/entrypoints/openai/protocol.py
SGLANG = "spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"
COUNTS = TypeAdapter(tuple[Number, Number | None, Number, list[Number] | None], config=ConfigDict(strict=True))


class Model(Received):
    id: Annotated[str, Field(min_length=1, max_length=1000)]


class Models(Received):
    data: list[Model]


class PromptTokens(Received):
    cached_tokens: Number | None = None


class Usage(Received):
    completion_tokens: Number | None = None
    prompt_tokens_details: PromptTokens | None = None


class Choice(Received):
    index: Annotated[int, Field(ge=0, le=0)] = 0  # one answer was requested
    text: str | None = None
    delta: Any = None  # of a chat
    token_ids: list[Number] | None = None  # vLLM's name
    finish_reason: str | None = None
    stop_reason: Number | str | None = None  # vLLM's and SGLang's name for the end token or stop string
    matched_stop: Number | str | None = None


class Event(Received):
    """One event of a streamed answer."""

    choices: Annotated[list[Choice], Field(max_length=1)] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None  # vLLM's
    sglext: Any = None  # SGLang's

    @property
    def speculation(self) -> Speculation | None:
        """Return the event's counts of speculation; None without them, or in a form of another version."""
        for engine, holder, name, fields in (
            ("vLLM", self.metrics, "speculative_decoding", VLLM),
            ("SGLang", self.sglext, "spec_tokens_details", SGLANG),
        ):
            reported = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(reported, dict) and reported.keys() >= set(fields):
                with suppress(ValidationError):
                    counts = COUNTS.validate_python(tuple(reported[field] for field in fields[:4]))
                    return Speculation(*counts, f"the server's metrics of each request, as {engine} names them")
        return None


@dataclass(slots=True)
class Reply:
    """The joined chunks that a server streamed for one prompt; None for values that it does not report."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty if the server returns text only
    pieces: int = 0  # chunks with text: at most as many as tokens
    finish: str | None = None  # `stop` or `length`
    stopped_by: int | str | None = None  # the end token or stop string, if the server reports it
    counted: int | None = None  # tokens by the server's count
    cached: int | None = None  # tokens of the prompt that the server had kept
    speculation: Speculation | None = None  # of this request
    first_s: float | None = None  # time.perf_counter() at the first chunk of the answer
    tries: int = 1  # more than one: the server was busy, and the time is not its speed

    def add(self, event: Event) -> None:
        """Append one chunk of the stream."""
        if event.usage is not None and event.usage.completion_tokens is not None:
            self.counted = event.usage.completion_tokens
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self.cached = event.usage.prompt_tokens_details.cached_tokens
        self.speculation = event.speculation or self.speculation
        for choice in event.choices or ():
            text, ids = choice.text or "", choice.token_ids or []
            if self.first_s is None and (text or ids or choice.finish_reason):
                self.first_s = time.perf_counter()
            self.text += text
            self.token_ids += ids
            self.pieces += bool(text)
            self.finish = choice.finish_reason or self.finish
            for stop in (choice.stop_reason, choice.matched_stop):
                self.stopped_by = self.stopped_by if stop is None else stop


class Limited(httpx.AsyncByteStream):
    """The body of a response as it is sent, up to `most` bytes. Raises TooMuch beyond."""

    def __init__(self, stream: httpx.AsyncByteStream, most: int) -> None:
        self.stream, self.most = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self.stream:
            total += len(chunk)
            if total > self.most:
                raise TooMuch(f"more than {self.most:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


@dataclass(frozen=True)
class Server:
    """A server's address, the environment variable with its key, the longest silence and the longest request."""

    url: str  # up to and with /v1
    key_env: str | None
    timeout_s: float
    total_s: float = 3600.0

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
            known = url.scheme in ("http", "https") and url.host and url.port != 0
            known = known and not (url.userinfo or url.query or url.fragment)  # it is stored in every file
        except httpx.InvalidURL:
            known = False
        if not known:
            raise UserError(
                f"url={self.url!r} is not a server's plain address, such as http://127.0.0.1:8000/v1; a key goes into "
                "an environment variable that `api_key_env` names."
            )

    @property
    def elsewhere(self) -> str | None:
        """The host, if it is another machine."""
        host = httpx.URL(self.url).host
        try:
            return None if ipaddress.ip_address(host).is_loopback else host
        except ValueError:  # a name
            return None if host == "localhost" else host

    def models(self) -> list[str]:
        """Return the names of the models that it serves."""

        async def ask() -> list[str]:
            async with self._open("GET", "models") as (response, _):
                return [model.id for model in Models.model_validate_json(await response.aread()).data]

        return completed(ask())

    def totals(self, names: Collection[str]) -> dict[str, int]:
        """Return the counters of these names in its metrics, each summed over its labels; empty if it has no metrics.

        Raises ServerError for a value that is no count.
        """

        async def ask() -> dict[str, int]:
            async with self._open("GET", METRICS) as (response, _):
                return totals_in((await response.aread()).decode(), names) if response.status_code == 200 else {}

        return completed(ask())

    def complete(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Send requests at once and return the streamed replies, each of at most `max_tokens` tokens and a few."""
        replies = self.ask("completions", bodies, [body["max_tokens"] for body in bodies], self._add)
        for reply in replies:
            if reply.finish not in ("stop", "length"):
                finish = self.clean(str(reply.finish))
                raise ServerError(f"{self.url} ended an answer by {finish!r}, not by stop or length; see its log")
            self.check_text(reply.text)
        return replies

    def ask(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        budgets: Sequence[int],
        add: Callable[[Reply, str], None],
    ) -> list[Reply]:
        """Send requests at once and return the replies, each of at most its budget of tokens and a few.

        They are streamed, if a body does not say otherwise. `path`: below /v1, or with a leading slash beside it.
        `add`: adds the data of an event, or a whole answer, to a reply; its ValueError is a fault of the server. Raises
        ServerError.
        """

        async def ask_all() -> list[Reply]:
            pairs = zip(bodies, budgets, strict=True)
            return await asyncio.gather(*(self._ask(path, body, budget, add) for body, budget in pairs))

        return completed(ask_all())

    async def _ask(self, path: str, body: Mapping[str, Any], budget: int, add: Callable[[Reply, str], None]) -> Reply:
        most = budget + SPARE_TOKENS
        size = ANSWER_BYTES + most * ANSWER_BYTES_PER_TOKEN
        streamed = body.get("stream", True)
        async with self._open("POST", path, {**body, "stream": streamed}, size) as (response, tries):
            reply = Reply(tries=tries)
            if streamed:
                await self._expect_stream(response)
            async for data in events(response) if streamed else whole(response):
                add(reply, data)
                if max(len(reply.token_ids), reply.pieces) > most:
                    raise ServerError(f"{self.url} gives more tokens than the {budget:,} that were asked")
        if reply.finish is None:
            raise self._broken("no finish_reason")
        return reply

    def _add(self, reply: Reply, data: str) -> None:
        """Add an event of OpenAI's protocol."""
        event = Event.model_validate_json(data)
        if event.error:
            message = self.clean(message_of(data))
            raise ServerError(f"{self.url} stopped with an error: {message}; see the server's log", again=True)
        if any(choice.delta is not None and choice.text is None for choice in event.choices or ()):
            raise ServerError(f"{self.url} answers completions as a chat; give a url= whose /completions returns text")
        reply.add(event)

    def check_text(self, text: str) -> None:
        """Raise ServerError for an answer that holds the key: it must not be stored."""
        if self._hidden(text) != text:
            raise ServerError(f"{self.url} repeats the key of api_key_env in an answer; the answer is not kept")

    def clean(self, text: str) -> str:
        """Return a server's text for a message: one short line without the key and control characters."""
        return first_line(RuntimeError(self._hidden(text).strip() or "nothing more"))[:SHOWN]

    def _hidden(self, text: str) -> str:
        """Return a text with `[key]` in place of the key."""
        key = self._key() or ""
        return re.sub(re.escape(key), "[key]", text, flags=re.IGNORECASE) if len(key) >= SECRET else text

    async def _expect_stream(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "no type")
        if "text/event-stream" not in kind:
            raise ServerError(
                f"{self.url} answers completions with {self.clean(kind)[:40]}, not a stream "
                f"({self.clean(message_of(await beginning(response)))[:60]}); {COMPATIBLE}"
            )

    @asynccontextmanager
    async def _open(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, most: int = BODY_BYTES
    ) -> AsyncIterator[tuple[httpx.Response, int]]:
        """Send a request, again if the server is busy, and yield the response and the number of tries.

        `path`: below /v1, or with a leading slash beside it; METRICS may have any status. `most`: bytes of the body.
        Every error, also in what is done with the response, is a ServerError.
        """
        address = self.url.removesuffix("/v1") + path if path.startswith("/") else f"{self.url}/{path}"
        silence_s = self.timeout_s if body is None or body.get("stream", True) else self.total_s
        timeout = httpx.Timeout(silence_s, connect=min(CONNECT_S, self.timeout_s))
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if (key := self._key()) else {})
        try:
            async with (
                asyncio.timeout(self.total_s),
                httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False, verify=tls()) as client,
            ):
                for tries in range(1, TRIES + 1):
                    async with client.stream(verb, address, json=body) as response:
                        wait_s = _wait_s(response, tries)
                        if wait_s is None or path == METRICS:
                            prepare(response, most)
                            await self._refuse_status(response, path)
                            yield response, tries
                            return
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            raise ServerError(
                f"{self.url} took longer than {self.total_s:g} s for a request; if it may, raise total_s"
            ) from None
        except (httpx.HTTPError, TooMuch, ValueError) as error:
            raise self._failed(path, error) from None

    async def _refuse_status(self, response: httpx.Response, path: str) -> None:
        """Raise ServerError for a status other than 200, if the answer is needed."""
        if (status := response.status_code) != 200 and path != METRICS:
            message = self.clean(message_of(await beginning(response)))
            remedy = "check url= and model=, or add plain=true"
            if status in BUSY:
                retry_after = self.clean(response.headers.get("retry-after", "no time"))[:40]
                remedy = f"it is busy (Retry-After: {retry_after}); try again later, or give a smaller --batch-size"
            raise ServerError(
                f"{self.url} answers {status} to {path}: {message}; {remedy}", again=status == 429 or status >= 500
            )

    def _failed(self, path: str, error: Exception) -> ServerError:
        """Return the error for what has happened to a request."""
        if isinstance(error, TooMuch):
            unread = ", or leave its counters unread by metrics=false" if path == METRICS else ""
            return ServerError(f"{self.url} answers {path} with {error}; see the server's log{unread}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            why = self.clean(str(error) or "no connection in time")
            return ServerError(f"{self.url} cannot be reached ({why}); start the server, or give its url=", again=True)
        if isinstance(error, httpx.TimeoutException):
            return ServerError(
                f"{self.url} sent nothing for {self.timeout_s:g} s; check whether it is busy, or raise timeout_s",
                again=True,
            )
        if isinstance(error, httpx.HTTPError):
            return self._broken(str(error) or type(error).__name__)
        found = self.clean(finding(error) if isinstance(error, ValidationError) else str(error))
        return ServerError(f"{self.url} replied unexpectedly to {path} ({found}); {COMPATIBLE}")

    def _broken(self, why: str) -> ServerError:
        return ServerError(f"{self.url} sent no complete answer ({self.clean(why)}); see the server's log", again=True)

    def _key(self) -> str | None:
        """Return the key. Raises ServerError, without it, if it is not set or cannot be sent."""
        if not self.key_env:
            return None
        key = os.environ.get(self.key_env, "")
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ServerError(
                f"the environment variable {self.key_env!r}, which is to have the key, is not set, or holds none: it "
                "has a space or line break at an end, or characters beyond ASCII"
            )
        return key


def completed(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine. It runs in a thread, because a notebook's own thread has an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@cache
def tls() -> ssl.SSLContext:
    """Return the TLS settings of this machine. They take milliseconds to load."""
    return ssl.create_default_context()


def prepare(response: httpx.Response, most: int) -> None:
    """Bound the body of a response, and let it be read as it is sent: UTF-8 that is not compressed."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    response.stream = Limited(response.stream, most)
    response.headers.pop("content-encoding", None)
    response.encoding = "utf-8-sig"  # a stream may begin with a byte order mark


async def whole(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of an answer that is not streamed."""
    yield (await response.aread()).decode()


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of server-sent events up to [DONE]; read the stream to its end, so that it is not reset."""
    ended = False
    async for event in EventSource(response).aiter_sse():
        ended |= event.data.strip() == "[DONE]"
        if event.data and not ended:
            yield event.data


async def beginning(response: httpx.Response) -> str:
    """Return the first ERROR_BYTES of a body and read no further."""
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= ERROR_BYTES:
            break
    return found[:ERROR_BYTES].decode(errors="replace")


def totals_in(text: str, names: Collection[str]) -> dict[str, int]:
    """Return the counters of these names in a page of Prometheus. Raises ValueError for a value that is no count."""
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line.strip())
        if sample and sample[1] in names:
            found[sample[1]] += float(sample[2])
    for name, value in found.items():
        if not (math.isfinite(value) and 0 <= value < 2**53):
            raise ValueError(f"{name} is {value}; leave its counters unread by metrics=false")
    return {name: int(value) for name, value in found.items()}


def message_of(answer: str) -> str:
    """Return an error response's message, wherever the server put it, else its text."""
    try:
        found: Any = from_json(answer)
        found = found.get("error", found)
        message = found if isinstance(found, str) else found["message"]
    except (ValueError, KeyError, AttributeError, TypeError):
        message = answer
    return message if isinstance(message, str) and message.strip() else answer


def _wait_s(response: httpx.Response, tries: int) -> float | None:
    """Return the time to wait before a request is repeated; None if the server is not busy, or for too long."""
    header = response.headers.get("retry-after", "")
    if response.status_code not in BUSY or tries == TRIES:
        return None
    wait_s = FIRST_WAIT_S * 2 ** (tries - 1)
    with suppress(ValueError, OverflowError):
        wait_s = float(header) if header[:1].isdecimal() else parsedate_to_datetime(header).timestamp() - time.time()
    return max(wait_s, 0.0) if wait_s <= LONGEST_WAIT_S else None
