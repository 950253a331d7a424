"""The plan that both builds run. Each build makes its own from the same options; the two must have the same work.

A build reads and writes plan.json in its own way, so a process gets the plan of its own build, cut to the work of the
process. The cuts are made on the JSON object: fields that this mtbench does not know stay.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import RootModel

from mtbench.errors import UserError
from mtbench.experiments.gate.format import Finding, Kind, Level
from mtbench.plan.directory import JsonObject, RunDirectory
from mtbench.plan.plan import Cell, Plan, SuitePlan
from mtbench.records import LONGEST_VALUE, dump

CELL_WORK = ("method", "options", "on", "engine", "checkpoints", "batch_size", "length", "batching")
GROUP_WORK = ("blocks", "rounds")


class AnyObject(RootModel[dict[str, Any]]):
    """A JSON object of any kind."""


class Planned(NamedTuple):
    """A plan as one build wrote it."""

    plan: Plan
    stored: JsonObject  # plan.json
    machine: JsonObject  # environment.json

    @classmethod
    def read(cls, directory: Path) -> "Planned":
        """Read the plan in a run directory. Raises UserError if it cannot be read."""
        run = RunDirectory(directory)
        return cls(
            run.read("plan.json", Plan),
            run.read("plan.json", AnyObject).root,
            run.read("environment.json", AnyObject).root,
        )


def compare(base: Planned, head: Planned) -> list[Finding]:
    """Return the cells, and the options of cells, that only one of the plans has: the stage `exact` finds their effect.

    Raises UserError for the first part of the work that differs.
    """
    a, b = ({cell.cell: cell for cell in planned.plan.cells} for planned in (base, head))
    findings = [
        _finding("vanished", "fail", name, f"head plans no cell {name}: its arm {a[name].arm} is gone")
        for name in a
        if name not in b
    ]
    findings += [_finding("new", "note", name, f"base plans no cell {name}") for name in b if name not in a]
    before, after = _work(base.plan), _work(head.plan)
    for what in {**before, **after}:
        part, owner = what
        if what in before and what in after:
            if before[what] != after[what]:
                raise UserError(
                    f"the builds plan other work, so they cannot be compared: {part} of {owner}: "
                    f"{_shown(before[what])} in base, {_shown(after[what])} in head; give the options that differ."
                )
        elif part.startswith("options.") and owner in a and owner in b:
            side, value = ("head", after[what]) if what in after else ("base", before[what])
            findings.append(_finding("new", "note", owner, f"{part} is known in {side} only, where it is {value!r}"))
    return findings


def _finding(kind: Kind, level: Level, cell: str, text: str) -> Finding:
    return Finding(stage="comparable", kind=kind, level=level, cell=cell, text=text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _work(plan: Plan) -> dict[tuple[str, str], Any]:
    """Return the work of a plan by part and owner, such as `options.tau` of a cell."""
    work: dict[tuple[str, str], Any] = {("digest of prompts", suite.suite): _prompts(suite) for suite in plan.suites}
    for group in plan.groups:
        owner = f"{group.suite} at batch size {group.batch_size}, {group.batching}"
        work |= {(field, owner): getattr(group, field) for field in GROUP_WORK}
    for cell in plan.cells:
        for field in CELL_WORK:
            value = getattr(cell, field)
            parts = {f"{field}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {field: value}
            work |= {(part, cell.cell): v for part, v in parts.items()}
    return work


def _prompts(suite: SuitePlan) -> tuple[str, int]:
    """Return the hash of a suite's prompts and its budget. Of a private suite a plan holds only the hash."""
    return suite.withheld or suite.digest(), suite.max_new_tokens


def items_of(plan: Plan, cell: Cell) -> list[str]:
    """Return the items that a cell decodes, in the order of its suite."""
    decoded = {i for block in plan.group(cell.cell).blocks for i in block}
    return [item.item for i, item in enumerate(plan.suite(cell.suite).items) if i in decoded]


def sha256(stored: JsonObject) -> str:
    """Return the SHA-256 of a plan's work: prompts, cells, blocks, rounds."""
    plan = Plan.model_validate(stored)
    work = {
        "suites": [[suite.suite, *_prompts(suite)] for suite in plan.suites],
        "cells": [[cell.cell, *(dump(cell)[field] for field in CELL_WORK)] for cell in plan.cells],
        "groups": [
            [g.suite, g.batch_size, g.batching, *(getattr(g, field) for field in GROUP_WORK)] for g in plan.groups
        ],
    }
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


def only(stored: JsonObject, cells: Collection[str], *, blocks: int | None = None, rounds: int = 1) -> JsonObject:
    """Return plan.json with these cells only, the first `blocks` of every group (None: all) and these rounds."""
    chosen = [cell for cell in stored["cells"] if cell["cell"] in cells]
    arms: dict[tuple[Any, ...], list[str]] = {}  # a cell is compared with arms of its own group
    for cell in chosen:
        arms.setdefault(_group(cell), []).append(cell["arm"])
    kept = []
    for cell in chosen:
        here = {
            name: [arm for arm in cell[name] if arm in arms[_group(cell)]] for name in ("baselines", "engine_baselines")
        }
        alone = {name: None for name in ("lossless_reference", "held_to") if name in cell}  # its name in older builds
        kept.append({**cell, **here, **alone})
    groups = []
    for group in stored["groups"]:
        if names := [name for name in group["cells"] if name in cells]:
            first = group["blocks"][:blocks]
            groups.append({**group, "cells": names, "blocks": first, "rounds": [len(first)] * rounds})
    return {**stored, "cells": kept, "groups": groups}


def _group(cell: JsonObject) -> tuple[Any, ...]:
    return cell["suite"], cell["batch_size"], cell["batching"]


def write(directory: Path, planned: Planned, stored: Mapping[str, Any]) -> RunDirectory:
    """Write a run directory with this plan."""
    run = RunDirectory.create(directory)
    run.write_json("environment.json", planned.machine)
    run.write_json("plan.json", stored, indent=None)
    return run
