"""A server that speaks OpenAI's completions protocol: what it is asked, what it streams back, what it counts.

Answers come as server-sent events (WHATWG, HTML, section 9.2), counters as Prometheus' text format 0.0.4. Every request
has a connection of its own, straight to the server: no proxy of the environment stands in between.
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
    """What went wrong between here and the server, in one line with its address and what to do."""


@dataclass(slots=True)
class Reply:
    """What a server streamed for one prompt, its chunks put together; None for what it does not say."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty where the server gives text alone
    finish: str | None = None  # `stop` or `length`
    stopped_by: int | str | None = None  # the end token or the stop string, where the server names it
    counted: int | None = None  # tokens by the server's count
    first_s: float | None = None  # time.perf_counter() when something of its answer was there

    def add(self, event: Mapping[str, Any]) -> None:
        """One chunk of the stream."""
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
    """Where it is, which environment variable holds the key to it, and how long it may be silent."""

    url: str  # up to and with /v1
    key_env: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            plain = "@" not in parts.netloc and not parts.query + parts.fragment  # it stands in every file of a run
        except ValueError:
            known = plain = False
        if not (known and plain):
            raise UserError(
                f"url={self.url!r} is not a server's plain address, such as http://127.0.0.1:8000/v1; a key goes into "
                "an environment variable that `api_key_env` names."
            )

    @property
    def elsewhere(self) -> str | None:
        """Its host, if that is another machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return None if ipaddress.ip_address(host).is_loopback else host
        except ValueError:  # a name
            return None if host == "localhost" else host

    def models(self) -> list[str]:
        """Names of what it serves."""
        with self._asked("GET", "models") as response:
            return [model["id"] for model in json.loads(response.read())["data"]]

    def samples(self) -> dict[str, float]:
        """Its metrics, each summed over its labels; empty if it has none."""
        path = urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + "/metrics"
        found: dict[str, float] = defaultdict(float)
        with self._asked("GET", path, needed=False) as response:
            for line in response.read().decode().splitlines() if response.status == 200 else ():
                if sample := SAMPLE.fullmatch(line.strip()):
                    found[sample[1]] += float(sample[2])
        return dict(found)

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """The answer to one prompt, as it was streamed."""
        reply = Reply()
        with self._asked("POST", "completions", {**body, "stream": True}) as response:
            for event in events(response):
                if event.get("error"):
                    raise ServerError(f"{self.url} broke off: {message_of(event)}; see the server's log")
                reply.add(event)
        if reply.finish is None:
            raise ServerError(f"{self.url} broke off in the middle of an answer; see the server's log")
        return reply

    @contextmanager
    def _asked(
        self, verb: str, path: str, body: Mapping[str, Any] | None = None, *, needed: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        """The server's response; `path` is beneath the url unless it begins at the root. Raises ServerError.

        A status other than 200 is an error if the response is `needed`.
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
                said = message_of(response.read().decode(errors="replace"))
                raise ServerError(f"{self.url} answers {response.status} to {path}: {said}; see url= and model=")
            yield response
        except TimeoutError:
            raise ServerError(
                f"{self.url} was silent for {self.timeout_s:g} s; see whether it is busy, or raise timeout_s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            if response is None:
                raise ServerError(
                    f"{self.url} cannot be reached ({first_line(error)}); start the server, or give its url="
                ) from None
            raise ServerError(f"{self.url} broke off in the middle of an answer; see the server's log") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self.url} answers {path} with something else ({first_line(error)}); is it OpenAI-compatible?"
            ) from None
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key_env and self.key_env not in os.environ:
            raise ServerError(f"the environment variable {self.key_env!r}, which api_key_env names, is not set")
        return headers | ({"Authorization": f"Bearer {os.environ[self.key_env]}"} if self.key_env else {})


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of server-sent events as it arrives, up to [DONE]; the rest of the stream is read, lest it be reset."""
    ended = False
    for line in lines:
        kind, _, data = line.decode().partition(":")
        ended |= kind == "data" and data.strip() == "[DONE]"
        if kind == "data" and not ended:
            yield json.loads(data)


def message_of(answer: str | Mapping[str, Any]) -> str:
    """What an error response says, in one line: its message, wherever the server put it, else its text."""
    try:
        found: Any = json.loads(answer) if isinstance(answer, str) else answer
        found = found.get("error", found)
        said = found if isinstance(found, str) else found["message"]
    except (ValueError, KeyError, AttributeError, TypeError):
        said = answer
    return first_line(RuntimeError(str(said) or "nothing more"))[:100]
