"""The commands that `make faults` disturbs, on the smallest runs and trainings, and what they must leave behind."""

import gc
import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import Ended, Words, in_process, run_child


class Stage(NamedTuple):
    """A command under test."""

    name: str
    given: str  # the stage that it follows; "": it starts in an empty folder
    share: float  # of all kills
    first: Words
    again: Callable[[Path], Words | None]  # what a user does after a fault; None: nothing is left to do
    outcome: Callable[[Path], Any]  # what must be equal


def _words(text: str) -> Words:
    return text.split()


RUN = _words(  # `mtbench plan` leaves `--dtype auto` to the machine that decodes, so it is named
    "--method ar:on=mars --method mars --limit 5 --batch-size 2 --rounds 2 --max-new-tokens 5 --device cpu "
    "--dtype float32"
)
REFILL = [*RUN, "--batching", "refill"]
TRAIN = _words(
    "mars --base ../base --data arithmetic --examples 12 --epochs 2 --batch-size 4 --save-steps 1 --max-length 200"
)
BASE = _words(
    "--vocab-size 300 --hidden-size 16 --intermediate-size 16 --num-hidden-layers 1 --num-attention-heads 2 "
    "--num-key-value-heads 1 --max-position-embeddings 512"
)
OF_THE_MACHINE = ("session", "order", "dropped", "disturbed")  # fields of a timing that differ from run to run


def same(*words: str) -> Callable[[Path], Words | None]:
    """The same command again."""
    return lambda folder: words


def unless(name: str, *words: str) -> Callable[[Path], Words | None]:
    """The same command again, unless `name` is there."""
    return lambda folder: None if (folder / name).exists() else words


def resumed(command: str, *words: str) -> Callable[[Path], Words | None]:
    """The same command, with `--resume` if its directory is there."""
    return lambda folder: (command, *words, "-o", "run", *(["--resume"] if (folder / "run").exists() else []))


def lines(folder: Path) -> Any:
    """Answers and timed blocks, each exactly once, and the scores."""
    from whole import figures

    found: dict[str, Any] = {"temporary": [path.name for path in folder.rglob(".*.tmp")]}
    for file in sorted([*folder.glob("**/generations/*.jsonl"), *folder.glob("**/timings/*.jsonl")]):
        records = [json.loads(line) for line in io.BytesIO(file.read_bytes())]
        kept = [{k: v for k, v in figures(r).items() if k not in OF_THE_MACHINE} for r in records]
        found[file.relative_to(folder).as_posix()] = sorted(json.dumps(record) for record in kept)
    for file in folder.glob("**/scores.json"):
        found[file.relative_to(folder).as_posix()] = json.loads(file.read_text())
    return found


def results(folder: Path) -> Any:
    """The lines, the figures that no clock measures, and the names of the files that people read."""
    from whole import figures

    found = {"lines": lines(folder)}
    for file in folder.glob("**/results.json"):
        kept = figures(json.loads(file.read_text()))
        for cell in kept["cells"]:
            cell["flags"] = [flag for flag in cell["flags"] if "timed, " not in flag]
        found[file.relative_to(folder).as_posix()] = kept
    kinds = ("report.*", "figures/*", "tables/*")
    found["pages"] = sorted(p.relative_to(folder).as_posix() for kind in kinds for p in folder.glob(f"**/{kind}"))
    return found


def contents(folder: Path) -> Any:
    """Every byte of what a stage wrote."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def trained(folder: Path) -> Any:
    """The weights, and the record without times."""
    from whole import figures

    out = folder / "out"
    record = figures(json.loads((out / "mtbench_training.json").read_text()))
    return record, {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


STAGES = {
    stage.name: stage
    for stage in (
        Stage("plan", "", 25, ["plan", *RUN, "-o", "run"], resumed("run", *RUN), results),
        Stage("generate", "plan", 26, ["generate", "run"], same("generate", "run"), lines),
        Stage("score", "generate", 22, ["score", "run"], same("score", "run"), contents),
        Stage("report", "score", 12, ["report", "run"], same("report", "run"), contents),
        Stage("run", "", 6, ["run", *REFILL, "-o", "run"], resumed("run", *REFILL), results),
        Stage("train", "", 7, ["train", *TRAIN, "-o", "out"], unless("out", "train", *TRAIN, "-o", "out"), trained),
        Stage("workers", "plan", 0.5, ["generate", "run", "--workers", "2"], same("generate", "run"), lines),
    )
}


class Lab:
    """The folder of all trials, with what each stage left that was not disturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ends, self.outcomes = folder, dict[str, Ended](), dict[str, Any]()
        for module in ("torch", "transformers", "mtbench.cli.main", "mtbench.hardware.machine", "whole"):
            importlib.import_module(module)
        sys.modules["torch"].set_num_threads(1)
        vars(importlib.import_module("mtbench.results.samples"))["FAR_OFF"] = float("inf")
        vars(sys.modules["mtbench.hardware.machine"])["COMPUTING_SHARE"] = 0.0  # a busy machine is not a fault here
        self._warm_up(["train", "init", "--data", "arithmetic", "--examples", "50", *BASE, "-o", "base"], folder)

    def _warm_up(self, words: Words, folder: Path) -> None:
        """Run a command in this process: children inherit what it imports."""
        with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
            assert in_process(words) == 0, errors.getvalue()

    def prepare(self, stage: Stage) -> None:
        """Run a stage in this process, then in a child that is not disturbed; keep its end and its outcome."""
        if stage.name in self.ends:
            return
        if stage.given:
            self.prepare(STAGES[stage.given])
        self._warm_up(stage.first, self.fill(stage, f"{stage.name}-warm"))
        gc.collect()
        gc.freeze()
        folder = self.fill(stage, stage.name)
        self.ends[stage.name] = run_child(stage.first, folder)
        assert self.ends[stage.name].code == 0, self.ends[stage.name].text
        whole = shutil.copytree(folder, self.folder / f"{stage.name}-whole")
        words = stage.again(whole)
        assert words is None or run_child(words, whole).code == 0
        self.outcomes[stage.name] = stage.outcome(whole)

    def fill(self, stage: Stage, name: str) -> Path:
        """Return a new folder with what the stage starts from."""
        folder = self.folder / name
        if stage.given:
            return shutil.copytree(self.folder / stage.given, folder)
        folder.mkdir()
        return folder
