"""Builds that misbehave: each ends in a word or in one line of error, and leaves no process behind."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from living import is_alive

from mtbench.errors import UserError
from mtbench.experiments.gate.format import Gate

pytest_plugins = ["gate_fixtures"]
FLOOD = "import os\nfor _ in range(40): os.write(1, b'\\xff\\x1b[2J' * 1000 + b'\\n')"


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Return what `action` returns; fail if it takes longer."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return done[0]


def test_output_beyond_a_pipe_stops_no_process(gate: Callable[..., Gate]) -> None:
    """Of `plan`, `generate`, and at a turn; it is not text."""
    faults = {"plan_code": FLOOD, "code": FLOOD, "turn_code": FLOOD}
    assert within(60, lambda: gate(**faults, asked={"interleave": True, "pairs": 2})).pairs == 2


def test_what_a_process_leaves_alive_ends_with_it(gate: Callable[..., Gate], tmp_path: Path) -> None:
    """A child that holds the process's output would keep the gate waiting and compute beside the next one."""
    child = f"""
import subprocess
with open({str(tmp_path / "children")!r}, "a") as file:
    file.write(f"{{subprocess.Popen(['sleep', '100']).pid}}\\n")
"""
    assert within(60, lambda: gate(code=child, asked={"interleave": True, "pairs": 2})).pairs == 2
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert children
    time.sleep(0.1)
    assert not [child for child in children if is_alive(child)]


def test_a_process_that_ends_at_its_turn(gate: Callable[..., Gate]) -> None:
    """It gets no turn any more; its exit code is the reason."""
    ended = within(60, lambda: gate(turn_code="import os\nif block: os._exit(7)", asked={"interleave": True}))
    assert ended.word == "FAIL"
    assert "ended with exit code 7" in ended.reason


HANG = "__import__('time').sleep(100)"


@pytest.mark.parametrize(
    "faults",
    [
        {"code": HANG},
        pytest.param({"code": f"timed and {HANG}"}, marks=pytest.mark.slow),
        {"turn_code": f"block and {HANG}", "live": True},
    ],
    ids=["exact", "timed", "at its turn"],
)
def test_a_head_that_hangs_fails(gate: Callable[..., Gate], faults: dict[str, Any]) -> None:
    asked = {"process_limit_s": 1.5, "interleave": faults.pop("live", False)}
    ended = within(60, lambda: gate(**faults, asked=asked))
    assert ended.word == "FAIL"
    assert "mtbench generate of head did not go on within 2 s" in ended.reason


def test_of_two_that_die_at_their_turns_base_is_named(gate: Callable[..., Gate]) -> None:
    dies = "block and __import__('os')._exit(7)"
    with pytest.raises(UserError, match="base cannot decode: mtbench generate of base ended with exit code 7"):
        gate(base={"turn_code": dies}, turn_code=dies, asked={"interleave": True})


def test_a_head_that_writes_what_cannot_be_read_fails(gate: Callable[..., Gate]) -> None:
    """It is head's fault, not a mistake of the user."""
    code = "import atexit\natexit.register(lambda: (run / 'timings/x.jsonl').write_text('[1,\\n'))"
    broken = gate(code=code, asked={"pairs": 2})
    assert broken.word == "FAIL"
    assert "mtbench generate of head wrote what cannot be read: " in broken.reason
    assert "timings/x.jsonl" in broken.reason


def test_a_plan_without_cells_is_no_pass(gate: Callable[..., Gate]) -> None:
    empty = """
import json
plan = json.loads((out / "plan.json").read_text())
(out / "plan.json").write_text(json.dumps({**plan, "cells": [], "groups": []}))
"""
    with pytest.raises(UserError, match=r"the plan of base .*has no cell"):
        gate(base={"plan_code": empty}, plan_code=empty)


def test_builds_that_decode_nothing_do_not_pass(gate: Callable[..., Gate]) -> None:
    """Exit code 0 without an answer is not the same tokens."""
    nothing = "import os; os._exit(0)"
    silent = gate(base={"code": nothing}, code=nothing, asked={"counts_only": True})
    assert silent.word == "INCONCLUSIVE"
    assert "base has no answer to 4 items" in silent.reason
