"""`mtbench serve` as a process on the embedded family: real clients, signals, and what it refuses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from mtbench.cli.serve import app
from mtbench.decoding.loop import decode
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.models import chat_template
from mtbench.plan.request import RunRequest
from mtbench.serving import served

QUESTION = {"messages": [{"role": "user", "content": "Tom has 3 apples and buys 14 more. How many has he?"}]}


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A serving process and the URL that it prints once it answers."""
    command = [sys.executable, "-m", "mtbench", "serve", "--port", "0", "--device", "cpu", "--offline", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), url + process.stdout.read()
        yield process, url
    finally:
        process.kill()
        process.wait()


@cache
def tiny(method: str) -> served.Served:
    return served.load(RunRequest(family="tiny", device="cpu", offline=True), method, 2)


def decoded(method: str, prompts: Sequence[Sequence[int]], budget: int) -> list[str]:
    """The texts that the decode loop gives for some prompts."""
    loaded = tiny(method)
    with torch.inference_mode():
        batch = loaded.make()
    requests = [Request(prompt_ids=prompt, max_new_tokens=budget) for prompt in prompts]
    return [g.text for g in decode(loaded.method, batch.runners, requests)[0]]


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_a_process_serves_and_drains() -> None:
    """An answer has the text of the decode loop; SIGTERM lets answers end."""
    with started("--method", "mars:tau=0.9", "--max-num-seqs", "2") as (process, url):
        answer = httpx.post(f"{url}/chat/completions", json={**QUESTION, "max_tokens": 24}, timeout=60).json()
        text = chat_template.render(tiny("ar").tokenizer, QUESTION["messages"], answer_follows=True, options={})
        prompt = tiny("ar").tokenizer([text], add_special_tokens=False)["input_ids"][0]
        assert [answer["choices"][0]["message"]["content"]] == decoded("mars:tau=0.9", [prompt], 24)
        asked = {"prompt": "12 + 30 =", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=60) == 0
        assert process.stdout is not None
        assert not process.stdout.read()


LOSES_THE_GPU = """
from dataclasses import dataclass
from mtbench.decoding.registry import METHODS

@METHODS.register("lost")
@dataclass(frozen=True, kw_only=True)
class Lost(METHODS["ar"]):
    reference = False
    default_arms = ()

    def accept(self, state, rows, output):
        if int(rows.prompt_len.max()) > 20:  # not the warm-up
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore lines")
        return super().accept(state, rows, output)
"""


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_a_process_without_its_gpu_fails_its_requests_and_ends(tmp_path: Path) -> None:
    """One line says why, and the exit code is not 0, so that a supervisor starts it again."""
    plugin = tmp_path / "lost.py"
    plugin.write_text(LOSES_THE_GPU)
    with started("--plugin", str(plugin), "--method", "lost", "--max-num-seqs", "2") as (process, url):
        answer = httpx.post(f"{url}/completions", json={"prompt": "12 + 30 =" * 20}, timeout=60)
        assert answer.status_code == 500
        assert "an illegal memory access" in answer.json()["error"]["message"]
        assert process.wait(timeout=60) == 1
        assert process.stdout is not None
        [line] = process.stdout.read().splitlines()
    assert line.startswith("error: lost@ar/graph cannot be served any more: CUDA error: an illegal memory access")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "openai:url=http://127.0.0.1:1/v1"}, "external engine"),
        ({"method": "mars:tau=0.9|0.8"}, "names 2 arms"),
        ({"method": "ar", "max_length": 1 << 20}, "--max-length"),
        ({"api_key_env": "MTBENCH_TEST_NO_SUCH_KEY"}, "is not set"),
        ({"host": "192.0.2.1"}, "cannot be used"),
        ({"request_timeout": "50ms"}, "--request-timeout 0.05s is not allowed; it is a time from 0.1s"),
    ],
    ids=str,
)
def test_mistakes_are_said_before_anything_is_served(options: dict[str, Any], message: str) -> None:
    assert "MTBENCH_TEST_NO_SUCH_KEY" not in os.environ
    given = {"method": "ar", "device": "cpu", "max_num_seqs": 2, "port": 0} | options
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UserError)
    assert message in str(error)


@pytest.mark.slow
def test_many_clients_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 requests, of which some are malformed or abandoned: all end, rows come free, memory stays."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from serve_soak import soak

    found = soak(
        ["--method", "mars:tau=0.9", "--max-num-seqs", "8", "--device", "cpu"], clients=32, requests=1000, seed=1
    )
    assert found["alive"]
    assert set(found["seen"]) <= {"ok", "rejected", "gone", "busy"}
    assert found["seen"]["gone"] >= 50
    assert found["seen"]["rejected"] >= 20
    assert found["different_answers"] == 0
    assert found["left"]["mtbench_rows_running"] == found["left"]["mtbench_queue_length"] == 0
    assert found["memory_bytes"]["at_the_end"] < 1.1 * found["memory_bytes"]["after_a_tenth"]
