"""A whole gate over made-up builds: every planted change is found in its stage, and a killed gate says the same."""

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_gates
import pytest
from driver import Driver
from fake_build import build
from fake_gate import AR, MARS, a_gate

from mtbench.errors import UserError
from mtbench.experiments.gate import decision, floor
from mtbench.experiments.gate.experiment import write
from mtbench.experiments.gate.format import Gate, NoiseFloor
from mtbench.hardware import machine
from mtbench.models import chat_template

pytest_plugins = ["gate_fixtures"]
pytestmark = pytest.mark.usefixtures("forks")
WITHOUT_MARS = f"""
import json
stored = json.loads((out / "plan.json").read_text())
stored["cells"] = [cell for cell in stored["cells"] if cell["cell"] == {AR!r}]
stored["groups"][0]["cells"] = [{AR!r}]
(out / "plan.json").write_text(json.dumps(stored))
"""


def found(gate: Gate, level: str = "fail") -> set[tuple[str, str, str | None]]:
    return {(f.stage, f.kind, f.cell) for f in gate.findings if f.level == level}


def test_the_same_build_passes_at_the_first_look(gate: Callable[..., Gate]) -> None:
    same = gate(noise=0.002, base={"noise": 0.002})
    assert same.word == "PASS"
    assert same.pairs == 6
    assert [cell.cell for cell in same.timed] == [AR, MARS]
    assert same.compared == [AR, MARS]
    assert not found(same)
    assert all(len(cell.base_s) == len(cell.head_s) == 6 for cell in same.timed)
    assert {f.kind for f in same.findings} == {"environment"}  # without a floor


def test_a_slowdown_fails_and_fresh_pairs_confirm_it(gate: Callable[..., Gate]) -> None:
    """The reason names the slowest cell, and not the mean of all cells; the other cell passes."""
    slow = gate(slower=1.1, slower_in=[MARS], noise=0.002, base={"noise": 0.002})
    assert slow.word == "FAIL"
    assert slow.reason.startswith(f"{MARS}: slower by +")
    assert found(slow) == {("timed", "slower", MARS)}
    assert slow.confirmation_pairs == slow.looks[1]
    assert {cell.cell: cell.test.word for cell in slow.timed} == {AR: "PASS", MARS: "FAIL"}
    assert slow.timed[1].test.ratio == pytest.approx(1.1, abs=0.01)


@pytest.mark.slow
def test_a_fresh_pair_without_valid_times_is_made_up_for(gate: Callable[..., Gate]) -> None:
    slow = gate(slower=1.05, noise=0.003, base={"noise": 0.003}, drops_in=["fresh/0002"])
    assert slow.word == "FAIL"
    assert slow.confirmation_pairs == slow.looks[1] + 1


def test_too_much_noise_is_inconclusive_and_names_the_pairs_needed(gate: Callable[..., Gate]) -> None:
    noisy = gate(noise=0.08, base={"noise": 0.08}, asked={"pairs": 6})
    assert noisy.word == "INCONCLUSIVE"
    assert {kind for _, kind, _ in found(noisy, "inconclusive")} == {"undecided"}
    assert any((cell.test.pairs_needed or 0) > 6 for cell in noisy.timed)
    hidden = r"speed is not decided. Pairs differ by .*, so the smallest detectable slowdown is (\S+)% in 40 pairs"
    said = re.search(hidden + r": add --interleave, .*, or give --max-slowdown \1;", noisy.reason)
    assert said is not None
    assert said[1] == f"{100 * (noisy.smallest_detectable or 0):g}"


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"tokens": [MARS]}, {("exact", "changed", MARS)}),
        ({"plan_code": WITHOUT_MARS}, {("comparable", "vanished", MARS)}),
        ({"crash": "exact"}, {("exact", "failed", None)}),
    ],
)
def test_a_planted_change_fails_before_anything_is_timed(
    gate: Callable[..., Gate], faults: dict[str, Any], expected: set[tuple[str, str, str | None]]
) -> None:
    changed = gate(**faults)
    assert changed.word == "FAIL"
    assert found(changed) == expected
    assert changed.pairs == 0


@pytest.mark.parametrize(
    ("faults", "live", "how"),
    [
        ({"crash": "timed"}, False, "ended with exit code -11: Fatal error: planted"),
        ({"turn_code": "import os\nif block: os._exit(7)"}, True, "ended with exit code 7"),
        ({"turn_code": "block and __import__('time').sleep(100)"}, True, "did not go on within 2 s"),
    ],
    ids=["crash", "exit at its turn", "hang at its turn"],
)
def test_a_head_that_crashes_or_hangs_while_timing_fails(
    gate: Callable[..., Gate], faults: dict[str, Any], live: bool, how: str
) -> None:
    failed = gate(**faults, asked={"process_limit_s": 1.5 if "within" in how else 60.0, "interleave": live})
    assert found(failed) == {("timed", "failed", None)}
    assert how in failed.reason


def test_a_process_that_crashes_once_costs_its_pair_only(gate: Callable[..., Gate]) -> None:
    """The pair is run again and nothing is lost."""
    assert gate(crash="timed once").word == "PASS"


@pytest.mark.parametrize("seed", [0, 1])
def test_head_is_not_blamed_for_what_kills_both(gate: Callable[..., Gate], seed: int) -> None:
    """Whichever build begins."""
    with pytest.raises(UserError, match="base cannot decode"):
        gate(base={"crash": "timed"}, crash="timed", asked={"seed": seed})


# --- Not comparable -------------------------------------------------------------------------------------------------


def test_changes_that_are_in_no_commit_are_refused(gate: Callable[..., Gate]) -> None:
    with pytest.raises(UserError, match="--allow-dirty"):
        gate(commit="abc-dirty")


def test_another_gpu_is_refused(tmp_path: Path, plan: Path) -> None:
    """Or another driver or power cap: the plan of each build names its own."""
    for name, cap in (("one", 700.0), ("two", 300.0)):
        shutil.copytree(plan, tmp_path / name)
        file = tmp_path / name / "environment.json"
        gpu = {"uuid": "GPU-1", "driver": "580", "power_cap_w": cap}
        file.write_text(json.dumps({**json.loads(file.read_text()), "gpu": gpu}))
    builds = build(tmp_path / "base", tmp_path / "one"), build(tmp_path / "head", tmp_path / "two")
    with pytest.raises(UserError, match=r"power_cap_w is 700\.0 for base and 300\.0 for head"):
        a_gate(tmp_path / "gate", *builds).run()


def test_a_build_that_plans_nothing(gate: Callable[..., Gate]) -> None:
    with pytest.raises(UserError, match="head makes no plan: mtbench plan of head ended with exit code 2: unknown"):
        gate(plan_code="import sys; print('unknown', file=sys.stderr); sys.exit(2)")


# --- Order and turns --------------------------------------------------------------------------------------------------


def test_live_processes_take_turns_block_by_block(gate: Callable[..., Gate], tmp_path: Path) -> None:
    """One block of one, then the same of the other; who begins changes with every block."""
    live = gate(slower=1.05, noise=0.003, base={"noise": 0.003}, asked={"interleave": True, "blocks": 3, "pairs": 6})
    assert live.word == "FAIL"
    turns = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
    one_pair = turns[: 2 * 3 * 3]  # two builds, the first three blocks, three rounds
    blocks = [one_pair[i : i + 2] for i in range(0, len(one_pair), 2)]
    assert all(a[1] == b[1] and a[0] != b[0] for a, b in blocks)
    assert [a[0] for a, _ in blocks] in ([*["base", "head"] * 4, "base"], [*["head", "base"] * 4, "head"])


@pytest.mark.slow
def test_cells_that_passed_are_not_run_again(tmp_path: Path, plan: Path) -> None:
    """Only the undecided cell is in the later pairs."""
    noisy = build(tmp_path / "a", plan, noise=0.03), build(tmp_path / "b", plan, noise=0.03)
    gate = a_gate(tmp_path / "gate", *noisy, pairs=12).run()
    sizes = {cell.cell: len(cell.base_s) for cell in gate.timed}
    last = json.loads((tmp_path / f"gate/pairs/{gate.pairs:04}/head/plan.json").read_text())
    assert {cell["cell"] for cell in last["cells"]} == {cell for cell, n in sizes.items() if n == gate.pairs}


# --- Kill and resume -----------------------------------------------------------------------------------------------


def test_a_gate_without_time_says_so_and_goes_on(tmp_path: Path, plan: Path) -> None:
    base, head = build(tmp_path / "base", plan), build(tmp_path / "head", plan)
    started = a_gate(tmp_path / "gate", base, head)
    ended = replace(started, deadline=0.0).run()
    assert (ended.word, ended.pairs, ended.smallest_detectable) == ("INCONCLUSIVE", 0, None)
    assert f"The time budget is over; `mtbench gate -o {tmp_path / 'gate'} --resume` makes more pairs" in ended.reason
    assert started.run().word == "PASS"


class Killed(Exception):
    """Stands for a kill: the gate's process gets no chance to do anything more."""


@pytest.mark.slow
def test_a_gate_killed_anywhere_says_the_same(tmp_path: Path, plan: Path) -> None:
    """Killed before every single process, resumed each time: the same word over the same pairs as without a kill."""
    base, head = build(tmp_path / "base", plan, noise=0.002), build(tmp_path / "head", plan, noise=0.002, slower=1.04)
    whole = a_gate(tmp_path / "runs" / "gate", base, head).run()
    shutil.rmtree(tmp_path / "runs")
    kills = 0
    for _ in range(100):
        patience = [0]

        def note(_: str, patience: list[int] = patience) -> None:
            patience[0] += 1
            if patience[0] > 1:  # lets one step through
                raise Killed

        try:
            resumed = a_gate(tmp_path / "runs" / "gate", base, head, note).run()
            break
        except Killed:
            kills += 1
    assert kills > 5
    assert resumed.changed(started=whole.started) == whole


def test_what_a_killed_process_left_is_run_again(tmp_path: Path, plan: Path) -> None:
    """A pair without its name is not read, and its folder is made anew."""
    base, head = build(tmp_path / "base", plan), build(tmp_path / "head", plan)
    whole = a_gate(tmp_path / "gate", base, head).run()
    (tmp_path / "gate/pairs/0006").rename(tmp_path / "gate/pairs/0006.partial")
    shutil.rmtree(tmp_path / "gate/pairs/0006.partial/head/timings")
    again = a_gate(tmp_path / "gate", base, head).run()
    assert again.changed(started=whole.started) == whole
    assert not (tmp_path / "gate/pairs/0006.partial").exists()


def test_a_resumed_gate_needs_the_machine_that_it_began_on(
    tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans on disk name the machine of the beginning; today's counts."""
    base, head = build(tmp_path / "base", plan), build(tmp_path / "head", plan)
    a_gate(tmp_path / "gate", base, head, counts_only=True).run()
    monkeypatch.setattr(machine, "host", lambda: {"platform": "another kernel", "processor": "another"})
    with pytest.raises(UserError, match="began with another machine or plan"):
        a_gate(tmp_path / "gate", base, head, counts_only=True).run()


def test_the_gpu_of_the_plan_is_read(tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one of the machine, and its power cap as it is now."""
    on_gpu = tmp_path / "plan"
    shutil.copytree(plan, on_gpu)
    environment = json.loads((on_gpu / "environment.json").read_text())
    gpu = {"uuid": "GPU-2", "driver": "580", "power_cap_w": 700.0}
    (on_gpu / "environment.json").write_text(json.dumps({**environment, "gpu": gpu}))
    read = []

    def gpu_by_id(uuid: str) -> Any:
        read.append(uuid)
        state = {"nvmlDeviceGetUUID": uuid, "nvmlDeviceGetEnforcedPowerLimit": 300_000}
        return Driver(nvmlDeviceGetComputeRunningProcesses=[], **state).gpu

    monkeypatch.setattr(machine, "gpu_by_id", gpu_by_id)
    env = build(tmp_path / "base", on_gpu)
    key = a_gate(tmp_path / "gate", env, env).comparable().key
    assert set(read) == {"GPU-2"}
    assert (key.gpu_uuid, key.power_cap_w) == ("GPU-2", 300)
    monkeypatch.setattr(machine, "gpu_by_id", lambda _: Driver().gpu)
    with pytest.raises(UserError, match="another process uses the GPU"):
        a_gate(tmp_path / "gate", env, env).comparable()


def test_a_resumed_gate_keeps_its_looks(tmp_path: Path, plan: Path) -> None:
    """A calibration in between changes nothing: the word does not depend on when a gate was killed."""
    base, head = build(tmp_path / "base", plan), build(tmp_path / "head", plan)
    before = a_gate(tmp_path / "runs" / "gate", base, head).run()
    calibrated(tmp_path, plan, 0.004)
    after = a_gate(tmp_path / "runs" / "gate", base, head).run()
    assert after == before


# --- Floor -----------------------------------------------------------------------------------------------------------


def calibrated(tmp_path: Path, plan: Path, noise: float, **asked: Any) -> NoiseFloor:
    env = build(tmp_path / "calibrated", plan, noise=noise)
    measured = a_gate(tmp_path / "runs" / "calibration", env, env, pairs=6, **asked).run().floor
    assert measured is not None
    return measured


def test_the_floor_sets_the_looks(gate: Callable[..., Gate], tmp_path: Path, plan: Path) -> None:
    """Six pairs of one build; a gate of the same plan finds their floor and takes no more pairs than it asks for."""
    measured = calibrated(tmp_path, plan, 0.004)
    assert (measured.pairs, {cell.cell for cell in measured.cells}) == (6, {AR, MARS})
    assert floor.read(tmp_path / "runs") == [measured]
    judged = gate(noise=0.004, base={"noise": 0.004})
    assert judged.floor == measured
    assert judged.looks[-1] < 40
    assert judged.looks == list(decision.looks(max(cell.pair_sd for cell in measured.cells), 0.02))
    assert not any("floor.json" in finding.text for finding in judged.findings)


@pytest.mark.slow
def test_a_slowdown_below_the_floor_is_refused(gate: Callable[..., Gate], tmp_path: Path, plan: Path) -> None:
    calibrated(tmp_path, plan, 0.05)
    with pytest.raises(UserError, match=r"--max-slowdown 2 takes --pairs \d+ by the noise in floor\.json.*-only"):
        gate()


def test_a_finished_gate_says_what_it_said(gate: Callable[..., Gate], tmp_path: Path) -> None:
    """A crash of head is on no disk; the word is."""
    failed = gate(crash="exact")
    (tmp_path / "head" / "faults.json").write_text((tmp_path / "base" / "faults.json").read_text())
    write(tmp_path / "runs" / "gate", failed)
    assert a_gate(tmp_path / "runs" / "gate", tmp_path / "base", tmp_path / "head").run() == failed


def test_a_floor_is_void_when_its_key_changes_or_it_is_old() -> None:
    measured = made_gates.floor(measured=time.strftime(floor.TIME, time.gmtime()))
    assert floor.find([measured], measured.key, interleave=False) == (measured, None)
    assert floor.find([measured], measured.key, interleave=True)[0] is None
    none, why = floor.find([measured], measured.key.changed(torch="9"), interleave=False)
    assert none is None
    assert why is not None
    assert "torch" in why
    old = measured.changed(measured="2020-01-01T00:00:00Z")
    assert floor.find([old], measured.key, interleave=False)[0] is None


@pytest.mark.parametrize("reads", [True, False])
def test_both_builds_plan_with_one_date(gate: Callable[..., Gate], tmp_path: Path, reads: bool) -> None:
    """The same every day. With a base that has stored none, as of an older mtbench, head has today's, too."""
    code = "import json, os; p = out / 'plan.json'; s = json.loads(p.read_text()); "
    code += f"d = os.environ[{chat_template.DATE!r}]; (out / 'date').write_text(d); "
    code += "s['request'].update(chat_template_date=d); p.write_text(json.dumps(s))" if reads else ""
    assert gate(base={"plan_code": code}, plan_code=code, asked={"counts_only": True}).word == "PASS"
    dates = [(tmp_path / f"runs/gate/plans/{side}/date").read_text() for side in ("base", "head")]
    assert dates == ["2024-07-26", "2024-07-26" if reads else ""]


def test_a_second_calibration_replaces_the_first(tmp_path: Path) -> None:
    first = made_gates.floor()
    for measured in (first, first.changed(pairs=20), first.changed(key=first.key.changed(torch="3"))):
        floor.add(tmp_path, measured)
    assert [(f.pairs, f.key.torch) for f in floor.read(tmp_path)] == [(20, "2.11.0"), (12, "3")]


# --- Other tokens by permission -----------------------------------------------------------------------------------


def test_allowed_changes_are_timed_per_token(gate: Callable[..., Gate]) -> None:
    allowed = gate(tokens=[MARS], asked={"allow_changed": True})
    assert allowed.word == "PASS"
    assert ("exact", "changed", MARS) in found(allowed, "note")
    assert ("timed", "changed", MARS) in found(allowed, "note")
