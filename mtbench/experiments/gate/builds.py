"""Builds: turn `--base ENV` and `--head ENV` into environments whose mtbench runs as processes.

    PATH               a virtual environment
    git:REV            a commit of the repository in the current directory, with the versions of its constraints.txt
    pip:NAME==VERSION  this environment, with this release of the serving engine of `--engine`

Environments of `git:` and `pip:` are made once, in the cache directory. Commits with the same requirements share the
files of their packages; each has its own mtbench.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mtbench.clients.engine_installation import RELEASE
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.experiments.gate import build_probe
from mtbench.experiments.gate.format import BuildRecord
from mtbench.files import cache_home
from mtbench.hardware import machine
from mtbench.models import chat_template
from mtbench.plugins import read_file
from mtbench.programs import environments
from mtbench.programs.environments import MARKER, Note, Pip, installed, share_packages
from mtbench.records import Record

ANSWER_S = 60.0  # time in which an environment must report its packages
CHOICES = "give a virtual environment or git:REV, or with --engine ENGINE a release of it, pip:NAME==VERSION"
PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*", re.ASCII)
DISTRIBUTION = "multi-token-bench"
SHORT = 7  # digits of a commit in a label
PIP = "pip:"
DATE = "2024-07-26"  # of every gate's prompts, so that a floor holds on any day; Llama 3's own default
ABBREVIATED = 12  # digits of a commit in a record, as in environment.json


@dataclass(frozen=True)
class Build:
    """An environment with mtbench installed, and the plugins and engine of its processes."""

    env: str  # as given
    label: str
    python: Path
    plugins: tuple[str, ...] = ()  # files of `--plugin`
    release: str | None = None  # of a serving engine, `ENGINE=NAME==VERSION`; None: the one that its mtbench pins
    date: str = DATE  # that a chat template reads; empty: today

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes."""
        ours = {chat_template.DATE: self.date, **({RELEASE: self.release} if self.release else {})}
        return environments.variables(self.python) | ours

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of `mtbench ARGUMENTS` in this build, which imports its plugin files."""
        named = (word for file in self.plugins for word in ("--plugin", file))
        return [str(self.python), "-m", "mtbench", *arguments, *named]


class ProbeReport(Record):
    """The output of `build_probe.py`."""

    mtbench: str
    folder: str  # of the package
    prefix: str  # of the environment
    packages: dict[str, str | None]
    code: str  # hash of the Python files of mtbench, its methods, its suites and plugins


def resolve(env: str | None, note: Note, engine: str | None = None) -> Build:
    """Return the build that `env` names; None: this environment. Install what `git:` or `pip:` names first.

    `engine`: whose releases `pip:` names. Raises UserError if there is no such build or if mtbench cannot be imported
    in it.
    """
    if env is None:
        return Build(sys.executable, "this environment", Path(sys.executable))
    if env.startswith(PIP):
        return _from_pip(env, engine, note)
    revision = env.removeprefix("git:")
    build = _from_git(env, revision, note) if revision not in ("", env) else _from_path(env)
    describe(build)
    return build


def describe(build: Build) -> BuildRecord:
    """Return the versions in a build, as a process of the build reports them.

    Raises UserError if mtbench is not installed, cannot be imported, or does not answer within 60 s.
    """
    command = [str(build.python), build_probe.__file__, *machine.PACKAGES]
    advice = f"try `{build.python} -m mtbench --version`"
    try:
        done = environments.run(command, build.variables, timeout_s=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{build.env!r} did not say what is installed: {error}; {advice}.") from None
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1].rstrip(".")
        raise UserError(f"{build.env!r}: mtbench cannot be imported: {reason}; {advice}.")
    answer = ProbeReport.model_validate_json(done.stdout.strip().rpartition("\n")[2])  # plugins may print before it
    marker = Path(answer.prefix, MARKER)  # of an environment that we made: its commit
    return BuildRecord(
        env=build.env,
        label=build.label,
        python=str(build.python),
        mtbench=answer.mtbench,
        git=marker.read_text() or None if marker.is_file() else machine.git_commit(Path(answer.folder)),
        packages=answer.packages,
        code_sha256=answer.code,
        plugins={file: read_file(file).sha256 for file in build.plugins},
        engine=build.release,
    )


def refuse_dirty(record: BuildRecord) -> None:
    """Raise UserError if the build has changes that are in no commit."""
    if record.git is not None and record.git.endswith("-dirty"):
        raise UserError(
            f"{record.label} has changes that are in no commit ({record.git}), so nobody could repeat the result; "
            "commit them, or add `--allow-dirty`."
        )


def same_build(a: BuildRecord, b: BuildRecord) -> bool:
    """Return whether two builds run the same code with the same packages and engine."""
    return (a.code_sha256, a.packages, a.engine) == (b.code_sha256, b.packages, b.engine)


# --- The kinds of ENV ---------------------------------------------------------------------------------------------


def _from_path(env: str) -> Build:
    path = Path(env).expanduser().absolute()  # links stay: a virtual environment's python is one
    for name in ("python", "python3"):
        if os.access(python := path / "bin" / name, os.X_OK):
            usual = path.name in {".venv", "venv", "env", ".env"}  # then the parent's name is shown, too
            return Build(env, "/".join(path.parts[-2:]) if usual else path.name, python)
    raise UserError(f"{env!r} has no bin/python, so it is no virtual environment; {CHOICES}.")


def _from_pip(env: str, engine: str | None, note: Note) -> Build:
    package = env.removeprefix(PIP)
    if engine is None or engine not in SERVING_ENGINES:
        raise UserError(
            f"{env!r} is a release of a serving engine, so name the engine by --engine: {', '.join(SERVING_ENGINES)}."
        )
    if not PACKAGE.fullmatch(package):
        pinned = SERVING_ENGINES[engine].package or "NAME==VERSION"
        raise UserError(f"{env!r} names no release; give {PIP}NAME==VERSION, such as {PIP}{pinned}.")
    SERVING_ENGINES[engine].fetch(note, package)
    return Build(env, package, Path(sys.executable), release=f"{engine}={package}")


def _from_git(env: str, revision: str, note: Note) -> Build:
    top = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel", error=f"{env!r} needs a git repository here"))
    unknown = f"{env!r}: the repository in {top} has no commit {revision!r}; `git fetch` may bring it"
    commit = _git(top, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", error=unknown)
    missing = f"{env!r} does not say which versions it needs; install it yourself and give the path"
    constraints, project = (
        _git(top, "show", f"{commit}:{file}", error=missing) for file in ("constraints.txt", "pyproject.toml")
    )
    needs = constraints + project.partition("\n[tool.")[0]  # settings of tools need no package
    folder, python = cache_home() / "builds", sys.implementation.cache_tag
    label, digest = f"git:{commit[:SHORT]}", hashlib.sha256(needs.encode()).hexdigest()

    def install(pip: Pip) -> None:
        with tempfile.TemporaryDirectory(prefix="mtbench-") as temporary:
            source, pins = f"{temporary}/source.tar", f"{temporary}/constraints.txt"
            Path(pins).write_text(constraints)
            _git(top, "archive", "--prefix=source/", f"--output={source}", commit, error=f"{env!r} cannot be read")

            def install_packages(pip: Pip) -> None:
                pip("install", "--constraint", pins, "torch")
                pip("install", "--constraint", pins, source)
                pip("uninstall", "--yes", DISTRIBUTION)

            lender = folder / f"packages-{digest[:ABBREVIATED]}-{python}"
            share_packages(installed(lender, f"packages of {label}", "", install_packages, note), pip.python)
            pip("install", "--no-deps", source)

    own = folder / f"{commit}-{python}"
    return Build(env, label, installed(own, label, commit[:ABBREVIATED], install, note, with_pip=False))


def _git(folder: Path, *arguments: str, error: str) -> str:
    """Run git and return what it prints. Raises UserError with `error` if it fails."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, errors="replace")
    except OSError:
        raise UserError(f"{error}: git is not installed.") from None
    if done.returncode != 0:
        raise UserError(f"{error} ({(done.stderr.strip().splitlines() or ['git gave no reason'])[0]}).")
    return done.stdout.strip()
