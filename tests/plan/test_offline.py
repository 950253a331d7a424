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


@real
@pytest.mark.slow
def test_suites_run_offline(offline: OfflinePython) -> None:
    """One run of all suites, from prompts to the report: every cell is ok, without network access."""
    suites = [word for name in WITH_DATA for word in ("--suite", name)]
    options = "--family tiny --method ar --limit 1 --rounds 1 --batch-size 4 --max-new-tokens 4 --skip-unscorable"
    arguments = ["run", *suites, *options.split(), "--offline", "--data-dir", str(REAL), "-o", "run"]
    process = offline.run(["-m", "mtbench", *arguments], 550)

    assert process.returncode == 0, process.stderr
    cells = json.loads((offline.folder / "run/results.json").read_text())["cells"]
    assert {cell["suite"]: cell["status"] for cell in cells} == dict.fromkeys(WITH_DATA, "ok")
    assert (offline.folder / "run/report.html").is_file()
    assert offline.attempts == ""
