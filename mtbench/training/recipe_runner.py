"""Run a recipe (mtbench/training/recipes.py): every stage is a `mtbench train` command in a process of its own.

So the training record of each checkpoint names a command that makes it again, memory is free after every stage, and
independent stages run in parallel. The output of a stage goes to `<stage>.log`. The same command resumes a recipe:
complete checkpoints are kept, an interrupted training resumes by itself.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mtbench.errors import UserError
from mtbench.options.fields import as_words, fields_of
from mtbench.programs.machine_share import usable_processors
from mtbench.programs.processes import last_line
from mtbench.training.checkpoint import read_record
from mtbench.training.recipes import Stage

POLL_EVERY_S = 0.2
GRACE_S = 20.0  # for a stage to end after SIGTERM, before SIGKILL


def needs(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """Return the stages that make this stage's base, teacher and data."""
    return [other.name for other in stages if other.name in (stage.base, stage.teacher, *stage.data)]


def output(stage: Stage, folder: Path) -> Path:
    """Return the stage's output: the folder of a checkpoint, or the file of answers."""
    return folder / (stage.name if stage.answer_tokens is None else f"{stage.name}.jsonl")


def default_workers() -> int:
    """Return one per core on a CPU, where the models are too small for several threads; one on a GPU."""
    return 1 if torch.cuda.is_available() else usable_processors()


def arguments(stage: Stage, stages: Sequence[Stage], folder: Path) -> list[str]:
    """Return the stage as arguments of `mtbench`, without those that are defaults."""
    made = {other.name: str(output(other, folder)) for other in stages if other.name in needs(stage, stages)}
    sources = [("base", stage.base), ("teacher", stage.teacher), *(("data", data) for data in stage.data)]
    given: list[tuple[str, Any]] = [(name, source and made.get(source, source)) for name, source in sources]
    given += [("examples", stage.examples), ("mask_token", stage.mask_token)]
    own = ["--keep-cut"] if stage.answer_tokens is not None else []
    if stage.objective:
        own = [*_option_words(stage.objective), *_option_words(stage.settings)]
    else:
        given += [("seed", stage.settings.seed), ("max_new_tokens", stage.answer_tokens), *stage.shape.items()]
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given if value is not None]
    kind = "init" if stage.answer_tokens is None else "answers"
    command = ["train", stage.objective.name if stage.objective else kind]
    return [*command, *chain.from_iterable(words), *own, "--out", str(output(stage, folder))]


def _option_words(holder: Any) -> list[str]:
    """Return the options of an objective or of settings that differ from their defaults, as command-line arguments."""
    values = {name: (getattr(holder, name), field.default) for name, field in fields_of(type(holder)).items()}
    return as_words({name: value for name, (value, default) in values.items() if value != default}, type(holder))


def missing(stages: Sequence[Stage], folder: Path) -> list[Stage]:
    """Return the stages without a checkpoint in `folder`. Raises UserError if something else is in a stage's place."""
    return [stage for stage in stages if not _is_complete(stage, output(stage, folder))]


def _is_complete(stage: Stage, out: Path) -> bool:
    if not out.exists() or stage.answer_tokens is not None:
        return out.exists()
    record = read_record(out)
    own: list[Any] = [None, {}]
    found = [record.get("objective"), record.get("options")]
    if stage.objective:
        own = [stage.objective.name, asdict(stage.objective), stage.settings.seed, stage.settings.flops]
        found += [record.get("settings", {}).get(name) for name in ("seed", "flops")]
    if found != own:
        raise UserError(f"{out} is not the stage {stage.name!r} of this recipe; remove it or choose another `--out`.")
    return True


def run(
    stages: Sequence[Stage],
    folder: Path,
    workers: int,
    launch: Sequence[str],
    session: Sequence[str],
    note: Callable[[str], None],
) -> bool:
    """Train the missing ones of `stages` into `folder`, `workers` in parallel; return whether all are complete then.

    `launch`: the command that starts `mtbench`; `session`: arguments for every stage. `note` gets a line when a stage
    begins or ends. A failed stage stops only the stages that need it.
    """
    waiting = missing(stages, folder)
    folder.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    threads = str(max(1, usable_processors() // workers))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    with ExitStack() as at_the_end:
        while True:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    failed.append(name)
                    note(f"{name} failed: {last_line(folder / f'{name}.log')}")
                else:
                    note(f"{name} is complete")
            absent = {*failed, *running, *(stage.name for stage in waiting)}
            ready = [stage for stage in waiting if absent.isdisjoint(needs(stage, stages))]
            for stage in ready[: workers - len(running)]:
                waiting.remove(stage)
                start = launch if stage.objective else [sys.executable, "-m", "mtbench"]  # others need one process
                command = [*start, *arguments(stage, stages, folder), *session]
                log = folder / f"{stage.name}.log"
                note(f"{stage.name} begins; its output: {log}")
                with log.open("wb") as printed:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment
                    )
                at_the_end.callback(_end, process)
                running[stage.name] = process
            if not running:
                break
            time.sleep(POLL_EVERY_S)
    for stage in waiting:
        note(f"{stage.name} is left out; it needs a stage that failed")
    return not failed


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage that still runs: SIGTERM first, SIGKILL after `GRACE_S` or at another interruption."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()
