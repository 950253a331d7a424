"""What `mtbench gate` and its subcommands do with their options, and what they print."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mtbench import files, plugins, records
from mtbench.cli import session
from mtbench.errors import UserError
from mtbench.experiments.gate import exports, floor, page
from mtbench.experiments.gate.builds import Build, resolve
from mtbench.experiments.gate.calibrate import Calibration
from mtbench.experiments.gate.format import Gate, GateRequest, NoiseFloor
from mtbench.experiments.gate.stages import FILE, GateRun
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory, new_directory, refuse_used


class Kind(NamedTuple):
    """A gate or a calibration. file: holds what was asked, and its name says which of the two it is."""

    file: str
    command: str  # that begins one
    folder: str  # begins the name of its default folder


GATE, CALIBRATION = Kind("request.json", "gate", "gate"), Kind("calibration.json", "gate calibrate", "calibration")


@dataclass(frozen=True, slots=True)
class Opened:
    """A gate or a calibration in its directory."""

    directory: Path
    kind: Kind
    request: GateRequest
    new: bool  # nothing was in the directory


def begin(directory: Path | None, kind: Kind, *, margin: float, **asked: Any) -> Opened:
    """Return a new gate. Raises UserError if something is in the directory, or for a value that is not allowed."""
    if not 0 < margin < 1:
        raise UserError(f"--margin {margin:g} is not allowed; give a share between 0 and 1, such as 0.02 for 2 %.")
    path = directory or new_directory(kind.folder)
    refuse_used(path, kind.command)
    fields = {"margin": margin, **asked}
    request = records.validate(fields, GateRequest, "the options", f"see `mtbench {kind.command} --help`.")
    return Opened(path, kind, request, new=True)


def reopen(directory: Path, kind: Kind) -> Opened:
    """Return the gate or the calibration in a directory. Raises UserError if there is none, or one of the other."""
    other = CALIBRATION if kind is GATE else GATE
    if os.path.isfile(directory / other.file):
        raise UserError(
            f"{str(directory)!r} was begun by `mtbench {other.command}`; go on with `mtbench {other.command} -o "
            f"{directory} --resume`."
        )
    if not os.path.isfile(directory / kind.file):
        raise UserError(f"{str(directory)!r} holds no gate: it has no {kind.file}. Start one without --resume.")
    request = records.read_json(directory / kind.file, GateRequest, "start anew, without --resume.")
    if kind is CALIBRATION and request.pairs is None:
        raise UserError(f"{directory / kind.file}: pairs is null: a number is needed; start anew, without --resume.")
    return Opened(directory, kind, request, new=False)


def run(opened: Opened, note: Callable[[str], None], budget_s: float | None) -> Gate:
    """Run what is missing of a gate, and write what it found."""
    with _working(opened, note, budget_s) as gate_run:
        gate = gate_run.run()
        page.write(opened.directory, gate)
    return gate


def tell_github(gate: Gate) -> list[str]:
    """Add the gate to the summary of the GitHub step, and return the lines that mark its findings; none elsewhere."""
    if not os.environ.get("GITHUB_ACTIONS"):
        return []
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with files.write_errors(Path(summary)), open(summary, "a", encoding="utf-8") as file:
            file.write(exports.step_summary(gate))
    return exports.workflow_commands(gate)


def calibrate(opened: Opened, note: Callable[[str], None], budget_s: float | None) -> tuple[NoiseFloor, Path]:
    """Run what is missing of a calibration; return the floor and the file that has it."""
    assert opened.request.pairs is not None
    floor.read(opened.directory.parent)  # a floor.json that cannot be kept is refused before hours of pairs
    with _working(opened, note, budget_s) as gate_run:
        measured = Calibration(gate_run, opened.request.pairs).measure(note)
    return measured, floor.add(opened.directory.parent, measured)


@contextmanager
def _working(opened: Opened, note: Callable[[str], None], budget_s: float | None) -> Iterator[GateRun]:
    """Yield the gate with its builds, its directory locked. A refusal before anything ran leaves nothing behind.

    Another gate may have begun in the directory while the builds were installed: only who has the lock writes.
    """
    deadline = float("inf") if budget_s is None else time.monotonic() + budget_s
    base, head = _builds(opened.request, note)
    directory = opened.directory
    made = not os.path.lexists(directory)
    with files.write_errors(directory, "choose another `-o DIR`."):
        directory.mkdir(parents=True, exist_ok=True)
    with RunDirectory(directory).locked():
        if opened.new:
            refuse_used(directory, opened.kind.command)
        session.started.append(directory)
        try:
            files.write_json(directory / opened.kind.file, dump(opened.request))
            yield GateRun(directory, opened.request, base, head, note, deadline)
        except UserError:
            if opened.new and not any((directory / name).exists() for name in (FILE, "pairs")):
                session.started.clear()
                _remove(directory, itself=made)
            raise


def _builds(request: GateRequest, note: Callable[[str], None]) -> tuple[Build, Build]:
    """Return base and head. Head's plugin files are imported here as well: this process asks what their methods do."""
    for file in request.plugins:
        plugins.load_file(file)
    base = resolve(request.base, note)
    head = base if request.head == request.base else resolve(request.head, note)
    return base.importing(request.base_plugins), head.importing(request.plugins)


def _remove(directory: Path, *, itself: bool) -> None:
    """Remove what is in a directory, and the directory if `itself` is given."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if itself:
        with suppress(OSError):  # something new is in it
            directory.rmdir()


def floor_table(measured: NoiseFloor) -> Table:
    """Return the noise of every cell as a table."""
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{measured.pairs} pairs of processes of one build; smallest detectable slowdown "
        f"{measured.smallest_detectable:.1%}",
        title_justify="left",
    )
    for heading in ("cell", "sd of a pair", "at most", "sd in a block", "outliers", "drift per pair"):
        table.add_column(heading, justify="left" if heading == "cell" else "right", overflow="fold")
    for cell in measured.cells:
        block_sd = "–" if cell.block_sd is None else f"{cell.block_sd:.2%}"
        drift = "–" if cell.drift_per_pair is None else f"{cell.drift_per_pair:+.3%}"
        sds = f"{cell.pair_sd:.2%}", f"{cell.pair_sd_high:.2%}"
        table.add_row(cell.cell, *sds, block_sd, f"{cell.outliers:.1%}", drift)
    return table
