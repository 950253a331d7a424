"""Steps that time methods and engines on random weights of 7B shapes. One process runs them all: it loads once."""

import json
from functools import partial
from unittest import mock

import torch

from gpu_parts.bench import LARGE, MARS, Bench, tokens
from gpu_parts.figures import interval
from gpu_parts.profile import profile
from mtbench import statistics
from mtbench.decoding.loop import Batch
from mtbench.decoding.request import in_batch
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.statistics import Ratio

SMOLLM2 = {  # config.json of SmolLM2-135M, as far as it has shapes
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}


def static(bench: Bench, size: int) -> None:
    """Static batches: AR and MARS, with a profile of one step of each."""
    plan = bench.plan(("ar", MARS), size)
    done, [ar, mars], doubt = bench.race(plan)
    bench.rate(f"AR 7B, batch {size}", done, ar, doubt)
    bench.ratio(f"MARS over AR 7B, batch {size}", done, mars, ar, doubt)
    bench.gap(f"AR 7B, batch {size}", done, ar, doubt)
    profile(bench, plan)


def refill(bench: Bench, size: int) -> None:
    """Refilled slots: AR and MARS."""
    plan = bench.plan(("ar", MARS), size, prompt=512, new=96, batching="refill")
    # Few tokens per prompt, so that the warm-up ends a block and also prefills a single row.
    done, [ar, mars], doubt = bench.race(plan, warm_tokens=8)
    bench.ratio(f"MARS over AR 7B, batch {size}, refill", done, mars, ar, doubt)


def hf_dynamic(bench: Bench) -> None:
    """AR against transformers' `generate` with its dynamic cache."""
    done, [ar, theirs], doubt = bench.race(bench.plan(("ar", "hf-generate:cache=dynamic"), 4))
    what = "ar graph over hf-generate dynamic, 7B batch 4, wall"
    bench.figure(what, done.ratio(ar, theirs, "wall_s"), beside="decode time unknown", doubt=doubt)


def invariant(bench: Bench) -> None:
    """What batch-invariant kernels cost; and whether their tokens are the same alone and in a batch."""
    engine = "ar:engine=invariant"
    done, [graph, ours], doubt = bench.race(bench.plan(("ar", engine), 16, prompt=512, new=64))
    bench.ratio("engine invariant over graph, AR 7B, batch 16", done, ours, graph, doubt)
    bench.free()
    plans = [bench.plan((engine,), size, prompt=64, new=32, blocks=16 // size) for size in (16, 1)]
    bench.in_time("its race; the comparison of batch sizes was not reached")
    count = min(len(plan.suites[0].items) for plan in plans)  # 16; on a CPU fewer
    together, alone = (tokens(bench.pool(plan), plan, plan.cells[0], count) for plan in plans)
    share = sum(a == b for a, b in zip(together, alone, strict=True)) / count
    bench.figure("invariant: share identical at batch 1 and 16, bf16", share, beside=f"{count} answers")


def prefill(bench: Bench) -> None:
    """Prefill of 8 prompts of 512 tokens, against the matrix peak."""
    plan = bench.plan(("ar",), 8, prompt=512, new=2)
    done, [ar], doubt = bench.race(plan, seconds=0 if bench.toy else 3)
    [suite], [cell], (probed, reason) = plan.suites, plan.cells, bench.probed
    what, shape = "prefill 7B, 8 x 512, share of the matrix peak", done.session["shapes"][cell.checkpoints["ar"]]
    # The first decode step feeds the prompt's last token.
    fed = sum(len(item.prompt_ids) - 1 for item in suite.items) / len(plan.groups[0].blocks)
    seconds = done.arms[ar].by_block("prefill_s")
    if probed is None:
        raise RuntimeError(f"the GPU was not probed: {reason}")
    least_s = 2 * shape["body"] * fed / probed.matmul_flop_per_s
    bench.figure(what, statistics.ratio_of_totals([[least_s] * len(seconds)], [seconds]), doubt=doubt)


def prompt(bench: Bench) -> None:
    """Prefill of one prompt of 64 tokens, with captured chunks and, in turn, with their launches from Python."""
    folder = bench.out / "smollm2-135m"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    for name, weights in (("SmolLM2-135M", f"random:{folder}"), ("7B", LARGE)):
        plan, what = bench.plan(("ar",), 1, prompt=64, new=2, weights=weights), f"prefill {name}, 1 x 64"
        pool, [cell], stopwatch = bench.pool(plan), plan.cells, Stopwatch(bench.device)
        found: dict[str, list[float]] = {}
        requests = in_batch(plan.requests(plan.suites[0], range(1)), temperature=0.0, ignore_eos=True)
        with torch.inference_mode():
            batch = pool.engine("graph").batch(cell.built, pool.runners_of(cell), 1, 256)
            batch.begin(requests)
            ways = {"captured": batch.feed_parts, "launched": partial(Batch.feed_parts, batch)}
            for _ in range(2 if bench.toy else 2 * statistics.UNITS_NEEDED["block"]):
                bench.in_time(f"{sum(map(len, found.values()))} prompts")
                for way, feed in ways.items():
                    began_at = stopwatch.now()
                    with mock.patch.object(batch, "feed_parts", feed):
                        batch.start([(0, requests[0])], [0])
                    found.setdefault(way, []).append(1000 * (stopwatch.now() - began_at))
        bench.keep(what, found)
        captured, launched = (_mean(found[way]) for way in ways)
        bench.figure(f"{what}, ms", captured, beside=f"without a graph {interval(*launched[:3])}")


def _mean(values: list[float]) -> Ratio:
    return statistics.ratio_of_totals([values], [[1.0] * len(values)])
