"""The sandbox: hostile programs achieve nothing and harm only themselves; what passes in `code_eval` passes here.

Hostile programs (helpers/hostile.py) run together with honest ones: one program for each kind of attack, and all of
them in `make slow`. Programs in the style of generated answers are in honest.txt. Without a sandbox these
tests are skipped, except where the environment variable CI is set.
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
from confinement import confined, programs
from hostile import KINDS, PROGRAMS, REPRESENTATIVE

from mtbench.errors import UserError
from mtbench.evaluation import sandbox
from mtbench.evaluation.sandbox import Limits, Outcome, run_all, unavailable
from mtbench.evaluation.seccomp import filter_for

pytestmark = pytest.mark.whole

LIMITS = Limits(cpu_s=1, wall_s=1.5, memory_bytes=2**28)
HONEST = """
import math, os, random, tempfile
assert os.listdir() == []  # the folder is empty
with tempfile.TemporaryFile() as file:
    file.write(b"mine")
print(math.pi, random.random())
"""
HOSTILE_PER_HONEST = 8
SECRET = "the content of the secret file"
VARIABLE = "MTBENCH_TEST_SECRET"
MARKER = f"mtbench-outlives-{os.getpid()}"


@dataclass(frozen=True)
class Aftermath:
    """The outcomes of hostile and honest programs, and the state of what the hostile ones attacked."""

    outcomes: dict[str, Outcome]
    honest: list[Outcome]
    secret: str
    connections: int


@pytest.fixture(scope="module", params=["representative", pytest.param("all", marks=pytest.mark.slow)])
def aftermath(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    """Run the hostile programs against a secret file and three servers of this process."""
    names = list(REPRESENTATIVE) if request.param == "representative" else list(PROGRAMS)
    folder = tmp_path_factory.mktemp("aftermath")
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
        interpreter_parts = {part for path in sandbox._interpreter_folders() for part in path.parts}
        definitions = {
            "HOME": str(Path.home()),
            "HOME_NAMES": sorted({path.name for path in Path.home().iterdir()} - interpreter_parts),
            "PROJECT": str(Path(__file__).parents[2]),
            "SECRET": str(secret),
            "VARIABLE": VARIABLE,
            "PORT": servers[0].getsockname()[1],
            "UNIX": str(folder / "unix"),
            "ABSTRACT": addresses[2],
            "PID": os.getpid(),
            "MARKER": MARKER,
        }
        header = "; ".join(f"{name} = {value!r}" for name, value in definitions.items())
        programs = []
        for number, name in enumerate(names):
            programs.append(f"{header}\n{PROGRAMS[name]}")
            if number % HOSTILE_PER_HONEST == 0:
                programs.append(HONEST)
        outcomes = run_all(programs, limits=LIMITS)
        hostile = [outcome for outcome, program in zip(outcomes, programs, strict=True) if program is not HONEST]
        honest = [outcome for outcome, program in zip(outcomes, programs, strict=True) if program is HONEST]
        connections = sum(map(_accepted, servers))
        yield Aftermath(dict(zip(names, hostile, strict=True)), honest, secret.read_text(), connections)


def _accepted(server: socket.socket) -> int:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return 0
    return 1


def count_running(marker: str) -> int:
    """Return how many processes of this machine have a command line that starts with `marker`."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended meanwhile
            commands.append(file.read_bytes())
    return sum(command.startswith(marker.encode()) for command in commands)


def all_ended(marker: str) -> bool:
    """Return whether no such process exists, now or within half a second."""
    deadline = time.monotonic() + 0.5
    while count_running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not count_running(marker)


def test_every_target_is_attacked_in_the_fast_tests() -> None:
    """The representative programs are 44 of over 200, and each group of attacks has one."""
    assert len(PROGRAMS) > 200
    assert len(REPRESENTATIVE) == 44
    assert {name.partition(":")[0] for name in REPRESENTATIVE} == set(KINDS)


@confined
def test_no_attack_succeeds(aftermath: Aftermath) -> None:
    """No hostile program passes, and each failure has a short printable reason."""
    passed = [name for name, outcome in aftermath.outcomes.items() if outcome.passed]
    reasons = {name: outcome.reason for name, outcome in aftermath.outcomes.items()}
    unclear = {name: text for name, text in reasons.items() if not 0 < len(text) < 100 or not text.isprintable()}

    assert passed == []
    assert unclear == {}


@confined
def test_attacks_fail_by_the_sandbox_and_not_by_mistakes_of_the_program(aftermath: Aftermath) -> None:
    """No program fails by an unintended name, syntax, type or import error."""
    mistakes = {f"{kind}Error" for kind in ("Name", "Syntax", "Type", "Attribute", "Import", "Indentation", "Value")}
    found = {name: o.reason for name, o in aftermath.outcomes.items() if o.reason in mistakes}
    intended = {
        "escapes: core files": "ValueError",  # what `resource` makes of a refusal
        "exhausts: a deep expression": "SyntaxError",
        "forges: syntax": "SyntaxError",
        "forges: a null byte": "SyntaxError",
    }

    assert found == {name: reason for name, reason in intended.items() if name in aftermath.outcomes}


@confined
def test_honest_programs_pass_beside_hostile_ones(aftermath: Aftermath) -> None:
    """A fork bomb, a full disk or an endless loop fails only its own program, and scratch folders are separate."""
    assert len(aftermath.honest) == -(-len(aftermath.outcomes) // HOSTILE_PER_HONEST)
    assert set(aftermath.honest) == {Outcome(True)}


@confined
def test_nothing_outside_the_sandbox_changes(aftermath: Aftermath) -> None:
    """The secret file is unchanged, no server got a connection, and no process is left."""
    assert aftermath.secret == SECRET
    assert aftermath.connections == 0
    assert all_ended(MARKER)
    assert not Path("/usr/mtbench_hostile").exists()
    assert not (Path.home() / "mtbench_hostile").exists()


GENERATED = programs("honest.txt")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run all honest programs at once."""
    return dict(zip(GENERATED, run_all(list(GENERATED.values())), strict=True))


@confined
@pytest.mark.parametrize("name", GENERATED)
def test_an_honest_program_passes(name: str, outcomes: dict[str, Outcome]) -> None:
    """It has packages, threads, memory, files and children; what it closes or locks does not change its result."""
    assert outcomes[name] == Outcome(True)


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
        ("exhausts: output to every file", "timeout"),
        ("forges: os._exit", "ended before its last line"),
        ("forges: sys.exit", "SystemExit"),
        ("forges: an exception without a readable name", "ended before its last line"),
        ("reads: passwd", "FileNotFoundError"),
        ("writes: system folder", "OSError"),
        ("connects: loopback", "PermissionError"),
    ],
)
def test_a_failure_has_its_reason(name: str, reason: str, aftermath: Aftermath) -> None:
    """The reason is the limit, the exception or the signal that ended the program."""
    assert aftermath.outcomes[name].reason == reason


@confined
def test_an_older_bubblewrap_gives_no_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.8 it cannot limit a folder's size: programs run, and cannot write files."""
    monkeypatch.setattr(sandbox, "_bwrap_supports", lambda option: False)

    assert run_all(["x = 1", "open('x', 'w')"]) == [Outcome(True), Outcome(False, "OSError")]


@confined
def test_programs_run_at_the_same_time_and_in_order() -> None:
    """Four programs of half a second take less than two seconds more; outcomes have the order of the programs."""
    started_at = time.monotonic()
    outcomes = run_all(["import time\ntime.sleep(0.5)", "import time\ntime.sleep(0.5)\nraise KeyError"] * 2)

    assert [outcome.reason for outcome in outcomes] == ["", "KeyError", "", "KeyError"]
    if (os.cpu_count() or 1) > 1:
        assert time.monotonic() - started_at < 2.0 + 2.0


@confined
def test_programs_die_with_their_parent() -> None:
    """Killing the process that runs the sandbox kills its programs."""
    marker = f"mtbench-orphan-{os.getpid()}"
    program = f"import os\nos.execv('/usr/bin/sleep', [{marker!r}, '60'])"
    code = (
        f"from mtbench.evaluation.sandbox import run_all, Limits\nrun_all([{program!r}] * 2, limits=Limits(wall_s=60))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not count_running(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert count_running(marker)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()

    assert all_ended(marker)


# --- Without a sandbox --------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the package and the option that runs without a sandbox; no program runs."""
    monkeypatch.setenv("PATH", "")
    unavailable.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^[^\n]*`apt install bubblewrap`[^\n]*--allow-unsandboxed-code[^\n]*$"):
            run_all(["1"])
    finally:
        unavailable.cache_clear()


@confined
def test_a_sandbox_that_cannot_start_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error quotes bubblewrap and says what to allow."""
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


def test_unsandboxed_programs_have_the_same_outcomes(tmp_path: Path) -> None:
    """They have limits on time and memory, no environment, a folder of their own, and leave no process behind."""
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
    assert all_ended(marker)


@pytest.mark.parametrize(("machine", "known"), [("x86_64", True), ("aarch64", True), ("riscv64", False)])
def test_only_known_machines_get_a_filter(machine: str, known: bool) -> None:
    """A filter with the wrong numbers would refuse other system calls."""
    code = filter_for(machine)

    assert (code is not None) == known
    assert code is None or len(code) % 8 == 0
