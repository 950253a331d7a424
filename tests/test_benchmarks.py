"""The script that runs on a GPU, run on a CPU, where only the script itself is tested."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


def run(out: Path, *options: str) -> Any:
    """Run the script on a CPU; return its results."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((out / "gpu.json").read_text())
    assert found["errors"] == {}
    return found


@pytest.mark.slow
def test_a_first_call_gives_a_race_a_profile_and_caches_for_the_next_one(tmp_path: Path) -> None:
    """Of both models; the caches are taken by the next call."""
    found = run(tmp_path / "first", "--only", "static-4")
    assert {"toy: 7B b4 static", "toy: 0.5B b4 static"} < set(found)
    for name in ("7B", "0.5B"):
        [profile] = (tmp_path / "first").glob(f"profile-toy-{name}-b4-static-ar.json")
        assert json.loads(profile.read_text())["kernels"] > 100
    run(tmp_path / "second", "--only", "probe", "--caches", str(tmp_path / "first" / "caches.tar.gz"))


@pytest.mark.slow
def test_every_required_figure_is_measured(tmp_path: Path, parts: Any) -> None:
    """By the part that measures it, under the name in the table."""
    measured = {bar["what"].removeprefix("toy: ") for bar in run(tmp_path, "--minutes", "9")["bars"]}
    assert measured == set(parts("required").REQUIRED)
