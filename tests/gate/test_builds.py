"""Builds: what `--base ENV` names is found or installed, tells its versions, and imports nothing of its caller."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tiny_wheels import write_wheel

from mtbench.errors import UserError
from mtbench.experiments.gate import builds
from mtbench.experiments.gate.builds import Build, describe, resolve, same_build
from mtbench.experiments.gate.format import BuildRecord
from mtbench.programs import environments

ROOT = Path(__file__).parents[2]
ANSWER = {"mtbench": "0.0.7", "folder": "/", "prefix": "/", "packages": {"torch": "9.9"}}
ANSWER |= {"code": "0" * 64}


def quiet(text: str) -> None: ...


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    """Make a virtual environment whose Python is a shell script."""

    def environment(script: str) -> Path:
        python = tmp_path / "base" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return tmp_path / "base"

    return environment


def answering(**changes: object) -> str:
    return f"echo '{json.dumps(ANSWER | changes)}'"


def record(**changes: object) -> BuildRecord:
    values = {"env": "a", "label": "a", "python": "/a/bin/python", "mtbench": "1", "git": "abc", "packages": {}}
    return BuildRecord.model_validate(values | {"code_sha256": None} | changes)


# --- Paths --------------------------------------------------------------------------------------------------------


def test_a_virtual_environment_is_asked_for_its_versions(make: Callable[[str], Path]) -> None:
    """Whatever a plugin prints before."""
    folder = make(f"echo a plugin says hello; {answering()}")
    build = resolve(str(folder), quiet)

    assert build == Build(env=str(folder), label="base", python=folder / "bin" / "python")
    assert describe(build) == BuildRecord(
        env=str(folder),
        label="base",
        python=str(folder / "bin" / "python"),
        mtbench="0.0.7",
        git=None,
        packages={"torch": "9.9"},
        code_sha256="0" * 64,
    )


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo \"ModuleNotFoundError: No module named 'mtbench'\" >&2; exit 1",
            "mtbench cannot be imported: ModuleNotFoundError: No module named 'mtbench'",
        ),
        ("exit 11", "mtbench cannot be imported: exit code 11"),
    ],
)
def test_an_environment_without_a_working_mtbench_is_one_line(
    script: str, says: str, make: Callable[[str], Path]
) -> None:
    """The line names the environment and the reason."""
    folder = make(script)
    with pytest.raises(UserError, match=says) as caught:
        resolve(str(folder), quiet)

    assert str(caught.value).startswith(repr(str(folder)))
    assert "\n" not in str(caught.value)


def test_an_environment_that_hangs_is_one_line(
    make: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children end with it."""
    monkeypatch.setattr(builds, "ANSWER_S", 0.3)
    with pytest.raises(UserError, match=r"did not say what is installed: .* timed out after 0\.3 s"):
        resolve(str(make(f"sleep 60 & echo $! > {tmp_path}/child; wait")), quiet)

    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    until = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_path_that_is_no_environment_is_one_line(tmp_path: Path) -> None:
    """The line says what may be given."""
    for env, says in (
        ("nothing", "has no bin/python"),
        (str(tmp_path), "has no bin/python"),
    ):
        with pytest.raises(UserError, match=f"{says}.*; give a virtual environment or git:REV"):
            resolve(env, quiet)


# --- What a process of a build imports ----------------------------------------------------------------------------


def package(folder: Path, version: str) -> None:
    """Write a package `mtbench` that prints its version when it runs."""
    (folder / "mtbench").mkdir(parents=True)
    (folder / "mtbench" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "mtbench" / "__main__.py").write_text("import mtbench\nprint(mtbench.__version__)\n")


@pytest.mark.whole
def test_a_build_imports_its_own_mtbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one in the current directory, nor that of the caller's variables."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "base"], check=True)
    (site_packages,) = (tmp_path / "base" / "lib").glob("python3*/site-packages")
    package(site_packages, "0.0.1")
    package(tmp_path / "here", "0.0.2")
    package(tmp_path / "path", "0.0.3")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    base = resolve(str(tmp_path / "base"), quiet)

    assert describe(base).mtbench == "0.0.1"
    assert printed(base) == "0.0.1"
    assert printed(resolve(None, quiet)) == version("multi-token-bench")


def printed(build: Build) -> str:
    """What `mtbench --version` prints in this build."""
    command, variables = build.command("--version"), environments.variables(build.python)
    return subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout.strip()


# --- Dirty builds, same builds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("same", "changes"), [(True, {}), (False, {"code_sha256": "f" * 64}), (False, {"packages": {"torch": "9"}})]
)
def test_two_environments_with_the_same_code_are_one_build(same: bool, changes: dict[str, object]) -> None:
    one, other = {"code_sha256": "0" * 64}, {"code_sha256": "0" * 64, "python": "/b/bin/python"}
    assert same_build(record(**one), record(**{**other, **changes})) is same


def test_the_code_of_a_build_is_that_of_core_methods_and_plugins(tmp_path: Path) -> None:
    """A plugin with another text is another build, though its version stays. The environment borrows our packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (own,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (own / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    metadata = own / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mtbench.methods]\nmine = mine\n")
    told = []
    for text in ("", "# changed\n", ""):
        (own / "mine.py").write_text(text)
        told.append(describe(resolve(str(tmp_path / "env"), quiet)).code_sha256)
    assert None not in told
    assert told[0] == told[2] != told[1]


# --- git: -------------------------------------------------------------------------------------------------------------

BACKEND = """
from pathlib import Path
from tiny_wheels import write_wheel

def build_wheel(folder, settings=None, metadata=None):
    contents = {f"mtbench/{file.name}": file.read_text() for file in Path("mtbench").glob("*.py")}
    return write_wheel(Path(folder), "multi-token-bench", "0.0.1", contents)
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "multi-token-bench"
version = "0.0.1"
"""


def git(*arguments: str | Path) -> str:
    names = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *arguments], env=os.environ | names, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a small project of our name, as the current directory. Its mtbench says 0.0.1."""
    folder = tmp_path / "clone"
    package(folder, "0.0.1")
    shutil.copy(ROOT / "tests" / "helpers" / "tiny_wheels.py", folder)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "constraints.txt").write_text("torch==9.9\n")
    git("init", "-q", folder)
    monkeypatch.chdir(folder)
    commit()
    return folder


def commit() -> str:
    git("add", ".")
    git("commit", "-qm", "a change")
    return git("rev-parse", "HEAD")


def test_a_revision_that_is_none_is_one_line(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed."""
    with pytest.raises(UserError, match="has no commit 'v9'; `git fetch` may bring it"):
        resolve("git:v9", quiet)
    monkeypatch.chdir(clone.parent)
    with pytest.raises(UserError, match="needs a git repository here"):
        resolve("git:HEAD", quiet)


def test_a_commit_without_its_versions_is_one_line(clone: Path) -> None:
    (clone / "constraints.txt").unlink()
    commit()
    with pytest.raises(UserError, match=r"which versions it needs; .* 'constraints\.txt' does not exist"):
        resolve("git:HEAD", quiet)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of the package index, and an empty cache directory.

    pip is installed once, which takes seconds; other environments get a copy.
    """
    folder = tmp_path / "wheels"
    folder.mkdir()
    for torch in ("9.9", version("torch")):
        write_wheel(folder, "torch", torch, {"torch.py": ""})
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    create, pips = venv.create, list[Path]()

    def created(made: Path, *, with_pip: bool, **options: Any) -> None:
        create(made, with_pip=with_pip and not pips, **options)
        if with_pip:
            (packages,) = made.glob("lib/python3*/site-packages")
            for pip in pips:
                shutil.copytree(pip, packages / pip.name)
            pips[:] = pips or packages.glob("pip*")

    monkeypatch.setattr(venv, "create", created)
    return folder


@pytest.mark.whole
def test_a_commit_is_installed_once_with_its_own_versions(clone: Path, index: Path) -> None:
    """The commit, not the files as they are now; in the cache, without a trace in the clone.

    A commit with the same requirements shares the files of the packages, and has a core of its own.
    """
    first = git("rev-parse", "HEAD")
    (clone / "mtbench" / "__init__.py").write_text("__version__ = 'changed'\n")
    before = git("status", "--porcelain", "--ignored"), git("worktree", "list")
    notes: list[str] = []
    build = resolve("git:HEAD", notes.append)
    found = describe(build)

    assert (found.label, found.git) == (f"git:{first[:7]}", first[:12])
    assert (found.mtbench, found.packages["torch"], found.packages["scipy"]) == ("0.0.1", "9.9", None)
    assert printed(build) == "0.0.1"
    assert [note.split()[0] for note in notes] == ["installing", "installing", "installed", "installed"]
    assert (git("status", "--porcelain", "--ignored"), git("worktree", "list")) == before
    assert resolve(f"git:{first[:8]}", notes.append).python == build.python
    assert len(notes) == 4

    commit()
    other = resolve("git:HEAD", notes.append)
    assert len(notes) == 6
    assert (printed(other), printed(build)) == ("changed", "0.0.1")
    shared, own = (next(of.python.parents[1].glob("lib/python3*/site-packages")) for of in (build, other))
    assert (own / "torch.py").samefile(shared / "torch.py")
    assert not (own / "mtbench/__init__.py").samefile(shared / "mtbench/__init__.py")
    (clone / "constraints.txt").write_text(f"torch=={version('torch')}\n")
    commit()
    assert describe(resolve("git:HEAD", notes.append)).packages["torch"] == version("torch")
    assert describe(build).packages["torch"] == "9.9"
