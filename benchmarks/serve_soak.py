"""Ask a server many ragged requests, some malformed, some abandoned, some read slowly; check that nothing is left.

    python benchmarks/serve_soak.py [--seconds 1800 | --requests 1000] [--clients 32] [-- OPTIONS of `mtbench serve`]

It starts `mtbench serve` itself. Every complete answer must equal the first one to the same request. At the end no
request waits, no row runs, and the outcomes in /metrics are those that the clients saw. The last line is JSON with the
counts, the latencies and the server's memory after a tenth of the time and at the end.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import checkout  # noqa: F401
import httpx
import psutil  # type: ignore[import-untyped]

from mtbench.clients.openai_client import events

TAUS = (1.0, 0.95, 0.8, 0.5)
PROMPTS = 40  # different requests; each is asked again and again
MALFORMED: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"prompt": {"a": 1}},
    {"n": 3},
    {"max_tokens": 10**9},
    {"temperature": "hot"},
    {"unknown": 1},
)
DEADLINE_S = 120.0  # longer than any answer may take
BUSY_S = 0.5  # a client waits this long after a 503


class Soak:
    """The clients of one server."""

    def __init__(self, url: str, pid: int, seed: int) -> None:
        self.url, self.process, self.chance = url, psutil.Process(pid), random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.answers: dict[int, str] = {}  # by request
        self.latencies_s: list[float] = []
        self.memory: list[int] = []  # bytes, a few times a second
        self.different = 0

    def body(self, number: int) -> dict[str, Any]:
        """Return a request: its length and its τ follow from its number."""
        chance = random.Random(number)
        prompt = [chance.randrange(90) for _ in range(chance.choice((1, 4, 30, 100)))]
        tokens = chance.choice((1, 5, 20, 60, 120))
        return {"prompt": prompt, "max_tokens": tokens, "tau": TAUS[number % len(TAUS)]}

    async def one(self, client: httpx.AsyncClient) -> None:
        """Ask once, in one of the ways in which clients ask."""
        kind = self.chance.choices(("whole", "stream", "gone", "malformed", "slow"), (45, 40, 8, 5, 2))[0]
        number = self.chance.randrange(PROMPTS)
        body = self.body(number)
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(DEADLINE_S):
                if kind == "malformed":
                    answer = await client.post("/completions", json=body | self.chance.choice(MALFORMED))
                    outcome = "rejected" if answer.status_code in (400, 413) else f"malformed got {answer.status_code}"
                elif kind == "whole":
                    answer = await client.post("/completions", json=body)
                    outcome = self._outcome(answer)
                    if outcome == "ok":
                        self._compare(number, answer.json()["choices"][0]["text"])
                else:
                    outcome = await self._stream(client, number, body, kind)
        except TimeoutError:
            outcome = "hung"
        except httpx.TransportError as error:
            outcome = type(error).__name__
        self.seen[outcome] += 1
        if outcome == "busy":
            await asyncio.sleep(BUSY_S)
        if outcome == "ok":
            self.latencies_s.append(time.perf_counter() - started_s)

    async def _stream(self, client: httpx.AsyncClient, number: int, body: dict[str, Any], kind: str) -> str:
        if kind == "gone":
            body |= {"max_tokens": 400, "ignore_eos": True}
            try:
                async with (
                    asyncio.timeout(self.chance.random()),
                    client.stream("POST", "/completions", json=body | {"stream": self.chance.random() < 0.5}) as answer,
                ):
                    await answer.aread()
            except TimeoutError:
                return "gone"
            return self._outcome(answer)
        pieces = []
        async with client.stream("POST", "/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return self._outcome(answer)
            async for data in events(answer):
                if kind == "slow":
                    await asyncio.sleep(0.05)
                pieces += [choice["text"] for choice in json.loads(data)["choices"]]
        self._compare(number, "".join(pieces))
        return "ok"

    def _outcome(self, answer: httpx.Response) -> str:
        if answer.status_code == 503 and "retry-after" not in answer.headers:
            return "503 without Retry-After"
        return {200: "ok", 503: "busy"}.get(answer.status_code, f"status {answer.status_code}")

    def _compare(self, number: int, text: str) -> None:
        self.different += self.answers.setdefault(number, text) != text

    async def run(self, clients: int, requests: int | None, seconds: float | None) -> None:
        """Ask until the number of requests or the time is reached."""
        started_s, asked = time.perf_counter(), 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, limits=limits) as client:

            async def ask() -> None:
                nonlocal asked
                while (requests is None or asked < requests) and (
                    seconds is None or time.perf_counter() - started_s < seconds
                ):
                    asked += 1
                    await self.one(client)

            watching = asyncio.create_task(self._watch_memory())
            await asyncio.gather(*(ask() for _ in range(clients)))
            watching.cancel()
            self.left = await self._left(client)

    async def _watch_memory(self) -> None:
        while True:
            self.memory.append(self.process.memory_info().rss)
            await asyncio.sleep(0.25)

    async def _left(self, client: httpx.AsyncClient) -> dict[str, float]:
        """Return the server's gauges and outcomes, once it has noticed the last client that went."""
        for _ in range(100):
            found = metrics((await client.get(self.url.removesuffix("/v1") + "/metrics")).text)
            if not found["mtbench_rows_running"] and not found["mtbench_queue_length"]:
                break
            await asyncio.sleep(0.1)
        return found

    def result(self) -> dict[str, Any]:
        """Return what the last line says."""
        tenth = max(1, len(self.memory) // 10)
        ordered = sorted(self.latencies_s) or [0.0]
        return {
            "seen": dict(self.seen),
            "different_answers": self.different,
            "latency_s": {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)]},
            "memory_bytes": {"after_a_tenth": max(self.memory[:tenth]), "at_the_end": max(self.memory[-tenth:])},
            "left": {name: value for name, value in self.left.items() if "bucket" not in name},
        }


def metrics(text: str) -> dict[str, float]:
    """Return the samples of a page of /metrics by name and labels."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#") and "_created" not in line]
    return {name: float(value) for name, _, value in lines}


def soak(
    options: Sequence[str], clients: int, *, requests: int | None = None, seconds: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """Start a server with these options, ask it, end it; return the result."""
    command = [sys.executable, "-m", "mtbench", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not (url := process.stdout.readline().strip()):
                raise SystemExit("the server did not start")
            asked = Soak(url, process.pid, seed)
            asyncio.run(asked.run(clients, requests, seconds))
            return asked.result() | {"alive": process.poll() is None}
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", default=["--method", "mars:tau=0.9", "--max-num-seqs", "8"])
    asked = parser.parse_args()
    seconds = 1800.0 if asked.seconds is None and asked.requests is None else asked.seconds
    print(json.dumps(soak(asked.options, asked.clients, requests=asked.requests, seconds=seconds, seed=asked.seed)))


if __name__ == "__main__":
    main()
