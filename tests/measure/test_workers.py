"""Several workers: the same files and figures as one, whoever dies."""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import save_small
from stages import assemble, begin_run, generate, score
from stored import stored_json, stored_lines
from whole import Quiet, figures, serve_busily

from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.measure import executor as generating
from mtbench.measure import workers
from mtbench.measure.workers import Died, Done, Failed, LocalWorker, Task
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump

pytestmark = pytest.mark.whole

SHARED = "2 workers shared the machine"


@pytest.fixture(autouse=True)
def busy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are compared on busy machines, too."""
    torch.set_num_threads(1)
    monkeypatch.setattr(workers, "_serve", serve_busily)


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> RunRequest:
    root = tmp_path_factory.mktemp("checkpoints")
    return RunRequest(
        checkpoint={"ar": str(save_small(root / "ar", 1)), "mars": str(save_small(root / "mars", 2))},
        method=("ar", "mars:tau=0.3"),
        batch_size=(2,),
        limit=12,
        rounds=2,
        max_new_tokens=6,
    )


def begun(path: Path, request: RunRequest) -> RunDirectory:
    """A run that leaves out the pass for peak memory, a process per cell."""
    plan = make_plan(request)
    run = begin_run(path, plan, ["mtbench", "run"])
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
    return run


def finish(run: RunDirectory, **how: Any) -> Any:
    generate(run, Quiet(), Execution(**how))
    return summarize(run)


def summarize(run: RunDirectory) -> Any:
    """What a clock does not decide, nor how many worked."""
    score(run)
    results = dump(assemble(run))
    for cell in results["cells"]:
        cell["flags"] = [flag for flag in cell["flags"] if not flag.startswith(SHARED)]
    return figures(json.loads(json.dumps(results)))


@pytest.fixture(scope="module")
def alone(request_: RunRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finish(begun(tmp_path_factory.mktemp("runs") / "alone", request_))


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_its_batch_and_no_more(request_: RunRequest, alone: Any, tmp_path: Path) -> None:
    """Its replacement has its own session; the figures equal those of one worker; each cell has the flag."""
    run = begun(tmp_path / "run", request_)

    def kill_one() -> None:
        while not list((run.path / "timings").glob("*")):
            time.sleep(0.005)
        victim = next(child for child in multiprocessing.active_children() if child.name == "worker 1")
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    assert finish(run, workers=2) == alone
    killer.join()
    assert len(stored_json(run, "environment.json")["sessions"]) == 3
    names = [f"timings/{file.name}" for file in (run.path / "timings").iterdir()]
    sessions = {line["session"] for name in names for line in stored_lines(run, name)}
    assert 3 in sessions  # the replacement decodes
    assert sessions & {1, 2}  # beside another worker
    assert all(SHARED in cell["flags"] for cell in stored_json(run, "results.json")["cells"])


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every worker dies of a batch of these cells."""
    fatal: list[str] = []

    class Mortal(LocalWorker):
        def decode(self, task: Task) -> Done | Failed:
            if task.cell in fatal:
                raise Died("worker 1 died (exit code -11)")
            return super().decode(task)

    @contextlib.contextmanager
    def start_workers(pool: Any, plan: Any, execution: Any) -> Iterator[list[LocalWorker]]:
        yield [Mortal(pool, plan.cells)]

    monkeypatch.setattr(generating, "start_workers", start_workers)
    return fatal


def test_a_batch_that_kills_two_workers_costs_its_cell(
    request_: RunRequest, alone: Any, tmp_path: Path, mortal: list[str]
) -> None:
    """The others' figures are what they were."""
    run = begun(tmp_path / "run", request_)
    fatal = stored_json(run, "plan.json")["groups"][0]["cells"][1]
    mortal.append(fatal)
    cells = {cell["cell"]: cell for cell in finish(run)["cells"]}

    assert "died (exit code -11), and so did another" in cells[fatal]["error"]
    assert cells[fatal]["status"] == "failed"
    whole = {cell["cell"]: cell for cell in alone["cells"]}
    assert all(cells[name]["tokens"] == whole[name]["tokens"] for name in cells.keys() - {fatal})


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_a_ray_cluster_gives_the_figures_of_one(actors: int, request_: RunRequest, alone: Any, tmp_path: Path) -> None:
    """On a local cluster."""
    assert finish(begun(tmp_path / "run", request_), workers=actors, ray="local") == alone


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"workers": 10_000},
            r"--workers 10000 is not allowed; it is from 1 to \d+, the cores of this process",
        ),
        pytest.param(
            {"ray": "local"}, r"has no GPU to count; give the number of workers: `--workers N`", marks=pytest.mark.slow
        ),
    ],
    ids=["too many", "not said"],
)
def test_workers_that_cannot_be_had_are_refused(request_: RunRequest, tmp_path: Path, how: Any, says: str) -> None:
    """In one line, before anything is decoded."""
    run = begun(tmp_path / "run", request_)
    with pytest.raises(UserError, match=rf"^[^\n]*{says}[^\n]*$"):
        generate(run, Quiet(), Execution(**how))
    assert not (run.path / "timings").exists()
