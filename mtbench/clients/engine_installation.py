"""Where a serving engine is installed: in an environment that mtbench makes, or an installation of the user's own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from mtbench.errors import UserError
from mtbench.files import cache_home, read_bytes, write_errors, write_text
from mtbench.programs import environments
from mtbench.programs.environments import Note, Pip
from mtbench.records import Record

# An environment variable, `ENGINE=NAME==VERSION`: the package of an engine in place of the pinned one.
RELEASE = "MTBENCH_ENGINE_RELEASE"
RELEASE_S = 60.0  # time in which an installation must print its release
PRINT_RELEASE = """
import importlib.metadata as metadata, sys
there = {found.metadata["name"].lower().replace("_", "-"): found.version for found in metadata.distributions()}
[first, *_] = [f"{name}=={there[name]}" for name in sys.argv[1:] if name in there]
print(first)
"""


class Installation(Record):
    """An installation of an engine that is the user's own."""

    program: str
    release: str


class EngineInstallation:
    """The installation of an engine."""

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str | None] = None  # distribution that its environment has, pinned; None: none is installed
    distributions: ClassVar[tuple[str, ...]] = ()  # others that have it, in a user's own installation
    unwanted: ClassVar[tuple[str, ...]] = ()  # distributions that it brings and that break it
    needs: ClassVar[Mapping[str, str]] = {}  # its name of a method -> the distribution that it needs

    @classmethod
    def release(cls) -> str | None:
        """Return what is run: the release that RELEASE names, the user's own installation, or the pinned package."""
        own = cls.own()
        return own.release if own is not None else cls._package()

    @classmethod
    def _package(cls) -> str | None:
        engine, _, package = os.environ.get(RELEASE, "").partition("=")
        return package if engine == cls.name else cls.package

    @classmethod
    def own(cls) -> "Installation | None":
        """Return the user's own installation, if there is one and RELEASE names no other."""
        file = cls._own_file()
        if not file.is_file() or os.environ.get(RELEASE, "").startswith(f"{cls.name}="):
            return None
        return Installation.model_validate_json(read_bytes(file))

    @classmethod
    def _own_file(cls) -> Path:
        return cache_home() / "engines" / f"{cls.name}.json"

    @classmethod
    def folder(cls, package: str | None = None) -> Path:
        """Return the folder of the environment that `mtbench fetch engine` makes. `package`: default, its own."""
        wanted = (package or cls._package() or cls.name).replace("==", "-")
        return cache_home() / "engines" / f"{wanted}-{sys.implementation.cache_tag}"

    @classmethod
    def installed(cls) -> Path | None:
        """Return the program of the user's own installation, or the Python of the engine's environment, if there."""
        if (own := cls.own()) is not None:
            return Path(own.program) if Path(own.program).exists() else None
        return environments.python_of(cls.folder())

    @classmethod
    def state(cls) -> str:
        """Return what is run, or how to install it."""
        if cls.release() is None:
            return "no package"
        return str(cls.release()) if cls.installed() else f"mtbench fetch engine {cls.name}"

    @classmethod
    def fetch(cls, note: Note, package: str | None = None) -> Path:
        """Make the engine's environment, if it is not there; return its Python. Raises UserError if that fails.

        It takes the place of the user's own installation. `package`: another release than its own, as `NAME==VERSION`.
        """
        wanted = package or cls._package()
        if package is None:
            cls._own_file().unlink(missing_ok=True)
        if wanted is None:
            raise UserError(f"mtbench has no package of {cls.title}; name an installation: --program PYTHON.")
        return environments.installed(cls.folder(wanted), wanted, "", partial(cls._install, wanted), note)

    @classmethod
    def use(cls, program: Path) -> str:
        """Use an installation of the user's: its Python, or a program that the engine knows. Return its release.

        Raises UserError if the engine is not there.
        """
        path = Path(os.path.abspath(program))  # not resolved: a link tells a Python its environment
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise UserError(f"--program {program}: it is no program; give the Python that has {cls.title}.")
        try:
            done = environments.run(cls.release_command(path), environments.variables(path), timeout_s=RELEASE_S)
            output = [*done.stdout.split("\n"), *done.stderr.split("\n")] if done.returncode == 0 else []
        except (OSError, subprocess.TimeoutExpired):
            output = []
        lines = [line.strip() for line in output if line.strip()]
        release = next((line for line in lines if line.startswith("version")), lines[0] if lines else None)
        if release is None:
            raise UserError(f"--program {program}: {cls.title} is not there; give the Python that has it.")
        with write_errors(cls._own_file()):
            cls._own_file().parent.mkdir(parents=True, exist_ok=True)
            write_text(cls._own_file(), Installation(program=str(path), release=release).model_dump_json())
        return release

    @classmethod
    def release_command(cls, program: Path) -> list[str]:
        """Return the command that prints the release of an installation, and fails if the engine is not there."""
        names = [*cls.distributions, *([cls.package.partition("==")[0]] if cls.package else [])]
        return [str(program), "-c", PRINT_RELEASE, *names]

    @classmethod
    def refuse_missing(cls, method: str) -> None:
        """Raise UserError if the engine is installed without the package that a method needs there."""
        program, needed = cls.installed(), cls.needs.get(method, "")
        command = [str(program), "-c", PRINT_RELEASE, needed]
        if program and needed and environments.run(command, environments.variables(program)).returncode:
            raise UserError(
                f"{cls.title} needs the package {needed!r} for {method}; run `{program} -m pip install {needed}`, or "
                "leave that method out."
            )

    @classmethod
    def _install(cls, package: str, pip: Pip) -> None:
        pip("install", package)
        if cls.unwanted:
            pip("uninstall", "--yes", *cls.unwanted)

    @classmethod
    def python(cls) -> Path:
        """Return the Python or program that runs the engine. Raises UserError with the command that installs it."""
        found, own = cls.installed(), cls.own()
        if found is None and cls.release() is None:
            raise UserError(
                f"mtbench has no package of {cls.title}; name your installation of it: "
                f"`mtbench fetch engine {cls.name} --program PYTHON`."
            )
        if found is None:
            gone = f"{own.program!r} is not there" if own is not None else f"{cls.name!r} is not installed"
            raise UserError(f"engine {gone}; run `mtbench fetch engine {cls.name}`.")
        return found
