"""Whether a server can be reached: in time, through a proxy, and what the clients of the hub do if it cannot."""

import os
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.lineup.lineup import line_up
from mtbench.models import families
from mtbench.models.configuration import explained
from mtbench.models.families import FAMILIES
from mtbench.models.loading import inspect
from mtbench.plan.request import RunRequest
from mtbench.programs import network

CLOSED = "https://127.0.0.1:1"


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of a server that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and settings that are restored: `go_offline` changes them for the whole process."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(network, "_refusals", [])


def test_a_server_is_reached_or_has_a_reason(listening: int) -> None:
    """A mirror on another port, too; a URL without a host is not asked."""
    assert network.refusal(f"http://127.0.0.1:{listening}/mirror") is None
    assert network.refusal(CLOSED) == "127.0.0.1: Connection refused"
    assert network.refusal("file:///data") is None


def test_the_proxy_is_asked_in_place_of_the_server(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy no name of the outside needs to be known; a host of `no_proxy` is asked itself."""
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listening}")
    assert network.refusal("https://hub.invalid") is None
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert network.refusal(CLOSED) == "127.0.0.1: Connection refused"


def test_a_server_that_does_not_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall may drop what is sent; the variable of the hub's client says how long a slow network may take."""
    monkeypatch.setattr(network, "_connect", lambda *_: time.sleep(0.3))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.05")
    assert network.refusal("https://192.0.2.1") == "192.0.2.1: no answer in 0.05 s"


@pytest.mark.parametrize("value", ["", "soon"])
def test_a_time_that_is_no_number_leaves_the_default(
    value: str, listening: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", value)
    assert network.refusal(f"http://127.0.0.1:{listening}") is None


def test_a_cached_checkpoint_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in the cache and need a package: only the library's own reason is known."""
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    reason = r"cannot be loaded from the local cache \(tokenizer: requires sentencepiece\), and the hub "
    with pytest.raises(UserError, match=reason), explained("me/cached", "tokenizer", offline=False):
        raise ImportError("requires sentencepiece")


def test_a_checkpoint_of_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at once, with what needs no network; the hub's client, which tries for half a minute, is not asked."""
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"hub cannot be reached \(127.*: tiny, smollm2-135m\.$"):
        inspect("nobody/nothing")

    local = [
        name for name, family in FAMILIES.items() if not any("/" in s.partition(":")[0] for s in family.roles.values())
    ]
    assert ", ".join(local) == network.LOCAL_FAMILIES
    assert time.monotonic() - began < 5
    assert constants.HF_HUB_OFFLINE
    assert network.hub_refusal() == "127.0.0.1: Connection refused"


def test_a_suite_without_its_model_gets_a_command_that_runs_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that was typed, with a family of this machine; as a library call, the option."""
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    monkeypatch.setattr(families, "FAMILIES", {name: FAMILIES[name] for name in ("tiny", "qwen2.5-0.5b")})
    words = ["run", "--suite", "gsm8k", "--data-dir", "a b"]
    monkeypatch.setattr(sys, "argv", ["mtbench", *words])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert capsys.readouterr().err == (
        "error: no model is named, and qwen2.5-0.5b, that of gsm8k, is not on this machine (127.0.0.1: Connection "
        "refused); add `--model PATH` (a folder or GGUF file) or `--family tiny`: `mtbench run --suite gsm8k "
        "--data-dir 'a b' --family tiny --time-budget 10m`\n"
    )
    assert line_up("gsm8k", RunRequest(suite=["gsm8k"], family="tiny"), None).arms
