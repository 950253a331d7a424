"""Programs that mean harm get nothing, and cost nobody but themselves anything; honest ones pass.

All of tests/hostile.py runs at once, with honest programs in between. Where there is no sandbox this is skipped, but
not where the environment variable CI is set.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile import PROGRAMS

from mtbench.errors import UserError
from mtbench.evaluation import sandbox
from mtbench.evaluation.sandbox import Limits, Outcome, run_all, unavailable
from mtbench.evaluation.seccomp import filter_for

confined = pytest.mark.skipif(
    bool(unavailable()) and not os.environ.get("CI"), reason=f"no sandbox on this machine: {unavailable()}"
)
LIMITS = Limits(cpu_s=1, wall_s=1.5, memory_bytes=2**28)
HONEST = """
import math, os, random, tempfile
assert os.listdir() == []  # nobody was here before
with tempfile.TemporaryFile() as file:
    file.write(b"mine")
print(math.pi, random.random())
"""
EVERY = 8  # hostile programs to an honest one
SECRET = "what no program may see"
VARIABLE = "MTBENCH_TEST_SECRET"
MARKER = f"mtbench-outlives-{os.getpid()}"


@dataclass(frozen=True)
class Aftermath:
    outcomes: dict[str, Outcome]
    honest: list[Outcome]
    secret: str
    connections: int


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    """What became of everybody, and of what they were after."""
    folder = tmp_path_factory.mktemp("after")
    folder.chmod(0o755)
    secret = folder / "mtbench secret.txt"
    secret.write_text(SECRET)
    secret.chmod(0o666)
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(VARIABLE, SECRET)
        servers = [stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, *[socket.AF_UNIX] * 2)]
        addresses: list[Any] = [("127.0.0.1", 0), os.path.relpath(folder / "unix"), f"\0mtbench-{os.getpid()}"]
        for server, address in zip(servers, addresses, strict=True):
            server.bind(address)
            server.listen()
            server.setblocking(False)
        needed = {part for path in sandbox._needed() for part in path.parts}
        names = {
            "HOME": str(Path.home()),
            "HOME_NAMES": sorted({path.name for path in Path.home().iterdir()} - needed),
            "PROJECT": str(Path(__file__).parents[2]),
            "SECRET": str(secret),
            "VARIABLE": VARIABLE,
            "PORT": servers[0].getsockname()[1],
            "UNIX": str(folder / "unix"),
            "ABSTRACT": addresses[2],
            "PID": os.getpid(),
            "MARKER": MARKER,
        }
        before = "; ".join(f"{name} = {value!r}" for name, value in names.items())
        programs = []
        for number, program in enumerate(PROGRAMS.values()):
            programs += [f"{before}\n{program}", *([HONEST] if number % EVERY == 0 else [])]
        outcomes = run_all(programs, limits=LIMITS)
        hostile = [outcome for outcome, program in zip(outcomes, programs, strict=True) if program is not HONEST]
        honest = [outcome for outcome, program in zip(outcomes, programs, strict=True) if program is HONEST]
        yield Aftermath(
            dict(zip(PROGRAMS, hostile, strict=True)), honest, secret.read_text(), sum(map(_accepted, servers))
        )


def _accepted(server: socket.socket) -> int:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return 0
    return 1


def running(marker: str) -> int:
    """How many processes of this machine go by a name."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            commands.append(file.read_bytes())
    return sum(command.startswith(marker.encode()) for command in commands)


def all_gone(marker: str) -> bool:
    """Nobody goes by that name any more, or in half a second."""
    deadline = time.monotonic() + 0.5
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running(marker)


@confined
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_gets_nothing(name: str, aftermath: Aftermath) -> None:
    """It would have passed, had it got what it was after."""
    outcome = aftermath.outcomes[name]

    assert not outcome.passed
    assert outcome.reason
    assert len(outcome.reason) < 100
    assert outcome.reason.isprintable()


@confined
def test_hostile_programs_fail_for_what_they_are_after(aftermath: Aftermath) -> None:
    """Not because they are badly written: none fails by a name, a syntax or a type that it did not mean."""
    slips = {"NameError", "SyntaxError", "TypeError", "AttributeError", "ImportError", "IndentationError", "ValueError"}
    found = {name: o.reason for name, o in aftermath.outcomes.items() if o.reason in slips}

    assert found == {
        "exhausts: a deep expression": "SyntaxError",
        "forges: exit": "NameError",
        "forges: quit": "NameError",
        "forges: syntax": "SyntaxError",
        "forges: indentation": "IndentationError",
        "forges: no text": "SyntaxError",
        "forges: a return": "SyntaxError",
    }


@confined
def test_honest_programs_pass_beside_them(aftermath: Aftermath) -> None:
    """A fork bomb, a full disk or a loop costs its own item only, and nobody finds another's files."""
    assert len(PROGRAMS) >= 60
    assert set(aftermath.honest) == {Outcome(True)}


@confined
def test_nothing_outside_was_touched(aftermath: Aftermath) -> None:
    """The file is as it was; no server was connected to; no process is left."""
    assert aftermath.secret == SECRET
    assert aftermath.connections == 0
    assert all_gone(MARKER)
    assert not Path("/usr/mtbench_hostile").exists()
    assert not (Path.home() / "mtbench_hostile").exists()


@confined
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exhausts: an endless loop", "timeout"),
        ("exhausts: sleep", "timeout"),
        ("exhausts: memory", "MemoryError"),
        ("exhausts: forks, counted", "BlockingIOError"),
        ("exhausts: one large file", "OSError"),
        ("exhausts: a broken pointer", "killed by SIGSEGV"),
        ("exhausts: output to every file", "wrote to its judge"),
        ("forges: os._exit", "ended before its last line"),
        ("forges: sys.exit", "SystemExit"),
        ("forges: an exception that lies", "ended before its last line"),
        ("reads: passwd", "FileNotFoundError"),
        ("writes: system folder", "OSError"),
        ("connects: loopback", "PermissionError"),
    ],
)
def test_a_failure_says_why(name: str, reason: str, aftermath: Aftermath) -> None:
    """The limit, the exception or the signal that ended it."""
    assert aftermath.outcomes[name].reason == reason


@confined
@pytest.mark.parametrize(
    "program",
    [
        "",
        "import numpy\nassert numpy.ones(3).sum() == 3",
        "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
        "from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(2).map(abs, [-1])) == [1]",
        "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout",
        "try:\n    input()\nexcept EOFError:\n    pass\nelse:\n    assert False",
        "assert __name__ != '__main__'",
        "x = 'é\u2028'\nassert len(x) == 2",
        "import sys\nassert sys.argv == ['']",
        "open('a', 'w').write('x' * 2**20)\nassert len(open('a').read()) == 2**20",
        "import os\nif not os.fork():\n    os._exit(1)\nos.wait()",
    ],
    ids=["empty", "numpy", "asyncio", "threads", "child", "input", "name", "text", "argv", "files", "fork"],
)
def test_what_an_honest_program_needs_is_there(program: str) -> None:
    """Packages, threads, children, files of its own; no input; and it is no main program, as for `code_eval`."""
    assert run_all([program]) == [Outcome(True)]


@confined
def test_an_older_bubblewrap_gives_no_folder_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.8 it cannot limit a folder's size: programs run all the same, and can write nothing."""
    monkeypatch.setattr(sandbox, "_knows", lambda option: False)

    assert run_all(["x = 1", "open('x', 'w')"]) == [Outcome(True), Outcome(False, "OSError")]


@confined
def test_programs_run_at_the_same_time_and_in_order() -> None:
    """Four that wait for half a second take less than two; outcomes come in the order of the programs."""
    began = time.monotonic()
    outcomes = run_all(["import time\ntime.sleep(0.5)", "import time\ntime.sleep(0.5)\nraise KeyError"] * 2)

    assert [outcome.reason for outcome in outcomes] == ["", "KeyError", "", "KeyError"]
    if (os.cpu_count() or 1) > 1:
        assert time.monotonic() - began < 2.0 + 2.0


@confined
def test_programs_die_with_us() -> None:
    """Killed outright, the judge takes its programs with it."""
    marker = f"mtbench-orphan-{os.getpid()}"
    program = f"import os\nos.execv('/usr/bin/sleep', [{marker!r}, '60'])"
    code = (
        f"from mtbench.evaluation.sandbox import run_all, Limits\nrun_all([{program!r}] * 2, limits=Limits(wall_s=60))"
    )
    judge = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not running(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(marker)
    finally:
        judge.send_signal(signal.SIGKILL)
        judge.wait()

    assert all_gone(marker)


# --- Without a sandbox --------------------------------------------------------------------------------------------


def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the package and the flag; nothing runs."""
    monkeypatch.setenv("PATH", "")
    unavailable.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^[^\n]*`apt install bubblewrap`[^\n]*--allow-unsandboxed-code[^\n]*$"):
            run_all(["1"])
    finally:
        unavailable.cache_clear()


@confined
def test_a_sandbox_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What bubblewrap complains of is passed on, with what to allow."""
    real = subprocess.run(["sh", "-c", "command -v bwrap"], capture_output=True, text=True).stdout.strip()
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --help ] && exec {real} --help\necho "bwrap: No permissions" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    unavailable.cache_clear()
    try:
        assert "bwrap: No permissions" in (reason := unavailable() or "")
        assert "user namespaces" in reason
        assert "\n" not in reason
    finally:
        unavailable.cache_clear()


def test_unsandboxed_programs_are_judged_alike(tmp_path: Path) -> None:
    """When told to: limits on time and memory, no environment, a folder of their own, and nothing left behind."""
    marker = f"mtbench-unconfined-{os.getpid()}"
    programs = {
        "x = 1": "",
        "assert False": "AssertionError",
        "import sys\nsys.exit(0)": "SystemExit",
        "import os\nos._exit(0)": "ended before its last line",
        "while True: pass": "timeout",
        "import time\ntime.sleep(60)": "timeout",
        "x = bytearray(2**33)": "MemoryError",
        "import os\nassert not os.listdir() and 'PATH' not in os.environ": "",
        f"import os\nif not os.fork(): os.execv('/bin/sleep', [{marker!r}, '60'])": "",
    }
    outcomes = run_all(list(programs), unsandboxed=True, limits=LIMITS)

    assert [outcome.reason for outcome in outcomes] == list(programs.values())
    assert all_gone(marker)


@pytest.mark.parametrize(("machine", "known"), [("x86_64", True), ("aarch64", True), ("riscv64", False)])
def test_the_filter_is_for_machines_whose_numbers_are_known(machine: str, known: bool) -> None:
    """Elsewhere there is none, rather than one that refuses other calls."""
    code = filter_for(machine)

    assert (code is not None) == known
    assert code is None or len(code) % 8 == 0
