"""Build, check and time the engines on a GPU within minutes, without network, lm-eval or datasets.

    python benchmarks/gpu.py [--minutes 9] [--out DIR] [--caches FILE] [--only PART]

It runs from a checkout, installed or not; it needs torch, triton, transformers, scipy, rich, typer and nvidia-ml-py.
Parts run in order of importance until the time is over; the output lists the parts not run, and `--only` runs them.
Into `--out` it writes gpu.json (all results, after every measurement), a profile of one step for each static batch, and
caches.tar.gz: the compiled and tuned kernels. A later call takes them by `--caches` and need not compile again.

Ratios and rates are ratios of totals with the t interval over blocks (benchmarks/race.py), and the interval decides
whether a bar, a required figure (gpu_parts/required.py), is met. Engines and methods are compared by decode time; the
wall time, with prefill, is shown beside it. External engines are compared by wall time. Weights are random and
acceptance is scripted (mtbench/runs/simulation.py), so this measures speed, not accuracy. `--device cpu` runs the
script on a small model, to test the script; it gives no verdicts.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import checkout  # noqa: F401
import torch
from gpu_parts import caches
from gpu_parts.bench import LARGE, SIMULATED, SMALL, Bench
from gpu_parts.checks import equality, grade, operations, probe_machine
from gpu_parts.times import blocks, external, joules, prefill, refill, selfspec, small, static, sweep
from rich.table import Table

from mtbench.hardware import machine

LAST_S = 15.0  # before the end: a part that still runs is interrupted
PARTS: dict[str, Callable[[Bench], None]] = {  # in order of importance
    "probe": probe_machine,
    "static-4": partial(static, size=4, models=(LARGE, SMALL)),
    "static-16": partial(static, size=16),
    "static-1": partial(static, size=1),
    "refill-4": partial(refill, size=4),
    "refill-16": partial(refill, size=16),
    "static-8": partial(static, size=8),
    "block-4": partial(blocks, size=4),
    "block-16": partial(blocks, size=16),
    "hf-dynamic": partial(external, cache="dynamic"),
    "prefill": prefill,
    "selfspec-1": partial(selfspec, weights=LARGE, size=1),
    "selfspec-8": partial(selfspec, weights=LARGE, size=8),
    "small": small,
    "equality": equality,
    "grade": grade,
    "operations": operations,
    "refill-8": partial(refill, size=8),
    "energy": joules,
    "hf-static": partial(external, cache="static"),
    "sweep": sweep,
}


class TimeUp(BaseException):
    """The time is over. A BaseException, so that no part catches it as an error of its own."""


def raise_time_up(_: int, __: FrameType | None) -> None:
    """Signal handler."""
    raise TimeUp("the time is over")


def run(bench: Bench, name: str) -> None:
    """Run one part. An error in it does not stop the others."""
    part, started_at = PARTS[name], time.monotonic()
    bench.say(f"{name}: {getattr(part, 'func', part).__doc__}")
    try:
        part(bench)
    except (Exception, TimeUp) as error:
        bench.found["errors"][name] = traceback.format_exc()
        bench.say(f"  failed: {type(error).__name__}: {error}")
    bench.found["seconds"][name] = time.monotonic() - started_at
    bench.say(f"  {bench.found['seconds'][name]:.0f} s")
    bench.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results, profiles and caches")
    parser.add_argument("--caches", type=Path, help="caches.tar.gz of an earlier call")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tests this script only")
    args = parser.parse_args()
    if args.caches is not None and not args.caches.is_file():
        parser.error(f"--caches {args.caches} is not a file; leave it out in the first call")
    args.out.mkdir(parents=True, exist_ok=True)
    kept = caches.unpack(args.caches)
    bench = Bench(args)
    bench.found["environment"] = machine.environment(sys.argv) | {"cuda": torch.version.cuda}
    signal.signal(signal.SIGALRM, raise_time_up)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, bench.ends - LAST_S - time.monotonic()))
    chosen = [name for name in PARTS if not args.only or name in ("probe", *args.only)]
    with suppress(TimeUp):
        for name in chosen:
            if time.monotonic() < bench.deadline:
                run(bench, name)
            else:
                bench.say(f"{name}: no time left; --only {name} runs it")
    signal.setitimer(signal.ITIMER_REAL, 0)
    bench.say(f"caches.tar.gz: {caches.pack(kept, args.out / 'caches.tar.gz') >> 20} MiB")
    title = f"a small model on a CPU, whatever the rows say; {SIMULATED}" if bench.cpu else SIMULATED
    left = [name for name in chosen if name not in bench.found["seconds"] or name in bench.found["errors"]]
    caption = f"not finished: {', '.join(left)}" if left else None
    table = Table("what", "asked", "found", "95 % interval", "beside", "", title=title, caption=caption)
    for bar in bench.bars:
        table.add_row(*bar.row())
    bench.console.print(table)


if __name__ == "__main__":
    main()
