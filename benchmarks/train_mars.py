"""Make a MARS checkpoint of a small chat model on one GPU in ten minutes, and measure it. No network is needed.

    python benchmarks/train_mars.py --data-dir DIR [--prompts more.jsonl] [--minutes 10] [--model PATH] [--out OUT]
    python benchmarks/train_mars.py --prompts a.jsonl --prompts b.jsonl --test t.jsonl [--metric contains]
    python benchmarks/train_mars.py --dry-run      # every stage on the embedded model on a CPU, to test the script

Its stages are commands of `mtbench`: the model's own answers to the prompts (arXiv 1606.07947), MARS training on them
(arXiv 2604.07023; anchored blocks of 4) until the held-out loss no longer falls, and a run at batch size 16, 8 and 1:
plain decoding of both models, MARS at τ = 1, 0.95, 0.9 and 0.8. Beside starts, whose time the first stage measures,
answers get 40 % of the time, training 30 %, the run the rest. Each stage keeps what it has when its time is over (the
last report may take 30 s more). The same command skips what is done and resumes what is not, also after a kill. It
ends with the decision of the run and its tables; OUT has them in train_mars.txt, and all figures in train_mars.json.

It runs from a checkout, installed or not, and needs torch, transformers, accelerate, scipy, rich, typer, pydantic,
pandas, httpx and httpx-sse, for a GGUF file gguf, but not lm-eval and datasets. `--model` is a folder or a GGUF file;
default: the family smollm2-135m. Lines of `--prompts` and `--test` have `prompt` or `question`, and `answer` where the
suite `prompts` scores it; no prompt of a test is trained on. Without `--test` the test is lists to copy, of which
SmolLM2-135M copies half, and with DIR also GSM8K (DIR/gsm8k/train.jsonl or .gz, and test.jsonl) without examples as in
the paper, of which it solves a few percent. More prompts are better than more passes: if DIR has their sources, 9,000
are added. On a machine without them: `python reports/2026-11-26_smollm2-135m_cpu_heads/prompts.py DIR > more.jsonl`
where they are, and `--prompts more.jsonl` here.
"""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import checkout

from mtbench import files
from mtbench.errors import UserError
from mtbench.models.families import FAMILIES, RECORD, TINY
from mtbench.programs import processes

SHARES = {"answers": 0.4, "training": 0.3, "run": 0.3}  # of the time beside starts
LOOK_S = 0.2  # between two looks whether the first answers are there
ARMS = ("ar", "ar:on=mars", "mars:tau=1|0.95|0.9|0.8")
START_S = {False: 25.0, True: 8.0}  # of a stage, for its imports and weights, until it is measured; in a dry run
MTBENCH = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import checkout, mtbench.__main__"
PROMPTS = Path(checkout.ROOT) / "reports/2026-11-26_smollm2-135m_cpu_heads/prompts.py"
NAMES = "Mia Tom Ana Ben Eva Leo Zoe Max Ida Sam Amy Jon Kim Ray Sue Dan".split()  # in lists  # noqa: SIM905
# Of 64 answers of SmolLM2-135M, 34 end within 384 tokens, one more within 512; most others loop.
REAL = """answers: --max-new-tokens 384; run: --max-new-tokens 256 --limit 256;
training: --epochs 4 --batch-size 64 --learning-rate 2e-4 --max-length 768 --held-out 128 --patience 3"""
DRY = """answers: --max-new-tokens 48; run: --max-new-tokens 48 --limit 4;
training: --epochs 1 --batch-size 8 --learning-rate 1e-3 --patience 3"""


class Stage(NamedTuple):
    """A command that makes `output`."""

    name: str
    output: Path
    words: list[str]

    def is_done(self) -> bool:
        """Return whether the output is there; of a run, with all blocks."""
        return self.output.exists() and (self.name != "run" or '"partial"' not in self.output.read_text())


def stages(args: argparse.Namespace) -> list[Stage]:
    """Return the stages in order."""
    parts = (part.partition(":") for part in (DRY if args.dry_run else REAL).split(";"))
    size = {name.strip(): words.split() for name, _, words in parts}
    base = args.model or (str(TINY / "ar") if args.dry_run else FAMILIES["smollm2-135m"].checkpoint("ar"))
    answers, mars, run = args.out / "answers.jsonl", args.out / "mars", args.out / "run"
    ask = ["train", "answers", "--teacher", base, "--keep-cut", "--data", str(args.out / "prompts.jsonl")]
    learn = ["train", "mars", "--base", base, "--layout", "anchored", "--data", str(answers), "-o", str(mars)]
    if args.mask_token and (args.model or not args.dry_run):
        learn += ["--mask-token", args.mask_token]
    measure = ["run", "--model", base, "--checkpoint", f"mars={mars}", "--batch-size", "16,8,1", "--rounds", "1"]
    measure += [word for test in tests(args) for word in ("--suite", f"prompts:{test}")]
    measure += [word for arm in ARMS for word in ("--method", arm)] + (["--metric", args.metric] if args.metric else [])
    return [
        Stage("answers", answers, [*ask, "-o", str(answers), *size["answers"]]),
        Stage("training", mars, [*learn, *size["training"]]),
        Stage("run", run / "results.json", [*measure, *size["run"]]),
    ]


def tests(args: argparse.Namespace) -> list[Path]:
    """Return the files to measure on."""
    if args.test:
        return [args.test]
    return [*([args.data_dir / "gsm8k/test.jsonl"] if args.data_dir else []), args.out / "copy.jsonl"]


def lists(count: int, seed: str) -> Iterator[dict[str, str]]:
    """Yield prompts that ask to copy a list, with the list as the answer."""
    random = Random(seed)
    for _ in range(count):
        lines = "\n".join(f"{name}: {random.randint(11, 199)}" for name in random.sample(NAMES, 8))
        yield {"prompt": f"Copy this list without changes:\n{lines}", "answer": lines}


def prompts(file: Path) -> Iterator[str]:
    """Yield the prompts of a JSONL file, gzipped or not. Raises UserError for a line without one."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                text = row.get("prompt", row.get("question"))
            except (ValueError, AttributeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f"{file}, line {number}: no JSON object with a text `prompt` or `question`; mend it.")
            yield text.strip()


def write_prompts(args: argparse.Namespace) -> None:
    """Write prompts.jsonl, in random order: each prompt once, and none of the tests; first the test's lists."""
    asked = [*map(prompts, args.prompts)]
    if not args.test:
        files.write_text(args.out / "copy.jsonl", "".join(json.dumps(row) + "\n" for row in lists(256, "test")))
        asked.append(row["prompt"] for row in lists(64 if args.dry_run else 2000, "training"))
    if args.data_dir:
        words, more = [sys.executable, str(PROMPTS), str(args.data_dir)], args.out / "more.jsonl"
        if subprocess.run(words, stdout=more.open("w"), stderr=subprocess.DEVNULL, check=False).returncode:
            print(f"{args.data_dir} has no sources of 9,000 prompts more; see --help", flush=True)
        asked.append(prompts(more))
    seen = set(chain.from_iterable(map(prompts, tests(args))))
    texts = [text for text in dict.fromkeys(chain.from_iterable(asked)) if text not in seen]
    empty = [str(file) for file in args.prompts if next(prompts(file), None) is None]
    if empty:
        raise UserError(f"--prompts {empty[0]} has no prompts; give another.")
    if not texts or not seen:
        raise UserError(f"there are {len(texts)} prompts that no test has, and {len(seen)} of tests; give others.")
    Random(0).shuffle(texts)
    lines = (json.dumps({"prompt": text, "completion": "-"}) + "\n" for text in texts)
    files.write_text(args.out / "prompts.jsonl", "".join(lines))


def limited(stage: Stage, left_s: float, start_s: float) -> list[str]:
    """Return the words of a stage with its part of the time that is left beside starts; nothing if there is none."""
    to_come = [*SHARES][[*SHARES].index(stage.name) :]
    share = SHARES[stage.name] / sum(SHARES[name] for name in to_come)
    own_s = share * (left_s - start_s * len(to_come))
    if own_s < 1:
        return []
    if stage.name != "run":
        return [*stage.words, "--minutes", f"{own_s / 60:.3f}"]
    folder = stage.output.parent
    words = ["run", "--resume"] if (folder / "plan.json").exists() else stage.words
    return [*words, "-o", str(folder), "--time-budget", f"{left_s:.0f}s"]  # its start is in it


def call(stage: Stage, words: Sequence[str], args: argparse.Namespace, limit_s: float) -> tuple[str, str, float]:
    """Run a stage. Return what it printed, why it is not done, if so, and how long its start took, to first answers."""
    log, command = args.out / f"{stage.name}.txt", [sys.executable, "-c", MTBENCH, *words, "--offline"]
    variables = os.environ | {"COLUMNS": "150"} | ({"CUDA_VISIBLE_DEVICES": ""} if args.dry_run else {})
    before, start_s, began, printed = answered(args.out), 0.0, time.monotonic(), b""
    with processes.started(command, variables, log, Path.cwd(), grace_s=2.0, pipes=True) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)  # a full pipe would stop it
        while not (in_time := processes.has_ended(process, LOOK_S)) and time.monotonic() - began < limit_s:
            start_s = start_s or (time.monotonic() - began if answered(args.out) > before else 0.0)
            printed += process.stdout.read() or b""
        printed += process.stdout.read() or b""
    problem = "" if stage.is_done() else "its time is over; the same command resumes it"
    if in_time and (process.returncode == 2 or not stage.output.exists()):
        problem = f"failed: {processes.last_line(log)} ({log})"
    return printed.decode(), problem, start_s or time.monotonic() - began


def answered(out: Path) -> int:
    """Return the answers that are there while not all are: the lines of their file behind the first."""
    with suppress(OSError):
        return max(0, (out / "answers.jsonl.partial").read_bytes().count(b"\n") - 1)
    return 0


def report(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what is known."""
    record, results = args.out / "mars" / RECORD, args.out / "run" / "results.json"
    found["training"] = json.loads(record.read_text()) if record.exists() else None
    found["cells"] = json.loads(results.read_text())["cells"] if results.exists() else []
    files.write_json(args.out / "train_mars.json", found)
    files.write_text(args.out / "train_mars.txt", found["printed"])


def go_on(args: argparse.Namespace, deadline: float) -> int:
    """Run the stages whose output is missing, until `deadline` (time.monotonic); return the exit code.

    Raises UserError for a folder of other inputs, such as a dry run's.
    """
    record, failed = args.out / "train_mars.json", False
    inputs = {name: str(value) for name, value in vars(args).items() if name not in ("minutes", "out")}
    found: dict[str, Any] = {"inputs": inputs, "seconds": {}, "commands": {}, "printed": ""}
    found |= json.loads(record.read_text()) if record.exists() else {}
    if found["inputs"] != inputs:
        raise UserError(f"{args.out} has results of other inputs ({found['inputs']}); choose another --out.")
    for stage in stages(args):
        began, left_s = time.monotonic(), deadline - time.monotonic()
        if stage.is_done():
            print(f"{stage.name:<10}done before", flush=True)
            continue
        start_s = found.get("start_s", START_S[args.dry_run])
        if not (words := limited(stage, left_s, start_s)):
            print(f"{stage.name:<10}no time left beside starts of {start_s:.0f} s; repeat it, or give more --minutes")
            break
        if stage.output.with_name("mars.training").exists() and stage.name == "training":
            words = found["commands"][stage.name]  # what is resumed has its minutes
        found["commands"][stage.name] = words
        report(args, found)
        printed, problem, start_s = call(stage, words, args, left_s + 30 * (stage.name == "run"))
        found["printed"] = printed if stage.name == "run" else ""
        said = processes.last_line(args.out / f"{stage.name}.txt")
        if stage.name == "answers" and not problem:
            found["start_s"] = round(start_s, 1)
        found["seconds"][stage.name], failed = round(time.monotonic() - began), problem.startswith("failed")
        report(args, found)
        print(f"{stage.name:<10}{found['seconds'][stage.name]} s  {problem or said}", flush=True)
        if problem:
            break
    print(found["printed"] or "no table yet")
    return int(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="time of all stages together; default 10, of a dry run 5")
    parser.add_argument("--out", type=Path, default=Path("train-mars"), help="folder of all files; default train-mars")
    parser.add_argument("--model", help="folder or GGUF file of the chat model")
    parser.add_argument("--mask-token", default="<filename>", help="reserved token of its tokenizer; '': its mask")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="JSONL to train on; repeatable")
    parser.add_argument("--test", type=Path, help="JSONL to measure on, in the place of DIR and lists")
    parser.add_argument("--metric", help="how answers of --test are scored; see `mtbench run --help`")
    parser.add_argument("--data-dir", type=Path, help="folder with gsm8k/")
    parser.add_argument("--dry-run", action="store_true", help="the embedded model on a CPU, in about a minute")
    args = parser.parse_args()
    args.minutes = args.minutes if args.minutes is not None else 5.0 if args.dry_run else 10.0
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes {args.minutes:g} is not a time; give a number above 0.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + 60 * args.minutes
    if args.test and (args.data_dir or not args.prompts):
        parser.error("--test takes `--prompts FILE`, and no --data-dir")
    if args.data_dir:
        args.prompts += sorted(args.data_dir.glob("gsm8k/train.jsonl*"))[:1]
        if not args.data_dir.joinpath("gsm8k/test.jsonl").exists() or not args.prompts:
            parser.error(f"--data-dir {args.data_dir} has no gsm8k/train.jsonl and gsm8k/test.jsonl")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if not (args.out / "prompts.jsonl").exists():
            write_prompts(args)
        sys.exit(go_on(args, deadline))
    except (UserError, OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted; the same command goes on\n")


if __name__ == "__main__":
    main()
