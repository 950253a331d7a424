"""Builds: turn `--base ENV` and `--head ENV` into environments whose mtbench runs as processes.

    PATH             a virtual environment or a Python executable
    git:REV          a commit of the repository in the current directory, with the versions of its constraints.txt
    pip:REQUIREMENT  a release, with this environment's version of torch
    url:ADDRESS      a server of an external engine; this environment sends the requests

Environments of `git:` and `pip:` are made once, in the cache directory. Each has its own copy of every package. A
marker file is written last, so that an interrupted installation is made again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from pydantic import Field

from mtbench import files
from mtbench.cache import cache_home
from mtbench.errors import UserError
from mtbench.gate import build_probe
from mtbench.gate.format import BuildRecord
from mtbench.hardware import machine
from mtbench.records import Record

Note = Callable[[str], None]

ANSWER_S = 60.0  # time in which an environment must say what is installed
CHOICES = "give a virtual environment, a Python executable, git:REV, pip:REQUIREMENT or url:ADDRESS"
LARGEST = 1 << 26  # bytes that an environment may print while it answers
LOOK_S = 0.5  # between two looks at the size of an output
READ = 1 << 24  # bytes of the end of an output that are read
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # with them a build would import packages of the caller
MARKER = "mtbench-build"  # file in an environment that we made and that is whole: its commit, or nothing
SHORT = 7  # digits of a commit in a label
ABBREVIATED = 12  # digits of a commit in a record, as in environment.json
PINNED = re.compile(r"[A-Za-z0-9._-]+(\[[A-Za-z0-9._,-]*\])?==[A-Za-z0-9.!+_-]+")


@dataclass(frozen=True)
class Build:
    """An environment with mtbench installed. Start every process of it with `environment_of`."""

    env: str  # as asked for
    label: str
    python: Path
    url: str | None = None  # of a server

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `mtbench ARGUMENTS` in this build."""
        return [str(self.python), "-m", "mtbench", *arguments]


class Answer(Record):
    """What `build_probe.py` prints."""

    mtbench: str
    folder: str  # of the package
    prefix: str  # of the environment
    commit: str | None
    packages: dict[str, str | None]
    parts: dict[str, str] = Field(default_factory=dict)  # folder of mtbench, of its methods and of its suites
    code: str | None = None  # hash of their Python files, and of those of plugins


def resolve(env: str | None, note: Note) -> Build:
    """Return the build that `env` names; None: this environment. Install it first if it is a `git:` or `pip:` build.

    Raises UserError if there is no such build or if mtbench cannot be imported in it.
    """
    if env is None:
        build = Build(sys.executable, "this environment", Path(sys.executable))
        record = describe(build)
        return replace(build, label=f"this environment ({', '.join(filter(None, (record.mtbench, _short(record))))})")
    kind, _, rest = env.partition(":")
    make = {"git": _from_git, "pip": _from_pip, "url": _from_url}.get(kind)
    build = make(env, rest, note) if make and rest else _from_path(env)
    describe(build)
    return build


def describe(build: Build) -> BuildRecord:
    """Return the versions in a build, as a process of the build tells them.

    Raises UserError if mtbench is not installed, cannot be imported, or does not answer within 60 s.
    """
    command = [str(build.python), build_probe.__file__, *machine.PACKAGES]
    try:
        done = _run(command, environment_of(build), timeout_s=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{build.env!r} did not say within {ANSWER_S:g} s what is installed; try `{build.python} -m mtbench "
            "--version`."
        ) from None
    except OSError as error:
        raise UserError(f"{build.env!r} cannot be run: {build.python}: {error.strerror or error}.") from None
    if done.returncode != 0:
        raise _no_answer(build, done)
    try:
        answer = Answer.model_validate_json(done.stdout.strip().rpartition("\n")[2])  # plugins may print before it
        commit = _commit(answer)
    except (OSError, ValueError):  # another answer, or one with paths that cannot be
        raise UserError(f"{build.env!r} did not say what is installed; is {build.python} a Python?") from None
    _refuse_two_trees(build, answer)
    return BuildRecord(
        env=build.env,
        label=build.label,
        python=str(build.python),
        mtbench=answer.mtbench,
        git=commit,
        packages=answer.packages,
        code_sha256=answer.code,
    )


def _refuse_two_trees(build: Build, answer: Answer) -> None:
    """Raise UserError if methods or suites of a build lie neither in its mtbench (a wheel) nor beside it (a checkout).

    An environment that borrows from another can import the core from one tree and the methods from the other.
    """
    core = Path(answer.folder)
    for name, folder in answer.parts.items():
        if core not in (Path(folder), Path(folder).parent) and Path(folder).parent != core.parent:
            raise UserError(
                f"{build.env!r} takes mtbench from {core} and {name} from {folder}; install it anew with "
                f"`{build.python} -m pip install`."
            )


def environment_of(build: Build) -> dict[str, str]:
    """Return the environment variables for a process of a build. Nothing of the caller's Python is in them.

    PYTHONSAFEPATH: `python -m mtbench` would import a folder `mtbench` of the current directory first.
    """
    ours = {name: value for name, value in os.environ.items() if name not in LEAKS}
    programs = os.pathsep.join(filter(None, (str(build.python.parent), ours.get("PATH"))))
    return ours | {"PATH": programs, "PYTHONSAFEPATH": "1"}


def refuse_dirty(record: BuildRecord) -> None:
    """Raise UserError if the build has changes that are in no commit."""
    if record.git is not None and record.git.endswith("-dirty"):
        raise UserError(
            f"{record.label} has changes that are in no commit ({record.git}), so nobody could repeat the result; "
            "commit them, or add `--allow-dirty`."
        )


def same_build(a: BuildRecord, b: BuildRecord) -> bool:
    """Return whether two builds run the same code: one environment or equal files and packages; not two servers."""
    same_files = a.code_sha256 is not None and (a.code_sha256, a.packages) == (b.code_sha256, b.packages)
    return _server(a) == _server(b) and (same_files or _environment(a.python) == _environment(b.python))


def _server(record: BuildRecord) -> str | None:
    return record.env if record.env.startswith("url:") else None


def _environment(python: str) -> tuple[Path, Path]:
    """Return what two names of one environment's Python share: `bin/python` and `bin/python3` differ in name only."""
    return Path(python).parent.resolve(), Path(python).resolve()


# --- The kinds of ENV ---------------------------------------------------------------------------------------------


def _from_path(env: str) -> Build:
    path = Path(env).expanduser().absolute()  # links stay: a virtual environment's python is one
    if not path.exists():
        raise UserError(f"{env!r} does not exist; {CHOICES}.")
    if path.is_file():
        if not os.access(path, os.X_OK):
            raise UserError(f"{env!r} is not executable; {CHOICES}.")
        folder = path.parent.parent
        return Build(env, _folder_name(folder) if (folder / "pyvenv.cfg").is_file() else env, path)
    for name in ("python", "python3"):
        if os.access(python := path / "bin" / name, os.X_OK):
            return Build(env, _folder_name(path), python)
    raise UserError(f"{env!r} has no bin/python, so it is no virtual environment; {CHOICES}.")


def _folder_name(folder: Path) -> str:
    """Return a folder's name, with its parent's if the name is a usual one: `base/.venv`."""
    return "/".join(folder.parts[-2:]) if folder.name in {".venv", "venv", "env", ".env"} else folder.name


def _from_url(env: str, address: str, note: Note) -> Build:
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"{env!r} is no server; write url:http://HOST:PORT/v1.")
    if "@" in parts.netloc:
        raise UserError("url: takes no user and no password, because gate.json would show them.")
    return Build(env, parts.netloc, Path(sys.executable), address)


def _from_git(env: str, revision: str, note: Note) -> Build:
    top = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel", error=f"{env!r} needs a git repository here"))
    commit = _git(
        top,
        "rev-parse",
        "--verify",
        "--end-of-options",
        f"{revision}^{{commit}}",
        error=f"{env!r}: the repository in {top} has no commit {revision!r}; `git fetch` may bring it",
    )
    _refuse_other_project(env, top, commit)
    constraints = _git(
        top,
        "show",
        f"{commit}:constraints.txt",
        error=f"{env!r} has no constraints.txt, so its versions are not known; install it yourself and give the path",
    )
    label = f"git:{commit[:SHORT]}"

    def install(pip: Pip) -> None:
        with tempfile.TemporaryDirectory(prefix="mtbench-") as folder:
            source, pins = Path(folder, "source.tar"), Path(folder, "constraints.txt")
            pins.write_text(constraints)
            _git(top, "archive", "--prefix=source/", f"--output={source}", commit, error=f"{env!r} cannot be read")
            pip("install", "--constraint", str(pins), "torch")
            pip("install", "--constraint", str(pins), str(source))

    folder = _builds() / f"{commit}-{sys.implementation.cache_tag}"
    return Build(env, label, _installed(folder, label, commit[:ABBREVIATED], install, note))


def _refuse_other_project(env: str, top: Path, commit: str) -> None:
    error = f"{env!r} is not a commit of {build_probe.DISTRIBUTION}; run the command in a clone of its repository"
    try:
        name = tomllib.loads(_git(top, "show", f"{commit}:pyproject.toml", error=error))["project"]["name"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        name = None
    if name != build_probe.DISTRIBUTION:
        raise UserError(f"{error}.")


def _from_pip(env: str, requirement: str, note: Note) -> Build:
    if not PINNED.fullmatch(requirement):
        requirement = _newest(env, requirement)
    torch = f"torch=={version('torch')}"
    key = hashlib.sha256(f"{requirement} {torch}".encode()).hexdigest()[:8]
    label = f"pip:{requirement.rpartition('==')[2]}"
    folder = _builds() / f"{label.replace(':', '-')}-{key}-{sys.implementation.cache_tag}"

    def install(pip: Pip) -> None:
        pip("install", torch)
        pip("install", torch, requirement)

    return Build(env, label, _installed(folder, label, "", install, note))


def _newest(env: str, requirement: str) -> str:
    """Return the release that pip would install now, as NAME==VERSION: an environment in the cache never changes."""
    pip = Pip(Path(sys.executable), env)
    report = json.loads(
        pip("install", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "--", requirement)
    )
    (found,) = report["install"]
    if found["is_direct"]:
        raise UserError(
            f"{env!r} is no release; install it in a new environment and give the path of that environment."
        )
    extras = f"[{','.join(found['requested_extras'])}]" if found.get("requested_extras") else ""
    return f"{found['metadata']['name']}{extras}=={found['metadata']['version']}"


# --- Installation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pip:
    """pip of one Python."""

    python: Path
    env: str  # what is installed, for errors
    keep: tuple[int, ...] = ()  # open files that pip inherits

    def __call__(self, *arguments: str) -> str:
        """Run pip and return what it prints. Raises UserError with pip's last error."""
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
        build = Build(self.env, self.env, self.python)
        done = _run(command, environment_of(build), keep=self.keep)
        if done.returncode != 0:
            raise UserError(f"{self.env!r} cannot be installed: {_pip_error(done.stderr)}.")
        return done.stdout


def _builds() -> Path:
    return cache_home() / "builds"


def _installed(folder: Path, label: str, commit: str, install: Callable[[Pip], None], note: Note) -> Path:
    """Return the Python of the environment in `folder`. Make the environment if it is not there or not whole."""
    python, marker = folder / "bin" / "python", folder / MARKER
    with files.write_errors(folder), _locked(folder, label, note) as lock:
        if not (marker.is_file() and python.exists()):
            started = time.monotonic()
            note(f"installing {label} in {folder}; this takes minutes")
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _make_environment(folder, label, lock)
                install(Pip(python, label, (lock,)))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            files.write_text(marker, commit)
            note(f"installed {label} in {time.monotonic() - started:.0f} s")
        os.utime(folder)  # when it was last used, so that old ones can be found and deleted
    return python


def _make_environment(folder: Path, label: str, lock: int) -> None:
    done = _run([sys.executable, "-m", "venv", str(folder)], {**os.environ, "PYTHONSAFEPATH": "1"}, keep=(lock,))
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        raise UserError(f"{label!r} cannot be installed: `python -m venv` failed: {said[0].rstrip('.')}.")


@contextmanager
def _locked(folder: Path, label: str, note: Note) -> Iterator[int]:
    """Wait until no other command installs this build. Yields the lock, an open file.

    Processes that inherit the file keep the lock: a killed command's pip works on until it ends.
    """
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


# --- Processes ----------------------------------------------------------------------------------------------------


def _run(
    command: Sequence[str],
    variables: dict[str, str],
    *,
    timeout_s: float | None = None,
    keep: tuple[int, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its children end with it if the time is over or this process is interrupted.

    With a time limit, raises TimeoutExpired if the time is over or the output has over LARGEST bytes.
    """
    with (
        tempfile.TemporaryFile() as out,  # no pipes: a child that outlives the process would keep them open
        tempfile.TemporaryFile() as err,
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=keep,
        ) as process,
    ):
        try:
            _wait(process, (out, err), timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        stdout, stderr = (_end_of(file).decode(errors="replace") for file in (out, err))
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _wait(process: subprocess.Popen[bytes], outputs: Sequence[IO[bytes]], timeout_s: float | None) -> None:
    """Wait until a process ends. With a time limit, raises TimeoutExpired beyond it or beyond LARGEST bytes."""
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            process.wait(None if ends is None else max(0.0, min(LOOK_S, ends - time.monotonic())))
            return
        except subprocess.TimeoutExpired:
            late = ends is None or time.monotonic() >= ends
            if late or any(os.fstat(file.fileno()).st_size > LARGEST for file in outputs):
                raise


def _end_of(file: IO[bytes]) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
    return file.read()


def _git(folder: Path, *arguments: str, error: str) -> str:
    """Run git and return what it prints. Raises UserError with `error` if it fails."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, errors="replace")
    except OSError:
        raise UserError(f"{error}: git is not installed.") from None
    if done.returncode != 0:
        raise UserError(f"{error} ({(done.stderr.strip().splitlines() or ['git gave no reason'])[0]}).")
    return done.stdout.strip()


def _no_answer(build: Build, done: subprocess.CompletedProcess[str]) -> UserError:
    said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1].rstrip(".")
    if said.endswith("No module named 'mtbench'"):
        return UserError(f"{build.env!r} has no mtbench; `{build.python} -m pip install {build_probe.DISTRIBUTION}`.")
    return UserError(f"{build.env!r}: mtbench cannot be imported: {said}. Try `{build.python} -m mtbench --version`.")


def _pip_error(stderr: str) -> str:
    """Return the last line of pip's output that is an error with a reason; without one the last line."""
    lines = stderr.strip().splitlines() or ["pip gave no reason"]
    errors = [line for line in lines if re.match(r"error: (?!ResolutionImpossible)", line, re.IGNORECASE)]
    return re.sub(r"^error: ", "", (errors or lines)[-1], flags=re.IGNORECASE).rstrip(".")


def _commit(answer: Answer) -> str | None:
    """Return the commit of an environment that we made, of a repository's address, or of a checkout; else None."""
    marker = Path(answer.prefix, MARKER)
    if marker.is_file():
        return marker.read_text() or None
    return answer.commit[:ABBREVIATED] if answer.commit else machine.git_commit(Path(answer.folder))


def _short(record: BuildRecord) -> str | None:
    """Return the commit with fewer digits, with `-dirty` if it has that."""
    return None if record.git is None else re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", record.git)
