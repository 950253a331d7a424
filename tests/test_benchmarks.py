"""The script that runs on a GPU, run on a CPU: every step on stand-ins, and what becomes of steps that fail."""

import importlib
import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import forking
from living import is_alive, until

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STEPS = ["doctor", "operations", "equality", "run", "static-1", "static-16", "static-8", "static-4"]
STEPS += ["refill-16", "hf-dynamic", "invariant", "prefill"]


@pytest.fixture(scope="module")
def script() -> Any:
    """Return a function that imports a module of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


class Call(NamedTuple):
    """One call of the script: its folder, exit code, what it printed, and the file of each step."""

    out: Path
    code: int
    text: str
    found: dict[str, Any]

    def line(self, step: str) -> str:
        """Return what is said of a step; empty if nothing is."""
        return "\n".join(line for line in self.text.splitlines() if line.startswith(f"{step} "))


def call(script: Path, out: Path, *options: str, first: str = "") -> Call:
    """Run the script. `first`: code that runs before it."""
    code = f"import runpy, sys\nsys.argv.pop(0)\nsys.path[0] = {str(BENCHMARKS)!r}\n{first}\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, *(("-c", code) if first else ()), str(script)]
    with forking():
        done = subprocess.run([*command, "--out", str(out), *options], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    found = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    return Call(out, done.returncode, done.stdout + done.stderr, found)


# Every step, on stand-ins.

WITHOUT = """
missing = ("lm_eval", "datasets")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ImportError(f"{name} is not on the machine with the GPU")

sys.meta_path.insert(0, Missing())
for name in list(sys.modules):  # those of the tests; what needs them is imported again
    if name.partition(".")[0] in (*missing, "mtbench"):
        del sys.modules[name]
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Without lm-eval and datasets."""
    return call(BENCHMARKS / "gpu.py", tmp_path_factory.mktemp("dry") / "out", "--dry-run", first=WITHOUT)


@pytest.mark.whole
def test_every_step_runs_on_stand_ins(dry: Call) -> None:
    """Each says so in one line and has a file of its own; the whole takes less than 45 s on an idle machine."""
    assert {step: dry.found[step]["ended"] for step in STEPS} == dict.fromkeys(STEPS), dry.text
    assert dry.code == 0
    assert all(dry.line(step) for step in STEPS)


@pytest.mark.whole
def test_every_required_figure_is_measured_by_its_step(dry: Call, script: Any) -> None:
    """With a number, under the name in the table of bars; a figure of the first contact stands beside it."""
    found = {(fig["what"], step): fig["value"] for step in STEPS for fig in dry.found[step]["figures"]}
    module = script("gpu_parts.figures")
    assert all(found[what, bar.step] is not None for what, bar in module.BARS.items())
    assert found["kernels against float64, worst relative error", "operations"] < 1e-5
    assert found["cells that differ or fail in float32", "equality"] == 0
    assert found["invariant: share identical at batch 1 and 16, bf16", "invariant"] == 1
    assert {what for what, _ in found} >= set(module.FIRST_CONTACT["figures"])
    assert "229.4" in next(line for line in dry.text.splitlines() if line.startswith("│ AR 7B, batch 1,"))


@pytest.mark.whole
def test_every_operation_is_timed_beside_the_first_contact(dry: Call) -> None:
    """Also heads of other sizes, and products by the library and batch-invariant."""
    rows = dry.found["operations"]["found"]["operations"]
    assert min(row["us"] for row in rows.values()) > 0
    assert {"add_norm 1 d64", "rotate 112 d64", "attend ×7 16 d256", "down 16 invariant"} <= set(rows)
    assert rows["down 16 library"]["first_contact_us"] == 40.4


@pytest.mark.whole
def test_ten_methods_are_compared_by_two_engines_and_batch_sizes(dry: Call) -> None:
    rows = dry.found["equality"]["found"]["cells"]
    assert len({row["method"] for row in rows}) == 10
    assert {tuple(row["cell"].split(".")[-2:]) for row in rows} == set(product(("graph", "eager"), ("b1", "b16")))


@pytest.mark.whole
def test_a_run_is_timed_from_its_command_to_its_first_block_and_its_page(dry: Call) -> None:
    found = dry.found["run"]
    assert 0 < found["found"]["first_block_s"] < found["wall_s"]
    assert any("MARS self-speculation" in line for line in found["found"]["printed"])
    assert (dry.out / "run" / "report.html").exists()
    assert dry.found["doctor-findings"]["checks"]


@pytest.mark.whole
def test_a_static_batch_has_its_roofline_and_a_profile_of_both_arms(dry: Call) -> None:
    found = dry.found["static-4"]["found"]
    assert all(arm["roofline_fraction"] > 0 for arm in found["race"]["arms"].values())
    assert all(found["profile"][arm]["kernels"] > 100 for arm in found["race"]["arms"])


@pytest.mark.whole
def test_a_second_call_runs_only_what_is_asked_again(dry: Call) -> None:
    again = call(BENCHMARKS / "gpu.py", dry.out, "--dry-run", "--only", "prefill")
    assert again.line("prefill")
    assert not again.line("static-1")
    assert again.found["static-1"] == dry.found["static-1"]
    assert call(BENCHMARKS / "gpu.py", dry.out, "--dry-run").text.startswith(f"done before: {', '.join(STEPS)};")


@pytest.mark.whole
def test_figures_of_a_dry_run_are_not_taken_for_a_gpus(tmp_path: Path) -> None:
    (tmp_path / "kind.json").write_text('{"dry_run": true}')
    found = call(BENCHMARKS / "gpu.py", tmp_path)
    assert found.code == 2
    assert found.text.strip() == f"{tmp_path} has figures of a dry run; choose another --out."


@pytest.mark.whole
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_tried(tmp_path: Path) -> None:
    """It says why, once."""
    for options in ((), ("--only", "equality")):
        found = call(BENCHMARKS / "gpu.py", tmp_path, *options)
        assert found.code == 2
        assert not any(map(found.line, STEPS))
    assert found.text.count("finds no GPU; --dry-run") == 1


def test_steps_have_their_order_and_all_end_within_thirteen_minutes(script: Any) -> None:
    gpu = script("gpu")
    assert list(gpu.STEPS) == STEPS
    assert gpu.START_S + sum(step.limit_s for step in gpu.STEPS.values()) <= 13 * 60


@pytest.mark.whole
def test_the_script_itself_stays_off_the_gpu() -> None:
    """With torch it would hold the GPU beside a step, and every batch would be void: shared with another process."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.whole
def test_a_wrong_kernel_is_named_and_the_others_are_checked(tmp_path: Path) -> None:
    """A product that depends on the number of rows."""
    wrong = "from mtbench import kernels\nright = kernels.linear\n"
    wrong += "kernels.linear = lambda x, weight, bias=None: (1 + 0.01 * len(x)) * right(x, weight, bias)\n"
    found = call(BENCHMARKS / "gpu.py", tmp_path / "out", "--dry-run", "--only", "operations", first=wrong)
    assert "qkv 16 invariant: the product of a row depends on the other rows" in found.line("operations")
    assert found.found["operations"]["found"]["operations"]["head 112 library"]["us"] > 0


# Planted faults. These steps take the place of the script's own, in processes without torch, which start at once.

PLANTED = """
import os, subprocess, sys, time

def stays(step):
    return not (step.out / "wait no more").exists()

def fine(step):
    step.keep("answer", 42)

def raises(step):
    step.keep("half", 1)
    step.say("1 of 2")
    raise RuntimeError("a shape\\nand its details")

def loses(step):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def late(step):
    for count in range(100):
        step.in_time(f"{count} of 100 cells")
        step.keep("cells", count)
        time.sleep(0.1)

def hangs(step):
    step.keep("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]).pid)
    if stays(step):
        time.sleep(600)

def dies(step):
    if stays(step):
        os.abort()
"""
SCRIPT = """
import os, sys, types
sys.path[:0] = [{benchmarks!r}, {folder!r}]
import gpu, gpu_parts
from gpu_parts import runner

class Bench(runner.StepFile):
    def __init__(self, args):
        super().__init__(args.out)
        print(os.getpid(), *args.steps, file=open(args.out / "ran", "a"))

    def free(self):
        pass

gpu_parts.__path__.append({folder!r})
sys.modules["gpu_parts.bench"] = types.SimpleNamespace(Bench=Bench)
gpu.STEPS = {{name: gpu.Step(limit_s, "planted", name.split("-")[0]) for name, limit_s in {steps!r}.items()}}
gpu.LEAST_S = 1
gpu.main()
"""


def planted(folder: Path, **limits_s: float) -> Path:
    """Write a script with other steps."""
    (folder / "planted.py").write_text(PLANTED)
    script = folder / "planted_gpu.py"
    steps = {name.replace("_", "-"): limit for name, limit in limits_s.items()}
    script.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS), folder=str(folder), steps=steps))
    return script


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """A call with steps that fail."""
    folder = tmp_path_factory.mktemp("real")
    steps = {"fine": 60, "raises": 60, "late": 2, "hangs": 2, "dies": 60, "loses": 60, "fine_last": 60}
    return call(planted(folder, **steps), folder / "out")


def test_a_step_that_raises_says_what_it_had_and_its_error(real: Call) -> None:
    """The log has the whole error."""
    assert real.line("raises").endswith("1 of 2; ended early: RuntimeError: a shape")
    assert real.found["raises"]["found"] == {"half": 1}
    assert "and its details" in (real.out / "logs" / "fine.txt").read_text()
    assert real.code == 1


def test_a_step_whose_time_ends_says_how_far_it_came(real: Call) -> None:
    assert "ended early: its time ended after" in real.line("late")
    assert real.found["late"]["found"]["cells"] > 3


def test_a_step_that_hangs_is_killed_with_its_processes(real: Call) -> None:
    """It says where it was, also inside a call of a library, where Python's own handlers would wait."""
    assert "ended early: no end in its time; it was in hangs, planted.py:" in real.line("hangs")
    assert not is_alive(real.found["hangs"]["found"]["child"])


def test_the_steps_behind_one_that_ends_its_process_run_in_another(real: Call) -> None:
    """As the abort after an error that leaves the GPU unusable, or an exception that says so."""
    assert real.line("dies").endswith("ended early: ended by SIGABRT")
    assert real.found["fine-last"]["found"] == {"answer": 42}
    processes = [line.split()[1] for line in (real.out / "ran").read_text().splitlines()]
    assert processes == ["fine", "dies", "loses", "fine-last"]


def test_a_command_whose_time_ends_leaves_what_it_printed(script: Any, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; print('1 of 2 findings', flush=True); time.sleep(30)"]
    found = script("gpu_parts.runner").command(tmp_path, "doctor", words, os.environ, 1.0, tmp_path / "findings")
    assert (found["said"], found["ended"]) == ("1 of 2 findings", "no end within 1 s")
    assert json.loads((tmp_path / "doctor.json").read_text()) == found


def test_a_figure_that_is_missing_has_its_reason(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"ended": "its time ended after 3 of 6 blocks", "figures": []}
    script("gpu").closing_table({"static-1": ended, "static-4": {}}, toy=False)
    shown = capsys.readouterr().out
    assert "static-1: its time ended after 3 of 6 blocks" in " ".join(shown.split())
    assert shown.count("static-4: not run") == 3


def test_a_killed_script_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    """The step that ran ends with the script."""
    out, script = tmp_path / "out", planted(tmp_path, fine=60, hangs=60, fine_last=60)
    process = subprocess.Popen([sys.executable, str(script), "--out", str(out)], stdout=subprocess.DEVNULL)
    assert until((out / "hangs.json").exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert until(lambda: not is_alive(int((out / "ran").read_text().split()[0])))
    (out / "wait no more").touch()
    second = call(script, out)
    assert second.text.startswith("done before: fine;")
    assert second.code == 0
    assert [line.split()[1:] for line in (out / "ran").read_text().splitlines()][1] == ["hangs", "fine-last"]


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    found = call(planted(tmp_path, fine=60), tmp_path / "out", "--minutes", "0.01")
    assert "no time left for fine; the same command goes on there" in found.text
    assert found.code == 1
