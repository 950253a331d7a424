"""The step `prefill-64`: how long one prompt of 64 tokens takes on SmolLM2, whose step is bound by launches."""

from gpu_parts.bench import Bench
from mtbench import statistics


def check(bench: Bench) -> None:
    """Prefill of one prompt."""
    bench.probe()
    done, [ar], doubt = bench.race(bench.plan(("ar",), 1, prompt=64, new=8, family="smollm2-135m"))
    milliseconds = [1000 * seconds for seconds in done.arms[ar].by_block("prefill_s")]
    found = statistics.ratio_of_totals([milliseconds], [[1.0] * len(milliseconds)])
    bench.figure("prefill SmolLM2, 1 x 64, ms", found, doubt=doubt)
