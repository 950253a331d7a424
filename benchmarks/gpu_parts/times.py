"""Steps that time methods and engines on random weights of 7B shapes. One process runs them all: it loads once."""

from gpu_parts.bench import MARS, Bench, tokens
from gpu_parts.profile import profile
from mtbench import statistics


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
