"""A run on disk: its results, what is kept when it stops, and one error line for a mistake."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small import save_small
from stages import generate
from stored import stored_json, stored_lines
from thinned import one_in
from whole import Quiet, cells_of, figures, finish, start

from mtbench.cli import main
from mtbench.decoding.method import Commit, Method, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution

ARMS = ("ar", "ar:on=mars", "mars:tau=0.3", "mars:tau=1", "mars:tau=0.3,cache=none", "mars:tau=0.3,cache=block")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {"ar": str(save_small(root / "ar", 1)), "mars": str(save_small(root / "mars", 2))}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def request_for(checkpoints: dict[str, str], **changes: Any) -> RunRequest:
    asked: dict[str, Any] = {
        "checkpoint": checkpoints,
        "method": ARMS,
        "batch_size": (1, 3),
        "limit": 7,
        "rounds": 2,
        "max_new_tokens": 6,
    }
    return RunRequest(**(asked | changes))


@pytest.fixture(scope="module")
def finished(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Any]:
    run = start(tmp_path_factory.mktemp("runs") / "whole", request_for(checkpoints))
    return run, finish(run)


@pytest.mark.whole
def test_every_cell_is_measured_from_its_own_generations(finished: tuple[RunDirectory, Any]) -> None:
    """Counts in results.json are those of the stored lines; autoregressive decoding has exactly 1 token per forward."""
    run, results = finished
    assert [c["status"] for c in results["cells"]] == ["ok"] * 12
    for cell in results["cells"]:
        lines = stored_lines(run, f"generations/{cell['cell']}.jsonl")
        assert all(sum(g["commits"]) == len(g["token_ids"]) and len(g["commits"]) == g["forwards"] for g in lines)
        assert cell["tokens"] == sum(len(g["token_ids"]) for g in lines)
        assert cell["tokens_per_forward"] == pytest.approx(cell["tokens"] / sum(g["forwards"] for g in lines))
        assert cell["items"] == 7
        assert cell["void"] == []
        if cell["method"] == "ar":
            assert cell["tokens_per_forward"] == 1
            assert set(cell["commit_histogram"]) == {"1"}


@pytest.mark.whole
def test_arms_are_held_to_what_they_promise(finished: tuple[RunDirectory, Any]) -> None:
    """τ=1 is graded against `ar` on the same checkpoint, `cache=none` against `cursor`; lossy arms get no grade."""
    grades = {arm: c["lossless"] for arm, c in cells_of(finished[1]).items()}
    assert grades["mars@mars/graph"]["against"] == "ar@mars/graph"
    assert grades["mars@mars/graph"]["grade"] == "exact"
    assert grades["mars@mars/graph"]["epsilon"] == 1e-4
    assert grades["mars:tau=0.3,cache=none@mars/graph"]["against"] == "mars:tau=0.3@mars/graph"
    assert grades["mars:tau=0.3,cache=none@mars/graph"]["grade"] == "exact"
    assert grades["mars:tau=0.3@mars/graph"] is None
    assert grades["ar@ar/graph"] is None


def test_a_time_budget_stops_between_blocks(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Cells that did not finish are `partial`; resuming finishes them."""
    run = start(tmp_path / "run", request_for(checkpoints, method=["ar"], batch_size=(3,), time_budget_s=1e-9))
    assert [c["status"] for c in finish(run)["cells"]] == ["partial"]
    ends, progress = list[float](), Quiet()
    progress.begin = lambda cells, work, until, *_: ends.append(until - time.monotonic())  # type: ignore[method-assign]
    for timed_only in (False, True):
        generate(run, progress, Execution(time_budget_s=600, timed_only=timed_only))
    assert ends == [pytest.approx(600, abs=30)] * 2, "what is left has re-scoring and pages in it"
    assert [c["status"] for c in finish(run)["cells"]] == ["ok"]


@pytest.mark.whole
@pytest.mark.parametrize("batches", one_in(3, [1, 5, 13, 22, 41]))
def test_an_interrupted_run_ends_with_the_same_figures(
    batches: int, checkpoints: dict[str, str], finished: tuple[RunDirectory, Any], tmp_path: Path
) -> None:
    """Wherever a run stops, resuming gives the figures of an uninterrupted run. A torn last line is dropped."""
    run = start(tmp_path / "run", request_for(checkpoints))
    with pytest.raises(KeyboardInterrupt):
        generate(run, Quiet(until=batches))
    victim = next((run.path / "timings").glob("*.jsonl"))
    with victim.open("a") as file:
        file.write('{"session": 1, "rou')  # torn by the crash
    assert figures(finish(run)) == figures(finished[1])


@pytest.mark.whole
def test_resuming_a_finished_run_changes_nothing(finished: tuple[RunDirectory, Any]) -> None:
    """No file of lines is written again."""
    run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*.jsonl")}
    generate(run, Quiet())
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*.jsonl")} == before


def test_a_line_is_not_added_to_a_torn_one(tmp_path: Path) -> None:
    """The crash of a machine may leave a part of the last line: the next session's lines are whole."""
    run = RunDirectory(tmp_path)
    for torn in ("", '{"a": 1}\n{"a": ', '{"a": '):
        (tmp_path / "lines.jsonl").write_text(torn)
        run.append("lines.jsonl", [{"a": 2}, {"a": 3}])
        assert stored_lines(run, "lines.jsonl") == [*([{"a": 1}] if "1" in torn else []), {"a": 2}, {"a": 3}]


def test_a_run_does_not_resume_in_another_type(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """A cell must not mix float32 and float64, even if `auto` means another type on the next machine."""
    run = start(tmp_path / "run", request_for(checkpoints, method=["ar"]))
    with pytest.raises(KeyboardInterrupt):
        generate(run, Quiet(until=2))
    plan = stored_json(run, "plan.json")
    plan["request"]["dtype"] = "float64"
    run.write_json("plan.json", plan)
    with pytest.raises(UserError, match="started with --dtype float32; it cannot resume with float64"):
        generate(run, Quiet())


class Hungry(Method):
    """Runs out of memory in its first forward."""

    roles = ("ar",)
    claims = "lossy"

    def window(self) -> Window:
        return Window(pending=1, guesses=0, commits=1)

    def accept(self, state: State, rows: Rows, judged: TargetOutput) -> Commit:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")


def test_a_method_without_memory_fails_only_its_own_cells(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other cells are measured; the failed cell has the error."""
    METHODS["ar"]
    monkeypatch.setitem(METHODS._classes, "hungry", dataclass(frozen=True)(Hungry))
    monkeypatch.setattr(Hungry, "name", "hungry", raising=False)
    brief = request_for(checkpoints, method=["ar", "hungry", "mars"], batch_size=(1,), limit=2, rounds=1)
    cells = cells_of(finish(start(tmp_path / "run", brief)), 1)
    assert [c["status"] for c in cells.values()] == ["ok", "failed", "ok"]
    error = r"out of memory at batch size 1, prompts of up to \d+ tokens and 6 new ones"
    assert re.match(error, cells["hungry@ar/graph"]["error"])


def mtbench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Any, str, str]:
    """Run `mtbench ARGS` in this process; return its exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["mtbench", *args])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main.main()
    return stopped.value.code, *capsys.readouterr()


BRIEF: Mapping[str, Any] = {"method": ("ar", "mars:tau=0.3"), "batch_size": (3,)}


BAD = {
    "suite": (["--suite", "gsm9k"], "unknown suite 'gsm9k' (did you mean 'gsm8k'?)"),
    "value": (["--method", "mars:tau=2"], "mars: tau=2 is not allowed; a probability is a number from 0 to 1."),
    "role": (["--method", "ar:on=poet"], "has no checkpoint in the role 'poet'"),
    "checkpoint": (["--checkpoint", "ar=/nowhere/at/all"], "'/nowhere/at/all' for the role 'ar' does not exist"),
    "device": (["--device", "tpu", "--limit", "1"], "--device 'tpu' is not available"),
    "context": (["--max-new-tokens", "9000"], "do not fit the context of"),
    "flag": (["--metod", "ar"], "No such option: --metod"),
    "hub": (
        ["--suite", "arithmetic", "--model", "nobody/nothing", "--offline"],
        "give a folder or GGUF file of this machine",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the value, the choices and the next command; the exit code is 2; no run directory is made."""
    given, says = BAD[case]
    code, _, error = mtbench(capsys, monkeypatch, "run", "-o", str(tmp_path / "run"), *given)
    assert code == 2
    assert error.count("\n") == 1, error
    assert error.startswith("error: ")
    assert says in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", ["experiments.run.make_plan", "experiments.pipeline.generate"])
def test_a_scheduler_interrupts_as_a_user_does(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a run like Ctrl-C: one line says how to resume, or that nothing was started."""
    monkeypatch.setattr(f"mtbench.{step}", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    path = tmp_path / "run"
    code, _, error = mtbench(capsys, monkeypatch, "run", "--limit", "8", "--method", "ar", "-o", str(path))
    expected = "nothing was started"
    if step.endswith("generate"):
        expected = f"complete results are kept; resume with `mtbench run -o {path} --resume`"
    assert (code, error.splitlines()[-1]) == (130, f"interrupted; {expected}")


SMALLEST = ["--method", "ar", "--limit", "2", "--max-new-tokens", "4", "--batch-size", "1", "--rounds", "1"]


def test_a_plan_may_be_for_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has the GPU, and decides what `--dtype auto` means."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "run"
    code, _, error = mtbench(capsys, monkeypatch, "plan", *SMALLEST, "--device", "cuda", "-o", str(path))
    assert not code, error
    assert stored_json(RunDirectory(path), "plan.json")["request"]["dtype"] == "auto"


def test_a_plan_has_the_dtype_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run may say `--dtype auto` again."""
    path = tmp_path / "run"
    code, _, error = mtbench(capsys, monkeypatch, "run", *SMALLEST, "--device", "cpu", "-o", str(path))
    assert not code, error
    assert stored_json(RunDirectory(path), "plan.json")["request"]["dtype"] == "float32"
    code, _, error = mtbench(capsys, monkeypatch, "run", "--dtype", "auto", "-o", str(path), "--resume")
    assert not code, error


def test_a_dry_run_refuses_what_the_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run refuses a directory that is not empty, before any work; and a plan that is there already."""
    (tmp_path / "file").touch()
    code, _, error = mtbench(capsys, monkeypatch, "run", "-o", str(tmp_path), "--dry-run")
    assert (code, "exists and is never overwritten" in error) == (2, True)
    code, _, error = mtbench(capsys, monkeypatch, "run", "-o", str(tmp_path), "--dry-run", "--resume")
    assert (code, "--dry-run plans anew" in error) == (2, True)


@pytest.mark.whole
def test_generation_needs_torch_and_transformers_only(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """`mtbench generate` runs where no other library can be imported."""
    run = start(tmp_path / "run", request_for(checkpoints, **BRIEF))
    code = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        hidden = {{'accelerate', 'scipy', 'matplotlib', 'jsonschema', 'lm_eval', 'datasets'}}
        return None if name.partition('.')[0] in hidden else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv = ['mtbench', 'generate', {str(run.path)!r}]
from mtbench.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list((run.path / "timings").iterdir())) == 2
