"""Who holds the GPU during a run: this command with its workers and servers, or a stranger, which alone disturbs it.

Whole runs on a driver that lists processes from a table, with scripted servers.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import SharedGpu, begun_with
from living import until
from scripted_engine import PLUGIN, Scripted, install
from stages import assemble, begin_run, generate, score
from whole import Quiet, forget_plugin_files

from mtbench import plugins
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.lineup.planner import make_plan
from mtbench.measure import worker_counts, workers
from mtbench.plan.formats import TimingLine
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.report.text import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SHARED = "device shared with another process"
STRANGER = 1  # no child of this process
# leaves the group of the server, so that it is not paused with it, and holds the GPU
CHILD = "import os, time; os.setsid(); open(os.path.join({!r}, str(os.getpid())), 'w').close(); {}"
SLEEPS, SPINS = "time.sleep(1000)", "\nwhile True: pass"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedGpu]:
    """A GPU, and the scripted engine, whose servers use it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    plugins.load_file(PLUGIN)
    (tmp_path / "gpu").mkdir()
    yield SharedGpu(tmp_path / "gpu")
    forget_plugin_files()


class Watching(Quiet):
    """Progress that keeps notes and counts blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)


def decoded(
    gpu: SharedGpu,
    progress: Quiet,
    script: dict[str, Any] | None = None,
    execution: Execution = Execution(timed_only=True),  # noqa: B008
    **asked: Any,
) -> Run:
    """A run of two arms in servers, read from its directory."""
    install(Scripted, "scripted==1", **{"holds": str(gpu.folder)} | (script or {}))
    few: dict[str, Any] = {"batch_size": (1, 2), "limit": 2, "rounds": 2, "max_new_tokens": 4, "device": "cpu"}
    request = RunRequest(method=["ar", "prompt-lookup:ahead=2"], engine=["scripted"], **few | asked)
    directory = begin_run(gpu.folder.with_name("run"), make_plan(request))
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        generate(directory, progress, execution)
    return Run.open(directory)


def lines(run: Run) -> list[TimingLine]:
    return [line for of_cell in run.timings.values() for line in of_cell]


@pytest.mark.parametrize(
    ("shift", "state"),
    [
        (0, {}),
        (1_000_000, {}),
        (0, {"nvmlDeviceGetClockInfo": None, "nvmlDeviceGetTotalEnergyConsumption": None}),
    ],
    ids=["ids of this namespace", "ids of another", "a part of a GPU"],
)
def test_servers_and_their_children_are_no_strangers(gpu: SharedGpu, shift: int, state: dict[str, Any]) -> None:
    """Paused ones and those of two batch sizes; in this namespace also a child that has left its server's group."""
    gpu.shift, gpu.state = shift, state
    child = {"child": str(gpu.folder.with_name("child")), "computes": CHILD.format(str(gpu.folder), SLEEPS)}
    run = decoded(gpu, Quiet(), {} if shift else child, batch_size=(1,) if state else (1, 2))
    assert len(lines(run)) == (8 if state else 12)
    assert {(line.shared, line.dropped, bool(line.disturbed)) for line in lines(run)} == {(False, None, False)}
    assert len(list(gpu.folder.glob("*"))) == (4 if shift or state else 8)


def test_blocks_beside_a_stranger_are_decoded_again_and_later_ones_are_kept(gpu: SharedGpu) -> None:
    """It comes behind the third block, and goes behind the next look."""
    progress, looks = Watching(), [0]

    def others() -> tuple[int, ...]:
        looks[0] += progress.batches >= 3
        return (STRANGER,) if 0 < looks[0] < 3 else ()

    gpu.others = others
    run = decoded(gpu, progress, batch_size=(1,), limit=3)
    assert {line.dropped for line in lines(run)} == {None}
    assert [[one.reason for one in line.disturbed] for line in lines(run) if line.disturbed] == [[SHARED]]
    assert progress.notes == [f"the machine was disturbed: {SHARED}; 1 block decoded again"]


def test_a_stranger_that_was_there_before_disturbs_every_block(gpu: SharedGpu) -> None:
    """Also where ids are of another namespace."""
    gpu.shift, gpu.others = 1_000_000, lambda: (STRANGER,)
    run = decoded(gpu, Quiet(), batch_size=(1,))
    assert {(line.shared, line.dropped) for line in lines(run)} == {(True, SHARED)}


def test_a_container_that_lists_no_process_is_named_once(gpu: SharedGpu) -> None:
    """On the terminal and on the page. No block is dropped."""
    gpu.lists, progress = False, Watching()
    run = decoded(gpu, progress, batch_size=(1,))
    assert {(line.shared, line.dropped) for line in lines(run)} == {(None, None)}
    reason = "NVML lists no process, as in some containers"
    assert progress.notes == [f"other programs on the GPU are not seen ({reason}); let none run there"]
    score(run.directory)
    assert ("Other programs on the GPU", f"not seen: {reason}") in environment(assemble(run.directory))


def test_a_server_that_computes_while_it_should_wait_is_named(gpu: SharedGpu) -> None:
    """A child that has left the server's group is not paused with it."""
    script = {"child": str(gpu.folder.with_name("child")), "computes": CHILD.format(str(gpu.folder), SPINS)}
    run = decoded(gpu, Quiet(), script | {"takes_s": 0.2}, batch_size=(1,), limit=1, rounds=1)
    assert {line.dropped for line in lines(run)} == {machine.UNPAUSED}


@pytest.mark.usefixtures("forks")
def test_a_worker_that_is_revived_has_its_gpu_and_its_servers_are_no_strangers(
    gpu: SharedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(workers, "visible_gpus", lambda device: ["GPU-a", "GPU-b"])
    timings = gpu.folder.with_name("run") / "timings"

    def kill_one() -> None:
        until(lambda: any(timings.glob("*")), within_s=60)
        [victim] = [child for child in multiprocessing.active_children() if child.name == "worker 1"]
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    execution = Execution(timed_only=True, workers=2)
    run = decoded(gpu, Quiet(), {"takes_s": 0.03}, execution, batch_size=(1,), limit=6)
    killer.join()
    assert len(run.sessions) == 3
    assert [(line.shared, line.dropped, line.disturbed) for line in lines(run)] == [(False, None, None)] * 24
    assert {folder.name: len(list(folder.glob("*"))) for folder in gpu.folder.iterdir()} == {"GPU-a": 4, "GPU-b": 2}


def test_a_worker_sees_its_gpu_alone_from_its_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports and plugins may ask CUDA, which then no longer reads the variable. A revived one sees the same."""
    monkeypatch.setenv(machine.VISIBLE, "GPU-a,GPU-b")
    monkeypatch.setattr(workers, "_serve", begun_with)
    worker = workers.Process(1, 2, RunRequest(), (), "GPU-b")
    try:
        for _ in range(2):
            assert f"{machine.VISIBLE}=GPU-b" in worker.describe()
            worker.process.kill()
            worker.revive()
    finally:
        worker.close()
    assert os.environ[machine.VISIBLE] == "GPU-a,GPU-b"


@pytest.mark.parametrize(
    ("visible", "found", "gpus"),
    [
        (None, 2, ["0", "1"]),
        ("3, 1", 2, ["3", "1"]),
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("0,9", 1, ["0"]),  # CUDA ends at an index that is not there
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"]),  # it shows a process one part
    ],
)
def test_each_worker_gets_one_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: int, gpus: list[str]
) -> None:
    """More workers are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE, visible)
    assert worker_counts.visible_gpus("auto") == gpus
    worker_counts.refuse(len(gpus), None, "cuda")
    with pytest.raises(UserError, match=rf"it is from 1 to {len(gpus)}, the GPUs of this machine"):
        worker_counts.refuse(len(gpus) + 1, None, "cuda")
