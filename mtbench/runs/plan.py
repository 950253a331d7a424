"""The plan: everything generation needs, in one file, so that a GPU node needs no network, no lm-eval, no datasets.

Only the prompts of private suites are not in it (mtbench/runs/prompts.py).

A **cell** is suite × arm × batch size × batching. The cells that differ only in the arm form a **group**: they share
the same **blocks** (fixed lists of prompts) and run next to each other inside every block, in random order. A static
block is one batch; a block of refilled batches has at least eight prompts for every slot.
Round 1 covers all blocks and yields the generations that are scored; later rounds repeat the first blocks for timing.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from mtbench.decoding.arms import ENGINES
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.models.loading import DTYPES
from mtbench.options import options_of

SCHEMA_VERSION = 1
MIN_BLOCKS = 6  # for an interval
BATCHINGS = ("static", "refill")
PROTOCOLS = ("own", "paper")  # paper: stop strings cut the text when it is scored, and do not end the decoding
T = TypeVar("T")
REFILLS = 8  # prompts per slot of a refilled block, at least: its ends, where slots run dry, must weigh little


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What was asked for: the options of `mtbench run` and `mtbench plan`."""

    suite: Sequence[str] = ("arithmetic",)
    family: str | None = None
    model: str | None = None
    checkpoint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    method: Sequence[str] = ()
    engine: str = ENGINES[0]
    batch_size: Sequence[int] = (1, 8)
    batching: Sequence[str] = ("static",)
    limit: int | None = None
    subtask: Sequence[str] = ()
    rounds: int = 3
    time_budget_s: float | None = None
    max_new_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    weights: str | None = None
    accept: str | None = None
    seed: int = 0
    temperature: float = 0.0
    data_dir: str | None = None
    offline: bool = False
    skip_unscorable: bool = False
    allow_unsandboxed_code: bool = False
    protocol: str = "own"
    fixed_length: bool = False
    accuracy_margin: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt, tokenised."""

    item: str
    prompt_ids: list[int]  # of a later turn, what comes behind the answer it follows
    stop: list[str]  # strings that end its decoding
    cut: list[str] = dataclasses.field(default_factory=list)  # strings that cut its text only when it is scored
    follows: int | None = None  # of a later turn, which of the suite's items comes before


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """A suite with its prompts."""

    suite: str  # as it was given, `name:rest`
    family: str
    task: dict[str, Any]
    metric: str | None
    max_new_tokens: int
    flags: list[str]
    items: list[Item]
    withheld: str | None = None  # of a private suite: the prompts are in no file, and this is their SHA-256

    def prompt(self, index: int, said: Mapping[str, Sequence[int]] = MappingProxyType({})) -> list[int]:
        """What is read for an item. `said`: answers to earlier turns, by item; one not there yet counts as empty."""
        item = self.items[index]
        if item.follows is None:
            return item.prompt_ids
        before = self.items[item.follows].item
        return [*self.prompt(item.follows, said), *said.get(before, ()), *item.prompt_ids]

    def positions(self, index: int) -> int:
        """Most positions an item can take, answers included."""
        item = self.items[index]
        before = 0 if item.follows is None else self.positions(item.follows)
        return before + len(item.prompt_ids) + self.max_new_tokens

    @property
    def room(self) -> int:
        """Positions that any item fits in: batches that have as many have one shape."""
        return max(map(self.positions, range(len(self.items))))

    def digest(self) -> str:
        """SHA-256 of all prompts."""
        return hashlib.sha256(json.dumps([[i.item, i.prompt_ids] for i in self.items]).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm on one suite at one batch size, with one way of batching."""

    cell: str
    suite: str
    arm: str
    method: str
    options: dict[str, Any]  # all options, resolved for the checkpoint
    on: str
    engine: str | None  # None: the method's loop is not ours
    family: str
    checkpoints: dict[str, str]  # role -> path or hub id
    batch_size: int
    length: str  # natural, or fixed: end tokens ignored
    batching: str
    flags: list[str]
    baselines: list[str]  # arms it is compared with: the reference on its own checkpoint, and on the family's own
    held_to: str | None  # the arm whose tokens it promises
    claims: str
    demonstration: bool  # a family made for one task: shows the mechanics, says nothing of real models
    # what older plans do not have
    engine_baselines: list[str] = dataclasses.field(default_factory=list)  # references by another engine
    accept: dict[str, Any] | None = None  # the acceptance it is made to have
    simulated: dict[str, Any] | None = None  # what is not real about it
    fault: str | None = None  # what its method broke in when it was planned: it is not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The cells that share blocks. `blocks` holds indices into the suite's items."""

    suite: str
    batch_size: int
    blocks: list[list[int]]
    rounds: list[int]  # how many blocks each round runs
    cells: list[str]
    batching: str = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole run before it starts."""

    schema_version: int
    request: dict[str, Any]
    suites: list[SuitePlan]
    cells: list[Cell]
    groups: list[Group]

    def to_json(self) -> dict[str, Any]:
        """What is stored: everything, but for the prompts of private suites."""
        suites = []
        for suite in self.suites:
            items = [_shallow(i) | ({"prompt_ids": []} if suite.withheld else {}) for i in suite.items]
            suites.append(_shallow(suite) | {"items": items})
        parts = {"suites": suites, "cells": list(map(_shallow, self.cells)), "groups": list(map(_shallow, self.groups))}
        return _shallow(self) | parts

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Raises UserError if the file is of another version or shape, or names what is not known here."""
        try:
            if data["schema_version"] != SCHEMA_VERSION:
                raise UserError(
                    f"plan.json has schema version {data['schema_version']}; this mtbench reads {SCHEMA_VERSION}."
                )
            plan = cls(
                schema_version=SCHEMA_VERSION,
                request=dataclasses.asdict(_read(RunRequest, data["request"])),
                suites=[_read(SuitePlan, {**s, "items": [_read(Item, i) for i in s["items"]]}) for s in data["suites"]],
                cells=[_read(Cell, c) for c in data["cells"]],
                groups=[_read(Group, g) for g in data["groups"]],
            )
            plan._refuse_unknown()
        except KeyError as error:
            raise _no_plan(f"it has no {error}") from None
        except (TypeError, AttributeError):
            raise _no_plan("a part of it is of another kind than mtbench writes") from None
        return plan

    def _refuse_unknown(self) -> None:
        """Raise UserError for a name that nothing here answers to."""
        if self.request["dtype"] not in ("auto", *DTYPES):
            raise unknown("dtype in plan.json", self.request["dtype"], ("auto", *DTYPES), "mtbench run --help")
        for c in self.cells:
            if c.method not in list(METHODS):
                raise unknown("method in plan.json", c.method, METHODS, "mtbench ls methods")
            if c.engine not in (None, *ENGINES):
                raise unknown("engine in plan.json", c.engine, ENGINES, "mtbench run --help")
            options = [o.name for o in options_of(METHODS[c.method])]
            if odd := [name for name in c.options if name not in options]:
                raise unknown(f"option of {c.method} in plan.json", odd[0], options, "mtbench ls methods")
        for batching in [*(c.batching for c in self.cells), *(g.batching for g in self.groups)]:
            if batching not in BATCHINGS:
                raise unknown("batching in plan.json", batching, BATCHINGS, "mtbench run --help")
        cells, suites = {c.cell for c in self.cells}, {s.suite for s in self.suites}
        for g in self.groups:
            if lost := [name for name in [*g.cells, g.suite] if name not in cells | suites]:
                raise _no_plan(f"it has no {lost[0]!r}")

    def cell(self, name: str) -> Cell:
        return next(c for c in self.cells if c.cell == name)

    def suite(self, name: str) -> SuitePlan:
        return next(s for s in self.suites if s.suite == name)

    def warnings(self) -> list[str]:
        """What is known beforehand to end without a verdict."""
        said = [
            f"{g.suite} at batch size {g.batch_size}{'' if g.batching == 'static' else f', {g.batching}'}: "
            f"inconclusive: {len(g.blocks)} block{'' if len(g.blocks) == 1 else 's'}, {MIN_BLOCKS} needed "
            f"for an interval, which takes {_items_needed(g)} items; raise `--limit`"
            for g in self.groups
            if len(g.blocks) < MIN_BLOCKS
        ]
        if asked := set(self.request["subtask"]):
            whole = [s.suite for s in self.suites if asked.isdisjoint(SUITES[s.suite.partition(":")[0]].subtasks)]
            said += [f"{suite}: asked whole, for --subtask names nothing of it" for suite in whole]
        if "refill" not in self.request["batching"]:
            return said
        if 1 in self.request["batch_size"]:
            said.append("batch size 1 has nothing to refill: it has no refilled cells")
        named = {spec.partition(":")[0] for spec in self.request["method"]} or set(METHODS)
        if static_only := sorted(name for name in named if METHODS[name].outside):
            said.append(f"{', '.join(static_only)}: static batches only, since the loop is not ours; no refill")
        return said


def _shallow(part: Any) -> dict[str, Any]:
    """A dataclass as a dictionary; `dataclasses.asdict` would copy every token of every prompt."""
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def _read(kind: type[T], stored: Mapping[str, Any]) -> T:
    """One part of a stored plan. Raises UserError for a key too many, or one that no default stands in for."""
    if not isinstance(stored, Mapping):
        raise TypeError(stored)
    what = "request" if issubclass(kind, RunRequest) else kind.__name__.lower()
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if odd := sorted(set(stored) - set(fields)):
        raise UserError(
            f"plan.json: {odd[0]!r} of a {what} is not known here; made by a newer mtbench? Go on with that one, or "
            "start another run with `mtbench run -o DIR`."
        )
    needed = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    if lost := [name for name in needed if name not in stored]:
        raise _no_plan(f"a {what} of it has no {lost[0]!r}")
    return kind(**stored)


def _no_plan(why: str) -> UserError:
    return UserError(f"plan.json is not a plan ({why}); restore it, or start another run with `mtbench run -o DIR`.")


def _items_needed(group: Group) -> int:
    """Items for enough blocks of this kind."""
    return MIN_BLOCKS * group.batch_size * (1 if group.batching == "static" else REFILLS)
