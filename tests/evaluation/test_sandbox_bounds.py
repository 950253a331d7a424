"""What a program can do to the machine: its share, the totals of all its processes, the host's files, crashes."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroup_trees import plant
from confinement import confined
from hostile import CALL, PROGRAMS

from mtbench.evaluation import sandbox
from mtbench.evaluation.sandbox import Limits, Outcome, max_concurrent, run_all
from mtbench.evaluation.sandbox_watch import Totals
from mtbench.programs.machine_share import usable_memory_bytes

whole = pytest.mark.whole
MIB = 2**20

# --- The share of the machine -------------------------------------------------------------------------------------


def test_a_group_or_one_above_it_limits_the_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smallest limit counts. A group without limits says `max`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    limits = {"job/memory.max": str(900 * MIB), "job/step/memory.max": str(1000 * MIB), "memory.max": "max"}
    plant(monkeypatch, tmp_path, {"job/cpu.max": "250000 100000", **limits})

    assert usable_memory_bytes() == 900 * MIB
    assert max_concurrent(Limits()) == 1
    small = Limits(memory_bytes=2**24, scratch_bytes=2**20, together=Totals(resident_bytes=2**24))
    assert max_concurrent(small) == 2


def test_a_machine_of_16_gb_runs_a_program_on_each_of_four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program may hold counts, and not its address space."""
    monkeypatch.setattr(sandbox, "usable_processors", lambda: 4)
    monkeypatch.setattr(sandbox, "usable_memory_bytes", lambda: 16 * 10**9)
    assert max_concurrent(Limits()) == 4


def test_a_group_that_is_not_visible_here_counts_by_the_root_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container sees its own group as the root folder, and may be told the host's path."""
    plant(monkeypatch, tmp_path, {"memory.max": str(700 * MIB)})
    assert usable_memory_bytes() == 700 * MIB


# --- The totals of all processes ----------------------------------------------------------------------------------


@confined
@whole
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exhausts: memory of processes", "too much: memory"),
        ("exhausts: memory that is resident in no process", "too much: memory"),
        ("exhausts: processors", "too much: processor time"),
        ("exhausts: empty files", "too much: files"),
        ("exhausts: links", "too much: files"),
        ("exhausts: folders in folders", "too much: files"),
        ("exhausts: sockets", "too much: sockets"),
    ],
)
def test_all_processes_together_stay_within_the_totals(name: str, reason: str) -> None:
    """A program that exceeds a total is stopped long before its time is over."""
    processor_s = 1.5 if reason.endswith("time") else 5.0
    together = Totals(address_bytes=2**30, processor_s=processor_s)
    limits = Limits(wall_s=30.0, cpu_s=20, memory_bytes=2**29, together=together)

    started_at = time.monotonic()
    assert run_all([PROGRAMS[name]], limits=limits) == [Outcome(False, reason)]
    assert time.monotonic() - started_at < 20


@confined
@whole
def test_what_a_program_holds_is_bounded_below_its_address_space() -> None:
    """A program that maps memory passes; the same program fails when it fills what it mapped."""
    maps = "import time, mmap\npages = mmap.mmap(-1, 2**28)\n{}\ntime.sleep(1)"
    programs = [maps.format(fills) for fills in ("", "pages[:] = bytes(2**28)")]
    limits = Limits(together=Totals(resident_bytes=2**27))

    assert [outcome.reason for outcome in run_all(programs, limits=limits)] == ["", "too much: memory"]


@confined
@whole
def test_one_program_over_a_total_stops_no_other() -> None:
    """The programs beside it pass, also those with many threads and much memory."""
    honest = "import time\nx = bytearray(2**28)\ntime.sleep(1)"
    limits = Limits(together=Totals(address_bytes=2**30))

    outcomes = run_all([honest, PROGRAMS["exhausts: memory of processes"], honest, honest], limits=limits)

    assert [outcome.reason for outcome in outcomes] == ["", "too much: memory", "", ""]


# --- The host's files and crashes ---------------------------------------------------------------------------------


def _while_running(program: str) -> Iterator[None]:
    """Run a sandbox with this program in another process, and yield many times until it ends."""
    code = f"from mtbench.evaluation.sandbox import run_all\nprint(run_all([{program!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        while process.poll() is None:
            yield
            time.sleep(0.01)
        assert process.stdout is not None
        assert process.stdout.read() == f"{[Outcome(True)]}\n"
    finally:
        process.kill()
        process.wait()


@confined
@whole
@pytest.mark.parametrize(
    "lock",
    [
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.lockf(file, fcntl.LOCK_SH)",
        "fcntl.fcntl(file, 37, __import__('struct').pack('hhqqi', fcntl.F_RDLCK, 0, 0, 0, 0))",
    ],
    ids=["flock", "record", "open file"],
)
def test_a_program_locks_no_file_of_the_host(lock: str) -> None:
    """The host can always lock a file of the interpreter that the program may read."""
    program = f"import fcntl, os, time\nfile = open(os.__file__)\n{lock}\ntime.sleep(0.7)"
    writable = os.access(os.__file__, os.W_OK)

    for _ in _while_running(program):
        with open(os.__file__, "r+b" if writable else "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if writable:  # a record lock for writing needs a file that is open for writing
            with open(os.__file__, "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@confined
@whole
def test_a_program_changes_no_times_of_devices() -> None:
    """Devices are files of the host that a program may write to."""
    before = [os.stat(f"/dev/{name}").st_mtime_ns for name in ("null", "zero")]

    run_all([program for name, program in PROGRAMS.items() if "times of a device" in name])

    assert [os.stat(f"/dev/{name}").st_mtime_ns for name in ("null", "zero")] == before


@confined
@whole
def test_a_crash_starts_no_program_of_the_host() -> None:
    """The limit of core files is 1, which core(5) defines as neither a file nor a collector; it cannot be changed."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("core files are already off here")
    check = "import resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)"

    assert run_all([check, PROGRAMS["escapes: core files"]]) == [Outcome(True), Outcome(False, "ValueError")]


@confined
@whole
def test_the_kernel_ends_programs_before_other_processes_if_memory_runs_out() -> None:
    """The score of a program and of its sandbox is the highest there is."""
    marker = f"mtbench-score-{os.getpid()}"
    scores = set()
    program = f"import os\nif not os.fork():\n    os.execv('/usr/bin/sleep', [{marker!r}, '1'])\nos.wait()"
    for _ in _while_running(program):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "cmdline").read_bytes().startswith(marker.encode()):
                    scores.add((folder / "oom_score_adj").read_text().strip())
            except OSError:  # the process has ended meanwhile
                pass

    assert scores == {"1000"}


@confined
@whole
def test_lower_limits_of_the_user_remain() -> None:
    """Where the user may open fewer files than a program, or have fewer pending signals, the program starts."""
    programs = ["x = 1", "y = [open('/dev/null') for _ in range(45)]"]
    code = f"from mtbench.evaluation.sandbox import run_all\nprint(run_all({programs!r}))"
    command = ["bash", "-c", 'ulimit -n 40 && ulimit -i 100 && exec "$@"', "bash", sys.executable, "-c", code]

    output = subprocess.run(command, capture_output=True, text=True).stdout

    assert output == f"{[Outcome(True), Outcome(False, 'OSError')]}\n"


@confined
@whole
def test_a_signal_to_the_group_of_a_program_does_not_reach_the_judge() -> None:
    """A program that kills all that it can reach fails alone."""
    kill = f"import os, signal\nos.killpg(0, {int(signal.SIGKILL)})"

    assert [o.passed for o in run_all(["x = 1", kill, CALL + "call(number(62, 129), -1, 9)", "x = 1"])] == [
        True,
        False,
        False,
        True,
    ]
