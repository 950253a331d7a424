"""`mtbench doctor`: each check's judgement, each measurement on a stand-in, its lines, JSON and exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cgroup_trees import quota_of
from driver import Driver, processes
from interpreted import definition, use_definitions
from safetensors.torch import load_file, save_file
from schemas import validator
from small import save_small
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from mtbench import kernels
from mtbench.cli import main
from mtbench.cli.session import err, out
from mtbench.doctor import checks, decoding, gpu, machine
from mtbench.doctor.checks import NO_GPU, Check, Finding, Subject, all_checks
from mtbench.hardware import machine as hardware
from mtbench.hardware import probe

BY_NAME = {check.name: check for check in all_checks()}
CPU, CUDA = Subject("cpu"), Subject("cuda")
SETTLED = {"clock_mhz": 1980, "most_mhz": 1980, "temperature_c": 45, "throttle": 0, "shared": False}
GOOD: dict[str, dict[str, Any]] = {
    "versions": {"versions": "torch 2", "unused": None, "uncompiled": 0.01},
    "processor": {"name": "a CPU", "cores": 2, "threads": 2, "bfloat16": True, "quota": None},
    "other load": {"others": 0.01, "stolen": 0.0},
    "steady times": {"laps_s": [0.002] * 95 + [0.003] * 5, "throttled": False},
    "GPU": {"name": "H100", "driver": "570", "capability": 90, "shared_bytes": 232448, "free_bytes": 8 << 30},
    "compilers": {"missing": []},
    "clock": SETTLED,
    "GPU's speed": {"bytes_per_s": 3.0e12, "matmul_flop_per_s": 7e14, "rated_bytes_per_s": 3.35e12},
    "operations": {"ours": True, "off": None, "dtype": "bfloat16", "errors": {"embed 13": 0.002}},
    "checkpoint": {"source": "a", "code": "ours", "dtype": "bfloat16", "why": None},
}
BAD: list[tuple[str, dict[str, Any], str, str, str]] = [  # check, changed figures, state, what it says, what to do
    ("versions", {"unused": "H100"}, "fail", "does not use the H100", "install torch's build for CUDA"),
    ("versions", {"uncompiled": 0.9}, "warn", "every start compiles 90 %", "unset PYTHONDONTWRITEBYTECODE"),
    ("processor", {"cores": 1, "quota": 0.6}, "fail", "1 core, 2 threads, CPU quota of 0.6 cores", "one core or more"),
    ("other load", {"stolen": 0.05}, "fail", "5.0 % are stolen", "shares its cores with nobody"),
    ("other load", {"others": 0.5}, "fail", "others use 50.0 %", "stop other programs"),
    ("steady times", {"laps_s": [0.002] * 90 + [0.003] * 10}, "warn", "10.0 % of 100", "stop other programs"),
    ("steady times", {"throttled": True}, "fail", "the median: the CPU quota stopped the process", "raise the quota"),
    ("GPU", {"capability": 75}, "warn", "no bfloat16", "--dtype float16"),
    ("GPU", {"name": "H100 MIG 1g.10gb"}, "warn", "a part (MIG)", "take a whole GPU"),
    ("GPU", {"driver": None}, "warn", "NVML does not answer", "libnvidia-ml"),
    ("compilers", {"missing": ["Triton"]}, "warn", "missing: Triton", "pip install triton"),
    ("clock", {"throttle": hardware.HEAT | 0x08}, "fail", "slowed by heat", "cool it"),
    ("clock", {"throttle": hardware.BRAKE}, "fail", "slowed by the hardware", "check the power"),
    ("clock", {"shared": True}, "fail", "another process uses it", "nvidia-smi"),
    ("GPU's speed", {"bytes_per_s": 1.2e12}, "fail", "36 % of what it is rated for", "end other processes"),
    ("GPU's speed", {"bytes_per_s": 2.0e12}, "warn", "60 % of what it is rated for", "reset clocks"),
    ("operations", {"errors": {"a": 0.5}}, "fail", "in bfloat16; wrong: a by 0.5", "MTBENCH_KERNELS=off"),
    ("operations", {"errors": {"a": float("nan")}, "ours": False}, "fail", "wrong: a by nan", "install torch again"),
    ("operations", {"ours": False, "off": "no Triton"}, "warn", "do not run: no Triton", "report it"),
    (
        "checkpoint",
        {"code": "modules", "why": "other layers"},
        "warn",
        "a: modules in bfloat16 (other layers)",
        "slower",
    ),
    ("checkpoint", {"code": None, "why": "no such folder"}, "fail", "nothing decodes it (no such folder)", "--model"),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_sound_machine_passes(name: str) -> None:
    finding = BY_NAME[name].judge(**GOOD[name])
    assert (finding.state, finding.advice) == ("pass", "")


@pytest.mark.parametrize(("name", "changes", "state", "said", "advice"), BAD, ids=[f"{b[0]} {b[1]}" for b in BAD])
def test_what_is_wrong_is_said_with_what_to_do(
    name: str, changes: dict[str, Any], state: str, said: str, advice: str
) -> None:
    finding = BY_NAME[name].judge(**GOOD[name] | changes)
    assert finding.state == state
    assert said in finding.text
    assert advice in finding.advice


# --- Measurements ---------------------------------------------------------------------------------------------------


def result(name: str, subject: Subject = CPU) -> Finding:
    return BY_NAME[name].result(subject)[1]


def test_without_a_gpu_its_checks_are_not_passed() -> None:
    """They say why they are not made."""
    of_gpu = [check for check in BY_NAME.values() if check.gpu]
    assert {check.name for check in of_gpu} == {"GPU", "compilers", "clock", "GPU's speed"}
    assert [check.result(CPU) for check in of_gpu] == [({}, ("none", NO_GPU, ""))] * 4


def test_a_gpu_that_torch_does_not_use_is_seen_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user names the processor."""
    monkeypatch.setattr(hardware, "gpu_by_id", lambda uuid: Driver(nvmlDeviceGetName="L4").gpu)
    assert "does not use the L4" in result("versions").text
    assert "L4" not in result("versions", Subject("cpu", option="cpu")).text


def test_the_load_is_that_of_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In percent of two cores, 25 are used by others and 5 stolen; a third core is not of this process."""
    looks = iter((("0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0"), ("50 0 0 140 0 0 0 10 0 0", "900 0 0 0 0 0 0 0")))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr(machine, "LOAD_S", 0.0)
    lines = "cpu {1}\ncpu0 {0}\ncpu1 0 0 0 0 0 0 0 0\ncpu2 {1}\nintr 5\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines.format(*next(looks)))
    assert BY_NAME["other load"].measure(CPU) == {"others": 0.25, "stolen": 0.05}


def test_laps_run_on_the_threads_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads would be stopped by a quota of one core, and a run has one there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        quota_of(monkeypatch, tmp_path, 100)
        monkeypatch.setattr(machine, "LAPS", 2)
        assert ", 1 thread, CPU quota of 1 cores" in result("processor").text
        assert BY_NAME["steady times"].measure(CPU)["throttled"] is False  # type: ignore[index]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets torch and the driver report a GPU, with other answers of the driver."""
    probed = probe.Probe(
        bandwidth_bytes_per_s=3e12, matmul_flop_per_s=7e14, copy_bytes=1 << 31, matmul_size=8192, cache_bytes=5 << 20
    )
    found = SimpleNamespace(name="H100", major=9, minor=0, shared_memory_per_block_optin=232448)

    def report(**state: Any) -> None:
        driver = Driver(nvmlDeviceGetMaxClockInfo=2619, nvmlDeviceGetMemoryBusWidth=5120, **state).gpu
        gpu.under_load.cache_clear()
        monkeypatch.setattr(hardware, "gpu", lambda: driver)
        monkeypatch.setattr(probe, "probe", lambda *_: (probed, None))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))

    return report


def test_a_gpu_is_read_under_load(h100: Callable[..., None]) -> None:
    """Its limits, its clock, and the measured speed of its memory beside the rated one of 3.35 TB/s."""
    h100(nvmlSystemGetDriverVersion="570.1")
    assert "H100, driver 570.1, sm_90, 227 KiB shared memory per block, 70.0 GiB free" in result("GPU", CUDA).text
    assert result("clock", CUDA) == ("pass", "1,980 of 2,619 MHz under load, 45 °C", "")
    text = "products 700 TFLOP/s in bfloat16; memory 3.00 TB/s, 89 % of what it is rated for"
    assert result("GPU's speed", CUDA).text == text
    reasons = iter((0, hardware.HEAT))
    h100(nvmlDeviceGetCurrentClocksEventReasons=lambda: next(reasons))
    assert "slowed by heat" in result("clock", CUDA).text
    h100(nvmlDeviceGetComputeRunningProcesses=processes(7, 8))
    assert "another process" in result("clock", CUDA).text
    h100(nvmlDeviceGetCurrentClocksEventReasons=None, nvmlDeviceGetViolationStatus=None)
    assert result("clock", CUDA) == ("none", gpu.UNKNOWN, "")


def test_operations_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are right are within float32's precision."""
    right = result("operations")
    assert right.state == "pass"
    assert "cases of PyTorch's operations in float32, within" in right.text
    swiglu = definition("swiglu")
    use_definitions(monkeypatch, swiglu=lambda both: 1.1 * swiglu(both))
    monkeypatch.setattr(decoding, "POSITIONS", (5,))
    text = "cases of mtbench's operations in float32; wrong: swiglu 5 by 0.1"
    assert text in result("operations").text


def test_an_embedded_checkpoint_is_decoded_by_mtbenchs_decoder() -> None:
    """On a CPU PyTorch's operations are no fall-back."""
    assert result("checkpoint") == ("pass", "embedded:tiny/ar: mtbench's decoder in float32", "")


def of_model(folder: Path | str) -> tuple[str, str]:
    """Return state and text of the check of a checkpoint."""
    state, text, _ = result("checkpoint", CPU._replace(model=str(folder)))
    return state, text


def test_kernels_that_run_or_fail_their_check_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_off", [])
    use_definitions(monkeypatch)
    folder = save_small(tmp_path / "small")
    assert of_model(folder) == ("pass", f"{folder}: mtbench's decoder and kernels in float32")
    use_definitions(monkeypatch, swiglu=lambda both: 1.1 * definition("swiglu")(both))
    state, text = of_model(folder)
    assert state == "warn"
    assert "mtbench's decoder in float32 (logits are wrong by" in text
    assert kernels.off() is None


def test_what_a_plan_refuses_or_what_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The refusal is that of `mtbench run`."""
    assert of_model("./nowhere")[0] == "fail"
    assert "./nowhere: nothing decodes it (checkpoint" in of_model("./nowhere")[1]
    gpt2 = save_small(tmp_path / "gpt2", config=GPT2Config, n_embd=32, n_head=4)
    assert of_model(gpt2)[0] == "warn"
    monkeypatch.setattr(GPT2LMHeadModel, "forward", lambda *_, **__: 1 / 0)
    state, text = of_model(gpt2)
    assert state == "fail"
    assert "transformers' modules of 'gpt2' do not run (ZeroDivisionError: division by zero)" in text


def test_a_checkpoint_whose_logits_are_not_numbers_fails(tmp_path: Path) -> None:
    """Its weights are finite; a product of them exceeds float32."""
    folder = save_small(tmp_path / "small")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(1e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    state, text = of_model(folder)
    assert state == "fail"
    assert "(the target's logits at token 1 of item 0 are not numbers (NaN or +inf) in float32" in text


# --- The command ----------------------------------------------------------------------------------------------------


def broken(_: Subject) -> Any:
    raise RuntimeError("no such symbol\nmore")


def hungry(_: Subject) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


HUNGRY = Check("hungry", hungry, lambda: Finding("pass", ""))
RIGHT = Check("right", lambda _: {"share": float("nan")}, lambda share: Finding("pass", f"share {share}"))
WRONG = Check("wrong", broken, lambda: Finding("pass", ""))


def run(monkeypatch: pytest.MonkeyPatch, found: list[Check], *words: str) -> Result:
    monkeypatch.setattr(checks, "all_checks", lambda: found)
    monkeypatch.setattr(out, "width", 80)
    monkeypatch.setattr(err, "width", 80)
    return CliRunner().invoke(main.app, ["doctor", "--device", "cpu", *words])


def test_a_check_that_ends_with_an_error_fails_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All have a line, JSON too, and the exit code is 1. Too little memory is no failure."""
    done = run(monkeypatch, [WRONG, RIGHT, HUNGRY], "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 1
    assert [line.rstrip() for line in done.stdout.splitlines()[:4]] == [
        "✗  wrong   it ends with RuntimeError: no such symbol",
        "           → report it with this output",
        "✓  right   share nan",
        "–  hungry  too little memory: CUDA out of memory",
    ]
    assert done.stdout.splitlines()[4].startswith("✗ Figures measured here cannot be trusted yet: wrong.")
    written = json.loads((tmp_path / "found.json").read_text())
    validator("doctor").validate(written)
    assert (written["passed"], written["checks"][1]["figures"]) == (False, {"share": "nan"})


def test_json_on_standard_output_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [RIGHT], "--json", "-")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["passed"] is True
    assert "✓ Figures measured here can be trusted." in done.stderr


@pytest.mark.whole
def test_this_machine_is_examined() -> None:
    """Whatever else runs on it: what decodes passes, and no check ends with an error."""
    found = [check.checked(CPU) for check in BY_NAME.values()]
    states = {checked.check: checked.state for checked in found}
    assert (states["operations"], states["checkpoint"]) == ("pass", "pass")
    assert not any("it ends with" in checked.found for checked in found)
    assert list(states) == list(GOOD)
