"""Steps that are commands: each is a process of its own, beside which none holds the GPU."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import checkout

from gpu_parts import runner
from gpu_parts.figures import Figure
from gpu_parts.runner import Found
from mtbench.errors import UserError

MTBENCH = f"import sys; sys.path.insert(0, {checkout.ROOT!r} + '/benchmarks'); import checkout, mtbench.__main__"
ARMS = ("ar:on=mars", "mars:tau=0.8", "mars-selfspec", "mars-speculative", "prompt-lookup:on=mars", "medusa")
REAL_ARMS = ("ar", "prompt-lookup", "suffix", "jacobi", "lookahead")
JUDGED = ("lossless/*", "readings.json", "scores.json")  # files that judging writes


def mtbench(args: argparse.Namespace, name: str, words: Sequence[str], limit_s: float, result: Path) -> Found:
    """Run a command of mtbench on the device."""
    words = [sys.executable, "-c", MTBENCH, *words, "--device", "cpu" if args.dry_run else "cuda"]
    return runner.command(args.out, name, words, os.environ | {"COLUMNS": "150"}, limit_s, result)


def doctor(args: argparse.Namespace, limit_s: float) -> Found:
    """Check the machine. Raises UserError if there is no GPU."""
    result = args.out / "doctor-findings.json"
    result.unlink(missing_ok=True)
    found = mtbench(args, "doctor", ["doctor", "--json", str(result)], limit_s, result)
    if found["found"]["exit_code"] == runner.CANNOT_RUN:
        advice = "; --dry-run tests the script on a CPU." if "no GPU" in found["ended"] else ""
        raise UserError(found["ended"] + advice)
    return found


def run(args: argparse.Namespace, limit_s: float) -> Found:
    """Run methods on the embedded family to a page."""
    words = ["--family", "tiny", *_methods(ARMS), "--batch-size", "2" if args.dry_run else "16"]
    return _run(args, "run", words, limit_s)


def real(args: argparse.Namespace, limit_s: float) -> Found:
    """Run five methods on SmolLM2 to a page, and say what the time was for."""
    began = time.time()
    found = _run(args, "real", [*_family(args), *_methods(REAL_ARMS), "--batch-size", "1,16", "--limit", "48"], limit_s)
    if found["ended"] is not None:
        return found
    folder, first_s = args.out / "real", found["found"]["first_block_s"]

    def after_s(*patterns: str) -> float:
        """Return when the last of these files was written, in seconds after the command began."""
        return float(max(file.stat().st_mtime for pattern in patterns for file in folder.glob(pattern)) - began)

    ends_s = [after_s("plan.json"), first_s, after_s("timings/*"), after_s("timings/*", *JUDGED), found["wall_s"]]
    parts = zip(("plan", "start", "decoding", "judging", "page"), ends_s, [0.0, *ends_s], strict=False)
    found["found"]["parts_s"] = parts_s = {name: end - begin for name, end, begin in parts}
    figures = {
        "run of SmolLM2, plan after, s": ends_s[0],
        "run of SmolLM2, first block after, s": first_s,
        "run of SmolLM2, judging over decoding": parts_s["judging"] / parts_s["decoding"],
        "run of SmolLM2 to its page, s": found["wall_s"],
    }
    said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts_s.items())
    scalars = [Figure(what, number, number, number) for what, number in figures.items()]
    return runner.measured(args.out, found, scalars, said, toy=args.dry_run)


def train_mars(args: argparse.Namespace, limit_s: float) -> Found:
    """Train a MARS checkpoint and measure it, by benchmarks/train_mars.py."""
    out, minutes = args.out / "train-mars", f"{(limit_s - 40) / 60:.2f}"  # its last report may come late
    words = [sys.executable, f"{checkout.ROOT}/benchmarks/train_mars.py", "--out", str(out), "--minutes", minutes]
    words += ["--dry-run"] if args.dry_run else []
    return runner.command(args.out, "train-mars", words, os.environ, limit_s, out / "run" / "report.html")


def engines(args: argparse.Namespace, limit_s: float) -> Found:
    """Run methods in mtbench's loop and in vLLM, of the Python that the variable VLLM_PYTHON names."""
    if python := os.environ.get("VLLM_PYTHON"):
        fetch = [sys.executable, "-c", MTBENCH, "fetch", "engine", "vllm", "--program", python]
        fetched = runner.command(args.out, "engines", fetch, os.environ, limit_s, Path(python))
        if fetched["ended"] is not None:
            return fetched
        limit_s -= fetched["wall_s"]
    words = ["--engine", "graph", "--engine", "vllm", "--engine-option", "vllm:enforce-eager", "--limit", "16"]
    words += [*_methods(("ar", "prompt-lookup", "suffix")), "--batch-size", "1,8"]
    return _run(args, "engines", [*_family(args), *words], limit_s)


def _run(args: argparse.Namespace, name: str, words: Sequence[str], limit_s: float) -> Found:
    folder, small = args.out / name, ("--limit", "4", "--max-new-tokens", "8") if args.dry_run else ()
    shutil.rmtree(folder, ignore_errors=True)
    words = ["run", "--out", str(folder), *words, "--rounds", "1", *small]
    return mtbench(args, name, words, limit_s, folder / "report.html")


def _family(args: argparse.Namespace) -> list[str]:
    return ["--suite", "arithmetic", "--family", "tiny" if args.dry_run else "smollm2-135m"]


def _methods(arms: Sequence[str]) -> list[str]:
    return [word for arm in arms for word in ("--method", arm)]
