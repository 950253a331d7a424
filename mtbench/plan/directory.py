"""A run on disk: one directory, written so that nothing is lost when the process dies and nothing is overwritten.

    environment.json   written first: command, versions, machine
    plan.json          prompts as token ids, cells, blocks, rounds
    generations/<cell>.jsonl   one line per item         (append-only)
    timings/<cell>.jsonl       one line per block × round (append-only, written after its generations)
    preparation.jsonl  what capture and compilation cost, by session and cell
    failures.jsonl     cells that failed, and why
    race.json          of a race: its looks
    eliminated.jsonl   of a race: cells that left before the last block, and why
    memory.json, energy.json, lossless/<cell>.json, prefix_cache/<cell>.json   untimed passes
    lossless/readings.jsonl    one line per answer that was re-scored (append-only)
    scores.json, readings.json, results.json, acceptance.yaml, report.md, report.html, tables/, figures/
    .lock              locked by the command that works on the run

JSON files are written aside and renamed: each is complete or absent.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mtbench import files, records
from mtbench.errors import UserError
from mtbench.records import M, dump

JsonObject = dict[str, Any]
LOCK = ".lock"
_locked: set[Path] = set()  # run directories that this process has locked
# By command, what its directory is called, a file in it, and a key that no other file of this name has.
DIRECTORIES = {
    "choose": ("a race", "race.json", "looks"),
    "run": ("a run", "plan.json", "cells"),
    "load": ("a load", "plan.json", "points"),
    "gate": ("a gate", "request.json", "resolved"),
    "audit": ("an audit", "asked.json", "a"),
}
ADVICE = "what was complete is kept. Make room or mend it, then go on with `--resume`."


def new_directory(name: str) -> Path:
    """Return `runs/<name>-<time>`, the directory of a command without `-o`."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def command_of(path: Path) -> str | None:
    """Return the command that made a directory; None if it is not recognised."""
    for command, (_, name, key) in DIRECTORIES.items():
        with suppress(OSError, UserError, ValueError, RecursionError):
            stored = json.loads(files.read_bytes(path / name))
            if isinstance(stored, dict) and key in stored:
                return command
    return None


def refuse_used(path: Path, command: str) -> None:
    """Raise UserError if the directory has files besides a lock. `command`: the one that resumes them."""
    with files.write_errors(path, "choose another `-o DIR`."):
        used = path.exists() and (not path.is_dir() or any(file.name != LOCK for file in path.iterdir()))
    if used:
        begun = path.is_dir() and any(path.glob("*.json"))
        go_on = f", or go on with `mtbench {command_of(path) or command} -o {path} --resume`" if begun else ""
        raise UserError(f"{str(path)!r} exists and is never overwritten; choose another `-o DIR`{go_on}.")


class RunDirectory:
    """The files of one run. Every write raises UserError in one line if the disk refuses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """A new run; raises UserError if something is there already."""
        refuse_used(path, "run")
        with files.write_errors(path, "choose another `-o DIR`."):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path, command: str = "plan") -> "RunDirectory":
        """A run that has a plan; raises UserError if there is none.

        `command`: makes such a directory.
        """
        if not os.path.isdir(path):  # unlike Path.is_dir, never an error: the name may be too long
            raise UserError(
                f"{str(path)!r} is no directory; give one of a run, or make one with `mtbench {command} -o DIR`."
            )
        if not (path / "plan.json").is_file():
            cls(path).refuse_other("run", "choose")
            raise UserError(f"{str(path)!r} is no run directory: it holds no plan.json. Give one that `mtbench` made.")
        return cls(path)

    def refuse_other(self, *commands: str) -> None:
        """Raise UserError, with the command that resumes it, for a directory of none of these commands."""
        made_by = command_of(self.path)
        if made_by is not None and made_by not in commands:
            raise UserError(
                f"{str(self.path)!r} is {DIRECTORIES[made_by][0]}; continue it with `mtbench {made_by} -o "
                f"{self.path} --resume`."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands away from the run. The lock ends with the process, however that ends.

        The temporary files of killed commands are deleted. Within this process the lock may be taken again. Raises
        UserError if another process has it.
        """
        path = self.path.resolve()
        if path in _locked:
            yield
            return
        handle = self._open_lock(os.O_RDWR | os.O_CREAT)
        taken = f"another mtbench command works on {str(self.path)!r}; wait until it ends, or choose another"
        try:
            self._lock(handle, fcntl.LOCK_EX, f"{taken} `-o DIR`.")
            _locked.add(path)
            files.remove_temporary(self.path)
            yield
        finally:
            _locked.discard(path)
            os.close(handle)

    def refuse_going(self) -> None:
        """Raise UserError if another command works on the run."""
        if self.path.resolve() in _locked or not self.has(LOCK):
            return
        handle = self._open_lock(os.O_RDONLY)
        try:
            taken = f"{str(self.path)!r} is still going: another mtbench command works on it; wait."
            self._lock(handle, fcntl.LOCK_SH, taken)
        finally:
            os.close(handle)

    def _open_lock(self, flags: int) -> int:
        with files.write_errors(self.path / LOCK, ADVICE):
            return os.open(self.path / LOCK, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def _lock(self, handle: int, kind: int, taken: str) -> None:
        """Lock the open file. Raises UserError: `taken` if another process has it, or if there are no locks here."""
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(taken) from None
        except OSError as error:
            raise UserError(
                f"cannot lock {self.path / LOCK} ({error.strerror}); choose a directory on a file system with locks."
            ) from None

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def sha256(self, name: str) -> str:
        """SHA-256 of the stored bytes of a file."""
        return hashlib.sha256(files.read_bytes(self.path / name)).hexdigest()

    def read(self, name: str, kind: type[M]) -> M:
        """Read a JSON file as a record. Raises UserError if the file is missing or is not such a record."""
        return records.read_json(self.path / name, kind)

    def read_lines(self, name: str, kind: type[M]) -> list[M]:
        """Read a JSONL file as records: none if it is absent, without a torn last line.

        Raises UserError with the number of the first line that is not such a record.
        """
        return records.read_lines(self.path / name, kind)

    def write_json(self, name: str, data: Any, *, indent: int | None = 1) -> None:
        """For people to read; without an indent, for what is too much to be read, and ten times as fast."""
        self.write_text(name, json.dumps(data, indent=indent, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Complete or absent: written aside, flushed, renamed."""
        files.write_bytes(self.path / name, data, ADVICE)

    def append(self, name: str, records: Iterable[JsonObject]) -> None:
        """Add lines and see them to the disk. A torn last line, which a crash of the machine left, is cut off first."""
        path = self.path / name
        with files.write_errors(path, ADVICE):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with open(handle, "a") as file:
                size = os.fstat(handle).st_size
                if size and os.pread(handle, 1, size - 1) != b"\n":
                    os.truncate(handle, path.read_bytes().rfind(b"\n") + 1)
                file.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
                file.flush()
                os.fsync(file.fileno())

    def keep_lines(self, name: str, records: Sequence[BaseModel]) -> None:
        """Rewrite a JSONL file with these records only, unless it holds just them."""
        data = "".join(json.dumps(dump(record), allow_nan=False) + "\n" for record in records).encode()
        path = self.path / name
        if (files.read_bytes(path) if path.is_file() else b"") != data:
            self.write_bytes(path.name if path.parent == self.path else name, data)
