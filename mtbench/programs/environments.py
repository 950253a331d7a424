"""Virtual environments in the cache folder, which mtbench makes once: builds of the gate, clients of the load.

A marker file is written last, so that an interrupted installation is made again. A lock keeps two commands from making
the same environment at once.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtbench import files
from mtbench.errors import UserError

Note = Callable[[str], None]

LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # with them an environment would import packages of the caller
MARKER = "mtbench-build"  # file in an environment that we made and that is whole: its commit, or nothing


def variables(python: Path) -> dict[str, str]:
    """Return the environment variables for a process of another Python. Nothing of the caller's Python is in them.

    PYTHONSAFEPATH: `python -m mtbench` would import a folder `mtbench` of the current directory first.
    """
    ours = {name: value for name, value in os.environ.items() if name not in LEAKS}
    programs = os.pathsep.join(filter(None, (str(python.parent), ours.get("PATH"))))
    return ours | {"PATH": programs, "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class Pip:
    """pip of one Python."""

    python: Path
    env: str  # what is installed, for errors
    lock: int  # an open file: if this command is killed, pip keeps it locked until it ends

    def __call__(self, *arguments: str) -> str:
        """Run pip and return what it prints. Raises UserError with pip's last error."""
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
        done = run(command, variables(self.python), keep=(self.lock,))
        if done.returncode != 0:
            raise UserError(f"{self.env!r} cannot be installed: {_pip_error(done.stderr)}.")
        return done.stdout


def python_of(folder: Path) -> Path | None:
    """Return the Python of the environment in `folder`; None if it is not there or not whole."""
    python = folder / "bin" / "python"
    return python if (folder / MARKER).is_file() and python.exists() else None


def installed(
    folder: Path, label: str, commit: str, install: Callable[[Pip], None], note: Note, *, with_pip: bool = True
) -> Path:
    """Return the Python of the environment in `folder`. Make the environment if it is not there or not whole.

    `with_pip`: False if `install` brings pip.
    """
    python = folder / "bin" / "python"
    with files.write_errors(folder), _locked(folder, label, note) as lock:
        if python_of(folder) is None:
            started = time.monotonic()
            note(f"installing {label} in {folder}; this takes minutes")
            shutil.rmtree(folder, ignore_errors=True)
            try:
                try:
                    venv.create(folder, with_pip=with_pip, symlinks=True)
                except (OSError, subprocess.CalledProcessError) as error:  # as where Debian lacks python3-venv
                    raise UserError(f"{label!r} cannot be installed: `python -m venv` fails: {error}.") from None
                install(Pip(python, label, lock))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            files.write_text(folder / MARKER, commit)
            note(f"installed {label} in {time.monotonic() - started:.0f} s")
        os.utime(folder)  # when it was last used, so that old ones can be found and deleted
    return python


def share_packages(lender: Path, borrower: Path) -> None:
    """Replace the packages in the environment of a Python by hard links to those of another one."""
    source, target = (sysconfig.get_path("purelib", "venv", {"base": f"{of.parents[1]}"}) for of in (lender, borrower))
    shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)


@contextmanager
def _locked(folder: Path, label: str, note: Note) -> Iterator[int]:
    """Wait until no other command makes this environment. Yields the lock, an open file."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"another command installs {label}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def run(
    command: Sequence[str], variables: dict[str, str], *, timeout_s: float | None = None, keep: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. `keep`: open files that it inherits.

    Its children end with it if the time is over or this process is interrupted. Raises TimeoutExpired if the time is
    over.
    """
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=keep,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _pip_error(stderr: str) -> str:
    """Return the last line of pip's output that is an error with a reason; without one the last line."""
    lines = stderr.strip().splitlines() or ["pip gave no reason"]
    errors = [line for line in lines if re.match(r"error: (?!ResolutionImpossible)", line, re.IGNORECASE)]
    return re.sub(r"^error: ", "", (errors or lines)[-1], flags=re.IGNORECASE).rstrip(".")
