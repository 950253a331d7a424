"""Make a MARS checkpoint of a small chat model on one GPU in ten minutes, and measure it. No network is needed.

    python benchmarks/train_mars.py --data-dir DIR [--minutes 10] [--model PATH] [--out DIR]
    python benchmarks/train_mars.py --prompts a.jsonl --prompts b.jsonl --test t.jsonl [--metric contains]
    python benchmarks/train_mars.py --dry-run      # every stage on the embedded model on a CPU, to test the script

Its stages are commands of `mtbench`: the model's own answers to the prompts (arXiv 1606.07947), MARS training on them
(arXiv 2604.07023; anchored blocks of 4), and runs at batch size 16, 8 and 1: plain decoding of both models, MARS at τ =
1, 0.95, 0.9 and 0.8. Answers get a fifth of the time, training 45 %, runs the rest; each ends by its time and keeps
what it has (the last report may take 30 s more). The same command skips what is done and resumes what is not, also
after a kill. After each stage `--out` gets train_mars.json and train_mars.md, with a row for each arm and batch size.

It runs from a checkout, installed or not, and needs torch, transformers, accelerate, scipy, rich, typer, pydantic,
pandas, httpx and httpx-sse, for a GGUF file gguf, but not lm-eval and datasets. `--model` is a folder or a GGUF file;
default: the family smollm2-135m. Lines of `--prompts` and `--test` have `prompt` or `question`, and `answer` where the
suite `prompts` scores it; the training leaves out prompts of the test. More prompts are better than 20 passes over few:
reports/2026-11-26_smollm2-135m_cpu_heads/prompts.py writes 9,000. With DIR they are GSM8K's (DIR/gsm8k/train.jsonl or
.gz, and test.jsonl), without examples as in the paper; a model of 135 M parameters solves a few percent. With neither
they are those of the suite arithmetic, which scores "The answer is N".
"""

import argparse
import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import checkout  # noqa: F401

from mtbench import files
from mtbench.errors import UserError
from mtbench.models.families import FAMILIES, TINY
from mtbench.programs import processes

ANSWERS, TRAINING = 0.2, 0.45  # shares of the time
FEWEST_MINUTES = 0.01  # that `mtbench train` takes
SIZES = (16, 8, 1)  # the largest first: it scores most items
ARMS = ("ar", "ar:on=mars", "mars:tau=1|0.95|0.9|0.8")
START_S = {False: 25.0, True: 8.0}  # of a run, for its imports, warm-up and report; in a dry run
MTBENCH = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import checkout, mtbench.__main__"
REAL = """answers: --max-new-tokens 256; training: --epochs 20 --batch-size 64 --learning-rate 2e-4 --held-out 128;
run: --max-new-tokens 256 --limit 256; arithmetic: --examples 20000"""
DRY = """answers: --max-new-tokens 48; training: --epochs 1 --batch-size 8 --learning-rate 1e-3;
run: --max-new-tokens 48 --limit 4; arithmetic: --examples 64"""


class Stage(NamedTuple):
    """A command that makes `output`. A run is told how long it may take when it starts."""

    name: str
    output: Path
    words: list[str]
    is_run: bool = False

    def is_done(self) -> bool:
        """Return whether the output is there; of a run, with all blocks."""
        return self.output.exists() and '"partial"' not in (self.output.read_text() if self.is_run else "")


def stages(args: argparse.Namespace) -> list[Stage]:
    """Return the stages in order."""
    parts = (part.partition(":") for part in (DRY if args.dry_run else REAL).split(";"))
    size = {name.strip(): words.split() for name, _, words in parts}
    base = args.model or (str(TINY / "ar") if args.dry_run else FAMILIES["smollm2-135m"].checkpoint("ar"))
    answers, mars, data, suite = args.out / "answers.jsonl", args.out / "mars", ["arithmetic"], "arithmetic"
    if args.test:
        data, suite = [str(args.out / "prompts.jsonl")], f"prompts:{args.test}"
    answering, learning = (str(max(FEWEST_MINUTES, share * args.minutes)) for share in (ANSWERS, TRAINING))
    ask = ["answers", "--teacher", base, "--keep-cut", "--minutes", answering, *size["answers"]]
    ask += ["--data", *data, *([] if args.test else size["arithmetic"]), "-o", str(answers)]
    learn = ["mars", "--base", base, "--layout", "anchored", "--minutes", learning]
    learn += [*size["training"], "--data", str(answers), "-o", str(mars)]
    if args.mask_token and not args.dry_run:
        learn += ["--mask-token", args.mask_token]
    run = ["run", "--model", base, "--checkpoint", f"mars={mars}", "--suite", suite, *size["run"]]
    run += ["--rounds", "1", *(word for arm in ARMS for word in ("--method", arm))]
    run += ["--metric", args.metric] if args.metric else []
    first = [Stage("answers", answers, ["train", *ask]), Stage("training", mars, ["train", *learn])]
    made = ((f"batch-{n}", args.out / f"batch-{n}/results.json", [*run, "--batch-size", str(n)]) for n in SIZES)
    return first + [Stage(*one, is_run=True) for one in made]


def prompts(file: Path) -> Iterator[str]:
    """Yield the prompts of a JSONL file, gzipped or not. Raises UserError for a line without one."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                text = row.get("prompt", row.get("question"))
            except (ValueError, AttributeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f"{file}, line {number}: no JSON object with a text `prompt` or `question`; mend it.")
            yield text


def write_prompts(args: argparse.Namespace) -> None:
    """Write prompts.jsonl, in random order: each prompt once, and none of the test."""
    seen, asked = set(prompts(args.test)), chain.from_iterable(map(prompts, args.prompts))
    texts = [text for text in dict.fromkeys(asked) if text not in seen]
    if not texts or not seen:
        raise UserError(f"--prompts has {len(texts)} prompts that --test has not, and --test {len(seen)}; give others.")
    Random(0).shuffle(texts)
    lines = (json.dumps({"prompt": text, "completion": "-"}) + "\n" for text in texts)
    files.write_text(args.out / "prompts.jsonl", "".join(lines))


def call(stage: Stage, args: argparse.Namespace, limit_s: float) -> str:
    """Run a stage; return why it has no output, or nothing."""
    log, command = args.out / f"{stage.name}.txt", [sys.executable, "-c", MTBENCH, *stage.words, "--offline"]
    variables = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if args.dry_run else {})
    with processes.started(command, variables, log, Path.cwd(), grace_s=2.0) as process:
        in_time = processes.has_ended(process, limit_s)
    if in_time and not stage.output.exists():
        return f"failed: {processes.last_line(log)} ({log})"
    return "" if stage.is_done() else "its time is over; the same command resumes it"


def shown(found: Mapping[str, Any] | None, scale: float = 1.0) -> str:
    """Return a value with its interval, as results.json has it; a dash without one."""
    value, low, high = ((found or {}).get(name) for name in ("value", "ci_low", "ci_high"))
    if value is None:
        return "–"
    ends = "" if low is None or high is None else f" [{scale * low:.4g}, {scale * high:.4g}]"
    return f"{scale * value:.4g}{ends}"


def report(args: argparse.Namespace, todo: Sequence[Stage], seconds: Mapping[str, float]) -> str:
    """Write what is known; return the table. A speedup is over plain decoding of the MARS checkpoint."""
    record = args.out / "mars" / "mtbench_training.json"
    training = json.loads(record.read_text()) if record.exists() else {}
    kept = {name: training.get(name) for name in ("steps", "tokens", "train_s", "tokens_per_s", "evaluation")}
    made = [one.output.read_text() for one in todo if one.is_run and one.output.exists()]
    cells = [cell for text in made for cell in json.loads(text)["cells"]]
    found = {"inputs": inputs(args), "seconds": seconds, "training": kept, "cells": cells}
    files.write_json(args.out / "train_mars.json", found)
    lines = ["| batch | arm | accuracy, % | tokens per forward | speedup | tokens/s | items |", "|---" * 7 + "|"]
    for cell in cells:
        low, high = cell["tokens_per_forward_ci"] or (None, None)
        forward = {"value": cell["tokens_per_forward"], "ci_low": low, "ci_high": high}
        speedup = next((one for one in cell["speedup"] or () if one["baseline"] == "ar@mars/graph"), None)
        figures = [shown(cell["accuracy"], 100), shown(forward), shown(speedup), shown(cell["tokens_per_s"])]
        lines.append(f"| {cell['batch_size']} | {cell['arm']} | {' | '.join(figures)} | {cell['items']} |")
    files.write_text(args.out / "train_mars.md", "\n".join(lines) + "\n")
    return "\n".join(lines)


def inputs(args: argparse.Namespace) -> dict[str, Any]:
    """Return what results depend on."""
    return {name: str(value) for name, value in vars(args).items() if name not in ("minutes", "out")}


def go_on(args: argparse.Namespace, deadline: float) -> int:
    """Run the stages whose output is missing, until `deadline` (time.monotonic); return the exit code.

    Raises UserError for a folder of other inputs, such as a dry run's.
    """
    record = args.out / "train_mars.json"
    before = json.loads(record.read_text()) if record.exists() else {}
    if before.get("inputs", inputs(args)) != inputs(args):
        raise UserError(f"{args.out} has results of other inputs ({before['inputs']}); choose another --out.")
    todo, seconds, failed = stages(args), dict[str, float](before.get("seconds", {})), False
    report(args, todo, seconds)
    for number, stage in enumerate(todo):
        began, left_s = time.monotonic(), deadline - time.monotonic()
        if stage.is_done():
            print(f"{stage.name:<10}done before", flush=True)
            continue
        if stage.is_run:
            folder, budget_s = stage.output.parent, left_s / (len(todo) - number) - START_S[args.dry_run]
            if budget_s < 1:
                print(f"{stage.name:<10}no time left; the same command goes on there", flush=True)
                break
            words = ["run", "--resume"] if (folder / "plan.json").exists() else stage.words
            stage = stage._replace(words=[*words, "-o", str(folder), "--time-budget", f"{budget_s:.0f}s"])
        problem = call(stage, args, left_s + 30 * stage.is_run)  # what is measured is reported, even late
        seconds[stage.name], failed = round(time.monotonic() - began), failed or problem.startswith("failed")
        report(args, todo, seconds)
        print(f"{stage.name:<10}{seconds[stage.name]} s  {problem}", flush=True)
        if problem and not stage.is_run:
            break
    print(report(args, todo, seconds))
    return int(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="time of all stages together; default 10, of a dry run 3")
    parser.add_argument("--out", type=Path, default=Path("train-mars"), help="folder of all files; default train-mars")
    parser.add_argument("--model", help="folder or GGUF file of the chat model")
    parser.add_argument("--mask-token", default="<filename>", help="reserved token of its tokenizer; '': its mask")
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL to train on; may be repeated")
    parser.add_argument("--test", type=Path, help="JSONL to measure on")
    parser.add_argument("--metric", help="how answers of --test are scored; see `mtbench run --help`")
    parser.add_argument("--data-dir", type=Path, help="folder with gsm8k/, in the place of --prompts and --test")
    parser.add_argument("--dry-run", action="store_true", help="the embedded model on a CPU, in about a minute")
    args = parser.parse_args()
    args.minutes = args.minutes if args.minutes is not None else 3.0 if args.dry_run else 10.0
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes {args.minutes:g} is not a time; give a number above 0.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + 60 * args.minutes
    if args.data_dir:
        args.prompts = sorted(args.data_dir.glob("gsm8k/train.jsonl*"))[:1]
        args.test = args.data_dir / "gsm8k/test.jsonl"
        if not args.prompts or not args.test.exists():
            parser.error(f"--data-dir {args.data_dir} has no gsm8k/train.jsonl and gsm8k/test.jsonl")
    if bool(args.prompts) != bool(args.test):
        parser.error("give both --prompts and --test, or --data-dir DIR with DIR/gsm8k, or none of them")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.test and not (args.out / "prompts.jsonl").exists():
            write_prompts(args)
        sys.exit(go_on(args, deadline))
    except (UserError, OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted; the same command goes on\n")


if __name__ == "__main__":
    main()
