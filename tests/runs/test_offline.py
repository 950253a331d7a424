"""`--offline`: every suite whose data are in a folder runs with the network forbidden.

Forbidden: in the process and all Python processes it starts, an audit hook fails and writes down whatever would look up
a name or reach out of the machine. It does not see into libraries that open sockets without Python.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtbench.evaluation.registry import SUITES

REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with the suites' data")

# What no folder here has, or what is a file of the user's.
NOT_HERE = {
    "gpqa": "its authors' archive is the user's own",
    "gpqa-paper": "its authors' archive is the user's own",
    "speed-bench": "made by NVIDIA's script, under NVIDIA's licence",
    "prompts": "a file of the user's",
    "synthetic": "needs no data, and exact lengths of no template",
}
HERE = [name for name in SUITES if name not in NOT_HERE]

GUARD = '''
import sys

LOG = {log!r}
LOOPBACK = {{None, "", "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1", b"::1", b""}}


def host_of(event, args):
    """Whom the event would reach; None: nobody beyond this machine."""
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


class Forbidden:
    """Runs Python without a network, and knows what was tried all the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "tried"
        guard = folder / "guard"
        guard.mkdir()
        (guard / "sitecustomize.py").write_text(GUARD.format(log=str(self.log)))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))},
            "PYTHONPATH": str(guard),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HOME": str(folder / "hub"),
        }

    def run(self, said: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *said],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    @property
    def tried(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def forbidden(tmp_path: Path) -> Forbidden:
    return Forbidden(tmp_path)


@pytest.mark.parametrize(
    ("code", "tried"),
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
def test_whoever_reached_out_would_be_found(code: str, tried: str, forbidden: Forbidden) -> None:
    """It fails, and it is written down even where the failure is swallowed."""
    assert forbidden.run(["-c", code], 60).returncode == 1
    assert forbidden.tried == tried


def test_loopback_is_not_the_network(forbidden: Forbidden) -> None:
    """Processes of one machine may talk to each other."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"

    assert forbidden.run(["-c", code], 60).returncode == 0
    assert forbidden.tried == ""


def test_every_suite_is_here_or_said_not_to_be() -> None:
    """A new suite is run offline too, or has a reason not to be."""
    assert set(NOT_HERE) <= set(SUITES)
    assert HERE


PLAN_AND_SCORE = """
import sys
from mtbench.runs.plan import RunRequest
from mtbench.runs.prompts import open_suite
from mtbench.runs.planner import make_plan
from mtbench.evaluation.registry import SUITES

for name in sys.argv[2:]:
    asked = RunRequest(suite=[name], family="tiny", method=["ar"], subtask=SUITES[name].subtasks[-1:], limit=1,
                    max_new_tokens=4, data_dir=sys.argv[1], offline=True, skip_unscorable=True)
    items = [item.item for item in make_plan(asked).suites[0].items]
    suite = open_suite(name, asked)
    scores = suite.score(dict.fromkeys(items, "I do not know.")) if suite.metric else dict.fromkeys(items)
    print(name, *scores.values())
"""


@real
def test_suites_plan_and_score_offline(forbidden: Forbidden) -> None:
    """Of every suite whose data are here an item (of one subtask) is planned, and a wrong answer scored 0."""
    ran = forbidden.run(["-c", PLAN_AND_SCORE, str(REAL), *HERE], 300)

    assert ran.returncode == 0, ran.stderr
    said = {name: rest for name, *rest in map(str.split, ran.stdout.splitlines())}
    assert list(said) == HERE
    assert all(set(scores) == {"0.0" if SUITES[name].metric else "None"} for name, scores in said.items())
    assert forbidden.tried == ""


@real
@pytest.mark.slow
def test_suites_run_offline(forbidden: Forbidden) -> None:
    """One command over all of them, from prompts to a page: every cell ok, and nobody was asked."""
    asked = ["run", *(word for name in HERE for word in ("--suite", name)), "--family", "tiny", "--method", "ar"]
    asked += ["--limit", "1", "--rounds", "1", "--batch-size", "4", "--max-new-tokens", "4", "--skip-unscorable"]
    ran = forbidden.run(["-m", "mtbench", *asked, "--offline", "--data-dir", str(REAL), "-o", "run"], 550)

    assert ran.returncode == 0, ran.stderr
    cells = json.loads((forbidden.folder / "run/results.json").read_text())["cells"]
    assert {cell["suite"]: cell["status"] for cell in cells} == dict.fromkeys(HERE, "ok")
    assert (forbidden.folder / "run/report.html").is_file()
    assert forbidden.tried == ""


@real
@pytest.mark.slow
def test_a_bundle_of_all_suites_runs_offline(forbidden: Forbidden) -> None:
    """Fetched into one file from the folder, run from that file alone: the same prompts."""
    specs = [word for name in HERE for word in ("--suite", name)]
    asked = [*specs, "--family", "tiny", "--offline", "--skip-unscorable"]
    fetched = forbidden.run(["-m", "mtbench", "fetch", *asked, "--data-dir", str(REAL), "--bundle", "all.tar"], 300)
    assert fetched.returncode == 0, fetched.stderr
    prompts: list[Any] = []
    for place in (["--bundle", "all.tar"], ["--data-dir", str(REAL)]):
        how = ["--method", "ar", "--limit", "1", "--max-new-tokens", "4", "-o", out := f"plan{len(prompts)}"]
        planned = forbidden.run(["-m", "mtbench", "plan", *asked, *how, *place], 300)
        assert planned.returncode == 0, planned.stderr
        prompts.append(json.loads((forbidden.folder / out / "plan.json").read_text())["suites"])

    assert prompts[0] == prompts[1]
    assert forbidden.tried == ""
