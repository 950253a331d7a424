"""Made-up gates: complete records, of which a test gives only what matters to it."""

import random
from typing import Any

from mtbench.experiments.gate.format import (
    BuildRecord,
    CellFloor,
    Finding,
    FloorFile,
    Gate,
    GateRequest,
    Key,
    NoiseFloor,
    TimedCell,
    TimeTest,
)

HOSTILE = "<b>&\"'\x1b[2J\u202e\x00</script><script>broken=1</script>]]>\n::error::|`$x$`%0A"
ARMS = ("ar@ar/graph", "mars:tau=0.9@mars/graph", "prompt-lookup:ahead=2@ar/graph", "medusa:tree=2x2@medusa/graph")
PACKAGES = {"torch": "2.11.0", "transformers": "5.17.1", "numpy": "2.3.4", "triton": None}


def build(label: str = "main", **given: Any) -> BuildRecord:
    values: dict[str, Any] = {
        "env": f"git:{label}",
        "label": label,
        "python": f"/cache/builds/{label}/bin/python",
        "mtbench": "0.2.0",
        "git": "4f7fb6513a355689f69f0849edeb369a4dc81729",
        "packages": PACKAGES,
        "code_sha256": None,
    }
    return BuildRecord(**values | given)


def key(**given: Any) -> Key:
    values: dict[str, Any] = {
        "gpu_uuid": "GPU-6a8e4a60-3f0c-4e0b-9d7c-0f4f7f6f2b11",
        "driver": "580.95.05",
        "power_cap_w": 700.0,
        "processor": "Intel(R) Xeon(R) Platinum 8480C",
        "kernel": "Linux-6.8.0-87-generic-x86_64-with-glibc2.39",
        "torch": "2.11.0",
        "plan_sha256": "0123456789abcdef" * 4,
    }
    return Key(**values | given)


def request(**given: Any) -> GateRequest:
    values: dict[str, Any] = {
        "base": "git:main",
        "head": "git:feature",
        "plan_arguments": ["--suite", "gsm8k", "--method", "mars:tau=0.9", "--limit", "64"],
        "max_slowdown": 2.0,
        "blocks": 8,
        "pairs": None,
        "interleave": False,
        "counts_only": False,
        "allow_changed": False,
        "allow_torch": False,
        "allow_dirty": False,
        "process_limit_s": 60.0,
        "seed": 0,
    }
    return GateRequest(**values | given)


def finding(**given: Any) -> Finding:
    values: dict[str, Any] = {"stage": "timed", "kind": "slower", "level": "fail", "cell": None, "text": "a finding"}
    return Finding(**values | given)


def time_test(change: float = 0.001, reach: float = 0.006, **given: Any) -> TimeTest:
    """A test that found a difference of `change`, with an interval of `change` ± `reach`."""
    values: dict[str, Any] = {
        "ratio": 1 + change,
        "ci_low": 1 + change - reach,
        "ci_high": 1 + change + reach,
        "fail_low": 1 + change - 1.8 * reach,
        "pass_high": 1 + change + 1.5 * reach,
        "word": "PASS",
        "pairs_needed": None,
    }
    return TimeTest(**values | given)


def timed_cell(number: int = 0, change: float = 0.001, **given: Any) -> TimedCell:
    """A cell whose pairs differ by `change` and some noise."""
    draw = random.Random(number)
    arm, size = ARMS[number % len(ARMS)], 1 if number < 4 else 8 * (number // 4)
    base = [3.0 + number + draw.gauss(0, 0.02) for _ in range(14)]
    values: dict[str, Any] = {
        "cell": f"gsm8k.{arm.split('@')[0].replace(':', '-').replace('=', '')}.graph.b{size}",
        "suite": "gsm8k",
        "arm": arm,
        "batch_size": size,
        "base_s": base,
        "head_s": [s * (1 + change + draw.gauss(0, 0.008)) for s in base],
        "test": time_test(change),
    }
    return TimedCell(**values | given)


def floor(**given: Any) -> NoiseFloor:
    cells = [CellFloor(cell=timed_cell(n).cell, pair_sd=0.008, pair_sd_high=0.0103) for n in range(2)]
    values: dict[str, Any] = {
        "key": key(),
        "measured": "2026-11-20T03:00:00Z",
        "interleave": False,
        "pairs": 12,
        "cells": cells,
    }
    return NoiseFloor(**values | given)


def floor_file() -> FloorFile:
    return FloorFile(schema_version=1, floors=[floor(), floor(key=key(gpu_uuid=None, driver=None, power_cap_w=None))])


def gate(**given: Any) -> Gate:
    """A gate that passes with four cells."""
    cells = given.pop("timed", [timed_cell(n, 0.001 * n - 0.002) for n in range(4)])
    values: dict[str, Any] = {
        "schema_version": 2,
        "word": "PASS",
        "reason": "no cell is slower by 2% or more",
        "started": "2026-11-22T09:00:00Z",
        "request": request(),
        "base": build("main"),
        "head": build("feature", git="0123456789abcdef0123456789abcdef01234567-dirty"),
        "same_build": False,
        "key": key(),
        "looks": [6, 9, 14],
        "pairs": 14 if cells else 0,
        "confirmation_pairs": 0,
        "floor": floor(),
        "findings": [],
        "compared": [cell.cell for cell in cells],
        "timed": cells,
        "all_cells": time_test(-0.0005, 0.003) if len(cells) > 1 else None,
    }
    return Gate(**values | given)


def slower() -> Gate:
    """FAIL by time, confirmed."""
    slow = timed_cell(1, 0.034, test=time_test(0.034, 0.008, word="FAIL"))
    undecided = timed_cell(2, 0.013, test=time_test(0.013, 0.012, word="INCONCLUSIVE", pairs_needed=61))
    text = "head takes 3.4% longer [2.6, 4.2] in 14 pairs, and in 9 fresh pairs too"
    return gate(
        word="FAIL",
        reason=f"{slow.cell} is slower: +3.4% [2.6, 4.2]",
        timed=[timed_cell(0, -0.004), slow, undecided, timed_cell(3, 0.002)],
        all_cells=time_test(0.011, 0.004, word="INCONCLUSIVE", pairs_needed=30),
        findings=[
            finding(cell=slow.cell, text=text),
            finding(kind="undecided", level="inconclusive", cell=undecided.cell, text="its upper bound is over 2%"),
        ],
        confirmation_pairs=9,
    )


def changed() -> Gate:
    """FAIL by tokens: nothing was timed."""
    names = [timed_cell(n).cell for n in range(3)]
    found = [
        finding(stage="exact", kind="unstable", level="note", cell=names[0], text="base disagrees with itself"),
        finding(
            stage="exact", kind="changed", cell=names[1], text="head has other tokens in 3 of 64 items, first in a/0/0"
        ),
        finding(
            stage="exact", kind="more work", cell=names[2], text="the same tokens from more work: forwards 90 → 97"
        ),
        finding(stage="comparable", kind="vanished", cell="gsm8k.echo.graph.b1", text="head plans no such cell"),
        finding(kind="not timed", level="note", text="no cell was timed, since the tokens differ"),
    ]
    reason = "2 cells have other tokens or more work, and 1 is gone"
    return gate(word="FAIL", reason=reason, timed=[], compared=names, findings=found, looks=[], floor=None)


def hostile() -> Gate:
    """Every text that a stranger may write is hostile."""
    bad = build(HOSTILE, env=HOSTILE, git=HOSTILE, mtbench=HOSTILE, packages={HOSTILE: HOSTILE})
    cell = timed_cell(1, arm=HOSTILE, suite=HOSTILE)
    return gate(
        word="FAIL",
        reason=HOSTILE,
        base=bad,
        head=bad,
        request=request(plan_arguments=[HOSTILE]),
        key=key(processor=HOSTILE, kernel=HOSTILE, driver=HOSTILE, gpu_uuid=HOSTILE),
        timed=[cell, timed_cell(2, suite="b")],
        findings=[
            finding(text=HOSTILE),
            finding(cell=cell.cell, text=HOSTILE, level="inconclusive", kind="undecided"),
            finding(stage="exact", kind="failed", cell=cell.cell, text=HOSTILE),
        ],
    )


GATES = {
    "PASS": gate,
    "FAIL by time": slower,
    "FAIL by tokens": changed,
    "one build": lambda: slower().changed(same_build=True, head=build("main")),
    "hostile": hostile,
}
