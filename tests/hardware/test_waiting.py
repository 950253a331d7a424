"""How threads wait for each other: chosen by the load of other programs, before torch is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtbench.hardware import machine

COMMANDS = (
    "run",
    "gate --base A --head B",
    "generate DIR --plugin p.py",
    "serve --method ar",
    "train mars",
    "train --recipe tiny",
)
LOOK = """
import os, sys
from mtbench.cli import main
from mtbench.hardware import machine

def looked(seconds):
    os.write(1, b"%d " % ("torch" in sys.modules))
    os._exit(0)

machine.load_of_others = looked
for command in sys.argv[1:]:
    if not os.fork():
        sys.argv = ["mtbench", *command.split()]
        main.main()
    os.wait()
"""


@pytest.mark.parametrize(
    ("load", "given", "sessions", "chosen"),
    [
        (0.1, {}, None, ""),
        (0.5, {}, None, machine.PASSIVE),
        (0.5, {"GOMP_SPINCOUNT": "1000"}, None, "GOMP_SPINCOUNT=1000"),  # a user's own choice
        (0.1, {}, [{"waiting": machine.PASSIVE}, {"waiting": ""}], machine.PASSIVE),  # that of the run to be resumed
        (0.5, {}, [{"waiting": ""}], ""),
        (0.5, {}, [{}], ""),  # a run of an older release, whose threads did not sleep
        (0.5, {}, [], machine.PASSIVE),  # nothing ran yet
        (0.5, {machine.SEEN: "0.01"}, None, ""),  # a child of a command that chose
    ],
)
def test_threads_wait_passively_beside_other_programs(
    load: float,
    given: dict[str, str],
    sessions: list[dict[str, str]] | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(machine, "load_of_others", lambda seconds: (load, 0.0))
    if sessions is not None:
        plan = tmp_path / "plans" / "base"  # a gate's run
        plan.mkdir(parents=True)
        (plan / "environment.json").write_text(json.dumps({"sessions": sessions}))
    machine.choose_waiting(tmp_path)
    assert machine.waiting() == chosen


def test_a_program_that_has_imported_torch_keeps_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp has read its variables. Processes that it starts do alike."""
    monkeypatch.setattr(os, "environ", {})
    machine.choose_waiting()
    assert os.environ == {machine.SEEN: ""}
    assert "waiting" not in machine.environment([])


def test_commands_look_before_they_import_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != machine.SEEN}
    done = subprocess.run([sys.executable, "-c", LOOK, *COMMANDS], env=environment, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["0"] * len(COMMANDS), "")
