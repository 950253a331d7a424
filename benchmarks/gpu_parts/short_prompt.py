"""The step `prefill-64`: how long one prompt of 64 tokens takes, on SmolLM2, which launches bound, and on 7B shapes.

With captured chunks and, in turn, with their launches from Python.
"""

from functools import partial
from unittest import mock

import torch

from gpu_parts.bench import Bench
from gpu_parts.figures import interval
from mtbench import statistics
from mtbench.decoding.loop import Batch
from mtbench.decoding.request import in_batch
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.sampling import GREEDY
from mtbench.statistics import Ratio


def check(bench: Bench) -> None:
    """Prefill of one prompt."""
    for name, family in (("SmolLM2", "smollm2-135m"), ("7B", None)):
        plan, what = bench.plan(("ar",), 1, prompt=64, new=2, family=family), f"prefill {name}, 1 x 64"
        pool, [cell], stopwatch = bench.pool(plan), plan.cells, Stopwatch(bench.device)
        found: dict[str, list[float]] = {}
        requests = in_batch(plan.requests(plan.suites[0], range(1)), sampling=GREEDY, ignore_eos=True)
        with torch.inference_mode():
            batch = pool.engine("graph").batch(cell.built, pool.runners_of(cell), 1, 256)
            batch.begin(requests)
            ways = {"captured": batch.feed_parts, "launched": partial(Batch.feed_parts, batch)}
            for lap in range(1 + (2 if bench.toy else 2 * statistics.UNITS_NEEDED["block"])):
                bench.in_time(f"{sum(map(len, found.values()))} prompts")
                for way, feed in ways.items():
                    began_at = stopwatch.now()
                    with mock.patch.object(batch, "feed_parts", feed):
                        batch.start([(0, requests[0])], [0])
                    if lap:  # the first one compiles
                        found.setdefault(way, []).append(1000 * (stopwatch.now() - began_at))
        bench.keep(what, found)
        captured, launched = (_mean(found[way]) for way in ways)
        bench.figure(f"{what}, ms", captured, beside=f"without a graph {interval(*launched[:3])}")


def _mean(values: list[float]) -> Ratio:
    return statistics.ratio_of_totals([values], [[1.0] * len(values)])
