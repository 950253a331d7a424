"""Do the times of servers of a serving engine compare? Two questions, on the embedded `ar` checkpoint.

    python benchmarks/engine_servers.py ENGINE [--runs 20] [--runs-per-start 1] [--turns 40]

A/A: plain decoding against plain decoding, in two servers. A run is 8 blocks of one request. `--runs-per-start` runs
have the same two servers. The interval of the ratio contains 1 in 19 of 20 runs, if nothing favours one server.
Idle: the time of a request while another server is paused, as mtbench pauses it, over that while it runs, idle; the two
cases take turns in random order. The last line prints all figures as JSON.
"""

import argparse
import json
import random
import signal
import tempfile
import time
from contextlib import closing
from pathlib import Path

import checkout  # noqa: F401
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
from mtbench.statistics import Ratio, ratio_of_totals

BLOCKS = 8  # of a run
MODEL = FAMILIES["tiny"].roles["ar"]


def same_twice(engine: str, runs: int, seed: int) -> list[Ratio]:
    """Return the ratios of two servers with the same arm, one for each run of BLOCKS blocks."""
    with tempfile.TemporaryDirectory() as folder:
        arms = ["ar", "ar"]
        mtbench.run(
            method=arms, engine=[engine], limit=runs * BLOCKS, batch_size=1, rounds=1, seed=seed, out=f"{folder}/run"
        )
        stored = read_stored(Run.open(RunDirectory(Path(folder, "run"))))
    first, second = (data.by_block("wall_s") for data in stored.cells.values())
    parts = [slice(start, start + BLOCKS) for start in range(0, runs * BLOCKS, BLOCKS)]
    return [ratio_of_totals([first[part]], [second[part]]) for part in parts]


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
            asked.generate([Request(prompt_ids=prompt, max_new_tokens=96, seed=seed)], ignore_eos=True, temperature=0.0)
            return time.perf_counter() - started_at

        other.generate([Request(prompt_ids=prompt, max_new_tokens=8)], ignore_eos=True, temperature=0.0)
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
    parser.add_argument("--runs-per-start", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    random.seed(0)
    starts = range(options.runs // options.runs_per_start)
    found = [ratio for seed in starts for ratio in same_twice(options.engine, options.runs_per_start, seed)]
    idle = paused(options.engine, options.turns)
    holds = [(ratio.ci_low or 0) <= 1 <= (ratio.ci_high or 0) for ratio in found]
    table = Table("engine", "A/A: 1 in the interval", "A/A: ratios", "beside a paused / an idle server")
    ratios = ", ".join(f"{ratio.value:.3f}" for ratio in found)
    idle_text = f"{idle.value:.3f} [{idle.ci_low:.3f}, {idle.ci_high:.3f}]"
    table.add_row(options.engine, f"{sum(holds)} of {len(holds)}", ratios, idle_text)
    Console().print(table)
    print(json.dumps({"engine": options.engine, "same": [ratio[:3] for ratio in found], "idle": idle[:3]}))


if __name__ == "__main__":
    main()
