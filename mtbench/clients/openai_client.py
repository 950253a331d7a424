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
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
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
FIRST_WAIT_S = 1.0  # if the server names no time; doubled each time
SECRET = 8  # characters that make a secret: a shorter key is a placeholder, a shorter part of one tells nothing
FINISHED = ("stop", "length")
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


class SglangSpeculation(Received):
    """SGLang's `sglext.spec_tokens_details` (srt/entrypoints/openai/protocol.py)."""

    spec_verify_ct: Number
    spec_num_proposed_drafts: Number
    spec_num_correct_drafts: Number
    spec_correct_drafts_histogram: list[Number] | None = None


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
        found = self._part("metrics", "speculative_decoding", VllmSpeculation)
        if found is not None:
            counts = (found.num_spec_steps, found.num_draft_tokens, found.num_accepted_draft_tokens)
            return Speculation(*counts, found.acceptance_histogram, "vLLM's per-request metrics")
        found = self._part("sglext", "spec_tokens_details", SglangSpeculation)
        if found is not None:
            counts = (found.spec_verify_ct, found.spec_num_proposed_drafts, found.spec_num_correct_drafts)
            return Speculation(*counts, found.spec_correct_drafts_histogram, "SGLang's per-request metrics")
        return None

    def _part(self, outer: str, inner: str, form: type[Received]) -> Any:
        """Return an object inside another, in its form; None without it."""
        holder = getattr(self, outer)
        if not isinstance(holder, dict):
            return None
        try:
            return form.model_validate(holder.get(inner))
        except ValidationError:
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
                    raise ServerError(
                        f"{self.url} stopped with an error: {self.clean(message_of(data))}; see the server's log",
                        again=True,
                    )
                reply.add(event)
                if max(len(reply.token_ids), reply.pieces) > most:
                    raise ServerError(f"{self.url} gives more tokens than the {body['max_tokens']:,} that were asked")
        if reply.finish is None:
            raise self._broken()
        if reply.finish not in FINISHED:
            raise ServerError(
                f"{self.url} ended an answer by {self.clean(reply.finish)!r}, not by stop or length; see its log"
            )
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
                wait_s = asked_wait_s(response.headers.get("retry-after"))
            waited = f"a request was sent again: the server was busy ({response.status})"
            self._wait(FIRST_WAIT_S * 2 ** (attempt - 1) if wait_s is None else wait_s, response.status, deadline)

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
        backend = bounded_http.Backend(deadline)
        try:
            with bounded_http.opened(
                backend, verb, self._address, place, self._headers(), content, self.timeout_s
            ) as response:
                headers = httpx.Headers(response.headers)
                yield Response(response.status, headers, response.iter_stream(), None)
        except httpcore.TimeoutException as error:
            raise self._late(error, deadline) from None
        except TooMuch as error:
            unread = ", or leave its counters unread by metrics=false" if path == METRICS else ""
            raise ServerError(f"{self.url} answers {path} with {error}; see the server's log{unread}") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            if backend.connection is None or isinstance(error, httpcore.ConnectError):
                raise ServerError(
                    f"{self.url} cannot be reached ({self.clean(cause_of(error))}); start the server, or give its url=",
                    again=True,
                ) from None
            if backend.connection.ended or not isinstance(error, httpcore.ProtocolError):
                raise self._broken() from None
            raise self._strange(path, f"no HTTP: {cause_of(error)}") from None
        except ValidationError as error:
            raise self._strange(path, finding(error)) from None
        except ValueError as error:
            raise self._strange(path, str(error)) from None

    def _late(self, error: Exception, deadline: float) -> ServerError:
        if time.monotonic() >= deadline:
            return ServerError(
                f"{self.url} took longer than {self.total_s:g} s for a request; if it may, raise total_s"
            )
        if isinstance(error, httpcore.ConnectTimeout):
            most = min(bounded_http.CONNECT_S, self.timeout_s)
            return ServerError(
                f"{self.url} cannot be reached (no connection within {most:g} s); start the server, or give its url=",
                again=True,
            )
        return ServerError(
            f"{self.url} sent nothing for {self.timeout_s:g} s; check whether it is busy, or raise timeout_s",
            again=True,
        )

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

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        return headers


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events up to [DONE]; read the stream to its end, so that it is not reset.

    Raises ValueError for what is not UTF-8.
    """
    stream = httpx.Response(
        200, headers={"Content-Type": "text/event-stream"}, content=_in_utf8(chunks), default_encoding="utf-8-sig"
    )
    ended = False
    for event in EventSource(stream).iter_sse():
        ended |= event.data.strip() == "[DONE]"
        if event.data and not ended:
            yield event.data


def _in_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for chunk in chunks:
        decoder.decode(chunk)
        yield chunk


def asked_wait_s(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which holds seconds or a date; None if it holds neither.

    >>> asked_wait_s("3"), asked_wait_s("Thu, 01 Jan 1970 00:00:00 GMT"), asked_wait_s("soon")
    (3.0, 0.0, None)
    """
    if text is None or len(text) > SHOWN:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError, IndexError, OSError):
        return None


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
    """Return the first line of a server's text, short and printable, without the key or any bearer token.

    The key is found in any case, URL-encoded, escaped, or split by control characters.

    >>> print(shown("no such key: SK-1%32%33", "sk-123"))
    no such key: [key]
    """
    text = text[:ERROR_BYTES]
    if key:
        text = _without_key(text, key)
    text = re.sub(r"(?i)(bearer)(?:%20|[\s+:=])+[^\s\"',;]+", r"\1 [key]", text)
    return first_line(RuntimeError(text.strip() or "nothing more"))[:SHOWN]


def _without_key(text: str, key: str) -> str:
    """Return the text without the key, and without any part of it that has SECRET characters."""
    seen, places = _visible(text)
    wanted, _ = _visible(key)
    size = min(len(wanted), SECRET)
    covered = [False] * len(seen)
    for part in {wanted[i : i + size] for i in range(len(wanted) - size + 1)} - {""}:
        at = seen.find(part)
        while at >= 0:
            covered[at : at + size] = [True] * size
            at = seen.find(part, at + 1)
    parts, end = [], 0
    for hidden, run in itertools.groupby(range(len(seen)), covered.__getitem__):
        if hidden:
            first, *rest = run
            parts += [text[end : places[first][0]], "[key]"]
            end = places[rest[-1] if rest else first][1]
    return "".join(parts) + text[end:]


def _visible(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the visible ASCII characters of a text, decoded and in lower case, and the place of each in the text."""
    found, places = [], []
    for token in TOKEN.finditer(text):
        encoded = token[1] or token[2]
        character = chr(int(encoded, 16)) if encoded else token[3] or ""
        if "!" <= character <= "~":
            found.append(character.lower())
            places.append(token.span())
    return "".join(found), places
