"""The server of a serving engine, for one arm: what it answers, when it runs, and how it ends."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import in_process
from living import is_alive, until
from scripted_engine import scripted_server

from mtbench.clients import engine_server
from mtbench.clients.openai_client import ServerError
from mtbench.clients.openai_data import Reply
from mtbench.decoding.external import Speculation
from mtbench.decoding.request import Request
from mtbench.programs import processes

PYTHON = Path(sys.executable)
REQUESTS = [Request(prompt_ids=[1, 2, 3], max_new_tokens=6), Request(prompt_ids=[4], max_new_tokens=4)]
# starts a server, says the processes of its group, and waits to be killed
COMMAND = """
import sys, time
from pathlib import Path
from living import until
from scripted_engine import scripted_server
from mtbench.decoding.request import Request
server = scripted_server(Path(sys.executable), Path(sys.argv[1]), child=sys.argv[2])
server.generate([Request(prompt_ids=[1], max_new_tokens=2)], ignore_eos=True)
print(server._group, flush=True)
time.sleep(1000)
"""


def state(pid: int) -> str:
    """A process's state: T is stopped; empty: it is not there."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


def test_tokens_are_those_of_the_server_and_forwards_are_what_no_draft_gave(tmp_path: Path) -> None:
    server = scripted_server(PYTHON, tmp_path / "log", accepted=3, counted=6)
    try:
        found = server.generate(REQUESTS[:1], ignore_eos=True)
    finally:
        server.close()
    assert found.token_ids == [[6, 7, 8, 9, 10, 11]]
    assert found.forwards == [3]
    assert found.prepared, "the first call starts the server"
    assert found.speculation is not None
    assert (found.speculation.drafted, found.speculation.accepted) == (8, 3)


@pytest.mark.parametrize("accepted", [6, 7])
def test_accepted_drafts_behind_the_end_token_hide_no_forward(accepted: int, tmp_path: Path) -> None:
    """Six tokens, of two drafts: the prefill, and a forward for each draft. Without their number there is no count."""
    server = scripted_server(PYTHON, tmp_path / "log")
    for drafts, forwards in ((2, [3]), (None, None)):
        told = Speculation(drafts, 8, accepted, None, "a test")
        assert server._forwards([Reply(counted=6, speculation=told)]) == forwards


def test_plain_decoding_has_a_forward_for_each_token(tmp_path: Path) -> None:
    server = scripted_server(PYTHON, tmp_path / "log", name="")
    try:
        assert server.generate(REQUESTS, ignore_eos=True).forwards == [6, 4]
    finally:
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_runs_only_while_it_is_asked(tmp_path: Path) -> None:
    """Its children are stopped with it. Asked again, it answers."""
    child = tmp_path / "child"
    server = scripted_server(PYTHON, tmp_path / "log", child=str(child))
    try:
        first = server.generate(REQUESTS, ignore_eos=True)
        assert server._group is not None
        pids = [server._group, int(child.read_text())]
        assert until(lambda: [state(pid) for pid in pids] == ["T", "T"])
        again = server.generate(REQUESTS, ignore_eos=True)
        assert (again.token_ids, again.prepared) == (first.token_ids, False)
    finally:
        server.close()
    assert until(lambda: not any(state(pid) for pid in pids)), "a stopped server and its child end with it"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"at_start": "no such model"}, "the server of 'arm' did not start: no such model. See "),
        ({"crash": "out of memory"}, "the server of 'arm' ended: Fatal: out of memory. See "),
    ],
    ids=["at start", "in a block"],
)
def test_a_server_that_ends_is_named_with_its_last_words_and_its_log(
    script: dict[str, str], message: str, tmp_path: Path
) -> None:
    server = scripted_server(PYTHON, tmp_path / "log", **script)
    with pytest.raises(ServerError, match=message):
        server.generate(REQUESTS, ignore_eos=True)
    server.close()


def test_a_flooded_log_is_bounded_and_ends_with_the_last_words(tmp_path: Path) -> None:
    server = scripted_server(PYTHON, tmp_path / "log", floods=40, crash="out of memory")
    with pytest.raises(ServerError, match=r"'arm' ended: Fatal: out of memory\. See "):
        server.generate(REQUESTS[:1], ignore_eos=True)
    assert (tmp_path / "log").stat().st_size < 32 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_another_server_on_the_port_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It answers first. This server cannot have the port, ends, and says why."""
    other = scripted_server(PYTHON, tmp_path / "other")
    other.start()
    monkeypatch.setattr(engine_server, "_free_port", lambda: int(other.url.rpartition(":")[2].removesuffix("/v1")))
    server = scripted_server(PYTHON, tmp_path / "log")
    try:
        with pytest.raises(ServerError, match=r"'arm' did not start: OSError: .* Address already in use"):
            server.start()
    finally:
        other.close()


@pytest.mark.parametrize("hangs", ["at start", "in a block"])
def test_a_server_that_hangs_is_given_up_after_a_bounded_time(
    hangs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_server, "READY_S", 0.5 if hangs == "at start" else 30.0)
    monkeypatch.setattr(engine_server, "SILENCE_S", 0.2)
    monkeypatch.setattr(engine_server, "TOTAL_S", 0.5)
    server = scripted_server(PYTHON, tmp_path / "log", hangs=hangs)
    started_at = time.monotonic()
    try:
        with pytest.raises(ServerError, match=str(tmp_path / "log")):
            server.generate(REQUESTS, ignore_eos=True)
    finally:
        server.close()
    assert time.monotonic() - started_at < (5 if hangs == "at start" else 20), "nothing is to be drained at start"
    assert not [*tmp_path.glob("*.group*")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_server, "DRAIN_S", 0.2)
    child = tmp_path / "child"
    server = scripted_server(PYTHON, tmp_path / "log", child=str(child), ignores_sigterm=True)
    server.generate(REQUESTS, ignore_eos=True)
    assert server._group is not None
    pids = [server._group, int(child.read_text())]
    server.close()
    assert until(lambda: not any(state(pid) not in ("", "Z") for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("forks")
def test_no_process_of_an_engine_survives_a_kill_of_mtbench(tmp_path: Path) -> None:
    """The server is stopped when its caller is killed by SIGKILL. It ends, and so does the child that it started."""
    child = tmp_path / "child"
    caller = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path / "log"), str(child)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert caller.stdout is not None
    pids = [int(caller.stdout.readline()), int(child.read_text())]
    assert all(map(state, pids))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    assert until(lambda: not any(state(pid) not in ("", "Z") for pid in pids))


def test_a_server_that_the_memory_does_not_hold_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 4096)
    monkeypatch.setattr(engine_server, "available_memory_bytes", lambda: 4095)
    server = scripted_server(PYTHON, tmp_path / "log")
    server.serving = dataclasses.replace(server.serving, model=str(tmp_path))
    with pytest.raises(ServerError, match=r"the server of 'arm' needs 0\.0 GiB .* run fewer arms at a time"):
        server.start()
    assert not (tmp_path / "log").exists()


# a child that computes for 0.1 s of processor time and ends, then one in another session that computes on
FAMILY = """
import subprocess, sys, time
spin = [sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < float(%r): pass"]
subprocess.run([*spin[:-1], spin[-1] % "0.1"])
child = subprocess.Popen([*spin[:-1], spin[-1] % "100"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processor_time_of_a_group_is_that_of_its_children_too() -> None:
    """Of those that have ended, and of those that lead a group of their own. The group's leader only sleeps."""
    leader = subprocess.Popen(
        [sys.executable, "-S", "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    try:
        [[first, _]] = processes.processor_times([leader.pid]).values()
        assert first > 0.09
        assert until(lambda: processes.processor_times([leader.pid])[leader.pid][0] > first + 0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        leader.kill()
        leader.communicate()


# leaves its parent, which ends, and the server's group
LEAVES = """
import os, sys, time
os.setsid()
if os.fork():
    os._exit(0)
with open({!r}, "w") as file:
    file.write(str(os.getpid()))
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_leaves_its_server_is_of_this_command_and_ends_with_the_server(tmp_path: Path) -> None:
    """It would hold the GPU, as a stranger."""
    left = tmp_path / "left"
    server = scripted_server(PYTHON, tmp_path / "log", child=str(tmp_path / "child"), computes=LEAVES.format(str(left)))
    try:
        server.start()
        assert until(lambda: left.exists() and left.read_text() != "")
        pid = int(left.read_text())
        assert until(lambda: not is_alive(int((tmp_path / "child").read_text())))
        assert processes.is_ours(pid)
    finally:
        server.close()
    assert until(lambda: not is_alive(pid))


def test_a_command_is_the_ancestor_that_its_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the builds of a gate are one command. Two commands of a user are not, whatever a shell has inherited."""
    monkeypatch.delenv(processes.COMMAND, raising=False)
    assert in_process(["--version"]) == 0
    assert os.environ[processes.COMMAND] == str(os.getpid())
    assert (processes.is_ours(os.getpid()), processes.is_ours(os.getppid())) == (True, False)
    monkeypatch.setenv(processes.COMMAND, str(os.getppid()))
    assert processes.is_ours(os.getppid())
    monkeypatch.setenv(processes.COMMAND, "4194305")  # no process has this number
    assert processes.command() == os.getpid()


PYDANTIC = """pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, the draft is too long [type=value_error, input_value=ArgsKwargs(())]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""
INSPECTED = PYDANTIC.replace(
    "the draft is too long", "it failed to be inspected. Please check the logs for more details."
)

OF_CORE = "\n".join(
    [
        "(EngineCore pid=7) ERROR 11-27 01:02:03 [core.py:9] ValueError: 12.5 GiB of cache are needed, 9 GiB are free",
        *["(APIServer pid=6)   uvloop.run(run_server(args))"] * 100,
        "(Worker pid=8) Exception: WorkerProc initialization failed. See stack trace for root cause.",
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (OF_CORE, "ValueError: 12.5 GiB of cache are needed, 9 GiB are free"),
        (f"ERROR [registry.py:1120] ImportError: no torchvision\n{INSPECTED}", "ImportError: no torchvision"),
        (PYDANTIC, "ValidationError: 1 validation error for SpeculativeConfig Value error, the draft is too long"),
        (
            "0.1 E llama_model_load: error loading model: 'a' is not within the file\n0.2 E srv init: exiting\n"
            "RuntimeError: Failed to init server, please check the input params.\n",
            "error loading model: 'a' is not within the file",
        ),
        (
            "/a/server.cpp:21: GGML_ASSERT(n > 0) failed\n#1 main () at a.c:5\n[Inferior 1 (process 8) detached]\n",
            "GGML_ASSERT(n > 0) failed",
        ),
        ("ImportError: no flash_attn; another is used\nFatal: no memory.\n", "Fatal: no memory"),
        ("", ""),
    ],
)
def test_the_cause_in_a_log_is_named(tmp_path: Path, log: str, said: str) -> None:
    (file := tmp_path / "server.log").write_text(log)
    found = processes.last_line(file)
    assert said in found
    assert len(found) < len(said) + 80
