"""The GitHub action of the gate: it passes its inputs on, and its result is the gate's exit code."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "gate" / "action.yml").read_text())
STEP = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "gate")


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """A folder with a Python that writes down its arguments and ends with the exit code in the file `code`."""
    (tmp_path / "code").write_text("0")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/arguments\nexit $(cat {tmp_path}/code)\n')
    python.chmod(0o755)
    return tmp_path


def run(runner: Path, **inputs: str) -> tuple[int, dict[str, str], list[str]]:
    """Run the step as GitHub does; return its exit code, its outputs, and the arguments of the gate."""
    values = {name: about.get("default", "") for name, about in ACTION["inputs"].items()}
    values |= {"base": "git:main", "python": str(runner / "python"), "out": str(runner / "out")}
    values |= {name.replace("_", "-"): value for name, value in inputs.items()}
    env: dict[str, Any] = {
        name: values[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in STEP["env"].items()
    }
    outputs = runner / "outputs"
    outputs.write_text("")
    env |= {
        "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(runner / "summary"),
        "GITHUB_RUN_ID": "7",
        "PATH": os.environ["PATH"],
        "HOME": str(runner),
    }
    shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", STEP["run"]]
    done = subprocess.run(shell, env=env, cwd=runner)
    written = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return done.returncode, written, (runner / "arguments").read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "strict", "ends_with", "word"),
    [
        (0, "true", 0, "PASS"),
        (1, "false", 1, "FAIL"),
        (2, "true", 2, "REFUSED"),
        (3, "true", 3, "INCONCLUSIVE"),
        (3, "false", 0, "INCONCLUSIVE"),
        (137, "false", 137, "ERROR"),
    ],
)
def test_the_step_ends_as_the_gate_does(code: int, strict: str, ends_with: int, word: str, runner: Path) -> None:
    """Except that an inconclusive gate may be let through. Its word is an output, and gate.md the summary."""
    (runner / "code").write_text(str(code))
    (runner / "out").mkdir()
    (runner / "out" / "gate.md").write_text("# a gate")
    ended, outputs, _ = run(runner, fail_on_inconclusive=strict)

    assert (ended, outputs["word"], (runner / "summary").read_text()) == (ends_with, word, "# a gate")


def test_the_gate_gets_the_inputs(runner: Path) -> None:
    """Options are split as a shell does, but nothing in them is executed."""
    options = """--suite gsm8k --method 'mars:tau=0.9|0.8' --suite "prompts:my file" $(touch executed)"""
    _, outputs, arguments = run(runner, options=options)

    given = ["--base", "git:main", "--head", "git:HEAD", "-o", str(runner / "out")]
    words = ["--suite", "gsm8k", "--method", "mars:tau=0.9|0.8", "--suite", "prompts:my file", "$(touch", "executed)"]
    assert arguments == ["-P", "-m", "mtbench", "gate", *given, *words]
    assert outputs["out"] == str(runner / "out")
    assert not (runner / "executed").exists()


def test_options_with_a_missing_quote_are_refused(runner: Path) -> None:
    """The gate is not started."""
    (runner / "arguments").write_text("")

    assert run(runner, options="--method 'mars") == (2, {"out": str(runner / "out")}, [])


def test_without_a_folder_gates_lie_side_by_side(runner: Path) -> None:
    """So that floor.json stays beside them, and each has a folder of its own."""
    _, outputs, arguments = run(runner, out="", options="")

    assert outputs["out"].startswith(f"{runner}/mtbench-gates/20")
    assert outputs["out"].endswith("-7")
    assert arguments[-1] == outputs["out"]
