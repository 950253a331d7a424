"""Running a recipe (mtbench/training/recipes.py): every stage is a `mtbench train` command in a process of its own.

So each checkpoint's record names a command that makes it again, memory is free after every stage, and those that wait
for nothing run side by side. A stage writes what it says to `<stage>.log`, whose last line is its progress. The same
command goes on: checkpoints that are there are left alone, an interrupted training resumes by itself.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mtbench.errors import UserError, unknown
from mtbench.models.families import RECORD
from mtbench.options import options_of, show
from mtbench.report.progress import clock
from mtbench.training.checkpoint import weights_sha256
from mtbench.training.recipes import Stage

LOOK_EVERY_S = 0.2
GRACE_S = 20.0  # for a stage to end by itself when it is told to
TAIL = 4096  # bytes in which a log's last line is looked for
WAITING, RUNNING, DONE, FAILED, LEFT = "waiting", "running", "done", "failed", "left out"


def needs(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    """The stages whose checkpoints this one starts from or learns from."""
    return [other.name for other in stages if other.name in (stage.base, stage.teacher)]


def needed(stages: Sequence[Stage], only: Sequence[str]) -> tuple[Stage, ...]:
    """The stages named in `only` (none: all) and those they need. Raises UserError for an unknown name."""
    by_name = {stage.name: stage for stage in stages}
    wanted: set[str] = set()
    open_ = list(only or by_name)
    while open_:
        name = open_.pop()
        if name not in by_name:
            raise unknown("stage", name, by_name, "mtbench train --recipe NAME --dry-run")
        if name not in wanted:
            wanted.add(name)
            open_ += needs(by_name[name], stages)
    return tuple(stage for stage in stages if stage.name in wanted)


def default_workers() -> int:
    """One per core: what trains on a CPU is too small to share. On a GPU one, which has it for itself."""
    return 1 if torch.cuda.is_available() else cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def arguments(stage: Stage, stages: Sequence[Stage], folder: Path) -> list[str]:
    """The stage as arguments of `mtbench`; what is the default is not said."""

    def place(source: str) -> str:
        return str(folder / source) if source in needs(stage, stages) else source

    said = ["train", stage.objective.name if stage.objective else "init"]
    said += ["--base", place(stage.base)] if stage.base else []
    said += ["--teacher", place(stage.teacher)] if stage.teacher else []
    for data in stage.data:
        said += ["--data", data]
    said += [] if stage.examples is None else ["--examples", str(stage.examples)]
    if stage.objective:
        said += [*_flags(stage.objective), *_flags(stage.settings)]
    else:
        said += ["--seed", str(stage.settings.seed)]
        for name, value in stage.shape.items():
            said += [_flag(name), str(value)]
    return [*said, "--out", str(folder / stage.name)]


def _flags(holder: Any) -> list[str]:
    said = []
    for o in options_of(type(holder)):
        value = getattr(holder, o.name)
        if value == o.default:
            continue
        if isinstance(value, bool):
            said.append(_flag(o.name) if value else _flag(f"no_{o.name}"))
        else:
            said += [_flag(o.name), show(value)]
    return said


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_complete(stage: Stage, folder: Path) -> bool:
    """Is the stage's checkpoint there? Raises UserError if something else stands in its place."""
    out = folder / stage.name
    if not out.exists():
        return False
    objective = stage.objective
    wanted: dict[str, Any] = {"objective": None, "options": {}}
    if objective:
        wanted = {"objective": objective.name, "options": asdict(objective), "settings": asdict(stage.settings)}
        wanted["base_sha256"] = weights_sha256(folder / str(stage.base))
    try:
        record = json.loads((out / RECORD).read_text())
        odd = [name for name, value in wanted.items() if value is not None and record.get(name, value) != value]
        odd += [name for name in ("objective", "options") if name not in record]
    except (OSError, ValueError, AttributeError):
        odd = [RECORD]
    if odd:
        raise UserError(
            f"{out} is not the stage {stage.name!r} of this recipe: its {odd[0]} is another; "
            "remove it or choose another `--out`."
        )
    return True


class Run:
    """Stages on their way. `states` and `told` are what is shown of each: its state, its last line."""

    def __init__(
        self, stages: Sequence[Stage], folder: Path, workers: int, launch: Sequence[str], session: Sequence[str]
    ) -> None:
        self.stages, self.folder, self.workers = stages, folder, workers
        self.launch, self.session = launch, session
        self.states = {s.name: DONE if is_complete(s, folder) else WAITING for s in stages}
        self.told = {s.name: "complete before" if self.states[s.name] == DONE else "" for s in stages}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def go_on(self) -> bool:
        """See what has ended, start what can be started; False when nothing runs any more."""
        for name, process in list(self.processes.items()):
            self.told[name] = last_line(self._log(name)) or self.told[name]
            if process.poll() is None:
                continue
            del self.processes[name]
            if process.returncode == 0 and (self.folder / name).is_dir():
                self.states[name], self.told[name] = DONE, summary(self.folder / name)
            else:
                self.states[name] = FAILED
                self.told[name] = f"{error_line(self._log(name))} ({self._log(name)})"
        for stage in self.stages:
            if self.states[stage.name] != WAITING:
                continue
            before = {name: self.states[name] for name in needs(stage, self.stages)}
            if lost := [name for name, state in before.items() if state in (FAILED, LEFT)]:
                self.states[stage.name], self.told[stage.name] = LEFT, f"needs {', '.join(lost)}"
            elif all(state == DONE for state in before.values()) and len(self.processes) < self.workers:
                self._start(stage)
        return bool(self.processes)

    def _start(self, stage: Stage) -> None:
        threads = str(max(1, cores() // self.workers))
        launch = self.launch if stage.objective else [sys.executable, "-m", "mtbench"]  # `init` is one process's work
        command = [*launch, *arguments(stage, self.stages, self.folder), *self.session]
        with self._log(stage.name).open("wb") as log:
            self.processes[stage.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ},
            )
        self.states[stage.name], self.told[stage.name] = RUNNING, "starts"

    def stop(self) -> None:
        """End what still runs: told to first, then made to."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def __rich__(self) -> Table:
        """For a terminal: a line per stage."""
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(3):
            table.add_column(no_wrap=True)
        for stage in self.stages:
            state = self.states[stage.name]
            style = {RUNNING: "bold", FAILED: "red", DONE: "green"}.get(state, "dim")
            table.add_row(escape(stage.name), f"[{style}]{state}[/]", escape(self.told[stage.name]))
        return table

    def lines(self) -> list[str]:
        """For a file: the same, of stages that have something to say."""
        said = {s.name: (self.states[s.name], self.told[s.name]) for s in self.stages}
        return [f"{name}: {state} {told}".rstrip() for name, (state, told) in said.items() if state != WAITING]


def run(
    stages: Sequence[Stage],
    folder: Path,
    workers: int,
    launch: Sequence[str],
    session: Sequence[str],
    console: Console,
) -> bool:
    """Train what is missing of `stages` into `folder`, `workers` side by side; True if all of it is there then.

    launch: what starts `mtbench`; session: arguments for every stage. A failed stage keeps only those from running that
    need it.
    """
    going = Run(stages, folder, workers, launch, session)
    folder.mkdir(parents=True, exist_ok=True)
    said: set[str] = set()
    try:
        with Live(going, console=console) if console.is_terminal else nullcontext():
            while going.go_on():
                _say(going, said, console)
                time.sleep(LOOK_EVERY_S)
        _say(going, said, console)
    finally:
        going.stop()
    return all(state == DONE for state in going.states.values())


def _say(going: Run, said: set[str], console: Console) -> None:
    """What is new, where nobody watches live."""
    for line in going.lines():
        if not console.is_terminal and line not in said:
            said.add(line)
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def last_line(log: Path) -> str:
    """What a stage said last; nothing if it said nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def error_line(log: Path) -> str:
    """Why a stage failed: a user's mistake, else the last line."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), last_line(log) or "died")


def summary(out: Path) -> str:
    """What a finished stage's record says in one line."""
    record = json.loads((out / RECORD).read_text())
    said = [f"{record['steps']:,} steps", clock(record["train_s"])] if record.get("train_s") else []
    if "evaluation" in record:
        said.append(f"held-out loss {record['evaluation']['loss']:#.4g}")
    return ", ".join(said)


def how_to_use(stages: Sequence[Stage], folder: Path) -> str:
    """The next command: a comparison of the checkpoints that are called what their objective's role is."""
    roles = [s.name for s in stages if s.objective and s.name == s.objective.role]
    chosen = " ".join(f"--checkpoint {role}={shlex.quote(str(folder / role))}" for role in roles)
    return f"{len(stages)} checkpoints in {folder}" + (f"; compare them: mtbench run {chosen}" if chosen else "")
