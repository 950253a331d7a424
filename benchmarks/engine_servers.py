"""Do the times of servers of a serving engine compare? Two questions, on the embedded `ar` checkpoint.

    python benchmarks/engine_servers.py ENGINE [--runs 20] [--runs-per-start 10] [--blocks 100] [--turns 40] [--busy]

A/A: plain decoding against plain decoding, in two servers. A run is so many blocks of one request, whose times are
summed over parts of at least a second, as in a run of mtbench. `--runs-per-start` runs have the same two servers. The
interval of the ratio contains 1 in 19 of 20 runs, if nothing favours one server. `--busy`: another process computes.
Idle: the time of a request while another server is paused, as mtbench pauses it, over that while it runs, idle; the two
cases take turns in random order. The last line prints all figures as JSON.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
from rich.console import Console
from rich.table import Table

import mtbench
from mtbench.clients.engine_server import EngineServer
from mtbench.clients.serving_engine import Serving, ServingEngine, Setting
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.models.families import FAMILIES, locate
from mtbench.models.loading import inspect
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run
from mtbench.results.aggregate import read_stored
from mtbench.results.samples import SERVED_UNIT_S
from mtbench.statistics import Ratio, ratio_of_totals, units_of

TOKENS = 200  # of an answer
MODEL = FAMILIES["tiny"].roles["ar"]


def same_twice(engine: str, runs: int, blocks: int, seed: int) -> list[Ratio]:
    """Return the ratios of two servers with the same arm, one for each run of `blocks` blocks."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("".join(f'{{"prompt": "{n} + {n} = "}}\n' for n in range(runs * blocks)))
        mtbench.run(
            suite=f"prompts:{prompts}",
            family="tiny",
            method=["ar", "ar"],
            engine=[engine],
            limit=runs * blocks,
            max_new_tokens=TOKENS,
            ignore_eos=True,
            batch_size=1,
            rounds=1,
            seed=seed,
            out=f"{folder}/run",
        )
        stored = read_stored(Run.open(RunDirectory(Path(folder, "run"))))
    walls = [{t.block: t.wall_s for t in data.timings if not t.dropped} for data in stored.cells.values()]
    first, second = walls
    return [_ratio(first, second, range(start, start + blocks)) for start in range(0, runs * blocks, blocks)]


def _ratio(first: Mapping[int, float], second: Mapping[int, float], blocks: Iterable[int]) -> Ratio:
    """Return the ratio of two servers' times on the blocks that both have, over parts of at least a second."""
    pairs = np.array([(first[block], second[block]) for block in blocks if block in first and block in second])
    units = units_of(pairs.min(axis=1), SERVED_UNIT_S)
    return ratio_of_totals(*([np.bincount(units, weights=walls)] for walls in pairs.T), unit="second")


def paused(name: str, turns: int) -> Ratio:
    """Return the time of a request beside a paused server over that beside an idle one that runs."""
    engine: ServingEngine = SERVING_ENGINES[name]()
    serving = Serving(engine.prepared(MODEL, "float32", offline=True), Setting(""), 1, 256, "float32", 1)
    prompt = inspect(locate(MODEL)).tokenizer.encode("12 + 34 * 5 =")
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(EngineServer(engine, engine.python(), serving, "asked", Path(folder, "asked.log"))) as asked,
        closing(EngineServer(engine, engine.python(), serving, "other", Path(folder, "other.log"))) as other,
    ):

        def request_s(seed: int) -> float:
            started_at = time.perf_counter()
            asked.generate([Request(prompt_ids=prompt, max_new_tokens=96, seed=seed)], ignore_eos=True)
            return time.perf_counter() - started_at

        other.generate([Request(prompt_ids=prompt, max_new_tokens=8)], ignore_eos=True)
        times: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
        for _ in range(3):
            request_s(0)  # warms
        for turn in range(turns):
            for state in random.sample([*times], 2):
                other._send(state)
                times[state].append(request_s(turn))
    return ratio_of_totals([times[signal.SIGSTOP]], [times[signal.SIGCONT]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--runs-per-start", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=40, help="6 or more")
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    random.seed(0)
    starts, of_start = range(options.runs // options.runs_per_start), (options.runs_per_start, options.blocks)
    with subprocess.Popen([sys.executable, "-c", "while True: pass" if options.busy else ""]) as other:
        found = [ratio for seed in starts for ratio in same_twice(options.engine, *of_start, seed)]
        idle = paused(options.engine, options.turns)
        other.kill()
    holds = [(ratio.ci_low or 0) <= 1 <= (ratio.ci_high or 0) for ratio in found]  # without an interval: no
    table = Table("engine", "A/A: 1 in the interval", "A/A: ratios", "beside a paused / an idle server")
    ratios = ", ".join(f"{ratio.value:.3f}" for ratio in found)
    idle_text = f"{idle.value:.3f} [{idle.ci_low:.3f}, {idle.ci_high:.3f}]"
    table.add_row(options.engine, f"{sum(holds)} of {len(holds)}", ratios, idle_text)
    Console().print(table)
    same = [(*ratio[:3], ratio.units) for ratio in found]
    print(json.dumps({"engine": options.engine, "busy": options.busy, "same": same, "idle": idle[:3]}))


if __name__ == "__main__":
    main()
