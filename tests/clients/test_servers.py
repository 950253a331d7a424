"""What misbehaving servers cost: one line that says why, within the bounds, without the key and control characters."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from decoding_cases import run_external
from server_corpus import ASKED, CORPUS, KEY, KEY_ENV, Behaviour, Connection, as_connection

from mtbench.clients.openai_client import ServerError
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.errors import printable
from mtbench.models.loading import Inspected, inspect

pytestmark = pytest.mark.whole

GRACE_S = 10.0  # a busy machine
CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
TEXTS = {".json", ".jsonl", ".md", ".html", ".csv", ".tex", ".svg"}
IN_A_RUN = [
    "nothing listens",
    "hangs before the head",
    "drips tokens",
    "sends an error for ever",
    "echoes the key in a header",
    "the key in a stream's error",
    "the key as an answer",
    "five choices",
    "usage NaN",
    r"error b'\x1b]52;c;aGk=\x07\x9b31m'",
    "the status line is a control",
    "models: the key as a wrong value",
    "metrics: NaN",
    "redirect to http://127.0.0.1:9/v1",
]


@pytest.fixture(scope="module")
def words() -> Inspected:
    return inspect("embedded:tiny/ar")


@pytest.fixture(autouse=True)
def _with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


def test_the_names_of_the_corpus_differ() -> None:
    assert len({how.name for how in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize("how", CORPUS, ids=lambda how: how.name.encode("ascii", "replace").decode()[:70])
def test_a_server_costs_one_line(how: Behaviour, words: Inspected) -> None:
    """An error names the cause and says whether another try may help; a good answer stays good."""
    started_at = time.monotonic()
    if how.said is None:
        [generation], timing = ask(how, words)
        assert (generation.token_ids, timing.counted, timing.dropped) == ([1, 1], 2, how.dropped)
        assert timing.drafts is None or timing.drafts >= 0
    else:
        with pytest.raises(ServerError, match=how.said) as failed:
            ask(how, words)
        assert_harmless(str(failed.value))
        assert str(failed.value).startswith(f"{how.scheme}://127.0.0.1:")
        assert failed.value.again == how.again
    assert time.monotonic() - started_at < min(how.timeout_s, how.total_s) + GRACE_S


def ask(how: Behaviour, words: Inspected) -> tuple[list[Generation], Timing]:
    """What the arm gets of such a server for one short prompt."""
    with how.serving() as url:
        method = METHODS["openai"](url=url, api_key_env=KEY_ENV, timeout_s=how.timeout_s, total_s=how.total_s)
        return run_external(method, {"ar": words}, [[11, 12]], ASKED)


def assert_harmless(line: str) -> None:
    """One short line, without any eight characters of the key."""
    assert printable(line) == line
    assert len(line) <= 250
    assert not any(KEY[i : i + 8].lower() in line.lower() for i in range(len(KEY) - 7))


@pytest.mark.parametrize("key", ["", " padded", "two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_not_shown(
    key: str, words: Inspected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the variable's name is."""
    monkeypatch.setenv(KEY_ENV, key)
    with pytest.raises(ServerError, match=f"variable '{KEY_ENV}', .* is not set, or holds none") as failed:
        ask(CORPUS[-1], words)
    assert not key or key not in str(failed.value)


def test_a_placeholder_may_be_in_an_answer(words: Inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local servers take any key; a short one is no secret."""
    monkeypatch.setenv(KEY_ENV, "1")
    [generation], _ = ask(next(how for how in CORPUS if how.name == "a good answer"), words)
    assert generation.token_ids == [1, 1]


def test_no_proxy_of_the_environment_is_used(words: Inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    [generation], _ = ask(as_connection(next(how for how in CORPUS if how.name == "a good answer")), words)
    assert generation.token_ids == [1, 1]


@pytest.mark.slow
def test_each_costs_its_own_cell_only(tmp_path: Path) -> None:
    """In a whole run `ar` beside them keeps all its samples; no file and no terminal gets the key or a control."""
    chosen = [how for how in CORPUS if how.name in IN_A_RUN]
    assert len(chosen) == len(IN_A_RUN)
    refusal = b"HTTP/1.1 429 No\r\nRetry-After: 0\r\n\r\n"
    chosen.append(Connection(name="is busy at every request", said=None, data=refusal, when=lambda n: n % 2 == 0))
    out = tmp_path / "run"
    with ExitStack() as servers:
        arms = ["ar"]
        for how in chosen:
            url = servers.enter_context(as_connection(how).serving())
            arms.append(f"openai:url={url},api_key_env={KEY_ENV},timeout_s={how.timeout_s},total_s={how.total_s}")
        shown = command("run", "-o", str(out), *(part for arm in arms for part in ("--method", arm)))
    results = json.loads((out / "results.json").read_text())
    cells = results["cells"]
    assert (cells[0]["status"], cells[0]["void"], cells[0]["samples"]) == ("ok", [], {"used": 3, "dropped": 0})
    for how, cell in zip(chosen[:-1], cells[1:-1], strict=True):
        assert cell["status"] == "failed", how.name
        assert re.search(how.said or "", cell["error"]), how.name
    assert cells[-1]["void"] == ["0 of 3 samples left, 80% needed"]
    assert "3 of 3 samples dropped: a request was sent again, because the server was busy" in cells[-1]["flags"]
    written = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for file, data in {**written, Path("terminal.md"): shown}.items():
        assert KEY.lower().encode() not in data.lower(), file
        assert file.suffix not in TEXTS or not CONTROLS.search(data), file


def command(*arguments: str) -> bytes:
    """What a run of the embedded family prints."""
    few = ("--limit", "6", "--batch-size", "2", "--rounds", "1", "--max-new-tokens", str(ASKED), "--device", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "mtbench", *arguments, *few],
        env={**os.environ, KEY_ENV: KEY, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr.decode()  # cells failed
    return done.stdout + done.stderr
