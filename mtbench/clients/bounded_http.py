"""One HTTP request within bounds: time to connect, silence, total time, bytes. Each request has its own connection.

httpx bounds every read, but not a request as a whole: a server that sends a byte now and then holds it for ever. Its
core, httpcore, takes a network backend; the one here knows when its request must have ended. Proxies and credentials of
the environment are ignored, redirects are not followed, and no content encoding is accepted.
"""

import contextlib
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import httpcore
import httpx

CONNECT_S = 10.0  # longest time to connect to one address
SENT_AT_ONCE = 4096  # bytes; between two such parts the total time is checked


class TooMuch(Exception):
    """A server sent more bytes than allowed."""


class Connection(httpcore.NetworkStream):
    """A connection whose operations all end when its request must have ended."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self.stream, self.deadline = stream, deadline
        self.unsent = b""
        self.ended = False  # by the server

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with contextlib.suppress(httpcore.WriteError):  # a server may answer without reading everything
            self._send(timeout)
        data = self.stream.read(max_bytes, within(self.deadline, timeout))
        self.ended |= not data
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.unsent += buffer  # head and body are sent together

    def _send(self, timeout: float | None) -> None:
        unsent, self.unsent = self.unsent, b""
        for start in range(0, len(unsent), SENT_AT_ONCE):
            self.stream.write(unsent[start : start + SENT_AT_ONCE], within(self.deadline, timeout))

    def close(self) -> None:
        self.stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self.stream = self.stream.start_tls(ssl_context, server_hostname, within(self.deadline, timeout))
        return self

    def get_extra_info(self, info: str) -> Any:
        return self.stream.get_extra_info(info)


class Backend(httpcore.SyncBackend):
    """Opens the connection of one request, which must end by `deadline` (time.monotonic)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.connection: Connection | None = None

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = within(self.deadline, timeout)
        stream = super().connect_tcp(host, port, timeout, local_address, socket_options)
        self.connection = Connection(stream, self.deadline)
        return self.connection


def within(deadline: float, timeout: float | None) -> float:
    """Return the seconds that an operation may take. Raises httpcore.ReadTimeout after the deadline."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise httpcore.ReadTimeout("the request took too long")
    return left_s if timeout is None else min(left_s, timeout)


@contextlib.contextmanager
def opened(
    backend: Backend,
    verb: str,
    host: httpx.URL,
    path: bytes,
    headers: Mapping[str, str],
    content: bytes | None,
    silence_s: float,
) -> Iterator[httpcore.Response]:
    """Send a request and yield the response, whose body is not read yet. Raises what httpcore raises."""
    timeout = {"connect": min(CONNECT_S, silence_s), "read": silence_s, "write": silence_s}
    sent = {"Host": host.netloc.decode(), "Connection": "close", "Accept-Encoding": "identity", **headers}
    if content is not None:
        sent["Content-Length"] = str(len(content))
    target = httpcore.URL(scheme=host.raw_scheme, host=host.raw_host, port=host.port, target=path)
    context = tls() if host.scheme == "https" else None
    with (
        httpcore.HTTPConnection(target.origin, context, network_backend=backend) as connection,
        connection.stream(
            verb, target, headers=list(sent.items()), content=content, extensions={"timeout": timeout}
        ) as response,
    ):
        yield response


@cache
def tls() -> ssl.SSLContext:
    """Return the TLS settings of this machine. They take milliseconds to load."""
    return ssl.create_default_context()


def limited(chunks: Iterable[bytes], most: int, most_in_line: int | None = None) -> Iterator[bytes]:
    """Yield the chunks of a body. Raises TooMuch beyond `most` bytes, or beyond `most_in_line` without a line's end."""
    total = line = 0
    for chunk in chunks:
        total += len(chunk)
        if total > most:
            raise TooMuch(f"more than {most:,} bytes")
        if most_in_line is not None:
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
            line = len(chunk) - 1 - end if end >= 0 else line + len(chunk)
            if line > most_in_line:
                raise TooMuch(f"a line of more than {most_in_line:,} bytes")
        yield chunk


def beginning(chunks: Iterable[bytes], most: int) -> bytes:
    """Return the first `most` bytes of a body and read no further."""
    found = b""
    for chunk in chunks:
        found += chunk
        if len(found) >= most:
            break
    return found[:most]
