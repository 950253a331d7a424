"""The plan: everything generation needs, in one file, so that a GPU node needs no network, no lm-eval, no datasets.

A **cell** is suite × arm × batch size. The cells of one suite and batch size form a **group**: they share the same
**blocks** (fixed lists of prompts, one batch each) and run next to each other inside every block, in random order.
Round 1 covers all blocks and yields the generations that are scored; later rounds repeat the first blocks for timing.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtbench import families
from mtbench.arms import Arm, cell_id, parse_arms
from mtbench.errors import UserError
from mtbench.families import Family
from mtbench.models import DTYPES, Inspected, inspect
from mtbench.options import build
from mtbench.registry import METHODS, SUITES
from mtbench.suite import Source, Suite

SCHEMA_VERSION = 1
TIMED_BLOCKS = 16  # blocks that later rounds repeat
SPEED_BLOCKS = 24  # blocks of the smaller batch sizes: they measure speed, the largest one accuracy too
MIN_BLOCKS = 6  # for an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for: the options of `mtbench run` and `mtbench plan`."""

    suite: Sequence[str] = ("arithmetic",)
    family: str | None = None
    model: str | None = None
    checkpoint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    method: Sequence[str] = ()
    engine: str = "eager"
    batch_size: Sequence[int] = (1, 8)
    limit: int | None = None
    rounds: int = 3
    time_budget_s: float | None = None
    max_new_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    data_dir: str | None = None
    offline: bool = False
    fixed_length: bool = False
    accuracy_margin: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt, tokenised."""

    item: str
    prompt_ids: list[int]
    stop: list[str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm on one suite at one batch size."""

    cell: str
    suite: str
    arm: str
    method: str
    options: dict[str, Any]  # all options, resolved for the checkpoint
    on: str
    engine: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The cells that share blocks. `blocks` holds indices into the suite's items."""

    suite: str
    batch_size: int
    blocks: list[list[int]]
    rounds: list[int]  # how many blocks each round runs
    cells: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole run before it starts."""

    schema_version: int
    request: dict[str, Any]
    suites: list[SuitePlan]
    cells: list[Cell]
    groups: list[Group]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Raises UserError if the file is of another version or shape."""
        try:
            if data["schema_version"] != SCHEMA_VERSION:
                raise UserError(
                    f"plan.json has schema version {data['schema_version']}; this mtbench reads {SCHEMA_VERSION}."
                )
            return cls(
                schema_version=SCHEMA_VERSION,
                request=data["request"],
                suites=[SuitePlan(**{**s, "items": [Item(**i) for i in s["items"]]}) for s in data["suites"]],
                cells=[Cell(**c) for c in data["cells"]],
                groups=[Group(**g) for g in data["groups"]],
            )
        except (KeyError, TypeError) as error:
            raise UserError(f"plan.json is not a plan ({error}); make one with `mtbench plan -o DIR`.") from None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def cell(self, name: str) -> Cell:
        return next(c for c in self.cells if c.cell == name)

    def suite(self, name: str) -> SuitePlan:
        return next(s for s in self.suites if s.suite == name)

    def warnings(self) -> list[str]:
        """What is known beforehand to end without a verdict."""
        few = [g for g in self.groups if len(g.blocks) < MIN_BLOCKS]
        return [
            f"{g.suite} at batch size {g.batch_size}: inconclusive: {len(g.blocks)} blocks, {MIN_BLOCKS} needed "
            "for an interval; raise `--limit`"
            for g in few
        ]


def make_plan(request: Request) -> Plan:
    """Ask the suites for prompts, tokenise them, lay out cells and blocks. Raises UserError for whatever is wrong."""
    _check(request)
    suites, cells, groups = [], [], []
    inspected: dict[str, Inspected] = {}
    for spec in dict.fromkeys(request.suite):
        suite = open_suite(spec, request)
        family = families.family(request.family or suite.family, request.model, request.checkpoint)
        arms = _arms(request, family)
        sources = {role: family.checkpoint(role) for arm in arms for role in _roles(arm)}
        masked = {sources[arm.on] for arm in arms if METHODS[arm.method].needs_mask}
        for source in sources.values():
            if source not in inspected:
                inspected[source] = inspect(source, offline=request.offline, needs_mask=source in masked)
        suite_plan = _plan_suite(spec, suite, family, [inspected[s] for s in sources.values()], request)
        suites.append(suite_plan)
        largest = max(request.batch_size)
        for size in sorted(set(request.batch_size)):
            blocks = _blocks(len(suite_plan.items), size, request.seed)
            blocks = blocks if size == largest else blocks[:SPEED_BLOCKS]
            of_group = [_plan_cell(spec, arm, arms, family, size, suite_plan.flags, request) for arm in arms]
            cells += of_group
            groups.append(
                Group(
                    suite=spec,
                    batch_size=size,
                    blocks=blocks,
                    rounds=[len(blocks)] + [min(TIMED_BLOCKS, len(blocks))] * (request.rounds - 1),
                    cells=[c.cell for c in of_group],
                )
            )
    names = [c.cell for c in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two cells would be called {twice!r}: a suite is given twice under two spellings.")
    asked = dataclasses.asdict(request)
    return Plan(schema_version=SCHEMA_VERSION, request=asked, suites=suites, cells=cells, groups=groups)


def open_suite(spec: str, request: Request | Mapping[str, Any]) -> Suite:
    """The suite `name:rest`, with its data source. Raises UserError."""
    asked = request if isinstance(request, Mapping) else dataclasses.asdict(request)
    name, _, rest = spec.partition(":")
    data_dir = Path(asked["data_dir"]) if asked["data_dir"] else None
    source = Source(data_dir=data_dir, offline=asked["offline"], seed=asked["seed"])
    suite: Suite = SUITES[name](rest, source)
    return suite


def _check(request: Request) -> None:
    for name, value in (("--limit", request.limit), ("--max-new-tokens", request.max_new_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} is not allowed; it is a whole number of at least 1.")
    if request.rounds < 1:
        raise UserError(f"--rounds {request.rounds} is not allowed; it is a whole number of at least 1.")
    if not request.batch_size or min(request.batch_size) < 1:
        asked = ",".join(map(str, request.batch_size))
        raise UserError(f"--batch-size {asked!r} is not allowed; it is whole numbers of at least 1, such as 1,8.")
    if request.dtype not in ("auto", *DTYPES):
        raise UserError(f"--dtype {request.dtype!r} is not known; choose {', '.join(DTYPES)}, or auto.")
    if not 0 < request.accuracy_margin < 1:
        raise UserError(f"--accuracy-margin {request.accuracy_margin} is not allowed; 0.02 means 2 points.")


def _arms(request: Request, family: Family) -> list[Arm]:
    """Those asked for; else every method's showcase, references first, as far as the family has the checkpoints."""
    if request.method:
        return parse_arms(request.method, request.engine)
    methods = sorted((METHODS[name] for name in METHODS), key=lambda m: (not m.reference, m.name))
    arms = parse_arms([spec for method in methods for spec in method.showcase], request.engine)
    return [arm for arm in arms if all(role in family.roles for role in _roles(arm))]


def _roles(arm: Arm) -> tuple[str, ...]:
    return (arm.on, *METHODS[arm.method].roles[1:])


def _plan_suite(
    spec: str, suite: Suite, family: Family, checkpoints: Sequence[Inspected], request: Request
) -> SuitePlan:
    tokenizer = checkpoints[0].tokenizer

    def template(messages: Sequence[Mapping[str, str]]) -> str:
        if tokenizer.chat_template is None:
            return "\n\n".join(m["content"] for m in messages)
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return str(text)

    prompts = suite.prompts(template, request.limit)
    if not prompts:
        raise UserError(f"suite {spec!r} has no items.")
    items = [
        Item(item=p.item, prompt_ids=tokenizer(p.text, add_special_tokens=False)["input_ids"], stop=list(p.stop))
        for p in prompts
    ]
    if empty := [i.item for i in items if not i.prompt_ids]:
        raise UserError(f"{empty[0]} is an empty prompt; there is nothing to continue.")
    for other in checkpoints[1:]:
        if other.tokenizer(prompts[0].text, add_special_tokens=False)["input_ids"] != items[0].prompt_ids:
            raise UserError(
                f"checkpoints {checkpoints[0].source!r} and {other.source!r} split {items[0].item} into different "
                "tokens, so their counts cannot be compared; give checkpoints of one family with `--checkpoint`."
            )
    budget = request.max_new_tokens or suite.max_new_tokens
    longest = max(items, key=lambda i: len(i.prompt_ids))
    for checkpoint in checkpoints:
        if len(longest.prompt_ids) + budget > checkpoint.max_positions:
            raise UserError(
                f"{longest.item} has {len(longest.prompt_ids)} prompt tokens, which with {budget} new ones do not fit "
                f"the context of {checkpoint.source!r} ({checkpoint.max_positions}); lower `--max-new-tokens`."
            )
    return SuitePlan(
        suite=spec,
        family=family.name,
        task=dict(suite.task),
        metric=suite.metric,
        max_new_tokens=budget,
        flags=["out of domain"] if family.domain not in (None, suite.name) else [],
        items=items,
    )


def _plan_cell(
    spec: str, arm: Arm, arms: Sequence[Arm], family: Family, size: int, flags: list[str], request: Request
) -> Cell:
    trained = family.training(arm.on)
    method, untrained = build(METHODS[arm.method], arm.options, trained)
    return Cell(
        cell=cell_id(_stem(spec), arm, size, fixed_length=request.fixed_length),
        suite=spec,
        arm=str(arm),
        method=arm.method,
        options=dataclasses.asdict(method),  # type: ignore[call-overload]  # methods are dataclasses by contract
        on=arm.on,
        engine=arm.engine,
        family=family.name,
        checkpoints={role: family.checkpoint(role) for role in _roles(arm)},
        batch_size=size,
        length="fixed" if request.fixed_length else "natural",
        batching="static",
        flags=flags + untrained,
        baselines=_baselines(arm, arms),
        held_to=_held_to(arm, method.claims, arms),
        claims=method.claims,
        demonstration=family.domain is not None,
    )


def _references(arm: Arm, arms: Sequence[Arm]) -> list[Arm]:
    return [a for a in arms if METHODS[a.method].reference and not a.changed and a.engine == arm.engine and a.copy == 1]


def _baselines(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    """The reference on the arm's own checkpoint (what decoding gains), then on its own role (deployment)."""
    references = _references(arm, arms)
    same = [a for a in references if a.on == arm.on]
    deployment = [a for a in references if a.on == METHODS[a.method].roles[0]]
    return [name for name in dict.fromkeys(str(a) for a in same + deployment) if name != str(arm)]


def _held_to(arm: Arm, claims: str, arms: Sequence[Arm]) -> str | None:
    """Whose tokens this arm promises, among the arms of the run."""
    if arm.twin in arms:
        return str(arm.twin)
    if claims == "lossless":
        return next((str(a) for a in _references(arm, arms) if a.on == arm.on and a != arm), None)
    return None


def _blocks(items: int, size: int, seed: int) -> list[list[int]]:
    order = list(range(items))
    random.Random(seed).shuffle(order)
    return [order[i : i + size] for i in range(0, items, size)]


def _stem(spec: str) -> str:
    """The suite's part of a cell's id; a file is named by its stem and the hash of what it holds."""
    name, _, rest = spec.partition(":")
    return SUITES[name].stem(rest) if rest else name
