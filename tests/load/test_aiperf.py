"""What real clients wrote is read as it was: texts, times, refusals, and what the server says about a request."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_loads import CLIENT, PYTHON, request
from tool_files import RECORDED

from mtbench.clients.openai_client import Server
from mtbench.errors import UserError
from mtbench.experiments.load import aiperf, planning
from mtbench.experiments.load.aiperf import Client, Sending, forwards_of, read, with_key
from mtbench.experiments.load.format import LoadPlan
from mtbench.experiments.load.servers import Running
from mtbench.programs import environments

ITEMS, PROMPTS = zip(*json.loads((RECORDED / "prompts.json").read_text()), strict=True)


@pytest.fixture(scope="module")
def plan() -> LoadPlan:
    """The recorded prompts, five at a time."""
    asked = request(url={"one": "http://h/v1"}, request_rate=[], concurrency=[5], requests=len(ITEMS), rounds=1)
    planned = planning.plan(asked)
    items = [
        item.changed(item=name, prompt=text) for item, name, text in zip(planned.items, ITEMS, PROMPTS, strict=True)
    ]
    points = [point.changed(items=list(range(len(items)))) for point in planned.points]
    return planned.changed(items=items, points=points, max_new_tokens=24, stop=["Q:"])


def sending(plan: LoadPlan, key_env: str | None = None, url: str = "http://127.0.0.1:8000/v1") -> Sending:
    return Sending(plan, plan.points[0], Running(Server(url, key_env, 60.0), "tiny", None), Path("tokenizer"))


@pytest.fixture
def of_aiperf(tmp_path: Path) -> Path:
    (tmp_path / aiperf.EXPORT).mkdir()
    for name in (aiperf.RECORDS, aiperf.RAW):
        shutil.copy(RECORDED / f"aiperf.{name}", tmp_path / aiperf.EXPORT / name)
    return tmp_path


def test_aiperf(plan: LoadPlan, of_aiperf: Path) -> None:
    """Six requests, five at a time, to a server with one row and room for one more."""
    lines = read(sending(plan), of_aiperf)
    assert [line.item for line in lines] == list(ITEMS)
    assert [line.outcome for line in lines] == ["ok", "ok", "rejected", "rejected", "rejected", "rejected"]
    first = lines[0]
    assert first.text == "Well, she has 325 cards. First, from dropping some which makes 325-72"
    assert (first.tokens, first.forwards, first.start_s) == (24, 11, 0.0)
    assert first.ttft_s == pytest.approx(0.099816772)
    assert first.e2e_s == pytest.approx(0.214992407)
    assert first.tpot_s == pytest.approx((0.214992407 - 0.099816772) / 23)
    assert lines[2].error is not None
    assert "queue_full" in lines[2].error
    assert lines[2].text is None


def test_a_line_separator_in_an_answer_ends_no_line_of_an_export(plan: LoadPlan, of_aiperf: Path) -> None:
    """aiperf does not escape it."""
    raw = of_aiperf / aiperf.EXPORT / aiperf.RAW
    raw.write_text(raw.read_text(encoding="utf-8").replace("Well", "We\u2028ll"), encoding="utf-8")
    assert str(read(sending(plan), of_aiperf)[0].text).startswith("We\u2028ll, she has")


def test_an_export_without_all_requests_is_refused(plan: LoadPlan, of_aiperf: Path) -> None:
    more = plan.changed(points=[plan.points[0].changed(items=[*plan.points[0].items, 0])])
    with pytest.raises(UserError, match="6 of 7 requests"):
        read(sending(more), of_aiperf)


@pytest.mark.parametrize(
    ("rate", "poisson", "words"),
    [
        (2.5, False, ["--fixed-schedule"]),
        (None, False, ["--concurrency 5", "--num-conversations 6"]),
    ],
)
def test_what_aiperf_is_told(
    plan: LoadPlan, tmp_path: Path, rate: float | None, poisson: bool, words: list[str]
) -> None:
    asked = plan.request.changed(request_rate=[rate] if rate else [], poisson=poisson)
    point = plan.points[0].changed(level=rate or 5.0)
    command = " ".join(Client().command(Path("python"), sending(plan.changed(request=asked, points=[point])), tmp_path))
    assert all(word in command for word in words)
    sent = [json.loads(text) for text in (tmp_path / aiperf.PROMPTS).read_text().splitlines()]
    assert sent[1]["payload"] | {"prompt": PROMPTS[1], "max_tokens": 24, "stop": ["Q:"]} == sent[1]["payload"]
    gaps = [b["timestamp"] - a["timestamp"] for a, b in pairwise(sent) if "timestamp" in a]
    assert len(gaps) == (5 if rate else 0)
    assert (gaps == pytest.approx([400.0] * len(gaps))) is not poisson


@pytest.mark.parametrize("metrics", [None, {}, {"mtbench": {"forwards": -1}}])
def test_a_server_that_tells_nothing(metrics: Any) -> None:
    assert forwards_of(metrics, 24) is None


def test_forwards_by_the_accepted_drafts_of_a_server() -> None:
    """As in a run: each forward gives a token of its own."""
    counts = {"num_spec_steps": 9, "num_draft_tokens": 27, "num_accepted_draft_tokens": 14}
    told = counts | {"acceptance_histogram": [1, 8], "mean_acceptance_length": 2.5}
    assert forwards_of({"speculative_decoding": told}, 24) == 10


def test_a_client_that_fails_says_why(plan: LoadPlan, tmp_path: Path) -> None:
    """Its last words are in the error, and its log is kept."""
    with pytest.raises(UserError, match=r"aiperf 0.13.0 ended with exit code 1: .*Connection refused.*client.log"):
        CLIENT.send(PYTHON, sending(plan, url="http://127.0.0.1:9/v1"), tmp_path / "point")


def test_a_key_is_in_no_command_line(plan: LoadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's process puts it in after its start; without a key nothing is sent."""
    monkeypatch.setenv("THE_KEY", "sk-secret")
    (tmp_path / "told.py").write_text("import json, sys\nprint(json.dumps(sys.argv))")
    python = Path(sys.executable)
    plain, command = (Client().command(python, sending(plan, key), tmp_path) for key in (None, "THE_KEY"))
    assert "key" not in json.dumps(plain).lower().replace("_", "-")
    command = with_key([*command[:2], "told", *command[3:]], "THE_KEY")
    assert "sk-secret" not in json.dumps(command)
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert "sk-secret" in told.stdout
    assert "<key>" not in told.stdout


def test_a_client_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never offline."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"--offline forbids to download it"):
        Client().python(print, offline=True)
    folder = tmp_path / "mtbench" / "clients" / f"aiperf-{aiperf.VERSION}-{sys.implementation.cache_tag}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / environments.MARKER).touch()
    assert Client().python(print, offline=True) == folder / "bin" / "python"
