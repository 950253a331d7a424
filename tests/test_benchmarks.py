"""The script that runs on a GPU, run on a CPU: every part on stand-ins, and what becomes of parts that fail."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mtbench.kernels import Operations

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FIRST = ["probe", "operations", "equality", "static-1", "static-4", "static-16"]
FIRST_FIGURE_S = 525  # the nine minutes of a call, but for the packing of the caches


@pytest.fixture(scope="module")
def script() -> Any:
    """Return a function that imports a module of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


class Call(NamedTuple):
    """One call of the script: its exit code, the lines of the parts that it ran, and gpu.json."""

    code: int
    text: str
    found: Any

    def line(self, part: str) -> str:
        """Return what is said of a part; empty if nothing is."""
        lines = [line.removeprefix(part).strip() for line in self.text.splitlines() if line.startswith(f"{part} ")]
        assert len(lines) <= 1
        return lines[0] if lines else ""


def call(script: Path, out: Path, *options: str) -> Call:
    """Run the script."""
    command = [sys.executable, str(script), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "Traceback" not in done.stderr, done.stderr
    return Call(done.returncode, done.stdout + done.stderr, json.loads((out / "gpu.json").read_text()))


# Every part, on stand-ins.


class Dry(NamedTuple):
    """A dry run and its folder."""

    out: Path
    call: Call


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    out = tmp_path_factory.mktemp("dry") / "out"
    return Dry(out, call(BENCHMARKS / "gpu.py", out, "--dry-run"))


@pytest.mark.whole
def test_every_part_runs_on_stand_ins(dry: Dry, script: Any) -> None:
    """Each says so in one line, and none fails."""
    parts = list(script("gpu").PARTS)
    assert dry.call.found["errors"] == {}, dry.call.text
    assert dry.call.code == 0
    assert list(dry.call.found["seconds"]) == parts
    assert all(dry.call.line(part) for part in parts)


@pytest.mark.whole
def test_every_required_figure_is_measured(dry: Dry, script: Any) -> None:
    """By the part that measures it, under the name in the table, with a number."""
    measured = {bar["what"].removeprefix("toy: ") for bar in dry.call.found["bars"] if bar["found"] is not None}
    assert measured == set(script("gpu_parts.required").REQUIRED)


@pytest.mark.whole
def test_a_share_of_the_roofline_is_computed(dry: Dry) -> None:
    """And the energy of a token, by stand-ins for a probe and a counter."""
    arms = dry.call.found["toy: 7B b4 static"]["arms"]
    assert all(arm["roofline_fraction"] > 0 for arm in arms.values()), arms
    assert all(arm["j_per_token"] > 0 for arm in dry.call.found["toy: energy"].values())


@pytest.mark.whole
def test_every_operation_equals_its_definition(dry: Dry, script: Any) -> None:
    """In float32 on a CPU; every operation of a layer is among them, and heads of other sizes."""
    found = dry.call.found["toy: operations"]
    assert max(result["error"] for result in found.values()) < 1e-5
    names = {name.split()[0] for name in found}
    assert names >= {*Operations._fields, "greedy", "sampled", "up", "down"}
    assert {name.split()[-1] for name in found if name.startswith("attend ×")} >= {"d64", "d80", "d96", "d256"}


@pytest.mark.whole
def test_a_static_batch_is_profiled(dry: Dry) -> None:
    """Of both models, with the estimate beside it."""
    for name in ("7B", "0.5B"):
        profile = json.loads((dry.out / f"profile-toy-{name}-b4-static-ar.json").read_text())
        assert profile["kernels"] > 100
        assert sum(profile["estimate"].values()) > 0


@pytest.mark.whole
def test_a_second_call_runs_only_what_is_asked_again(dry: Dry) -> None:
    """The other parts keep their figures."""
    again = call(BENCHMARKS / "gpu.py", dry.out, "--dry-run", "--again", "probe")
    assert again.line("probe")
    assert not again.line("operations")
    assert again.found["bars"] == dry.call.found["bars"]
    assert again.found["seconds"] | {"probe": 0} == dry.call.found["seconds"] | {"probe": 0}


@pytest.mark.whole
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_tried(tmp_path: Path) -> None:
    """The first part says why, once."""
    found = call(BENCHMARKS / "gpu.py", tmp_path)
    assert found.code == 2
    assert found.text.count("finds no GPU; --dry-run") == 1
    assert not found.line("operations")


def test_checks_come_first_and_the_first_speed_within_nine_minutes(script: Any) -> None:
    gpu = script("gpu")
    assert list(gpu.PARTS)[: len(FIRST)] == FIRST
    assert sum(gpu.PARTS[part][0] for part in FIRST[: FIRST.index("static-1") + 1]) <= FIRST_FIGURE_S
    assert gpu.PACKING_S + FIRST_FIGURE_S <= 9 * 60


@pytest.mark.whole
def test_the_script_itself_stays_off_the_gpu() -> None:
    """With torch it would hold the GPU beside a part, and every batch would be void: shared with another process."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Planted faults. Parts named here take the place of the script's own, and run as its parts do.

REAL = """
import os, signal, sys, time

def fine(bench):
    bench.keep("answer", 42)

def raises(bench):
    bench.keep("half", 1)
    raise RuntimeError("CUDA error: an illegal memory access\\nCompile with `TORCH_USE_CUDA_DSA`")

def stuck(bench):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def wrong(bench):
    from gpu_parts.checks import operations
    from mtbench import kernels

    right = kernels.linear
    kernels.linear = lambda x, weight: (1 + 0.01 * len(x)) * right(x, weight)
    operations(bench)
"""

# These need no torch, so they start at once. Each notes that it ran, and leaves something in the compile cache.
BARE = """
import json, os, pathlib, signal, subprocess, sys, time

out, part = (sys.argv[sys.argv.index(option) + 1] for option in ("--out", "--part"))
note = open(os.path.join(out, "ran"), "a")
note.write(f"{part} {os.getpid()} {sorted(os.listdir(os.environ['TRITON_CACHE_DIR']))}\\n")
note.close()
pathlib.Path(os.environ["TRITON_CACHE_DIR"], part).touch()
stays = not os.path.exists(os.path.join(out, "wait no more"))
if part == "hangs" and stays:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(out, "child").write_text(str(child.pid))
    time.sleep(600)
elif part == "dies":
    os.abort()
elif part == "waits" and stays:
    time.sleep(600)
found = {"bars": [], "errors": {}, "seconds": {part: 0.1}}
pathlib.Path(out, "parts", part + ".json").write_text(json.dumps(found))
"""


def planted(folder: Path, parts: dict[str, tuple[float, str]], bare: bool = True) -> Path:
    """Write a script with other parts: time limit and function. `bare`: they run as BARE says."""
    (folder / "planted.py").write_text(REAL)
    script = folder / "planted_gpu.py"
    table: Any = {name: (*part, {}) for name, part in parts.items()}
    lines = [
        "import sys",
        f"if {bare} and '--part' in sys.argv:",
        f"    exec({BARE!r})",
        "    sys.exit()",
        f"sys.path.insert(0, {str(BENCHMARKS)!r})",
        "import gpu, gpu_parts",
        f"gpu_parts.__path__.append({str(folder)!r})",
        f"gpu.PARTS, gpu.LEAST_S = {table!r}, 0",
        "gpu.main()",
    ]
    script.write_text("\n".join(lines))
    return script


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Dry:
    """A call with parts that fail."""
    folder = tmp_path_factory.mktemp("real")
    parts = {name: (120.0, f"planted.{name}") for name in ("raises", "stuck", "fine", "wrong")}
    return Dry(folder / "out", call(planted(folder, parts, bare=False), folder / "out", "--dry-run"))


@pytest.mark.whole
def test_a_part_that_raises_says_the_first_line_of_its_error(real: Dry) -> None:
    """What it had found is kept; its log has the whole error, and the next parts run."""
    error = "RuntimeError: CUDA error: an illegal memory access"
    assert real.call.line("raises").partition("failed: ")[2] == f"{error} (logs/raises.txt)"
    assert real.call.found["errors"]["raises"] == error
    assert real.call.found["toy: half"] == 1
    assert "TORCH_USE_CUDA_DSA" in (real.out / "logs" / "raises.txt").read_text()
    assert real.call.found["toy: answer"] == 42
    assert real.call.code == 1


@pytest.mark.whole
def test_a_part_that_is_ended_prints_where_it_was(real: Dry) -> None:
    """Also inside a call of the GPU's library, where Python's own handlers would wait."""
    assert real.call.found["errors"]["stuck"] == "ended by SIGTERM"
    assert "in stuck" in (real.out / "logs" / "raises.txt").read_text()


@pytest.mark.whole
def test_a_wrong_kernel_is_named_and_the_others_are_checked(real: Dry) -> None:
    """A product that depends on the number of rows."""
    assert real.call.found["errors"]["wrong"] == "RuntimeError: products: kernels.linear is not batch-invariant"
    [bar] = real.call.found["bars"]
    assert bar["found"] == pytest.approx(0.16, rel=1e-3)
    found = real.call.found["toy: operations"]
    assert {name for name, one in found.items() if one["error"] > 1e-5} == {"up 1 invariant", "up 16 invariant"}
    assert any(name.startswith("rotate") for name in found)


@pytest.mark.whole
def test_a_part_that_hangs_is_killed_with_its_processes(tmp_path: Path) -> None:
    """Although it ignores SIGTERM; the next part runs. A second call tries it last."""
    out, script = tmp_path / "out", planted(tmp_path, {"hangs": (3.0, ""), "fine": (60.0, "")})
    first = call(script, out)
    assert first.found["errors"] == {"hangs": "no end within 3 s"}
    assert first.line("fine")
    assert not _lives(int((out / "child").read_text()))
    (out / "wait no more").touch()
    assert call(script, out, "--again", "fine").found["errors"] == {}
    assert [line.split()[0] for line in (out / "ran").read_text().splitlines()] == ["hangs", "fine", "fine", "hangs"]


@pytest.mark.whole
def test_a_part_that_dies_by_a_signal_ends_alone(tmp_path: Path) -> None:
    """As the abort after an error that leaves the GPU unusable."""
    parts = {"dies": (60.0, ""), "fine": (60.0, "")}
    found = call(planted(tmp_path, parts), tmp_path / "out")
    assert found.found["errors"] == {"dies": "ended by SIGABRT"}
    assert found.line("fine")


@pytest.mark.whole
def test_a_killed_script_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    """The part that ran ends with the script. What was compiled before is there again."""
    out, script = tmp_path / "out", planted(tmp_path, dict.fromkeys(("fine", "waits", "last"), (60.0, "")))
    process = subprocess.Popen([sys.executable, str(script), "--out", str(out)], stdout=subprocess.DEVNULL)
    ran = out / "ran"
    _until(lambda: ran.exists() and ran.read_text().count("\n") == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _until(lambda: not _lives(int(ran.read_text().splitlines()[1].split()[1])))
    assert list(json.loads((out / "gpu.json").read_text())["seconds"]) == ["fine"]
    (out / "wait no more").touch()
    second = call(script, out)
    assert second.text.startswith("done before: fine;")
    assert (second.code, second.found["errors"]) == (0, {})
    words = [line.split(maxsplit=2) for line in ran.read_text().splitlines()]
    assert [word[0] for word in words] == ["fine", "waits", "waits", "last"]
    assert [word[2] for word in words[1:]] == ["['fine']", "['fine']", "['fine', 'waits']"]


@pytest.mark.whole
def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    """It is left to the next call."""
    found = call(planted(tmp_path, {"fine": (60.0, "")}), tmp_path / "out", "--minutes", "0.1")
    assert "no time left for fine; the same command goes on there" in found.text
    assert "not finished: fine" in found.text
    assert found.code == 0


def _lives(process: int) -> bool:
    """Return whether a process runs; one that has ended and is not reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(true: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
