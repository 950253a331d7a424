import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtbench.errors import UserError
from mtbench.gate.format import BuildRecord


@dataclass(frozen=True)
class Build:
    env: str
    label: str
    python: Path
    url: str | None = None

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-P", "-m", "mtbench", *arguments]


def resolve(env: str | None, note: Callable[[str], None]) -> Build:
    if env is None:
        return Build("this environment", "this environment", Path(sys.executable))
    return Build(env, Path(env).name, Path(env) / "bin/python")


def environment_of(build: Build) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def describe(build: Build) -> BuildRecord:
    code = "import json; from mtbench.hardware import machine; print(json.dumps(machine.environment([])))"
    out = json.loads(
        subprocess.run(
            [str(build.python), "-P", "-c", code], env=environment_of(build), capture_output=True, text=True, check=True
        ).stdout
    )
    return BuildRecord(
        env=build.env,
        label=build.label,
        python=str(build.python),
        mtbench=out["mtbench"],
        git=out["git"],
        packages=out["packages"],
    )


def refuse_dirty(record: BuildRecord) -> None:
    if record.git and record.git.endswith("-dirty"):
        raise UserError(f"{record.label} is dirty")


def same_build(a: BuildRecord, b: BuildRecord) -> bool:
    return a.python == b.python
