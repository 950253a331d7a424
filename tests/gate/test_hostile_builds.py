"""Builds that misbehave: each ends in a word or in one line of error, and leaves no process behind."""

import os
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_build import build
from fake_gate import a_gate
from living import is_alive
from thinned import one_in

from mtbench.errors import UserError
from mtbench.experiments.gate.format import Gate

pytest_plugins = ["gate_fixtures"]
FLOOD = "import os\nfor _ in range(40): os.write({}, b'\\xff\\x1b[2J' * 1000 + b'\\n')"


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Return what `action` returns; fail if it takes longer."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return done[0]


@pytest.mark.parametrize("stream", [1, 2])
def test_output_beyond_a_pipe_stops_no_process(gate: Callable[..., Gate], stream: int) -> None:
    """Of `plan`, `generate`, and at a turn; it is not text."""
    flood = FLOOD.format(stream)
    faults = {"plan_code": flood, "code": flood, "turn_code": flood}
    assert within(60, lambda: gate(**faults, asked={"interleave": True, "pairs": 2, "counts_only": False})).pairs == 2


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


@pytest.mark.parametrize(
    ("file", "stage"),
    one_in(
        3, product(["timings/x.jsonl", "generations/x.jsonl", "failures.jsonl", "memory.json"], ["not timed", "timed"])
    ),
)
def test_a_head_that_writes_what_cannot_be_read_fails(gate: Callable[..., Gate], stage: str, file: str) -> None:
    """It is head's fault, not a mistake of the user."""
    code = f"""
import atexit
if {stage}:
    atexit.register(lambda: (run / {file!r}).write_text('[1,\\n'))
"""
    broken = gate(code=code, asked={"pairs": 2})
    assert broken.word == "FAIL"
    assert "mtbench generate of head wrote what cannot be read: " in broken.reason
    assert file in broken.reason


def test_a_process_of_a_build_reads_no_input(gate: Callable[..., Gate]) -> None:
    within(60, lambda: gate(code="import sys; sys.stdin.read()", asked={"counts_only": True}))


@pytest.mark.parametrize(
    "text", one_in(3, ["{", "[]", "{}", '{"processor": 1, "platform": "a"}', "[" * 100_000, "\\xff"])
)
def test_an_environment_of_another_kind(gate: Callable[..., Gate], text: str) -> None:
    code = f"(out / 'environment.json').write_bytes({text.encode()!r})"
    with pytest.raises(UserError, match=r"the plan of head \(head\) cannot be read: .*environment\.json"):
        gate(plan_code=code)


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


def test_an_interrupt_while_a_process_starts_is_kept(tmp_path: Path, plan: Path) -> None:
    """A fork with hooks would lose it: Python ignores an exception in a hook, and the gate would go on to its end."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    own = build(tmp_path / "base", plan)
    a_gate(tmp_path / "gate", own, own, counts_only=True).run()
    assert not forks


def test_a_process_that_removes_its_folder(gate: Callable[..., Gate]) -> None:
    code = "import os, shutil; shutil.rmtree(run); os._exit(0)"
    with pytest.raises(UserError, match=r"cannot write .*exact/head: No such file"):
        gate(code=code, asked={"counts_only": True})
