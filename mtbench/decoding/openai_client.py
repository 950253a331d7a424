"""Client of a server with OpenAI's completions protocol: requests, streamed replies, counters.

Replies are server-sent events (WHATWG, HTML, section 9.2), counters Prometheus' text format 0.0.4. Every request opens
its own connection, directly to the server; it ignores proxies that the environment sets.
"""

import http.client
import ipaddress
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mtbench.errors import UserError, first_line

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")  # name, labels, value, time


class ServerError(RuntimeError):
    """A failed request: one line with the server's address, the cause and what to do."""


@dataclass(slots=True)
class Reply:
    """The joined chunks that a server streamed for one prompt; None for values that it does not report."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty if the server returns text only
    finish: str | None = None  # `stop` or `length`
    stopped_by: int | str | None = None  # the end token or stop string, if the server reports it
    counted: int | None = None  # tokens by the server's count
    first_s: float | None = None  # time.perf_counter() at the first chunk of the answer

    def add(self, event: Mapping[str, Any]) -> None:
        """Append one chunk of the stream."""
        self.counted = (event.get("usage") or {}).get("completion_tokens", self.counted)
        for choice in event.get("choices") or ():
            text, ids = choice.get("text") or "", choice.get("token_ids") or []  # `token_ids`: vLLM
            if self.first_s is None and (text or ids or choice.get("finish_reason")):
                self.first_s = time.perf_counter()
            self.text += text
            self.token_ids += ids
            self.finish = choice.get("finish_reason") or self.finish
            for name in ("stop_reason", "matched_stop"):  # vLLM's and SGLang's name for it
                self.stopped_by = self.stopped_by if choice.get(name) is None else choice[name]


@dataclass(frozen=True)
class Server:
    """A server's address, the environment variable with its key, and the longest silence in seconds."""

    url: str  # including /v1
    key_env: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            plain = "@" not in parts.netloc and not parts.query + parts.fragment  # files store the url: no key in it
        except ValueError:
            known = plain = False
        if not (known and plain):
            raise UserError(
                f"url={self.url!r} is not a server's plain address, such as http://127.0.0.1:8000/v1; a key goes into "
                "an environment variable that `api_key_env` names."
            )

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
            return [model["id"] for model in json.loads(response.read())["data"]]

    def samples(self) -> dict[str, float]:
        """Return its metrics, each summed over its labels; empty if it has none."""
        path = urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + "/metrics"
        found: dict[str, float] = defaultdict(float)
        with self._open("GET", path, needed=False) as response:
            text = response.read().decode() if response.status == 200 else ""
            for line in text.splitlines():
                if sample := SAMPLE.fullmatch(line.strip()):
                    found[sample[1]] += float(sample[2])
        return dict(found)

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """Return the streamed reply to one prompt."""
        reply = Reply()
        with self._open("POST", "completions", {**body, "stream": True}) as response:
            for event in events(response):
                if event.get("error"):
                    raise ServerError(f"{self.url} stopped with an error: {message_of(event)}; see the server's log")
                reply.add(event)
        if reply.finish is None:
            raise ServerError(f"{self.url} stopped in the middle of an answer; see the server's log")
        return reply

    @contextmanager
    def _open(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, needed: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response. Raises ServerError.

        `path`: relative to the url, or absolute. `needed`: a status other than 200 is an error.
        """
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        place = path if path.startswith("/") else f"{parts.path.rstrip('/')}/{path}"
        response = None
        try:
            connection.request(verb, place, None if body is None else json.dumps(body), self._headers())
            response = connection.getresponse()
            if needed and response.status != 200:
                message = message_of(response.read().decode(errors="replace"))
                raise ServerError(f"{self.url} answers {response.status} to {path}: {message}; check url= and model=")
            yield response
        except TimeoutError:
            raise ServerError(
                f"{self.url} sent nothing for {self.timeout_s:g} s; check whether it is busy, or raise timeout_s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if response is None:
                raise ServerError(
                    f"{self.url} cannot be reached ({first_line(error)}); start the server, or give its url="
                ) from None
            raise ServerError(f"{self.url} stopped in the middle of an answer; see the server's log") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self.url} replied unexpectedly to {path} ({first_line(error)}); check that it is OpenAI-compatible"
            ) from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key_env:
            if self.key_env not in os.environ:
                raise ServerError(f"the environment variable {self.key_env!r}, which api_key_env names, is not set")
            headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        return headers


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events up to [DONE]; read the stream to its end, so that it is not reset."""
    ended = False
    for line in lines:
        kind, _, data = line.decode().partition(":")
        ended |= kind == "data" and data.strip() == "[DONE]"
        if kind == "data" and not ended:
            yield json.loads(data)


def message_of(answer: str | Mapping[str, Any]) -> str:
    """Return the message of an error response in one line, from any field that servers use; else its text."""
    try:
        found: Any = json.loads(answer) if isinstance(answer, str) else answer
        found = found.get("error", found)
        message = found if isinstance(found, str) else found["message"]
    except (ValueError, KeyError, AttributeError, TypeError):
        message = answer
    return first_line(RuntimeError(str(message) or "no message"))[:100]
