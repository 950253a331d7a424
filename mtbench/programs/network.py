"""Whether a server can be reached, tested once: without a network the hub's client tries for a minute, then fails."""

import os
import queue
import socket
import sys
import threading
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

WITHIN_S = 3.0  # HF_HUB_ETAG_TIMEOUT, a variable of the hub's client, is used instead where it is set
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
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and parts.hostname and not proxy_bypass(parts.hostname):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname, parts.port or PORTS.get(parts.scheme, 80)


@cache
def _refusal(host: str, port: int, within_s: float) -> str | None:
    """Try to connect, in a thread: the look-up of a name may hang."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_connect, args=((host, port), within_s, answers), daemon=True).start()
    try:
        reason = answers.get(timeout=within_s)
    except queue.Empty:
        reason = f"no answer in {within_s:g} s"
    return None if reason is None else f"{host}: {reason}"


def _connect(address: tuple[str, int], within_s: float, answers: "queue.SimpleQueue[str | None]") -> None:
    """Put None if a connection can be made, and else the reason."""
    try:
        socket.create_connection(address, within_s).close()
    except OSError as error:
        return answers.put(error.strerror or str(error))
    return answers.put(None)
