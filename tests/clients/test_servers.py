"""What misbehaving servers cost: one line that says why, within the bounds, without the key and control characters."""

import pytest
from decoding_cases import run_external
from made_loads import answering
from server_corpus import ASKED, CORPUS, KEY, KEY_ENV, LATE, NOWHERE, Behaviour

from mtbench.clients.openai_client import ServerError
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.errors import printable
from mtbench.models.loading import Inspected, inspect


@pytest.fixture(scope="module")
def words() -> Inspected:
    return inspect("embedded:tiny/ar")


@pytest.fixture(autouse=True)
def _with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.mark.parametrize("how", CORPUS, ids=lambda how: how.name.encode("ascii", "replace").decode())
def test_a_server_costs_one_line(how: Behaviour, words: Inspected) -> None:
    """An error names the cause and says whether another try may help; a good answer stays good."""
    if how.said is None:
        [generation], timing = ask(how, words)
        assert (generation.token_ids, timing.counted) == ([1, 1], 2)
        return
    with pytest.raises(ServerError, match=how.said) as failed:
        ask(how, words)
    line = str(failed.value)
    assert line.startswith(NOWHERE)
    assert printable(line) == line
    assert len(line) <= 250
    assert KEY not in line
    assert failed.value.again == how.again


def ask(how: Behaviour, words: Inspected) -> tuple[list[Generation], Timing]:
    with how.serving() as url:
        return answers(url, words, total_s=0.4 if LATE in (how.said or "") else 10.0)


def answers(url: str, words: Inspected, total_s: float = 10.0) -> tuple[list[Generation], Timing]:
    """What the arm gets of a server for one short prompt."""
    method = METHODS["openai"](url=url, api_key_env=KEY_ENV, timeout_s=5.0, total_s=total_s)
    return run_external(method, {"ar": words}, [[11, 12]], ASKED)


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


def test_over_a_connection_no_proxy_of_the_environment_is_used(
    words: Inspected, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with answering(lambda prompt: (200, "1")) as server:
        [generation], _ = answers(server.url, words)
    assert generation.text == "1"
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9/v1 cannot be reached \(.+\)"):
        answers(NOWHERE, words)
