"""Whether a server can be reached, asked once: without a network the hub's client tries for a minute, then fails."""

import os
import queue
import socket
import sys
import threading
import time
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

WITHIN_S = 3.0  # HF_HUB_ETAG_TIMEOUT, a variable of the hub's client, is used instead where it is set
RETRY_S = 0.5  # after a failure of name resolution that may pass
LOCAL_FAMILIES = "tiny, smollm2-135m"  # their checkpoints are embedded, or in a package that is installed
PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080}
_refusals: list[str] = []  # of the hub


def hub_refusal() -> str | None:
    """Return why the hub (HF_ENDPOINT) cannot be reached; None if it can.

    If it cannot, the clients of the hub use their caches only from now on, in this process and its children.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _refusals[-1] if _refusals else "HF_HUB_OFFLINE is set"
    reason = refusal(constants.ENDPOINT)
    if reason is not None:
        _refusals.append(reason)
        go_offline()
    return reason


def go_offline() -> None:
    """Forbid network access of Hugging Face's libraries, in this process and its children."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    os.environ |= dict.fromkeys(names, "1")
    # Both libraries read the environment once, at import, and may be imported already.
    for module in filter(None, map(sys.modules.get, ("huggingface_hub.constants", "datasets.config"))):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, True)


def refusal(url: str) -> str | None:
    """Return why the server of a URL, or the proxy before it, cannot be reached; None if it can, or has no name."""
    host, port = _first_hop(url)
    try:
        within_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", WITHIN_S))
    except ValueError:
        within_s = WITHIN_S
    return _refusal(host, port, within_s) if host else None


def _first_hop(url: str) -> tuple[str | None, int]:
    """Return host and port of the first connection to a URL."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and parts.hostname and not proxy_bypass(parts.hostname):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname, parts.port or PORTS.get(parts.scheme, 80)


@cache
def _refusal(host: str, port: int, within_s: float) -> str | None:
    """Try IPv4 and IPv6 at once: a machine may have a route for one of them only. A look-up of a name may hang."""
    end = time.monotonic() + within_s
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    families = (socket.AF_INET, socket.AF_INET6)
    for family in families:
        threading.Thread(target=_connect, args=(family, (host, port), end, answers), daemon=True).start()
    reasons: list[str] = []
    for _ in families:
        try:
            answer = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if answer is None:
            return None
        reasons.append(answer)
    return f"{host}: {reasons[0] if reasons else f'no answer in {within_s:g} s'}"


def _connect(family: int, address: tuple[str, int], end: float, answers: "queue.SimpleQueue[str | None]") -> None:
    """Put None if a connection can be made before `end` (`time.monotonic`), and else the reason."""
    while True:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(0.1, end - time.monotonic()))
                connection.connect(address)
            return answers.put(None)
        except OSError as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() + RETRY_S > end:
                return answers.put(error.strerror or str(error))
        time.sleep(RETRY_S)
