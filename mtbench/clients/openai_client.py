"""Client of a server with OpenAI's completions protocol: requests and streamed replies.

Replies are server-sent events (WHATWG, HTML, section 9.2). A server's data is validated once, here. Any fault of it
becomes one ServerError, whose text holds no key and no control character. Nothing is sent again: `again` says that a
later session may. Proxies and credentials of the environment are ignored; redirects are not followed.
"""

import asyncio
import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource, SSEError
from pydantic import ValidationError

from mtbench.clients.openai_data import Event, Models, Reply
from mtbench.errors import UserError, first_line, printable
from mtbench.records import finding

SPARE_TOKENS = 16  # an answer may have so many more than were requested
SHOWN = 100  # characters of a server's text that an error repeats
SECRET = 8  # characters that make a secret: a shorter key is a placeholder
CONNECT_S = 10.0  # longest time to connect
BUSY = (429, 503)
COMPATIBLE = "check that it is OpenAI-compatible"
T = TypeVar("T")


class ServerError(RuntimeError):
    """A failed request: one line with the server's address, the cause and what to do. `again`: it may pass."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(printable(message))
        self.again = again


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
            secret = url.userinfo or url.query or url.fragment  # the address is stored in every file
            plain = url.scheme in ("http", "https") and bool(url.host) and not secret
        except httpx.InvalidURL:
            plain = False
        if not plain:
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
            async with self._open("GET", "models") as response:
                await self._refuse_status(response, "models")
                return [model.id for model in Models.model_validate_json(await response.aread()).data]

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
        streamed = body.get("stream", True)
        async with self._open("POST", path, {**body, "stream": streamed}) as response:
            await self._refuse_status(response, path)
            reply = Reply()
            async for data in events(response) if streamed else whole(response):
                add(reply, data)
                if max(len(reply.token_ids), reply.pieces) > budget + SPARE_TOKENS:
                    raise ServerError(f"{self.url} gives more tokens than the {budget:,} that were asked")
        if reply.finish is None:
            raise self._broken("no finish_reason")
        return reply

    def _add(self, reply: Reply, data: str) -> None:
        event = Event.model_validate_json(data)
        if event.error:
            message = self.clean(message_in(event.error))
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
        key = self._key() or ""
        return text.replace(key, "[key]") if len(key) >= SECRET else text

    @asynccontextmanager
    async def _open(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the response.

        `path`: below /v1, or with a leading slash beside it. Every error, also in what is done with the response, is a
        ServerError.
        """
        address = self.url.removesuffix("/v1") + path if path.startswith("/") else f"{self.url}/{path}"
        silence_s = self.timeout_s if body is None or body.get("stream", True) else self.total_s
        timeout = httpx.Timeout(silence_s, connect=min(CONNECT_S, self.timeout_s))
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if (key := self._key()) else {})
        try:
            async with (
                asyncio.timeout(self.total_s),
                httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False, verify=tls()) as client,
                client.stream(verb, address, json=body) as response,
            ):
                yield response
        except TimeoutError:
            raise ServerError(
                f"{self.url} took longer than {self.total_s:g} s for a request; if it may, raise total_s"
            ) from None
        except (httpx.HTTPError, ValueError) as error:
            raise self._failed(path, error) from None

    async def _refuse_status(self, response: httpx.Response, path: str) -> None:
        if (status := response.status_code) == 200:
            return
        await response.aread()
        try:
            message = message_in(response.json())
        except ValueError:
            message = response.text
        remedy = "check url= and model=, or add plain=true"
        if status in BUSY:
            remedy = "it is busy; try again later, or give a smaller --batch-size"
        again = status == 429 or status >= 500
        raise ServerError(f"{self.url} answers {status} to {path}: {self.clean(message)}; {remedy}", again=again)

    def _failed(self, path: str, error: Exception) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            why = self.clean(str(error) or "no connection in time")
            return ServerError(f"{self.url} cannot be reached ({why}); start the server, or give its url=", again=True)
        if isinstance(error, httpx.TimeoutException):
            return ServerError(
                f"{self.url} sent nothing for {self.timeout_s:g} s; check whether it is busy, or raise timeout_s",
                again=True,
            )
        if isinstance(error, httpx.HTTPError) and not isinstance(error, SSEError):
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


def message_in(answer: Any) -> str:
    """Return the message of an error, wherever the server put it."""
    while isinstance(answer, dict) and (inner := answer.get("error") or answer.get("message")):
        answer = inner
    return str(answer)
