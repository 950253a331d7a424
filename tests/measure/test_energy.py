"""Energy per token: whole blocks for ten seconds of the GPU's counter, and null with a reason where that cannot be."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from driver import Driver, processes
from stored import stored_json

from mtbench.decoding.request import Request
from mtbench.hardware import machine
from mtbench.measure import energy
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import EnergyRecord
from mtbench.plan.plan import Cell, Item, Plan, SuitePlan
from mtbench.results import aggregate

IDLE_W, BUSY_W, BLOCK_S, TOKENS = 70, 500, 4, 100
FOREVER = float("inf")


class Bench:
    """A GPU, a clock and a lab in which a block takes four seconds at 500 W and yields a hundred tokens."""

    device = "cuda"

    def __init__(self) -> None:
        self.now, self.energy_mj, self.decoded = 0.0, 0, list[tuple[str, int]]()
        self.driver = Driver(nvmlDeviceGetTotalEnergyConsumption=lambda: self.energy_mj)
        self.breaks: str | None = None
        self.notes: list[str] = []

    def spend(self, seconds: float, watts: int = IDLE_W) -> None:
        self.now += seconds
        self.energy_mj += round(1000 * seconds * watts)

    def decode(self, cell: Cell, requests: list[Request], **_: Any) -> Any:
        if cell.cell == self.breaks:
            raise RuntimeError("broken\nin two lines")
        self.spend(BLOCK_S, BUSY_W)
        self.decoded.append((cell.cell, len(requests)))
        return [], SimpleNamespace(tokens=TOKENS)

    def measure(
        self, run: RunDirectory, *, failed: set[str] | None = None, deadline: float = FOREVER, second: str = "ar"
    ) -> dict[str, Any]:
        opened = cast("Any", SimpleNamespace(directory=run, answers={"one": [], "two": []}))
        energy.measure(opened, plan(second), cast("Any", self), failed or set(), self.notes.append, deadline)
        found: dict[str, Any] = stored_json(run, "energy.json") if run.has("energy.json") else {}
        return found


def plan(second: str) -> Plan:
    """Two cells on five items in blocks of two, the second one's method as named."""
    items = [Item(item=f"s/{n}/0", prompt_ids=[1], stop=[]) for n in range(5)]
    suite = SuitePlan(suite="s", family="tiny", task={}, metric=None, max_new_tokens=64, flags=[], items=items)
    cells = [
        SimpleNamespace(cell=name, method=by, suite="s", computes_here=by != "openai")
        for name, by in (("one", "ar"), ("two", second))
    ]
    groups = [SimpleNamespace(cells=["one", "two"], blocks=[[0, 1], [2, 3], [4]])]
    made: Any = Plan.model_construct
    return cast("Plan", made(request=SimpleNamespace(seed=0), suites=[suite], cells=cells, groups=groups))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()

    def now() -> float:
        return made.now

    clock = SimpleNamespace(perf_counter=now, process_time=now, thread_time=now, monotonic=now, sleep=made.spend)
    monkeypatch.setattr(energy, "time", clock)
    monkeypatch.setattr(machine, "time", clock)
    monkeypatch.setattr(machine, "gpu", lambda: made.driver.gpu)
    return made


def figures_of(known: Any, cell: str, error: str | None = None) -> dict[str, Any]:
    """Return what results.json has of a cell, given energy.json."""
    return energy.of(EnergyRecord.model_validate(known), cell, error).model_dump(include=aggregate.ENERGY)


def test_a_window_holds_whole_blocks_for_ten_seconds(bench: Bench, run: RunDirectory) -> None:
    """Three full blocks of four seconds behind one that warms up; what the GPU draws when idle stays in."""
    found = bench.measure(run)
    assert found["idle_power_w"] == IDLE_W
    assert found["cells"]["one"] == {
        "energy_j": 12 * BUSY_W,
        "window_s": 12,
        "tokens": 3 * TOKENS,
        "j_per_token": 12 * BUSY_W / (3 * TOKENS),
        "mean_power_w": BUSY_W,
        "energy_reason": None,
    }
    assert bench.decoded == [("one", 2)] * 4 + [("two", 2)] * 4
    assert figures_of(found, "one") == {"energy_j": 6000, "j_per_token": 20, "energy_reason": None}
    assert len(bench.notes) == 1


def test_what_is_measured_is_not_measured_again(bench: Bench, run: RunDirectory) -> None:
    """A run that is gone on with does what is missing, and a finished one nothing."""
    first = bench.measure(run, failed={"two"})
    assert list(first["cells"]) == ["one"]
    bench.decoded.clear()
    assert bench.measure(run)["cells"]["one"] == first["cells"]["one"]
    assert {name for name, _ in bench.decoded} == {"two"}
    bench.decoded.clear()
    now = bench.now
    bench.measure(run)
    assert (bench.decoded, bench.now) == ([], now)


def test_the_time_budget_ends_it(bench: Bench, run: RunDirectory) -> None:
    """Between two cells, and said; what is not measured says how to."""
    found = bench.measure(run, deadline=bench.now + 10)
    assert list(found["cells"]) == ["one"]
    assert "the energy of 1 cells is measured with --resume" in bench.notes[-1]
    assert figures_of(found, "two")["energy_reason"] == energy.UNMEASURED
    assert not bench.measure(RunDirectory(run.path / "other"), deadline=bench.now - 1)


def test_a_method_that_breaks_costs_its_own_figure(bench: Bench, run: RunDirectory) -> None:
    """The others are measured."""
    bench.breaks = "one"
    found = bench.measure(run)
    assert figures_of(found, "one") == {"energy_j": None, "j_per_token": None, "energy_reason": "RuntimeError: broken"}
    assert found["cells"]["two"]["tokens"] == 300
    assert figures_of({}, "three", "out of memory")["energy_reason"] == "out of memory"


def test_an_engine_of_its_own_process_has_no_figure(bench: Bench, run: RunDirectory) -> None:
    """Whose GPU that is on nobody knows; nor is it asked for anything."""
    found = bench.measure(run, second="openai")
    assert {name for name, _ in bench.decoded} == {"one"}
    assert figures_of(found, "two") == {"energy_j": None, "j_per_token": None, "energy_reason": energy.ELSEWHERE}
    assert bench.measure(run, second="openai") == found


def test_a_window_shared_with_another_process_has_no_figure(bench: Bench, run: RunDirectory) -> None:
    """Its joules were not all ours."""
    bench.driver.state["nvmlDeviceGetComputeRunningProcesses"] = lambda: processes(1, 2) if bench.now > 20 else []
    found = bench.measure(run)
    assert found["cells"]["one"]["energy_j"] == 6000
    assert figures_of(found, "two")["energy_reason"] == "device shared with another process"


@pytest.mark.parametrize(
    ("hide", "reason"),
    [
        (lambda bench, patch: setattr(bench, "device", "cpu"), energy.NO_GPU),
        (lambda bench, patch: patch.setattr(machine, "gpu", lambda: None), energy.NO_NVML),
        (
            lambda bench, patch: bench.driver.state.update(nvmlDeviceGetTotalEnergyConsumption=None),
            energy.NO_COUNTER,
        ),
    ],
    ids=["processor", "no library", "no counter"],
)
def test_without_a_counter_nothing_runs_and_the_reason_is_written(
    hide: Callable[[Bench, pytest.MonkeyPatch], None],
    reason: str,
    bench: Bench,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No decoding, no waiting, no note."""
    hide(bench, monkeypatch)
    assert bench.measure(run) == {"reason": reason}
    assert (bench.decoded, bench.notes, bench.now) == ([], [], 0)
    assert figures_of({"reason": reason}, "one")["energy_reason"] == reason
