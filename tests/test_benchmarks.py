"""The script that runs on a GPU, run on a CPU, where only the script itself is tested; and what it computes itself."""

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


def test_a_profile_tells_the_time_between_kernels(parts: Any) -> None:
    """Also where kernels overlap, which programmatic dependent launches do."""
    profile = parts("profile")
    ran = [
        profile.Kernel("a", 10, 14),
        profile.Kernel("b", 15, 20),
        profile.Kernel("a", 19, 22),
        profile.Kernel("c", 25, 26),
    ]
    found = profile.summary(ran)
    assert [one["gap_us"] for one in found["in_order"]] == [0, 1, -1, 3]
    assert (found["us"], found["busy_us"], found["kernels"]) == (16, 12, 4)
    assert found["by_name"] == {"a": {"us": 7, "count": 2}, "b": {"us": 5, "count": 1}, "c": {"us": 1, "count": 1}}
    assert list(found["by_name"]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="no kernel"):
        profile.summary([])


def test_caches_survive_the_way_to_another_machine(tmp_path: Path, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive where torch and triton look for them."""
    caches = parts("caches")
    for variable in caches.VARIABLES:
        monkeypatch.setenv(variable, "elsewhere")
    folder = caches.unpack(None)
    (folder / "inductor" / "ab").mkdir()
    (folder / "inductor" / "ab" / "kernel.py").write_text("tuned")
    (folder / "triton" / "kernel.cubin").write_bytes(b"\0\1")
    caches.pack(folder, tmp_path / "caches.tar.gz")
    other = caches.unpack(tmp_path / "caches.tar.gz")
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == other / "inductor"
    assert (other / "inductor" / "ab" / "kernel.py").read_text() == "tuned"
    assert (Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin").read_bytes() == b"\0\1"
