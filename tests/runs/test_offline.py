"""`--offline`: every suite whose data are in a folder runs without network access.

An audit hook, in the process and in all Python processes that it starts, records and refuses every DNS request and
every connection to another machine. It does not see libraries that open sockets without Python.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtbench.evaluation.registry import SUITES

pytestmark = pytest.mark.whole

REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with the suites' data")

# Suites without data in MTBENCH_DATA_DIR, and why.
WITHOUT_DATA = {
    "gpqa": "the user must get the authors' archive",
    "gpqa-paper": "the user must get the authors' archive",
    "speed-bench": "the user must run NVIDIA's script, under NVIDIA's licence",
    **dict.fromkeys(
        ("math500", "aime25", "mbpp", "mbpp-deepspec", "livecodebench", "alpaca", "arena-hard"), "not copied"
    ),
    "prompts": "the user's own file",
    "synthetic": "needs no data and no chat template",
}
WITH_DATA = [name for name in SUITES if name not in WITHOUT_DATA]

GUARD = '''
import sys

LOG = {log!r}
LOOPBACK = {{None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1", b"::1", b""}}


def host_of(event, args):
    """Return the host of the event; None if it stays on this machine."""
    if event in ("socket.connect", "socket.sendto", "socket.bind", "socket.sendmsg"):
        address = args[1]
        return address[0] if isinstance(address, tuple) else None
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        return args[0]
    return None


def forbid(event, args):
    if event.startswith("socket.") and (host := host_of(event, args)) not in LOOPBACK:
        with open(LOG, "a") as log:
            print(event, host, file=log)
        raise OSError(f"the network is forbidden: {{event}} {{host}}")


sys.addaudithook(forbid)
'''


class OfflinePython:
    """Runs Python without network access, and records every attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "attempts"
        guard = folder / "guard"
        guard.mkdir()
        (guard / "sitecustomize.py").write_text(GUARD.format(log=str(self.log)))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))},
            "PYTHONPATH": str(guard),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HOME": str(folder / "hub"),
        }

    def run(self, arguments: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def attempts(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def offline(tmp_path: Path) -> OfflinePython:
    return OfflinePython(tmp_path)


@pytest.mark.parametrize(
    ("code", "attempts"),
    [
        ("import urllib.request as u; u.urlopen('http://example.org')", "socket.getaddrinfo example.org\n"),
        ("import socket; socket.create_connection(('192.0.2.1', 80))", "socket.getaddrinfo 192.0.2.1\n"),
        ("import socket; socket.socket().connect(('192.0.2.1', 80))", "socket.connect 192.0.2.1\n"),
        (
            "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))",
            "socket.sendto 192.0.2.1\n",
        ),
        (
            "import subprocess, sys; code = 'import socket; socket.gethostbyname(\"example.org\")'\n"
            "sys.exit(subprocess.run([sys.executable, '-c', code]).returncode)",
            "socket.gethostbyname example.org\n",
        ),
    ],
    ids=["url", "connection", "connect", "datagram", "child"],
)
def test_every_network_access_is_recorded(code: str, attempts: str, offline: OfflinePython) -> None:
    """It fails, and the record exists even if the program catches the error."""
    assert offline.run(["-c", code], 60).returncode == 1
    assert offline.attempts == attempts


def test_the_loopback_device_is_allowed(offline: OfflinePython) -> None:
    """Processes of one machine may communicate."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"

    assert offline.run(["-c", code], 60).returncode == 0
    assert offline.attempts == ""


def test_every_suite_is_tested_or_has_a_reason() -> None:
    """A new suite also runs offline, or WITHOUT_DATA has a reason."""
    assert set(WITHOUT_DATA) <= set(SUITES)
    assert WITH_DATA


PLAN_AND_SCORE = """
import sys
from mtbench.runs.plan import RunRequest
from mtbench.runs.prompts import open_suite
from mtbench.runs.planner import make_plan
from mtbench.evaluation.registry import SUITES

for name in sys.argv[2:]:
    request = RunRequest(suite=[name], family="tiny", method=["ar"], subtask=SUITES[name].subtasks[-1:], limit=1,
                    max_new_tokens=4, data_dir=sys.argv[1], offline=True, skip_unscorable=True)
    items = [item.item for item in make_plan(request).suites[0].items]
    suite = open_suite(name, request)
    scores = suite.score(dict.fromkeys(items, "I do not know.")) if suite.metric else dict.fromkeys(items)
    print(name, *scores.values())
"""


@pytest.mark.slow
@real
def test_suites_plan_and_score_offline(offline: OfflinePython) -> None:
    """Each suite with data plans one item (of one subtask) and scores a wrong answer 0."""
    process = offline.run(["-c", PLAN_AND_SCORE, str(REAL), *WITH_DATA], 300)

    assert process.returncode == 0, process.stderr
    scores_of = {name: scores for name, *scores in map(str.split, process.stdout.splitlines())}
    assert list(scores_of) == WITH_DATA
    assert all(set(scores) == {"0.0" if SUITES[name].metric else "None"} for name, scores in scores_of.items())
    assert offline.attempts == ""


@real
@pytest.mark.slow
def test_suites_run_offline(offline: OfflinePython) -> None:
    """One run of all suites, from prompts to the report: every cell is ok, without network access."""
    arguments = [
        "run",
        *(word for name in WITH_DATA for word in ("--suite", name)),
        "--family",
        "tiny",
        "--method",
        "ar",
    ]
    arguments += ["--limit", "1", "--rounds", "1", "--batch-size", "4", "--max-new-tokens", "4", "--skip-unscorable"]
    process = offline.run(["-m", "mtbench", *arguments, "--offline", "--data-dir", str(REAL), "-o", "run"], 550)

    assert process.returncode == 0, process.stderr
    cells = json.loads((offline.folder / "run/results.json").read_text())["cells"]
    assert {cell["suite"]: cell["status"] for cell in cells} == dict.fromkeys(WITH_DATA, "ok")
    assert (offline.folder / "run/report.html").is_file()
    assert offline.attempts == ""
