"""Client of a server with OpenAI's completions protocol: requests, streamed replies, counters.

Replies are server-sent events (WHATWG, HTML, section 9.2), counters Prometheus' text format 0.0.4. What a server sends
is validated once, here. Whatever is wrong with it ends as one ServerError, whose text holds no key and no control
character. A server that is busy (HTTP 429 or 503) is asked again after the time that it names.
"""

import codecs
import ipaddress
import itertools
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import httpcore
import httpx
from httpx_sse import EventSource
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from mtbench.clients import bounded_http
from mtbench.clients.bounded_http import TooMuch, beginning, limited
from mtbench.decoding.external import Speculation
from mtbench.errors import UserError, first_line, printable
from mtbench.records import finding

MIB = 1024 * 1024
LINE_BYTES = 4 * MIB  # of an answer's stream
ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN = 16 * MIB, 4096
BODY_BYTES = 16 * MIB  # of /models and /metrics
ERROR_BYTES = 64 * 1024  # of an error's body; the rest is not read
SPARE_TOKENS = 16  # an answer may have so many more than were asked
SHOWN = 100  # characters of a server's text that an error repeats
TRIES = 5  # of a request to a busy server
LONGEST_WAIT_S = 60.0  # before one of them
FIRST_WAIT_S = 1.0  # if the server names no number of seconds; doubled each time
SECONDS = re.compile(r"[0-9]{1,9}")  # of a Retry-After header
SECRET = 8  # characters that make a secret: a shorter key is a placeholder, a shorter part of one tells nothing
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")  # name, labels, value, time
METRICS = "/metrics"
TOKEN = re.compile(r"%([0-9a-f]{2})|\\+(?:u00|x)([0-9a-f]{2})|\\+[rnt0]?|(.)", re.IGNORECASE | re.DOTALL)
COMPATIBLE = "check that it is OpenAI-compatible"


class ServerError(RuntimeError):
    """A failed request: one line with the server's address, the cause and what to do. `again`: it may pass."""

    def __init__(self, message: str, *, again: bool = False, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.again = again
        self.status = status  # of HTTP, if that is what failed


class Received(BaseModel):
    """What a server sends: other fields are ignored, but nothing is converted."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Number = Annotated[int, Field(ge=0, lt=2**31)]  # a token id, or a number of tokens


class Model(Received):
    id: Annotated[str, Field(min_length=1, max_length=1000)]


class Models(Received):
    data: list[Model]


class Usage(Received):
    completion_tokens: Number | None = None


class Choice(Received):
    index: Annotated[int, Field(ge=0, le=0)] = 0  # one answer was asked
    text: str | None = None
    token_ids: list[Number] | None = None  # vLLM's name
    finish_reason: str | None = None
    stop_reason: Number | str | None = None  # vLLM's and SGLang's name for the end token or stop string
    matched_stop: Number | str | None = None


class VllmSpeculation(Received):
    """vLLM's `metrics.speculative_decoding` (docs, features/speculative_decoding/acceptance_metrics.md)."""

    num_spec_steps: Number
    num_draft_tokens: Number
    num_accepted_draft_tokens: Number
    acceptance_histogram: list[Number]
    mean_acceptance_length: float | None  # TensorRT-LLM's object, of other numbers, lacks it

    def counted(self) -> Speculation:
        counts = (self.num_spec_steps, self.num_draft_tokens, self.num_accepted_draft_tokens)
        return Speculation(*counts, self.acceptance_histogram, "vLLM's per-request metrics")


class SglangSpeculation(Received):
    """SGLang's `sglext.spec_tokens_details` (srt/entrypoints/openai/protocol.py)."""

    spec_verify_ct: Number
    spec_num_proposed_drafts: Number
    spec_num_correct_drafts: Number
    spec_correct_drafts_histogram: list[Number] | None = None

    def counted(self) -> Speculation:
        counts = (self.spec_verify_ct, self.spec_num_proposed_drafts, self.spec_num_correct_drafts)
        return Speculation(*counts, self.spec_correct_drafts_histogram, "SGLang's per-request metrics")


class Event(Received):
    """One event of a streamed answer."""

    choices: Annotated[list[Choice], Field(max_length=1)] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None  # vLLM's
    sglext: Any = None  # SGLang's

    @property
    def speculation(self) -> Speculation | None:
        """Return what the event says of the request's speculation; None if nothing, or in a form of another version."""
        for holder, name, form in (
            (self.metrics, "speculative_decoding", VllmSpeculation),
            (self.sglext, "spec_tokens_details", SglangSpeculation),
        ):
            if isinstance(holder, dict):
                with suppress(ValidationError):
                    return form.model_validate(holder.get(name)).counted()
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
    speculation: Speculation | None = None  # of this request
    first_s: float | None = None  # time.perf_counter() at the first chunk of the answer
    waited: str | None = None  # why the request was sent more than once: its time is not the server's speed

    def add(self, event: Event) -> None:
        """Append one chunk of the stream."""
        if event.usage is not None and event.usage.completion_tokens is not None:
            self.counted = event.usage.completion_tokens
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


class Response(NamedTuple):
    """The head of a response, and its body in the chunks in which it arrives."""

    status: int
    headers: httpx.Headers
    chunks: Iterable[bytes]
    waited: str | None  # as in Reply


@dataclass(frozen=True)
class Server:
    """A server's address, the environment variable with its key, the longest silence and the longest request."""

    url: str  # up to and with /v1
    key_env: str | None
    timeout_s: float
    total_s: float = 3600.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            plain = "@" not in parts.netloc and not parts.query + parts.fragment  # it is stored in every file
            _ = self._address
        except (ValueError, httpx.InvalidURL):
            known = plain = False
        if not (known and plain):
            raise UserError(
                f"url={self.url!r} is not a server's plain address, such as http://127.0.0.1:8000/v1; a key goes into "
                "an environment variable that `api_key_env` names."
            )

    @cached_property
    def _address(self) -> httpx.URL:
        return httpx.URL(self.url)

    @property
    def elsewhere(self) -> str | None:
        """The host, if it is another machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return None if ipaddress.ip_address(host).is_loopback else host
        except ValueError:  # a name
            return None if host == "localhost" else host

    def models(self) -> list[str]:
        """Return the names of the models that it serves."""
        with self._open("GET", "models") as response:
            found = Models.model_validate_json(b"".join(limited(response.chunks, BODY_BYTES)))
        return [model.id for model in found.data]

    def totals(self, names: Collection[str]) -> dict[str, int]:
        """Return the counters of these names in its metrics, each summed over its labels; empty if it has no metrics.

        Raises ServerError for a value that is no count.
        """
        found: dict[str, float] = defaultdict(float)
        with self._open("GET", METRICS, needed=False) as response:
            if response.status != 200:
                return {}
            text = b"".join(limited(response.chunks, BODY_BYTES)).decode()
            for line in text.splitlines():
                sample = SAMPLE.fullmatch(line.strip())
                if sample and sample[1] in names:
                    found[sample[1]] += float(sample[2])
        for name, value in found.items():
            if not (math.isfinite(value) and 0 <= value < 2**53):
                raise ServerError(f"{self.url} counts {value} as {name}; leave its counters unread by metrics=false")
        return {name: int(value) for name, value in found.items()}

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """Return the streamed reply to one prompt, of at most `max_tokens` tokens and a few."""
        most = body["max_tokens"] + SPARE_TOKENS
        reply = Reply()
        with self._open("POST", "completions", {**body, "stream": True}) as response:
            reply.waited = response.waited
            self._expect_stream(response)
            chunks = limited(response.chunks, ANSWER_BYTES + most * ANSWER_BYTES_PER_TOKEN, LINE_BYTES)
            for data in events(chunks):
                event = Event.model_validate_json(data)
                if event.error:
                    said = self.clean(message_of(data))
                    raise ServerError(f"{self.url} stopped with an error: {said}; see the server's log", again=True)
                reply.add(event)
                if max(len(reply.token_ids), reply.pieces) > most:
                    raise ServerError(f"{self.url} gives more tokens than the {body['max_tokens']:,} that were asked")
        if reply.finish is None:
            raise self._broken()
        if reply.finish not in ("stop", "length"):
            finish = self.clean(reply.finish)
            raise ServerError(f"{self.url} ended an answer by {finish!r}, not by stop or length; see its log")
        self.check_text(reply.text)
        return reply

    def check_text(self, text: str) -> None:
        """Raise ServerError for an answer that holds the key: it must not be stored."""
        key = self._key()
        if key is not None and len(key) >= SECRET and key.lower() in text.lower():
            raise ServerError(f"{self.url} repeats the key of api_key_env in an answer; the answer is not kept")

    def clean(self, text: str) -> str:
        """Return a server's text for a message: one short line without keys and control characters."""
        return shown(text, self._key())

    def _expect_stream(self, response: Response) -> None:
        kind = response.headers.get("content-type")
        if kind is not None and not kind.strip().lower().startswith("text/event-stream"):
            text = beginning(response.chunks, ERROR_BYTES).decode(errors="replace")
            raise ServerError(
                f"{self.url} answers completions with {self.clean(kind)[:40]}, not a stream "
                f"({self.clean(message_of(text))[:60]}); {COMPATIBLE}"
            )

    @contextmanager
    def _open(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, needed: bool = True
    ) -> Iterator[Response]:
        """Send a request, again if the server is busy, and yield the response. Raises ServerError.

        `path`: relative to the url; METRICS is beside its /v1. `needed`: a status other than 200 is an error.
        """
        deadline = time.monotonic() + self.total_s
        waited = None
        for attempt in itertools.count(1):
            with self._sent(verb, path, body, deadline) as found:
                response = found._replace(waited=waited)
                if response.status not in (429, 503) or not needed:
                    self._refuse_status(response, path, needed=needed)
                    yield response
                    return
                self._refuse_status(response, path, needed=attempt == TRIES)
                asked = SECONDS.fullmatch(response.headers.get("retry-after", ""))
            waited = f"a request was sent again: the server was busy ({response.status})"
            self._wait(float(asked[0]) if asked else FIRST_WAIT_S * 2 ** (attempt - 1), response.status, deadline)

    def _wait(self, seconds: float, status: int, deadline: float) -> None:
        most = min(LONGEST_WAIT_S, deadline - time.monotonic())
        if seconds > most:
            raise ServerError(
                f"{self.url} is busy ({status}) and asks to wait {seconds:,.0f} s; {max(most, 0):,.0f} s is the most",
                again=True,
            )
        time.sleep(seconds)

    def _refuse_status(self, response: Response, path: str, *, needed: bool) -> None:
        """Raise ServerError for a status other than 200, if the answer is `needed`, and for an encoded body."""
        if needed and response.status != 200:
            message = self.clean(message_of(beginning(response.chunks, ERROR_BYTES).decode(errors="replace")))
            raise ServerError(
                f"{self.url} answers {response.status} to {path}: {message}; check url= and model=",
                again=response.status == 429 or response.status >= 500,
                status=response.status,
            )
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ServerError(
                f"{self.url} answers {path} in the encoding {self.clean(encoding)!r}, which was not asked"
            )

    @contextmanager
    def _sent(self, verb: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Iterator[Response]:
        """Send one request and yield its response. Every error, also in what is done with it, is a ServerError."""
        base = self._address.raw_path.rstrip(b"/")
        place = base + b"/" + path.encode() if path != METRICS else base.removesuffix(b"/v1") + b"/metrics"
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        backend = bounded_http.Backend(deadline)
        try:
            with bounded_http.opened(backend, verb, self._address, place, headers, content, self.timeout_s) as response:
                yield Response(response.status, httpx.Headers(response.headers), response.iter_stream(), None)
        except httpcore.TimeoutException as error:
            raise self._late(error, deadline) from None
        except TooMuch as error:
            unread = ", or leave its counters unread by metrics=false" if path == METRICS else ""
            raise ServerError(f"{self.url} answers {path} with {error}; see the server's log{unread}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            if backend.connection is None or isinstance(error, httpcore.ConnectError):
                raise self._unreachable(self.clean(cause_of(error))) from None
            if backend.connection.ended or not isinstance(error, httpcore.ProtocolError):
                raise self._broken() from None
            raise self._strange(path, f"no HTTP: {self.clean(cause_of(error))}") from None
        except ValueError as error:
            raise self._strange(path, finding(error) if isinstance(error, ValidationError) else str(error)) from None

    def _late(self, error: Exception, deadline: float) -> ServerError:
        if time.monotonic() >= deadline:
            return ServerError(
                f"{self.url} took longer than {self.total_s:g} s for a request; if it may, raise total_s"
            )
        if isinstance(error, httpcore.ConnectTimeout):
            return self._unreachable(f"no connection within {min(bounded_http.CONNECT_S, self.timeout_s):g} s")
        return ServerError(
            f"{self.url} sent nothing for {self.timeout_s:g} s; check whether it is busy, or raise timeout_s",
            again=True,
        )

    def _unreachable(self, why: str) -> ServerError:
        return ServerError(f"{self.url} cannot be reached ({why}); start the server, or give its url=", again=True)

    def _broken(self) -> ServerError:
        return ServerError(f"{self.url} stopped in the middle of an answer; see the server's log", again=True)

    def _strange(self, path: str, what: str) -> ServerError:
        return ServerError(f"{self.url} replied unexpectedly to {path} ({self.clean(what)}); {COMPATIBLE}")

    def _key(self) -> str | None:
        """Return the key. Raises ServerError, without it, if it is not set or cannot be sent."""
        if not self.key_env:
            return None
        key = os.environ.get(self.key_env)
        if key is None:
            raise ServerError(f"the environment variable {self.key_env!r}, which api_key_env names, is not set")
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ServerError(
                f"the environment variable {self.key_env!r}, which api_key_env names, holds no key: it is empty, or "
                "has a space or line break at an end, or characters beyond ASCII"
            )
        return key


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events up to [DONE]; read the stream to its end, so that it is not reset.

    Raises ValueError for what is not UTF-8.
    """
    text = codecs.iterdecode(chunks, "utf-8-sig")
    headers = {"Content-Type": "text/event-stream"}
    stream = httpx.Response(200, headers=headers, content=(part.encode() for part in text))
    ended = False
    for event in EventSource(stream).iter_sse():
        ended |= event.data.strip() == "[DONE]"
        if event.data and not ended:
            yield event.data


def message_of(answer: str) -> str:
    """Return an error response's message, wherever the server put it, else its text."""
    try:
        found: Any = from_json(answer)
        found = found.get("error", found)
        message = found if isinstance(found, str) else found["message"]
    except (ValueError, KeyError, AttributeError, TypeError):
        message = answer
    return message if isinstance(message, str) and message.strip() else answer.strip() or "nothing more"


def cause_of(error: BaseException) -> str:
    """Return the text of the exception that caused this one."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__


def shown(text: str, key: str | None = None) -> str:
    """Return the first line of a server's text, short and printable, without a bearer token; `[key]` if it has the key.

    SECRET characters of the key are found in any case, URL-encoded, escaped, or split by control characters.

    >>> shown("no such key: SK-1%32%33-abc", "sk-123-abc"), shown("an empty prompt", "EMPTY")
    ('[key]', 'an empty prompt')
    """
    text = text[:ERROR_BYTES]
    wanted, seen = _visible(key or ""), _visible(text)
    if any(wanted[i : i + SECRET] in seen for i in range(len(wanted) - SECRET + 1)):
        return "[key]"
    text = re.sub(r"(?i)(bearer)(?:%20|[\s+:=])+[^\s\"',;]+", r"\1 [key]", text)
    return first_line(RuntimeError(text.strip() or "nothing more"))[:SHOWN]


def _visible(text: str) -> str:
    """Return the visible ASCII characters of a text, decoded and in lower case."""
    tokens = TOKEN.finditer(text)
    characters = (chr(int(token[1] or token[2], 16)) if token[1] or token[2] else token[3] or "" for token in tokens)
    return "".join(character.lower() for character in characters if "!" <= character <= "~")
