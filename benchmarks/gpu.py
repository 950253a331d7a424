"""Build, check and time the engines on a GPU within minutes, without network, lm-eval or datasets.

    python benchmarks/gpu.py [--minutes 9] [--out DIR] [--only PART] [--again PART] [--caches FILE]
    python benchmarks/gpu.py --dry-run      # every part on small stand-ins on a CPU, to test the script; no verdicts

It runs from a checkout, installed or not; it needs torch, triton, transformers, scipy, rich, typer and nvidia-ml-py.
Parts run in order of importance until the time is over: checks first, then figures. Each part is a separate
process with a time limit, and prints one line when it ends. The same command runs the parts that are not done.
Into `--out` it writes, after each part, gpu.json (all results) and caches.tar.gz: the compiled and tuned kernels, which
the next call takes and need not compile again; also what each part printed (logs/), and a profile of one step for each
static batch.

Ratios and rates are ratios of totals with the t interval over blocks (benchmarks/race.py), and the interval decides
whether a bar, a required figure (gpu_parts/required.py), is met. Engines and methods are compared by decode time; the
wall time, with prefill, is shown beside it. External engines are compared by wall time. Weights are random and
acceptance is scripted (mtbench/runs/simulation.py), so this measures speed, not accuracy.
"""

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from bars import Bar
from gpu_parts import caches, runner
from rich.console import Console
from rich.table import Table

from mtbench.errors import UserError, first_line

PACKING_S = 15.0  # before the end, for the caches of the last part
LEAST_S = 40.0  # a part does not start with less


# In order of importance: time limit, function in gpu_parts, its options. The first four take 525 s at most, so that the
# first speed is known within nine minutes.
PARTS: dict[str, tuple[float, str, Mapping[str, Any]]] = {
    "probe": (40, "checks.probe_machine", {}),
    "operations": (105, "checks.operations", {}),
    "equality": (140, "checks.equality", {}),
    "static-1": (240, "times.static", {"size": 1}),
    "static-4": (240, "times.static", {"size": 4, "names": ("7B", "0.5B")}),
    "static-16": (200, "times.static", {"size": 16}),
    "grade": (200, "checks.grade", {}),
    "dependent-1": (120, "times.dependent_launch", {"size": 1}),
    "dependent-16": (120, "times.dependent_launch", {"size": 16}),
    "refill-4": (200, "times.refill", {"size": 4}),
    "refill-16": (200, "times.refill", {"size": 16}),
    "static-8": (200, "times.static", {"size": 8}),
    "block-4": (240, "times.blocks", {"size": 4}),
    "block-16": (240, "times.blocks", {"size": 16}),
    "hf-dynamic": (200, "times.external", {"cache": "dynamic"}),
    "prefill": (120, "times.prefill", {}),
    "selfspec-1": (240, "times.selfspec", {"size": 1}),
    "selfspec-8": (240, "times.selfspec", {"size": 8}),
    "small": (120, "times.small", {}),
    "refill-8": (200, "times.refill", {"size": 8}),
    "energy": (180, "times.joules", {}),
    "hf-static": (300, "times.external", {"cache": "static"}),
    "sweep": (500, "times.sweep", {}),
}


def work(args: argparse.Namespace) -> int:
    """Run parts in this process; return its exit code. SIGTERM prints where it is, also in a call that hangs."""
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    started_at = time.monotonic()
    from gpu_parts.bench import Bench

    for name in args.part:
        try:
            bench = Bench(args, name)
        except UserError as error:
            print(error)
            return runner.CANNOT_RUN
        _, where, options = PARTS[name]
        module, function = where.split(".")
        try:
            getattr(import_module(f"gpu_parts.{module}"), function)(bench, **options)
        except Exception as error:
            traceback.print_exc()
            bench.found["errors"][name] = f"{type(error).__name__}: {first_line(error)}"
        bench.found["seconds"], started_at = {name: time.monotonic() - started_at}, time.monotonic()
        bench.save()
    return 0


def go_on(args: argparse.Namespace) -> int:
    """Run the parts that are not done, each in a separate process; return the exit code.

    In a dry run a process goes through all parts until one ends it: importing torch takes longer than a stand-in.
    """
    deadline = time.monotonic() + 60 * args.minutes - PACKING_S
    chosen = [name for name in PARTS if not args.only or name in ("probe", *args.only, *args.again)]
    done = [name for name in chosen if name not in args.again and runner.is_done(args.out, name)]
    if done:
        print(f"done before: {', '.join(done)}; --again PART repeats one", flush=True)
    failed = set(runner.merge(args.out, PARTS)["errors"]) - set(args.again)
    todo = [name for name in chosen if name not in done]
    todo.sort(key=failed.__contains__)  # a part that hangs must not keep others from running
    packed = args.out / "caches.tar.gz"
    with tempfile.TemporaryDirectory(prefix="caches-") as folder:
        variables = os.environ | caches.unpack(args.caches or packed, Path(folder))
        while todo:
            names = todo if args.dry_run else todo[:1]
            limit_s = min(sum(PARTS[name][0] for name in names), deadline - time.monotonic())
            if limit_s < LEAST_S:
                print(f"no time left for {', '.join(todo)}; the same command goes on there", flush=True)
                break
            command = [sys.executable, *sys.argv, "--ends", str(time.monotonic() + limit_s), "--part", *names]
            for name, found in runner.run(args.out, names, command, variables, limit_s):
                said = "; ".join(Bar(**bar).short() for bar in found["bars"]) or "done"
                if name in found["errors"]:
                    said = f"failed: {found['errors'][name]} (logs/{names[0]}.txt)"
                print(f"{name:<12}{found['seconds'][name]:5.0f} s  {said}", flush=True)
                todo = [other for other in todo if other != name]
            runner.merge(args.out, PARTS)
            caches.pack(Path(folder), packed)
    found, left = runner.merge(args.out, PARTS), [name for name in chosen if not runner.is_done(args.out, name)]
    title = ("stand-ins on a CPU, whatever the rows say; " if args.dry_run else "") + found.get("simulated", "")
    caption = f"not finished: {', '.join(left)}" if left else None
    table = Table("what", "asked", "found", "95 % interval", "beside", "", title=title, caption=caption)
    for bar in found["bars"]:
        table.add_row(*Bar(**bar).row())
    Console(width=150, highlight=False).print(table)
    return int(any(name in found["errors"] for name in chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of this call")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results, profiles and caches")
    parser.add_argument("--caches", type=Path, help="caches.tar.gz of another folder")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--again", choices=list(PARTS), action="append", default=[], help="repeat this part")
    parser.add_argument("--dry-run", action="store_true", help="run small stand-ins on a CPU")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)  # run these in this process
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)  # when its time is over (time.monotonic)
    args = parser.parse_args()
    if args.caches is not None and not args.caches.is_file():
        parser.error(f"--caches {args.caches} is not a file; leave it out in the first call")
    try:
        code = work(args) if args.part else go_on(args)
    except UserError as error:
        parser.exit(2, f"\n{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted; the same command goes on\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with a broken GPU the interpreter's own end may hang


if __name__ == "__main__":
    main()
