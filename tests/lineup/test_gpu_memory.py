"""How a GPU's memory is divided among servers and mtbench's own arms, on fake devices: all fit, or none starts."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import PLUGIN, Scripted, begun, install
from small import save_small
from stored import stored_lines
from typer.testing import CliRunner, Result
from whole import forget_plugin_files, whole_run

from mtbench import plugins
from mtbench.cli import main
from mtbench.clients.engine_server import GIB
from mtbench.clients.serving_engine import Serving
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.lineup import gpu_memory
from mtbench.lineup.gpu_memory import FILLED, OWN_BYTES, described, device_bytes, divided
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.configuration import cached_numbers
from mtbench.plan.plan import Plan, RunRequest

WORK, BESIDE = 2 * GIB, GIB // 2  # of the scripted engine's servers
FEW: dict[str, Any] = {"limit": 1, "batch_size": (1,), "max_new_tokens": 4, "dtype": "float32", "rounds": 1}
ARMS = ("ar", "prompt-lookup:ahead=2")


@pytest.fixture(autouse=True)
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripted engine, installed, as one whose servers take a part of a GPU's memory by --memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plugins.load_file(PLUGIN)
    install(Scripted, "scripted==1")
    launch = Scripted.launch

    def launched(self: Any, python: Path, serving: Serving, port: int) -> list[str]:
        words = launch(self, python, serving, port)
        return [*words, *(() if serving.share is None else ("--memory", str(serving.share))), *serving.options]

    traits = {
        "share_option": "memory",
        "work_bytes": WORK,
        "beside_bytes": BESIDE,
        "launch": launched,
        "splits": ("halves",),
    }
    for name, value in traits.items():
        monkeypatch.setattr(SERVING_ENGINES["scripted"], name, value)
    yield
    forget_plugin_files()


def a_device(monkeypatch: pytest.MonkeyPatch, total_gib: float, free_gib: float | None = None) -> None:
    sizes = int(total_gib * GIB), int((total_gib if free_gib is None else free_gib) * GIB)
    monkeypatch.setattr(gpu_memory, "device_bytes", lambda device: sizes)


def planned(**asked: Any) -> Plan:
    return make_plan(RunRequest(**{"method": ARMS, "engine": ["scripted"]} | FEW | asked))


def given_to(plan: Plan) -> list[int]:
    return [cell.gpu_bytes for cell in plan.cells if cell.gpu_bytes is not None]


@settings(deadline=None, max_examples=50)  # the first of each plan takes longer
@given(data=st.data())
def test_shares_fit_beside_mtbench_and_each_server_in_its_own_or_the_plan_is_refused(data: st.DataObject) -> None:
    total_gib, engines = data.draw(st.floats(1, 200)), data.draw(st.sampled_from([["scripted"], ["graph", "scripted"]]))
    free_gib, processes = data.draw(st.floats(0, total_gib)), data.draw(st.integers(1, 2))
    methods = [f"prompt-lookup:ahead={n}" for n in range(1, data.draw(st.integers(2, 5)))]
    with pytest.MonkeyPatch.context() as patch:
        a_device(patch, total_gib, free_gib)
        plan = _planned(tuple(methods), tuple(engines))
        usable = min(free_gib, FILLED * total_gib / processes) * GIB
        own = gpu_memory._own_bytes(plan)
        served = [cell for cell in plan.cells if cell.engine == "scripted"]
        needs = [gpu_memory._needed(plan, cell, int(total_gib * GIB))[0] for cell in served]
        if sum(needs) + own > usable + 2:
            with pytest.raises(UserError, match=r"GiB are there"):
                divided(plan, processes)
            return
        shares = given_to(divided(plan, processes))
    assert len(shares) == len(served)
    assert sum(shares) + own <= usable + 2
    assert all(share >= needed > WORK for share, needed in zip(shares, needs, strict=True))


PLANS: dict[tuple[tuple[str, ...], ...], Plan] = {}


def _planned(methods: tuple[str, ...], engines: tuple[str, ...]) -> Plan:
    key = methods, engines
    if key not in PLANS:
        PLANS[key] = planned(method=methods, engine=engines)
    return PLANS[key]


def test_two_servers_do_not_get_the_same_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole run: the parts in the servers' commands leave room for mtbench and for what each takes beside them.

    The command to deploy has none: that server is alone.
    """
    a_device(monkeypatch, 80, 78)
    shares, launch = list[float](), SERVING_ENGINES["scripted"].launch

    def launched(self: Any, python: Path, serving: Serving, port: int) -> list[str]:
        words: list[str] = launch(self, python, serving, port)
        shares.extend(float(words[words.index("--memory") + 1]) for _ in range("--memory" in words))
        return words

    monkeypatch.setattr(SERVING_ENGINES["scripted"], "launch", launched)
    run = whole_run(tmp_path, RunRequest(method=ARMS, engine=["graph", "scripted"], **FEW))
    shown = [line["server"] for line in stored_lines(run, "preparation.jsonl") if line.get("server")]
    assert (len(shares), len(shown), "--memory" in " ".join(shown)) == (2, 2, False)
    assert min(shares) > 0.4
    assert sum(shares) * 80 + (2 * BESIDE + OWN_BYTES) / GIB <= FILLED * 80


def mtbench(*words: str) -> Result:
    few = ("--limit", "1", "--max-new-tokens", "4", "--dtype", "float32", "--batch-size", "1")
    arms = [word for arm in ARMS for word in ("--method", arm)]
    return CliRunner().invoke(main.app, ["run", "--plugin", str(PLUGIN), "--engine", "scripted", *arms, *few, *words])


def test_what_does_not_fit_is_refused_before_a_start_and_fits_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_device(monkeypatch, 6)
    started = begun(monkeypatch)
    refused = mtbench("-o", str(tmp_path / "run")).exception
    assert str(refused) == (
        "batch size 1 needs 5.0 GiB of the GPU's memory for 2 servers and 1.5 GiB for mtbench, and 5.7 GiB are there; "
        "give fewer arms or smaller batch sizes, or start servers one at a time: `mtbench run --apart --rounds 5`."
    )
    assert (started, (tmp_path / "run").exists()) == ([], False)
    alone = divided(planned(apart=True, rounds=5))
    assert given_to(alone) == [int(FILLED * 6 * GIB) - OWN_BYTES] * 2
    assert described(alone) == [
        "GPU memory at batch size 1, one server at a time: mtbench 1.5 GiB, ar@ar/scripted 4.2, "
        "prompt-lookup:ahead=2@ar/scripted 4.2"
    ]


def test_a_server_that_does_not_fit_alone_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 4)
    expected = "the server of 'ar@ar/scripted' needs 2.5 GiB of the GPU's memory at batch size 1, and 2.3 GiB are there"
    for asked in ({}, {"apart": True, "rounds": 5}):
        with pytest.raises(UserError) as refused:
            divided(planned(**asked))
        assert str(refused.value).startswith(expected)
        assert str(refused.value).endswith("two GPUs: `--engine-option scripted:halves=2`.")


def test_an_option_of_the_user_stands_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 40)
    plan = divided(planned(method=["ar"], engine_option=["scripted:memory=0.25|0.5"]))
    assert given_to(plan) == [10 * GIB + BESIDE, 20 * GIB + BESIDE]
    with pytest.raises(UserError, match=r"needs 43\.0 GiB"):
        divided(planned(method=["ar"], engine_option=["scripted:memory=0.5|0.55"]))


@pytest.mark.parametrize(
    "given", ["memory=2", "memory=0", "memory=nan", "memory=abc", "memory", "halves=0", "halves=x"]
)
def test_an_option_that_is_no_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    a_device(monkeypatch, 40)
    with pytest.raises(
        UserError, match=rf"`--engine-option scripted:{given.partition('=')[0]}=.*` is not allowed; give a"
    ):
        divided(planned(method=["ar"], engine_option=[f"scripted:{given}"]))


def test_an_engine_on_one_gpu_alone_advises_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 4)
    monkeypatch.setattr(SERVING_ENGINES["scripted"], "splits", ())
    with pytest.raises(UserError, match=r"give a quantised checkpoint\.$"):
        divided(planned())


def test_a_build_for_a_cpu_is_refused_in_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 80)
    monkeypatch.setattr(SERVING_ENGINES["scripted"], "on_gpu", lambda engine: False)
    with pytest.raises(UserError, match=r"scripted==1 computes on a CPU.*fetch engine scripted --program PYTHON"):
        divided(planned())


def test_servers_of_a_cpu_have_no_share() -> None:
    plan = divided(planned())
    assert (given_to(plan), plan.gpu_bytes, described(plan)) == ([], None, [])


def test_a_dry_run_says_who_gets_what(monkeypatch: pytest.MonkeyPatch) -> None:
    a_device(monkeypatch, 80)
    said = " ".join(mtbench("--rounds", "1", "--dry-run").output.split())
    own, each = 1.5, (76 - 1.5) / 2
    parts = f"ar@ar/scripted {each:.1f}, prompt-lookup:ahead=2@ar/scripted {each:.1f}"
    assert f"GPU memory at batch size 1: mtbench {own:.1f} GiB, {parts}" in said


def test_the_sizes_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a GPU, which the driver does not know, those of torch."""
    monkeypatch.setattr(gpu_memory, "resolve_device", lambda device: "cuda")
    driver = Driver(nvmlDeviceGetMemoryInfo=SimpleNamespace(total=80 * GIB, free=70 * GIB, used=10 * GIB))
    monkeypatch.setattr(machine, "gpu", lambda: driver.gpu)
    assert device_bytes("cuda") == (80 * GIB, 70 * GIB)
    monkeypatch.setattr(machine, "gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=10 * GIB))
    assert device_bytes("cuda") == (10 * GIB, 10 * GIB)


def test_keys_and_values_are_counted_as_the_caches_hold_them() -> None:
    plan = planned(engine=["graph"], method=["ar"])
    pool = ModelPool(plan.request)
    pool.decode(plan.cells[0], plan.requests(plan.suites[0], [0]))
    [runner] = pool.runners.values()
    assert cached_numbers(runner.checkpoint.model.config) * 4 == runner.cache.bytes_per_slot > 0


def test_weights_are_counted_in_the_dtype_of_the_run_and_packed_ones_as_they_are(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "model", dtype="float32")
    stored = (folder / "model.safetensors").stat().st_size
    request = RunRequest(dtype="bfloat16")
    (folder / "pytorch_model.bin").write_bytes(bytes(stored))  # the same weights in another format
    assert gpu_memory._sizes(str(folder), request)[0] == pytest.approx(stored / 2, rel=0.1)  # without a header
    (folder / "pytorch_model.bin").unlink()
    config = json.loads((folder / "config.json").read_text())
    packed = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    assert gpu_memory._sizes(str(folder), request)[0] == stored
