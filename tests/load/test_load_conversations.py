"""Recorded conversations under load: whole ones, the same prompts for all arms, a cache that is cold."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_loads import CLIENT, PYTHON, answering, begun, line, load_run, point, request
from transformers import AutoTokenizer

from mtbench.clients.openai_client import Server
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.html_page import html
from mtbench.errors import UserError
from mtbench.experiments.load import aiperf, planning
from mtbench.experiments.load.aiperf import Sending
from mtbench.experiments.load.document import document, plan_document
from mtbench.experiments.load.format import LoadPlan
from mtbench.experiments.load.request import LoadRequest
from mtbench.experiments.load.runner import LoadRun, read_points
from mtbench.experiments.load.servers import Running
from mtbench.experiments.load.summary import Sent, cell, summarise

TURNS, THINK_S = (1, 2, 6), 0.25  # of the conversations; before a later turn
URLS = {"one": "http://h/v1", "two": "http://i/v1"}


@pytest.fixture(autouse=True)
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of three conversations in the working folder."""
    lines = [
        [
            message
            for turn in range(turns)
            for message in (
                {"role": "user", "content": f"{talk} + {turn}?", "think_s": THINK_S},
                {"role": "assistant", "content": str(talk + turn)},
            )
        ]
        for talk, turns in enumerate(TURNS)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)


def asked(**given: Any) -> LoadRequest:
    values = {"suite": "conversations:c.jsonl", "family": "tiny", "url": URLS, "requests": 3, "rounds": 1}
    return request(**{**values, **given})


def lines_of(planned: LoadPlan, number: int = 0, *, prefix_cache: bool = False) -> list[dict[str, Any]]:
    running = Running(Server("http://h/v1", None, 60.0), "m", None, prefix_cache=prefix_cache)
    return list(Sending(planned, planned.points[number], running, Path("tokenizer")).requests())


def test_a_point_sends_whole_conversations() -> None:
    """All arms get the suite's own prompts, and what is sent is known before."""
    planned = planning.plan(asked(requests=2, rounds=3))
    talks = [[f"conversations/{talk}/{turn}" for turn in range(turns)] for talk, turns in enumerate(TURNS, start=1)]
    sent: dict[Any, list[int]] = {}
    for each in planned.points:
        names = [planned.items[place].item for place in each.items]
        firsts = [names[place] for place in range(len(names)) if names[place].endswith("/0")]
        assert [talk[0] for talk in talks if talk[0] in firsts]
        assert names == [name for first in firsts for talk in talks if talk[0] == first for name in talk]
        assert sent.setdefault((each.round, each.level), each.items) == each.items
    assert [item.turn for item in planned.items] == [1, 1, 2, 1, 2, 3, 4, 5, 6]
    tokenizer = AutoTokenizer.from_pretrained(planned.tokenizer)
    for item in planned.items:
        assert item.prompt.endswith("assistant\n")
        assert len(tokenizer(item.prompt).input_ids) == item.prompt_tokens
    every = sum(len(each.items) for each in planned.points)
    assert f"1 per second: 2 conversations, 8 per second: 2 conversations. {every} requests" in str(
        plan_document(planned)
    ).replace(" and 8", ", 8")


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    """Conversations start by the schedule, which all arms share; a later turn waits for its think time."""
    planned = planning.plan(asked(request_rate=[4.0], poisson=True))
    first, second = lines_of(planned, 0), lines_of(planned, 1)
    assert first == second
    starts = [sent["timestamp"] for sent in first if "timestamp" in sent]
    assert len(starts) == len(TURNS)
    assert starts == sorted(starts)
    items = [planned.items[place] for place in planned.points[0].items]
    for place, (item, sent) in enumerate(zip(items, first, strict=True)):
        assert sent["payload"]["prompt"] == item.prompt
        assert int(sent["session_id"]) == place - item.turn + 1
        assert sent.get("delay") == (1000 * THINK_S if item.turn > 1 else None)
    constant = lines_of(planned.changed(request=planned.request.changed(poisson=False)))
    assert [sent["timestamp"] for sent in constant if "timestamp" in sent] == [250.0, 500.0, 750.0]


def test_only_turns_of_a_conversation_and_a_point_share_a_cache() -> None:
    """Also of a conversation that is sent again, so each first turn is cold."""
    planned = planning.plan(asked(requests=4))
    sent = [one for number in (0, 1) for one in lines_of(planned, number, prefix_cache=True)]
    salts: dict[str, list[str]] = {}
    for one in sent:
        salts.setdefault(one["payload"]["cache_salt"], []).append(one["payload"]["prompt"])
    assert len(salts) == 2 * 4
    assert not any("/" in salt for salt in salts)  # vLLM refuses it
    assert all(a in b for prompts in salts.values() for a, b in pairwise(prompts))
    assert [one["payload"]["cache_prompt"] for one in sent] == ["delay" in one for one in sent]
    assert not any("cache_salt" in one["payload"] for one in lines_of(planned))


def test_a_server_of_ours_has_no_prefix_cache() -> None:
    with pytest.raises(UserError, match=r"mtbench's own server has no such cache.*`--server` one of .*llamacpp"):
        planning.plan(asked(method=["ar"], prefix_cache=["on"]))
    with pytest.raises(UserError, match="a URL keeps its settings"):
        planning.plan(asked(prefix_cache=["on"]))


def test_a_killed_load_goes_on_with_whole_points(tmp_path: Path) -> None:
    """A point is there whole or not at all, nothing is counted twice, and turns add up to the cell."""
    with answering(lambda prompt: (200, "7")) as server:
        run, planned = begun(
            tmp_path / "load", asked(url={"one": server.url}, rounds=3, concurrency=[2], request_rate=[])
        )

        class Killed(Exception): ...

        def until(note: str) -> None:
            raise Killed

        with pytest.raises(Killed):
            LoadRun(run, planned, CLIENT, until).send(PYTHON)
        whole = (run.path / "points.jsonl").read_text()
        (run.path / "points.jsonl").write_text(whole + whole[: len(whole) // 2])  # killed in the second one
        load_run(run, planned).send(PYTHON)
    assert len(server.asked) == 3 * (sum(TURNS) + planned.request.max_num_seqs)
    found = summarise(run, planned)
    [all_turns] = found.cells
    assert (found.unit, all_turns.sent, all_turns.ok) == ("conversation", 27, 27)
    assert [(part.turn, part.sent) for part in all_turns.turns] == [("1", 9), ("2", 6), ("3", 3), ("4", 3), ("5–8", 6)]
    assert sum(part.goodput.value or 0 for part in all_turns.turns) == pytest.approx(all_turns.goodput.value)
    text = str(document(found, drawn=False))
    assert "By turn of a conversation" in text
    assert "2 conversations at a time" in text
    assert "requests per second offered" not in html(document(found))


def test_figures_by_turn_by_hand() -> None:
    """Per round of 4 s: a first turn that is cold, and two second turns, of which one is late and one has failed."""
    first = line(0, prompt_tokens=20, cached_tokens=0)
    late = line(1, turn=2, prompt_tokens=50, cached_tokens=20, ttft_s=0.5)
    other = line(2, turn=2, prompt_tokens=50, cached_tokens=40)
    failed = line(3, turn=2, outcome="failed", error="no", ttft_s=None, e2e_s=None, tpot_s=None, cached_tokens=None)
    points = [point(number, [first, late, other, failed], energy_j=5.0) for number in range(1, 6)]
    found = cell(Sent("a", 2.0, points, {}, {"ttft": 0.2}))
    one, two = found.turns
    assert [part.cached_share and part.cached_share.value for part in (found, one, two)] == [60 / 120, 0.0, 60 / 100]
    assert (two.sent, two.ok, two.failed, two.good) == (15, 10, 5, 5)
    assert two.goodput.value == pytest.approx(0.25)
    assert two.ttft.p50.value == pytest.approx(0.3)
    assert two.goodput.ci_low is not None
    assert (one.j_per_token, two.j_per_token) == (None, None)  # it is known of all turns together only
    assert not any("first turn" in flag for flag in found.flags)


def test_a_first_turn_that_was_cached_is_flagged() -> None:
    """A cache that is warm by another point or a common beginning is not silent."""
    warm = [line(0, prompt_tokens=20, cached_tokens=16), line(1, prompt_tokens=20, cached_tokens=0)]
    found = cell(Sent("a", 2.0, [point(number, warm) for number in range(1, 6)], {}, {}))
    assert any("had cached tokens of 5 first turns" in flag for flag in found.flags)


@pytest.mark.slow
def test_llamacpp_reads_again_only_what_is_new(tmp_path: Path) -> None:
    """A real engine reports what it kept: nothing of a first turn, at every level; of a later one, the turn before."""
    SERVING_ENGINES["llamacpp"].fetch(lambda text: None)
    run, planned = begun(
        tmp_path / "load", asked(url={}, engine=["llamacpp"], prefix_cache=["on"], dtype="float32", max_new_tokens=4)
    )
    load_run(run, planned).send(PYTHON)
    points = read_points(run, planned)
    assert len(points) == 2
    for before, sent in (pair for ended in points for pair in pairwise(ended.requests)):
        least = (before.prompt_tokens or 0) if sent.turn > 1 else 0
        most = least + 4 if sent.turn > 1 else 0  # the answer may begin as the recorded one
        assert sent.cached_tokens is not None
        assert least <= sent.cached_tokens <= most


@pytest.mark.slow
@pytest.mark.parametrize("level", [{"request_rate": [4.0]}, {"request_rate": [], "concurrency": [1]}])
def test_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: dict[str, Any]) -> None:
    """If it is installed: turns one after the other behind their think times, conversations side by side."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    client = aiperf.Client()
    try:
        python = client.python(print, offline=True)
    except UserError:
        pytest.skip(f"{aiperf.LABEL} is not installed")
    with answering(lambda prompt: (200, "7")) as server:
        run, planned = begun(tmp_path / "load", asked(url={"one": server.url}, **level))
        LoadRun(run, planned, client, print).send(python)
    [ended] = read_points(run, planned)
    assert [sent.outcome for sent in ended.requests] == ["ok"] * sum(TURNS)
    starts = [sent.start_s for sent in ended.requests if sent.turn == 1]
    if "concurrency" in level:
        assert all(a.start_s + (a.e2e_s or 0.0) <= b.start_s for a, b in pairwise(ended.requests))
    else:
        assert [later - before for before, later in pairwise(starts)] == pytest.approx([0.25] * 2, abs=0.1)
    for before, later in pairwise(ended.requests):
        if later.turn > 1:
            assert later.start_s >= before.start_s + (before.e2e_s or 0.0) + THINK_S - 0.01
