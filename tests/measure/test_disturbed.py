"""A machine that stalls while a block is decoded: what is decoded again, what is dropped, and what is only told."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cgroup_trees import quota_of
from fork_server import run_child
from made_records import cell_data, doubted, timing_line
from stages import assemble, begin_run, generate
from whole import Quiet, start

from mtbench.decoding.batch_clock import BatchClock
from mtbench.hardware import machine
from mtbench.lineup.planner import make_plan
from mtbench.measure.block_runner import BlockRunner
from mtbench.measure.workers import Done, WorkerSession
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import TimingLine
from mtbench.plan.plan import LEARNS, Cell, RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump
from mtbench.report.phrases import shown_verdict
from mtbench.report.text import environment
from mtbench.results import samples
from mtbench.results.comparisons import compare
from mtbench.results.flags import disturbances
from mtbench.results.samples import CellData, far_off

REQUEST = RunRequest(method=("ar", "mars"), limit=8, batch_size=(1,), rounds=1, max_new_tokens=4, device="cpu")
STOPPED_S = 0.7


@pytest.mark.whole
def test_a_block_in_which_the_process_is_stopped_is_decoded_again(tmp_path: Path) -> None:
    """Generated in a real process that is stopped inside the clock of a block; the stored time is without the stop."""
    run = start(tmp_path / "run", REQUEST)

    def stop_once() -> None:
        ended, decoded = BatchClock.end_prefill, run.path / "timings/arithmetic.mars.mars.graph.b1.jsonl"
        stopped: list[bool] = []

        def end_prefill(clock: BatchClock) -> None:
            ended(clock)
            machine.COMPUTING_SHARE = 0  # another block that a busy machine disturbs would use up the repeats
            if not stopped and decoded.exists() and len(decoded.read_text().splitlines()) == 6:
                stopped.append(True)
                machine.COMPUTING_SHARE = 0.75
                os.kill(os.getpid(), signal.SIGSTOP)

        setattr(BatchClock, "end_prefill", end_prefill)  # noqa: B010

    def go_on(child: int, _: int) -> bool:
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(STOPPED_S)
        os.kill(child, signal.SIGCONT)
        return True

    ended = run_child(["generate", str(run.path)], tmp_path, stop_once, go_on)
    assert ended.code == 0, ended.text
    lines = [line for cell in ("ar.ar", "mars.mars") for line in timings(run, f"arithmetic.{cell}.graph.b1")]
    assert len(lines) == 16
    [stopped] = [line for line in lines for one in line.disturbed or () if one.wall_s > STOPPED_S]
    assert stopped.block >= 5  # the arms of a block run in random order
    assert stopped.wall_s < STOPPED_S
    assert "the machine was disturbed: the process did not get the processor" in ended.text


def timings(run: RunDirectory, cell: str) -> list[TimingLine]:
    return run.read_lines(f"timings/{cell}.jsonl", TimingLine)


Disturb = Callable[[Callable[[int], bool]], list[str]]


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Disturb:
    """Give a function the number of every timed decoding; it says which ones the machine disturbs."""

    def begin(disturbed: Callable[[int], bool]) -> list[str]:
        decoded: list[str] = []
        decode = BlockRunner.decode

        def decode_disturbed(
            runner: BlockRunner, session: WorkerSession, cell: Cell, *given: int, cold: bool = False, **more: Any
        ) -> Any:
            outcome = decode(runner, session, cell, *given, cold=cold, **more)
            if cold:
                return outcome
            decoded.append(cell.cell)
            assert isinstance(outcome, Done)
            reason = machine.NO_PROCESSOR if disturbed(len(decoded)) else None
            return outcome._replace(conditions=outcome.conditions | {"dropped": reason})

        monkeypatch.setattr(BlockRunner, "decode", decode_disturbed)
        return decoded

    return begin


@pytest.mark.whole
@pytest.mark.parametrize(
    ("disturbed", "decodings", "dropped"),
    [
        (lambda n: n == 3, 17, 0),
        (lambda n: True, 20, 16),  # a machine that is busy for ever: four repeats, and no more
    ],
    ids=["once", "always"],
)
def test_a_disturbed_sample_is_decoded_again_at_once_and_not_for_ever(
    disturb: Disturb, tmp_path: Path, disturbed: Callable[[int], bool], decodings: int, dropped: int
) -> None:
    """At most twice in a row, and a tenth of the stage or four; what stays disturbed is dropped."""
    run, decoded, said = start(tmp_path / "run", REQUEST), disturb(disturbed), list[str]()
    progress = Quiet()
    progress.note = said.append  # type: ignore[assignment, method-assign]
    generate(run, progress, Execution(timed_only=True))
    again = "1 block" if decodings == 17 else f"{decodings - 16} blocks"
    assert said == [f"the machine was disturbed: the process did not get the processor; {again} decoded again"]
    lines = [line for name in set(decoded) for line in timings(run, name)]
    assert len(lines) == 16
    assert len(decoded) == decodings
    assert sum(bool(line.dropped) for line in lines) == dropped
    assert sum(len(line.disturbed or ()) for line in lines) == decodings - 16


def test_an_arm_that_would_draft_its_own_answer_is_not_decoded_again(disturb: Disturb, tmp_path: Path) -> None:
    planned = make_plan(REQUEST.changed(method=("ar",), limit=3))
    marked = planned.changed(cells=[cell.changed(flags=[*cell.flags, LEARNS]) for cell in planned.cells])
    run, decoded = begin_run(tmp_path / "run", marked), disturb(lambda n: n == 2)
    generate(run, Quiet(), Execution(timed_only=True))
    assert len(decoded) == 3
    assert [bool(line.dropped) for line in timings(run, decoded[0])] == [False, True, False]


@pytest.mark.whole
def test_nothing_is_decoded_again_behind_the_time_budget(
    disturb: Disturb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample that ends behind it stays, and is dropped."""
    run, decoded = start(tmp_path / "run", REQUEST), disturb(lambda n: True)
    undisturbed = BlockRunner._undisturbed

    def behind(runner: BlockRunner, session: WorkerSession, cell: Cell, round_: int, block: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(runner.scheduler, "share_until", 0.0)
            return undisturbed(runner, session, cell, round_, block)

    monkeypatch.setattr(BlockRunner, "_undisturbed", behind)
    generate(run, Quiet(), Execution(timed_only=True))
    assert len(decoded) == 16


def arms(**walls: Sequence[float]) -> dict[str, CellData]:
    """Arms with one sample of 10 forwards and 10 tokens per block. walls: arm -> seconds by block."""
    return {
        arm: cell_data(
            [],
            [
                timing_line(block=b, wall_s=w, decode_s=w, device_s=w, tokens=10, batch_forwards=10, row_forwards=10)
                for b, w in enumerate(seconds)
            ],
            cell=arm,
            arm=arm,
            baselines=[] if arm == "ar" else ["ar"],
        )
        for arm, seconds in walls.items()
    }


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "FAR_OFF", 4.0)  # tests/helpers/common_fixtures.py has none


@pytest.mark.usefixtures("far")
def test_a_block_far_off_its_siblings_leaves_no_word_no_factors_and_is_told() -> None:
    """As once seen: 89.5 s among blocks of 3 s. The value stays; an arm beside others than that one keeps its word."""
    ar, mars = [2.4, 3.1, 2.7, 89.5, 2.8, 2.6, 3.0, 2.5], [2.0 + b / 100 for b in range(8)]
    group = arms(ar=ar, mars=mars)
    assert {arm: (off.block, off.wall_s) for arm, off in far_off(group.values()).items()} == {"ar": (3, 89.5)}
    found = compare(group, 0.0, 0.02)
    [over] = found["mars"].speedup
    assert over.verdict == doubted("the machine was disturbed in block 3 of ar", "disturbed")
    assert over.value == pytest.approx(sum(ar) / sum(mars))
    assert over.factors is None
    [flag] = disturbances(group["ar"], found["ar"].far_off)
    assert flag.startswith("the machine was disturbed: block 3 took 89.5 s, 33 times its usual time")
    assert disturbances(group["mars"], found["mars"].far_off) == []

    other = compare(arms(ar=[2.7] * 8, mars=mars, medusa=[1.0] * 7 + [30.0]), 0.0, 0.02)
    assert other["mars"].speedup[0].verdict.word == "faster"
    assert other["mars"].speedup[0].factors is not None
    assert other["medusa"].speedup[0].verdict == doubted("the machine was disturbed in block 7 of medusa", "disturbed")


def test_arms_that_waited_unequally_for_the_processor_have_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """As once seen in llama.cpp: plain decoding waited for 55 % of its time, and a slower arm was called faster."""
    monkeypatch.setattr(samples, "STRETCHED", 1.1)  # tests/helpers/common_fixtures.py has none

    def found(plain: float, copies: float) -> str:
        group = arms(ar=[2.0 + b / 100 for b in range(8)], copies=[1.0 + b / 100 for b in range(8)])
        for data, share in ((group["ar"], plain), (group["copies"], copies)):
            data.timings[:] = [t.changed(wanted_s=t.wall_s, cpu_s=share * t.wall_s) for t in data.timings]
        return shown_verdict(compare(group, 0.0, 0.02)["copies"].speedup[0].verdict).text

    assert found(0.45, 0.78) == (
        "inconclusive: the machine was disturbed: others had the processor in 55% of the time of ar, and in 22% of the "
        "time of copies"
    )
    assert found(0.78, 0.45).startswith("inconclusive: the machine was disturbed")
    assert found(0.45, 0.44) == found(0.99, 0.92) == "faster"


@pytest.mark.parametrize(("dropped", "warned"), [(3, True), (40, True), (2, False)])
def test_a_quota_is_named_with_its_own_remedy(dropped: int, warned: bool) -> None:
    """And no other program. A few dropped samples are no warning."""
    [data] = arms(ar=[2.0] * 40).values()
    lost = {"dropped": machine.THROTTLED, "cpu_s": 1.2}
    data.timings[:] = [t.changed(**lost) if t.block < dropped else t for t in data.timings]
    text = f"{dropped} of 40 samples dropped: the CPU quota stopped the process (block 0: 1.2 of 2 s)"
    remedy = "; raise the quota, or end other programs that share it"
    assert disturbances(data, None) == [f"the machine was disturbed: {text}{remedy}" if warned else text]


def test_a_run_under_a_quota_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside the cores of its machine, and where it is compared with other runs."""
    quota_of(monkeypatch, tmp_path, 60)
    run = start(tmp_path / "run", REQUEST.changed(method=("ar",), limit=2))
    generate(run, Quiet(), Execution(timed_only=True))
    results = assemble(run)
    assert dict(environment(results))["Processor"].endswith(" cores, CPU quota of 0.6 cores")
    assert dump(results)["environment"]["sessions"][0]["cpu_quota"] == 0.6


@pytest.mark.usefixtures("far")
def test_longer_work_is_not_far_off() -> None:
    """A long prompt takes all arms longer, more forwards take one arm longer, and a slow arm is slow in all blocks."""
    assert not far_off(arms(ar=[1.0] * 7 + [20.0], mars=[1.0] * 7 + [19.0]).values())
    more = arms(ar=[1.0] * 8, mars=[1.0] * 7 + [8.0])
    last = more["mars"].timings[-1]
    more["mars"].timings[-1] = last.changed(batch_forwards=80)
    assert not far_off(more.values())
    assert not far_off(arms(ar=[1.0] * 8, mars=[9.0] * 8).values())
    assert far_off(arms(ar=[1.0] * 7 + [4.1]).values()).keys() == {"ar"}
    assert not far_off(arms(ar=[1.0] * 7 + [3.9]).values())
    short = arms(ar=[3.0] * 7 + [2.5])
    short["ar"].timings[-1] = short["ar"].timings[-1].changed(batch_forwards=1)  # nearly all of it is prefill
    assert not far_off(short.values())
