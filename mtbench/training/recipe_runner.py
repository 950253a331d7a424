"""Run a recipe (mtbench/training/recipes.py): every stage is a `mtbench train` command in a process of its own.

So the training record of each checkpoint names a command that makes it again, memory is free after every stage, and
independent stages run in parallel. The output of a stage goes to `<stage>.log`; its last line is the stage's progress.
The same command resumes a recipe: complete checkpoints are kept, an interrupted training resumes by itself.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from mtbench.errors import UserError, unknown
from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.families import RECORD
from mtbench.options import options_of, show
from mtbench.programs.processes import last_line
from mtbench.report.progress import clock
from mtbench.training.checkpoint import read_record
from mtbench.training.recipes import Stage

POLL_EVERY_S = 0.2
GRACE_S = 20.0  # for a stage to end after SIGTERM, before SIGKILL
WAITING, RUNNING, DONE, FAILED, LEFT_OUT = "waiting", "running", "done", "failed", "left out"


def needs(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """Return the stages that make this stage's base and teacher."""
    return [other.name for other in stages if other.name in (stage.base, stage.teacher)]


def needed(stages: Sequence[Stage], only: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages named in `only` (none: all) and those they need, in the order of the recipe.

    Raises UserError for an unknown name.
    """
    dependencies = {stage.name: needs(stage, stages) for stage in stages}
    for name in only:
        if name not in dependencies:
            raise unknown("stage", name, dependencies, "mtbench train --recipe NAME --dry-run")
    if not only:
        return tuple(stages)
    selected = set(only)
    for name in reversed([*TopologicalSorter(dependencies).static_order()]):  # dependents before what they need
        if name in selected:
            selected.update(dependencies[name])
    return tuple(stage for stage in stages if stage.name in selected)


def default_workers() -> int:
    """Return one per core on a CPU, where the models are too small for several threads; one on a GPU."""
    return 1 if torch.cuda.is_available() else cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def arguments(stage: Stage, stages: Sequence[Stage], folder: Path) -> list[str]:
    """Return the stage as arguments of `mtbench`, without those that are defaults."""
    made = needs(stage, stages)

    def location(source: str) -> str:
        return str(folder / source) if source in made else source

    words = ["train", stage.objective.name if stage.objective else "init"]
    if stage.base:
        words += ["--base", location(stage.base)]
    if stage.teacher:
        words += ["--teacher", location(stage.teacher)]
    for data in stage.data:
        words += ["--data", data]
    if stage.examples is not None:
        words += ["--examples", str(stage.examples)]
    if stage.objective:
        words += [*_option_words(stage.objective), *_option_words(stage.settings)]
    else:
        words += ["--seed", str(stage.settings.seed)]
        for name, value in stage.shape.items():
            words += [_flag(name), str(value)]
    return [*words, "--out", str(folder / stage.name)]


def _option_words(holder: Any) -> list[str]:
    """Return the options of an objective or of settings that differ from their defaults, as command-line arguments."""
    words = []
    for option in options_of(type(holder)):
        value = getattr(holder, option.name)
        if value == option.default:
            continue
        if isinstance(value, bool):
            words.append(_flag(option.name) if value else _flag(f"no_{option.name}"))
        else:
            words += [_flag(option.name), show(value)]
    return words


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def complete_stages(stages: Sequence[Stage], folder: Path) -> list[str]:
    """Return the names of the stages whose checkpoints exist. Raises UserError if something else is in their place."""
    return [stage.name for stage in stages if _is_complete(stage, folder)]


def _is_complete(stage: Stage, folder: Path) -> bool:
    out = folder / stage.name
    if not out.exists():
        return False
    expected: dict[str, Any] = {"objective": None, "options": {}}
    if stage.objective:
        expected = {
            "objective": stage.objective.name,
            "options": asdict(stage.objective),
            "settings": asdict(stage.settings),
        }
        base_sha256 = weights_sha256(folder / str(stage.base))
        if base_sha256 is not None:  # the base is a stage of this recipe
            expected["base_sha256"] = base_sha256
    difference = _difference(out, expected)
    if difference is not None:
        raise UserError(
            f"{out} is not the stage {stage.name!r} of this recipe: its {difference} differs; "
            "remove it or choose another `--out`."
        )
    return True


def _difference(out: Path, expected: Mapping[str, Any]) -> str | None:
    """Return the first entry of the training record in `out` that is not as expected; None if all are.

    `objective` and `options` must be there; another entry counts only if the record has it.
    """
    try:
        record = read_record(out)
    except UserError:
        return RECORD
    for name, value in expected.items():
        if value is not None and record.get(name, value) != value:
            return name
    for name in ("objective", "options"):
        if name not in record:
            return name
    return None


class RecipeRun:
    """The stages of a recipe while it runs. `states` and `notes` hold each stage's state and last line of output."""

    def __init__(
        self, stages: Sequence[Stage], folder: Path, workers: int, launch: Sequence[str], session: Sequence[str]
    ) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.dependencies = {stage.name: needs(stage, stages) for stage in stages}
        self.folder, self.workers = folder, workers
        self.launch, self.session = launch, session
        self.states = dict.fromkeys(self.stages, WAITING)
        self.notes = dict.fromkeys(self.stages, "")
        for name in complete_stages(stages, folder):
            self.states[name], self.notes[name] = DONE, "complete before"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ready: list[str] = []  # may start, in the order of the recipe
        missing = [name for name in self.stages if self.states[name] == WAITING]
        self.order = TopologicalSorter(
            {name: [need for need in self.dependencies[name] if need in missing] for name in missing}
        )
        self.order.prepare()

    def update(self) -> bool:
        """Record which stages have ended, start those that can start; return False when none runs any more."""
        for name, process in list(self.processes.items()):
            self.notes[name] = last_line(self._log(name)) or self.notes[name]
            if process.poll() is not None:
                del self.processes[name]
                self._end(name, process.returncode)
        self.ready = sorted([*self.ready, *self.order.get_ready()], key=[*self.stages].index)
        while self.ready and len(self.processes) < self.workers:
            self._start(self.stages[self.ready.pop(0)])
        return bool(self.processes)

    def _end(self, name: str, returncode: int) -> None:
        if returncode == 0 and (self.folder / name).is_dir():
            self.states[name], self.notes[name] = DONE, summary(self.folder / name)
            self.order.done(name)
            return
        self.states[name] = FAILED
        self.notes[name] = f"{error_line(self._log(name))} ({self._log(name)})"
        for dependent in TopologicalSorter(self.dependencies).static_order():
            lost = [need for need in self.dependencies[dependent] if self.states[need] in (FAILED, LEFT_OUT)]
            if self.states[dependent] == WAITING and lost:
                self.states[dependent], self.notes[dependent] = LEFT_OUT, f"needs {', '.join(lost)}"

    def _start(self, stage: Stage) -> None:
        threads = str(max(1, cores() // self.workers))
        launch = self.launch if stage.objective else [sys.executable, "-m", "mtbench"]  # `init` needs one process
        command = [*launch, *arguments(stage, [*self.stages.values()], self.folder), *self.session]
        with self._log(stage.name).open("wb") as log:
            self.processes[stage.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ},
            )
        self.states[stage.name], self.notes[stage.name] = RUNNING, "starts"

    def stop(self) -> None:
        """End all running stages: SIGTERM first, SIGKILL after `GRACE_S` or at another interruption."""
        try:
            for process in self.processes.values():
                process.terminate()
            deadline = time.monotonic() + GRACE_S
            for process in self.processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lines(self) -> list[str]:
        """Return a line per stage that has begun or ended."""
        return [
            f"{name}: {state} {self.notes[name]}".rstrip() for name, state in self.states.items() if state != WAITING
        ]


def run(
    stages: Sequence[Stage],
    folder: Path,
    workers: int,
    launch: Sequence[str],
    session: Sequence[str],
    console: Console,
) -> bool:
    """Train the missing ones of `stages` into `folder`, `workers` in parallel; return whether all are complete then.

    `launch`: the command that starts `mtbench`; `session`: arguments for every stage. A failed stage stops only the
    stages that need it.
    """
    recipe = RecipeRun(stages, folder, workers, launch, session)
    folder.mkdir(parents=True, exist_ok=True)
    printed: set[str] = set()
    running = True
    try:
        with console.status("") as status:  # a terminal shows what runs in lines that change
            while running:
                running = recipe.update()
                lines = recipe.lines()
                for line in lines:
                    if line not in printed and not (console.is_terminal and f": {RUNNING} " in line):
                        printed.add(line)
                        console.print(line, markup=False, highlight=False, soft_wrap=True)
                status.update(escape("\n".join(line for line in lines if line not in printed)))
                time.sleep(POLL_EVERY_S if running else 0)
    finally:
        recipe.stop()
    return all(state == DONE for state in recipe.states.values())


def error_line(log: Path) -> str:
    """Return why a stage failed: its error message, else its last line."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), last_line(log) or "no output")


def summary(out: Path) -> str:
    """Return steps, time and held-out loss from a stage's training record, in one line."""
    record = read_record(out)
    facts = [f"{record['steps']:,} steps", clock(record["train_s"])] if record.get("train_s") else []
    if "evaluation" in record:
        facts.append(f"held-out loss {record['evaluation']['loss']:#.4g}")
    return ", ".join(facts)


def how_to_use(stages: Sequence[Stage], folder: Path) -> str:
    """Return the command that compares the checkpoints named after their objective's role."""
    roles = [stage.name for stage in stages if stage.objective and stage.name == stage.objective.role]
    made = f"{len(stages)} checkpoints in {folder}"
    if not roles:
        return made
    checkpoints = " ".join(f"--checkpoint {role}={shlex.quote(str(folder / role))}" for role in roles)
    return f"{made}; compare them: mtbench run {checkpoints}"
