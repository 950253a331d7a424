"""The step `gate`: `mtbench gate` of this checkout with itself, and with a copy that is a little slower.

The copy computes some of its first layers twice in each forward pass, as many as come nearest to 4 % of all: the same
tokens, counts and memory, whatever bounds the model's speed. Random weights; both need no network.
"""

import argparse
import shutil
import sys
import time
import venv
from pathlib import Path

import checkout

from gpu_parts import runner
from gpu_parts.commands import mtbench
from gpu_parts.figures import Figure
from gpu_parts.runner import Found

SLOWER = """
from copy import copy  # noqa: E402


def _some_layers_twice(self, ids, metadata, cache, judged, forward=Decoder.forward):
    part, layers = copy(self), list(self.layers)
    part.__dict__ |= {"layers": layers[: max(1, round(0.04 * len(layers)))], "lm_head": self.embedding[:1]}  # no head
    forward(part, ids, metadata, cache, judged)  # writes the keys and values that the whole pass writes
    return forward(self, ids, metadata, cache, judged)


Decoder.forward = _some_layers_twice
"""
PLAN = ["--method", "ar", "--batch-size", "1", "--limit", "4", "--blocks", "4", "--pairs", "4"]
PLAN += ["--interleave", "--allow-dirty"]
PAIRS_UNTIL = 0.9  # of a gate's time, from when on no pair begins
LARGE = ["--weights", "random:qwen2.5-0.5b", "--suite", "synthetic:64x256"]
TOY = ["--weights", "random:embedded:tiny/ar", "--suite", "synthetic:24x64"]


def check(args: argparse.Namespace, limit_s: float) -> Found:
    """Gate both; the first must not fail, and the second must, or say what it would take."""
    began_at, folder = time.monotonic(), args.out / "gate"
    limit_s *= 3 if args.dry_run else 1  # two processes share a CPU
    shutil.rmtree(folder, ignore_errors=True)
    _make_environment(folder / "itself")
    decoder = _make_environment(folder / "slower") / "models/fused_decoder.py"
    decoder.write_text(decoder.read_text() + SLOWER)
    said, figures = list[str](), list[Figure]()
    for head, share in (("itself", 0.4), ("slower", 1.0)):
        left_s, result = share * (limit_s - (time.monotonic() - began_at)), folder / f"gate-{head}" / "gate.json"
        words = ["gate", "--base", str(folder / "itself"), "--head", str(folder / head), "--out", str(result.parent)]
        words += [*PLAN, *(TOY if args.dry_run else LARGE), "--time-budget", f"{PAIRS_UNTIL * left_s:.0f}s"]
        found = mtbench(args, "gate", words, left_s, result)
        if found["ended"] is not None:
            break
        gate, wanted = runner.read(result), "FAIL" if head == "slower" else "not FAIL"
        test = gate["timed"][0]["test"] if gate["timed"] else {}
        ends = (None if (r := test.get(name)) is None else 100 * (r - 1) for name in ("ratio", "ci_low", "ci_high"))
        value, low, high = ends
        beside = f"{gate['pairs']} and {gate['confirmation_pairs']} fresh pairs, {found['wall_s']:.0f} s"
        word = f"{gate['word']}, and must {wanted}"
        figures.append(Figure(f"gate, {head}, slower by %", value, low, high, beside, word))
        said.append(f"{head}: {gate['word']}: {gate['reason']}")
    found["wall_s"] = time.monotonic() - began_at
    return runner.measured(args.out, found, figures, " ".join(said), toy=args.dry_run)


def _make_environment(folder: Path) -> Path:
    """Make an environment with a copy of this mtbench and the packages of this Python; return the copy."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for part in ("", "methods", "suites", "engines"):  # inside the package, as an installation has them
        shutil.copytree(Path(checkout.ROOT, part or "mtbench"), packages / "mtbench" / part, dirs_exist_ok=True)
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return packages / "mtbench"
