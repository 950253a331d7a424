"""Write files atomically, and read untrusted files within bounds.

Written data goes to a temporary file in the same folder, is flushed to the disk and then renamed to its final name: a
file is complete or absent, whatever interrupts the process. A killed process leaves its temporary file behind;
`remove_temporary` deletes such files.

What is read may be anything: a FIFO, a device, a file of many gigabytes or of one endless line. Only plain files are
opened, and never more is read than the bounds allow.
"""

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mtbench.errors import UserError

LARGEST_FILE = 1 << 29  # bytes of a file that is read as a whole
LONGEST_LINE = 1 << 26  # bytes of a line: an answer of millions of tokens, with its prompt
TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")  # of the file with the name in the group
ADVICE = "Free disk space or choose another place, then repeat the command."


@contextmanager
def write_errors(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Turn an OSError into a UserError of one line that names `path` and ends with `advice`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from None


@contextmanager
def atomic_write(path: Path, advice: str = ADVICE) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to `path` at the end, or remove it after an error.

    Missing parent folders are made. Raises UserError if the disk refuses the write.
    """
    with write_errors(path, advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            flush(temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_temporary(folder: Path) -> None:
    """Delete the temporary files in `folder` and below that killed processes left. No other process may write there."""
    for path in folder.rglob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            with write_errors(path):
                path.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes, advice: str = ADVICE) -> None:
    """Write `data` atomically. Raises UserError if the disk refuses the write."""
    with atomic_write(path, advice) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str, advice: str = ADVICE) -> None:
    """Write `text` atomically, as UTF-8. Raises UserError if the disk refuses the write."""
    write_bytes(path, text.encode(), advice)


def write_json(path: Path, data: Any, *, indent: int | None = 1, advice: str = ADVICE) -> None:
    """Write `data` as JSON with a final newline, atomically.

    Raises ValueError for a NaN or an infinity, UserError if the disk refuses the write.
    """
    write_text(path, json.dumps(data, indent=indent, allow_nan=False) + "\n", advice)


def refuse_existing(path: Path | None, own: Path | None = None) -> None:
    """Raise UserError if the file that an option names exists: a command checks it before it runs, and overwrites none.

    path: None and `-`, standard output, are no file; devices and pipes may be written. own: the file of the run
    directory with the same content; it may be named, and so may any file with the same `run_id`.
    """
    if path is None or str(path) == "-" or not (os.path.isfile(path) or os.path.isdir(path)):
        return
    if own is None or (path.resolve() != own.resolve() and ((run := _run_id(path)) is None or run != _run_id(own))):
        raise UserError(f"{str(path)!r} exists and is never overwritten; choose another name, or remove it.")


def _run_id(results: Path) -> object:
    """Return the run that a file has results of; None if it is no such file."""
    try:
        return json.loads(read_bytes(results))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def flush(path: Path) -> None:
    """See the file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a plain file to read it.

    Raises FileNotFoundError if there is none, and UserError if it is something else or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO does not wait
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"cannot read {path}: it is not a plain file.")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_bytes(path: Path, largest: int = LARGEST_FILE) -> bytes:
    """Return the content of a plain file. Raises as `open_plain` does, and UserError if it has over `largest` bytes."""
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise UserError(f"{path} has {size:,} bytes, and at most {largest:,} are read.")
        try:
            return file.read(largest)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}.") from None


def read_lines(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield the lines of an open file with their line feeds. Raises ValueError for a line of over `longest` bytes.

    A line feed alone ends a line: JSON may hold U+2028 and U+0085, at which `str.splitlines` and httpx's lines end.
    """
    while line := file.readline(longest + 1):
        if len(line) > longest:
            raise ValueError(f"the line has over {longest:,} bytes")
        yield line


def cache_home() -> Path:
    """Return `$XDG_CACHE_HOME/mtbench`, by default `~/.cache/mtbench`: files that mtbench can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtbench"
