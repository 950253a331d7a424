"""What fits in a time budget, and what a race in a serving engine does with it: starts, blocks, arms left out."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import PLUGIN, Scripted, begun, install
from stored import stored_lines
from typer.testing import CliRunner, Result
from whole import Quiet, forget_plugin_files

from mtbench import plugins
from mtbench.cli import main
from mtbench.clients.serving_engine import Serving
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import INCOMPLETE, UserError
from mtbench.experiments.choose.plan import plan_of
from mtbench.experiments.choose.request import RaceRequest
from mtbench.experiments.choose.runner import Racing
from mtbench.hardware import machine
from mtbench.lineup.planner import make_plan, write_plan
from mtbench.measure import block_runner
from mtbench.measure.executor import _decode, _say_if_busy, _say_if_changed, generate
from mtbench.measure.scheduler import Scheduler
from mtbench.measure.time_budget import (
    FEWEST_ARMS,
    Part,
    TimeBudget,
    blocks_within,
    fitting,
    needs_s,
    outlook,
    part_of,
    remember_start,
)
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import SessionRecord
from mtbench.plan.plan import MIN_BLOCKS, RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run

PLAIN, FAST, SLOW = "ar@ar/scripted", "prompt-lookup:ahead=2@ar/scripted", "prompt-lookup:ahead=4@ar/scripted"
ARMS = ("prompt-lookup:ahead=2", "prompt-lookup:ahead=4")


@st.composite
def a_part(draw: st.DrawFn) -> Part:
    arms = draw(st.integers(2, 5))
    starts_s, block_s = (draw(st.lists(st.floats(0.01, 100), min_size=arms, max_size=arms)) for _ in range(2))
    needed = draw(st.lists(st.integers(0, 6), min_size=arms, max_size=arms))
    return Part(starts_s, needed, draw(st.integers(6, 64)), block_s)


@given(parts=st.lists(a_part(), min_size=1, max_size=3), left_s=st.floats(0, 3000))
def test_what_fits_takes_no_longer_than_the_budget_and_one_arm_more_would(parts: list[Part], left_s: float) -> None:
    arms = fitting(left_s, parts)
    most = max(len(part.starts_s) for part in parts)
    assert arms == 0 or FEWEST_ARMS <= arms <= most
    if arms:
        assert needs_s(parts, arms) <= left_s
    if arms < most:
        assert needs_s(parts, max(arms + 1, FEWEST_ARMS)) > left_s


def test_the_blocks_that_fit_are_those_beside_all_starts() -> None:
    """Ten minutes less four starts of 90 s leave four minutes: 12 blocks of 5 s in four arms."""
    part = Part([90.0] * 4, [6] * 4, 64, [5.0] * 4)
    assert blocks_within(600 - 360, [part]) == 12
    assert blocks_within(300 - 360, [part]) == 0
    assert blocks_within(6000 - 360, [part]) == 64
    assert blocks_within(600 - 360, [part] * 2) == 6
    assert fitting(600, [Part([90.0], [6], 64, [5.0])]) == 1, "plain decoding alone needs no second arm"


@pytest.fixture(autouse=True)
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    """The scripted engine, installed; by the drafted tokens of an arm (0: plain decoding), what its server does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plugins.load_file(PLUGIN)
    install(Scripted, "scripted==1")
    engine, scripts, launch = SERVING_ENGINES["scripted"], dict[str, dict[str, Any]](), Scripted.launch
    lookup = engine.methods["prompt-lookup"]
    monkeypatch.setattr(
        engine,
        "methods",
        {**engine.methods, "prompt-lookup": lambda m, d: lookup(m, d)._replace(words=(str(m.ahead),))},
    )

    def launched(self: Any, python: Path, serving: Serving, port: int) -> Any:
        self.script |= scripts.get("".join(serving.setting.words), {})
        return launch(self, python, serving, port)

    monkeypatch.setattr(engine, "launch", launched)
    yield scripts
    forget_plugin_files()


@dataclass
class Noting(Quiet):
    """Progress that keeps what is noted."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


def raced(folder: Path, budget_s: float | None, methods: tuple[str, ...] = ARMS, **asked: Any) -> tuple[Run, list[str]]:
    """A race in the scripted engine as far as its time budget goes, and what was noted."""
    few: dict[str, Any] = {"batch_size": (1,), "limit": 12, "max_new_tokens": 4, "dtype": "float32"}
    planned = plan_of(RaceRequest(method=methods, engine=["scripted"], **few | asked))
    directory = RunDirectory.create(folder)
    write_plan(directory, planned.plan, ["mtbench"], planned.race)
    run, progress = Run.open(directory), Noting()
    execution = Execution(time_budget_s=budget_s, timed_only=True)
    generate(run, progress, Racing(run, execution).executing())
    return run, progress.notes


def known(start_s: float) -> None:
    """Remember the last start of plain decoding."""
    remember_start(make_plan(RunRequest(method=["ar"], engine=["scripted"], limit=1)).cells[0], start_s)


def blocks(run: Run) -> dict[str, int]:
    """Blocks by arm, over all batch sizes."""
    found = Counter[str]()
    for cell in run.plan.cells:
        found[cell.arm] += len(run.timings[cell.cell])
    return dict(found)


def test_a_server_that_does_not_start_costs_its_own_start_only(
    scripted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others go on, and it is not started again at another batch size."""
    scripted["4"], started = {"at_start": "no such package"}, begun(monkeypatch)
    run, notes = raced(tmp_path / "run", None, batch_size=(1, 2))
    assert Counter(started) == {PLAIN: 2, FAST: 2, SLOW: 1}
    assert {line.cell for line in run.failures} == {cell.cell for cell in run.plan.cells if cell.arm == SLOW}
    assert "at batch size 2: the server of" in run.failures[1].error
    assert blocks(run) == {PLAIN: 18, FAST: 18, SLOW: 0}
    assert sum("no such package" in note for note in notes) == 2


def test_a_server_gets_one_request_of_each_row_before_it_is_timed(scripted: dict[str, Any], tmp_path: Path) -> None:
    """It prepares no shapes, so neither a second call nor that of the short last block tells anything."""
    asked = tmp_path / "asked"
    scripted[""] = {"asked": str(asked)}
    run, _ = raced(tmp_path / "run", None, ARMS[:1], batch_size=(2,), limit=13)
    assert blocks(run)[PLAIN] == 7
    assert len(asked.read_text()) == 2 + 13
    assert [line["preparation_s"] > 0 for line in stored_lines(run.directory, "preparation.jsonl")] == [True, True]


def test_a_server_that_is_not_ready_in_time_ends_the_race_within_its_budget(
    scripted: dict[str, Any], tmp_path: Path
) -> None:
    """It has not failed: with more time it is ready."""
    scripted["2"], started_at = {"ready_s": 1000}, time.monotonic()
    run, notes = raced(tmp_path / "run", 3.0, ARMS[:1])
    assert time.monotonic() - started_at < 6
    assert (blocks(run), run.failures, run.left) == ({PLAIN: 0, FAST: 0}, [], [])
    assert any(note.startswith(f"time budget: the server of '{FAST}' was not ready after") for note in notes)
    assert notes[-1] == "time budget spent; `--resume` runs what is missing"
    scripted["2"].clear()
    progress = Quiet()
    generate(run, progress, Racing(run, Execution(timed_only=True)).executing())
    assert min(blocks(run).values()) >= 6


def test_a_slow_server_is_left_out_for_a_decision_among_the_others(
    scripted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may take the time that the others do not need."""
    scripted["2"] = {"ready_s": 1000}
    known(0.4)
    monkeypatch.setattr(block_runner, "remember_start", lambda *_: None)  # the machine may be busy
    run, notes = raced(tmp_path / "run", 4.0)
    [gone] = run.left
    assert (run.plan.cell(gone.cell).arm, gone.block, gone.lost, gone.unraced) == (FAST, 0, False, True)
    assert any(note.startswith(f"{FAST} at batch size 1: left out: the server of") for note in notes)
    assert blocks(run)[FAST] == 0


def choose(folder: Path, *words: str) -> Result:
    base = ["choose", "--plugin", str(PLUGIN), "--engine", "scripted", "--batch-size", "1", "--limit", "12"]
    methods = [word for arm in ARMS for word in ("--method", arm)]
    return CliRunner().invoke(main.app, [*base, *methods, "--max-new-tokens", "4", *words, "-o", str(folder)])


def test_the_last_arms_are_left_out_if_a_decision_among_all_does_not_fit(
    scripted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are named on the terminal and in decision.json. With more time they come back."""
    scripted |= {"": {"takes_s": 0.25}, "2": {"takes_s": 0.1}}
    monkeypatch.setattr(SERVING_ENGINES["scripted"], "start_s", 20.0)
    monkeypatch.setattr(block_runner, "remember_start", lambda *_: None)
    shown = choose(tmp_path / "run", "--time-budget", "6s", "--limit", "24")
    assert shown.exit_code == INCOMPLETE, shown.output
    assert "time budget 6 s: 3 server starts take about 60 s (a guess: none was measured here)" in shown.output
    refused = json.loads((tmp_path / "run" / "decision.json").read_text())["refused"]
    reason = refused[f"{SLOW} at batch size 1"]
    assert re.fullmatch(r"the time budget has room for 2 of 3 arms; all need `--time-budget 1m`", reason)
    assert f"{SLOW} at batch size 1: left out: {reason}" in shown.output
    said = " ".join(shown.output.split())  # a sentence wraps
    assert f"Not run: Prompt lookup ahead=4 (Scripted ngram): {reason}." in said
    lines = stored_lines(RunDirectory.open(tmp_path / "run"), "eliminated.jsonl")
    assert [SLOW.partition(":")[0] in lines[0]["cell"], lines[0]["unraced"]] == [True, True]
    again = choose(tmp_path / "run", "--resume", "--time-budget", "2m", "--limit", "24")
    assert json.loads((tmp_path / "run" / "decision.json").read_text())["refused"] == {}, again.output
    assert blocks(Run.open(RunDirectory.open(tmp_path / "run")))[SLOW] >= MIN_BLOCKS


def test_a_budget_that_is_known_to_be_too_short_is_refused_before_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the time of the last start here. A guess refuses nothing."""
    started = begun(monkeypatch)
    known(100.0)
    refused = choose(tmp_path / "run", "--time-budget", "2m").exception
    assert isinstance(refused, UserError)
    assert str(refused) == (
        "time budget 2 min: 3 server starts take about 5 min; judging 12 s; 0 s are left for blocks, and a "
        "decision needs 6; give `--time-budget 5m` at least."
    )
    assert not (tmp_path / "run").exists()
    assert started == []


def test_a_measured_start_is_that_of_its_device_and_its_servers_options() -> None:
    """The engine guesses the others."""
    plan = make_plan(RunRequest(method=["ar"], engine=["scripted"], limit=1, batch_size=(1,)))
    [cell], [group] = plan.cells, plan.groups
    on_gpu, eager = cell.changed(gpu_bytes=1 << 30), cell.changed(engine_options=["enforce-eager"])
    remember_start(cell, 3.0)
    guess = SERVING_ENGINES["scripted"].start_s
    assert [part_of(group, [one]).starts_s[0] for one in (cell, on_gpu, eager)] == [3.0, guess, guess]
    remember_start(on_gpu, 90.0)
    assert [part_of(group, [one]).starts_s[0] for one in (cell, on_gpu, eager)] == [3.0, 90.0, guess]


def test_a_dry_run_starts_one_server_and_says_whether_a_decision_fits(
    scripted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = begun(monkeypatch)
    shown = choose(tmp_path / "run", "--dry-run", "--time-budget", "1m").output
    assert started == [PLAIN]
    assert "time budget 60 s: 3 server starts take about" in shown
    assert "12 blocks fit in the rest, and a decision needs 6" in shown
    assert "about" in choose(tmp_path / "run", "--dry-run").output.splitlines()[-2]


def test_without_a_measured_start_the_outlook_is_a_guess() -> None:
    plan = make_plan(RunRequest(method=["ar"], engine=["scripted"], limit=4, batch_size=(1, 2), rounds=1))
    assert outlook(plan, None, None) == (
        "2 server starts take about 2 min (a guess: none was measured here); at most 6 blocks, and a decision "
        "needs 4 at each batch size"
    )


def test_a_busy_machine_is_named_before_and_after_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how threads wait there, if there are several; behind the last block, if other programs came or went."""
    progress, passive = Noting(), "OMP_WAIT_POLICY=PASSIVE"
    for others, waiting, threads in ((None, None, 2), (0.05, "", 2), (0.5, passive, 1), (0.5, passive, 2)):
        session = SessionRecord(load_of_others=others, waiting=waiting, threads=threads)
        _say_if_busy(session, progress)
        monkeypatch.setattr(machine, "load_of_others", lambda seconds: (0.3, 0.0))
        _say_if_changed(session, progress)
    busy = "other programs use 50 % of the cores"
    came = "other programs use 30 % of the cores now, and used 5 % when this began; measure again"
    assert progress.notes == [came, busy, f"{busy}; threads wait passively ({passive})"]


class Clock:
    """A race of scripted block times in a group of 24 blocks: who takes part, block after block, on a made clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget_s: float, arms: int, blocks: int = 64) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        plan = make_plan(
            RunRequest(method=["ar", *(f"prompt-lookup:ahead={n}" for n in range(1, arms))], limit=blocks, rounds=1)
        )
        group = next(group for group in plan.groups if group.batch_size == 1)
        self.cells = [plan.cell(name) for name in group.cells]
        self.timings: dict[str, list[Any]] = {cell.cell: [] for cell in self.cells}
        self.out: list[Any] = []
        run = SimpleNamespace(race=True, timings=self.timings, keep_blocks=lambda *_: None)
        writer = SimpleNamespace(
            run=run, plan=plan, group=group, suite=plan.suites[0], cells=self.cells, live=self.live, begun=self.begun
        )
        writer.leave_out = lambda cells, reason: self.out.extend(cells)
        budget = TimeBudget(budget_s, judged=False)
        self.scheduler = Scheduler(writer, budget)  # type: ignore[arg-type]

    def live(self, cells: Any = None) -> list[Any]:
        return [cell for cell in (self.cells if cells is None else cells) if cell not in self.out]

    def begun(self, cell: Any) -> bool:
        return bool(self.timings[cell.cell])

    def race(self, block_s: Callable[[int, int], float]) -> list[list[int]]:
        """Return by block the numbers of the arms that took part. block_s: time of an arm in a block."""
        self.now += block_s(0, -1)
        self.scheduler.tried_s, found = self.now, list[list[int]]()
        for _, block in self.scheduler.todo:
            part = self.scheduler.taking_part(())
            if not self.scheduler.has_time((), part):
                break
            for cell in part:
                wall_s = block_s(self.cells.index(cell), block)
                self.now += wall_s
                self.timings[cell.cell].append(SimpleNamespace(wall_s=wall_s, round=1, block=block, dropped=None))
            self.scheduler.end(1, block)
            found.append([self.cells.index(cell) for cell in part])
            self.scheduler.leave_out_hopeless(())
        return found


def test_a_race_takes_as_many_arms_as_get_six_blocks_the_first_in_the_plan_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 s less a margin are 13 blocks in six arms of 1 s, and six in eleven."""
    assert Clock(monkeypatch, 100, arms=6).race(lambda *_: 1.0)[:1] == [[0, 1, 2, 3, 4, 5]]
    race = Clock(monkeypatch, 40, arms=10)
    assert race.race(lambda *_: 1.0)[0] == [0, 1, 2, 3, 4]
    assert min(len(race.timings[cell.cell]) for cell in race.cells[:5]) >= MIN_BLOCKS
    assert race.now <= 40


def test_one_odd_block_throws_no_arm_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding's first block takes 45 s and all others 2: arms come in as soon as that is seen."""
    race = Clock(monkeypatch, 300, arms=6)
    race.race(lambda arm, block: 45.0 if block == -1 else 2.0)
    assert race.out == []
    assert min(map(len, race.timings.values())) >= MIN_BLOCKS
    race = Clock(monkeypatch, 300, arms=6)
    race.race(lambda arm, block: 45.0 if (arm, block) == (3, 1) else 2.0)
    assert (race.out, min(map(len, race.timings.values())) >= MIN_BLOCKS) == ([], True)


def test_an_arm_that_is_slower_than_thought_waits_and_the_others_get_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last arm takes 30 times as long as plain decoding, which three of its blocks show."""
    race = Clock(monkeypatch, 130, arms=4)
    found = race.race(lambda arm, _: 30.0 if arm == 3 else 1.0)
    assert [3 in part for part in found[:4]] == [True, True, True, False]
    assert all(len(race.timings[cell.cell]) >= MIN_BLOCKS for cell in race.cells[:3])
    assert race.now <= 130


def test_one_arm_of_each_method_begins_before_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Clock(monkeypatch, 40, arms=10)
    race.cells[8] = race.cells[8].changed(method="suffix")
    race.scheduler = Scheduler(race.scheduler.writer, race.scheduler.budget)
    assert race.race(lambda *_: 1.0)[0] == [0, 1, 8, 2, 3]


def test_a_resumed_race_decodes_again_what_a_recovered_arm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding tells which blocks are whole, beside an arm that failed for a cause that has passed."""
    race = Clock(monkeypatch, 1000, arms=3)
    race.race(lambda *_: 1.0)
    again = race.cells[2].cell
    del race.timings[again][2:]
    writer, budget = race.scheduler.writer, race.scheduler.budget
    assert len(Scheduler(writer, budget).done) == 24
    assert Scheduler(writer, budget, recovered={again}).done == {(1, 0), (1, 1)}


@pytest.mark.parametrize("apart", [False, True])
def test_batch_sizes_share_the_time_and_the_first_gets_what_is_left(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not apart: a round goes on in the servers in which it began."""
    now, shares = [0.0], list[tuple[int, float]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def stage(number: int, takes_s: float) -> Any:
        scheduler = SimpleNamespace(todo=[1], apart=apart, leave_out_hopeless=lambda *_, **__: None)

        def decode(sessions: Any) -> bool:
            left_s = scheduler.share_until - now[0]
            shares.append((number, left_s))
            now[0] += min(takes_s, left_s)
            return bool(takes_s <= left_s)

        return SimpleNamespace(scheduler=scheduler, decode=decode, runner=SimpleNamespace(again=Counter()))

    _decode([stage(0, 80), stage(1, 10)], [SimpleNamespace(warm=())], Noting(), TimeBudget(100, judged=False))  # type: ignore[list-item]
    assert shares == [(0, 50), (1, 50), *([] if apart else [(0, float("inf"))])]
