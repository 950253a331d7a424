"""Check and time the engines on a GPU: one command, 13 minutes at most, every result kept when it is found.

    python benchmarks/gpu.py [--out DIR] [--minutes 13] [--only STEP ...]
    python benchmarks/gpu.py --dry-run      # every step on small stand-ins on a CPU, to test the script; no verdicts

It runs from a checkout, installed or not, without network, lm-eval or datasets. It needs torch, triton, transformers,
pydantic (mtbench's records), scipy, rich, typer and nvidia-ml-py (the last for the clock and other processes).

Steps run in order, checks before timings; in a dry run `run` comes last. Each prints one line and has its own file,
 DIR/STEP.json, which grows while the step runs; also there: doctor-findings.json, logs/ with what was printed,
and run/ with the page of `mtbench run`. A step that ends early says what it had and why, and the next ones run. The
timed steps share a process, which loads one model of 7B shapes. The same command goes on with what is not complete.

Weights are random and acceptance is scripted (mtbench/lineup/simulation.py): this measures speed, not accuracy. Ratios
and rates are ratios of totals with the t interval over blocks (benchmarks/race.py); the interval decides whether a bar,
a required figure (gpu_parts/figures.py), is met. "First contact" is what was measured before (first_contact.json).
"""

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import checkout
from gpu_parts import runner
from gpu_parts.figures import BARS, FIRST_CONTACT, Figure
from rich.console import Console
from rich.table import Table

from mtbench.errors import UserError, first_line, loses_device

START_S = 60.0  # for a process to import, and to load the model of timed steps
LEAST_S = 10.0  # a step does not start with less
MTBENCH = f"import sys; sys.path.insert(0, {checkout.ROOT!r} + '/benchmarks'); import checkout, mtbench.__main__"
ARMS = ("ar:on=mars", "mars:tau=0.8", "mars-selfspec", "mars-speculative", "prompt-lookup:on=mars", "medusa")


class Step(NamedTuple):
    """A step: its time limit, and a function of a module of gpu_parts; without a module, a command of mtbench.

    Steps of one module share a process.
    """

    limit_s: float
    module: str = ""
    function: str = "check"
    options: Mapping[str, Any] = {}


STEPS: dict[str, Step] = {
    "doctor": Step(80),
    "operations": Step(50, "operations"),
    "equality": Step(80, "equality"),
    "run": Step(80),
    **{f"static-{size}": Step(35, "times", "static", {"size": size}) for size in (1, 16, 8, 4)},
    "refill-16": Step(100, "times", "refill", {"size": 16}),
    "hf-dynamic": Step(60, "times", "hf_dynamic"),
    "invariant": Step(60, "times", "invariant"),
    "prefill": Step(30, "times", "prefill"),
    "prompt": Step(40, "times", "prompt"),
}


def work(args: argparse.Namespace) -> int:
    """Run steps in this process; return its exit code. A step that hangs ends it, and the log says where it was."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_S, exit=True)
    from gpu_parts.bench import Bench

    try:
        bench = Bench(args)
    except UserError as error:
        print(error)
        return runner.CANNOT_RUN
    bench.begin(args.steps[0], START_S)
    if any(STEPS[name].module == "times" for name in args.steps):
        bench.load()
        print(f"loaded after {time.monotonic() - bench.began_at:.1f} s")
    for name in args.steps:
        limit_s = min(STEPS[name].limit_s, args.ends - time.monotonic())
        if limit_s < LEAST_S:
            break
        faulthandler.dump_traceback_later(limit_s, exit=True)
        bench.begin(name, limit_s)
        _, module, function, options = STEPS[name]
        try:
            getattr(import_module(f"gpu_parts.{module}"), function)(bench, **options)
            bench.end(None)
        except TimeoutError as error:
            bench.end(str(error))
        except Exception as error:
            traceback.print_exc()
            bench.end(f"{type(error).__name__}: {first_line(error)}")
            if loses_device(error):
                break
        bench.free()
    return 0


def run_command(name: str, args: argparse.Namespace, limit_s: float) -> runner.Found:
    """Run `doctor` or `run`; return what it found. Raises UserError if the doctor says that there is no GPU."""
    small = ("--limit", "4", "--max-new-tokens", "8") if args.dry_run else ()
    if name == "doctor":
        result = args.out / "doctor-findings.json"
        result.unlink(missing_ok=True)
        words = ["doctor", "--json", str(result)]
    else:
        result = args.out / "run" / "report.html"
        shutil.rmtree(result.parent, ignore_errors=True)
        words = ["run", "--out", str(result.parent), "--family", "tiny", "--rounds", "1", *small, "--batch-size"]
        words += ["2" if args.dry_run else "16", *(word for arm in ARMS for word in ("--method", arm))]
    words = [sys.executable, "-c", MTBENCH, *words, "--device", "cpu" if args.dry_run else "cuda"]
    found = runner.command(args.out, name, words, os.environ | {"COLUMNS": "150"}, limit_s, result)
    if name == "doctor" and found["found"]["exit_code"] == runner.CANNOT_RUN:
        advice = "; --dry-run tests the script on a CPU." if "no GPU" in found["ended"] else ""
        raise UserError(found["ended"] + advice)
    return found


def go_on(args: argparse.Namespace) -> int:
    """Run the steps that are not complete; return the exit code. Raises UserError for a folder of the other kind."""
    deadline = time.monotonic() + 60 * args.minutes
    kind = {"dry_run": args.dry_run}
    if runner.read(args.out / "kind.json") not in ({}, kind):
        raise UserError(f"{args.out} has figures of {'a GPU' if args.dry_run else 'a dry run'}; choose another --out.")
    chosen = [name for name in STEPS if not args.only or name in args.only]
    done = [] if args.only else [n for n in chosen if runner.is_complete(runner.read(runner.file_of(args.out, n)))]
    if done:
        print(f"done before: {', '.join(done)}; --only STEP repeats one", flush=True)
    todo = [name for name in chosen if name not in done]
    while todo:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            print(f"no time left for {', '.join(todo)}; the same command goes on there", flush=True)
            break
        name, module = todo[0], STEPS[todo[0]].module
        if not module:
            show(name, run_command(name, args, min(STEPS[name].limit_s, left_s)))
            runner.write(args.out / "kind.json", kind)
            todo.remove(name)
            continue
        # In a dry run all steps have one process as far as it gets: importing torch takes longer than a stand-in.
        names = [n for n in todo if STEPS[n].module and (args.dry_run or STEPS[n].module == module)]
        limit_s = min(START_S + sum(STEPS[n].limit_s for n in names), left_s)
        words = [sys.executable, *sys.argv, "--ends", str(time.monotonic() + limit_s), "--steps", *names]
        for name, found in runner.work(args.out, names, words, limit_s + LEAST_S):
            show(name, found)
            runner.write(args.out / "kind.json", kind)
            todo.remove(name)
    files = {name: runner.read(runner.file_of(args.out, name)) for name in STEPS}
    closing_table(files, toy=args.dry_run)
    return int(not all(runner.is_complete(files[name]) for name in chosen))


def show(name: str, found: runner.Found) -> None:
    """Print the line of a step that has ended."""
    ended = f"ended early: {found['ended']}" if found["ended"] else ""
    print(f"{name:<11}{found['wall_s']:5.0f} s  {'; '.join(filter(None, (found['said'], ended)))}", flush=True)


def closing_table(found: Mapping[str, runner.Found], *, toy: bool) -> None:
    """Print every figure; of one that is not there, the reason."""
    before = f"{FIRST_CONTACT['measured']['date']}, {FIRST_CONTACT['measured']['gpu']}"
    title = "stand-ins on a CPU, whatever the rows say" if toy else f"first contact: {before}"
    columns = ("what", "asked", "found, 95 % interval", "beside", "first contact", "verdict")
    table = Table(*columns, title=title, caption=found.get("doctor", {}).get("said"))
    for name, step in found.items():
        shown = {figure["what"]: Figure(**figure) for figure in step.get("figures", ())}
        why = "not run" if not step else step["ended"] or "the step did not measure it"
        for what, bar in BARS.items():
            if bar.step == name and what not in shown:
                shown[what] = Figure(what, verdict=f"{name}: {why}")
        for figure in shown.values():
            table.add_row(*figure.row())
    Console(width=170, highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results and logs")
    parser.add_argument("--minutes", type=float, default=13.0, help="time limit of this call")
    parser.add_argument("--only", choices=list(STEPS), nargs="+", metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--dry-run", action="store_true", help="run small stand-ins on a CPU")
    parser.add_argument("--steps", nargs="+", help=argparse.SUPPRESS)  # run these in this process
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)  # when its time is over (time.monotonic)
    args = parser.parse_args()
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes {args.minutes:g} is not a time; give a number above 0.")
    if not args.steps:  # a process of steps prints where it is instead
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with nullcontext() if args.steps else runner.alone(args.out):
            code = work(args) if args.steps else go_on(args)
    except UserError as error:
        parser.exit(2, f"\n{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted; the same command goes on\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with a broken GPU the interpreter's own end may hang


if __name__ == "__main__":
    main()
