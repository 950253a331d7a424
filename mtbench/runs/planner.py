"""Planning: arms, cells and blocks are laid out over what the suites ask; what is wrong is refused here."""

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtbench.decoding import method_checks
from mtbench.decoding.arms import Arm, baselines, cell_id, engine_baselines, parse_arms, reference_arm
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Suite
from mtbench.hardware import machine
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.models.loading import DTYPES, Inspected, inspect
from mtbench.models.random_shapes import SHAPES
from mtbench.options import build, roles_of
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import (
    BATCHINGS,
    PROTOCOLS,
    REFILLS,
    SCHEMA_VERSION,
    Cell,
    Group,
    Item,
    Plan,
    RunRequest,
    SuitePlan,
)
from mtbench.runs.prompts import open_suite, plan_suite, refuse_unknown_subtasks
from mtbench.runs.simulation import Acceptance, flags_of, mark, refuse_scored, refuse_unmeant, refuse_unmoved

TIMED_BLOCKS = 16  # blocks that later rounds repeat
MOST_GUESSES = 2048  # of a forward: no method gains by as many, and they would take a machine's memory
SPEED_BLOCKS = 24  # blocks of the smaller batch sizes: they measure speed, the largest one accuracy too


def make_plan(request: RunRequest) -> Plan:
    """Ask the suites for prompts, tokenise them, lay out cells and blocks. Raises UserError for whatever is wrong."""
    _check(request)
    suites, cells, groups = [], [], []
    inspected: dict[str, Inspected] = {}
    acceptance = None if request.accept is None else Acceptance(request.accept)
    refuse_unknown_subtasks(request)
    contestants = {spec: _contestants(spec, request, acceptance) for spec in request.suite}
    for spec, (family, arms) in contestants.items():
        suite = open_suite(spec, request)
        sources = {role: family.checkpoint(role) for arm in arms for role in arm.roles}
        masked = {sources[arm.on] for arm in arms if METHODS[arm.method].needs_mask}
        for source in sources.values():
            if source not in inspected:
                inspected[source] = inspect(source, offline=request.offline, needs_mask=source in masked)
        suite_plan = plan_suite(spec, suite, family, [inspected[s] for s in sources.values()], request)
        suites.append(suite_plan)
        largest = max(request.batch_size)
        for size, batching in itertools.product(sorted(set(request.batch_size)), dict.fromkeys(request.batching)):
            chosen = _batched(arms, size, batching)
            if not chosen:
                continue
            blocks = _blocks(suite_plan.items, size, request.seed, batching)
            blocks = blocks if size == largest else blocks[:SPEED_BLOCKS]
            of_group = [
                _plan_cell(suite_plan, arm, chosen, family, inspected, size, batching, request, acceptance)
                for arm in chosen
            ]
            cells += of_group
            groups.append(
                Group(
                    suite=spec,
                    batch_size=size,
                    batching=batching,
                    blocks=blocks,
                    rounds=[len(blocks)] + [min(TIMED_BLOCKS, len(blocks))] * (request.rounds - 1),
                    cells=[c.cell for c in of_group],
                )
            )
    if not groups:
        raise UserError(
            "--batching refill leaves nothing to run: it needs a batch size of at least 2 and a method whose loop is "
            "ours; add `--batching static,refill` or `--batch-size 8`."
        )
    names = [c.cell for c in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two cells would be called {twice!r}: a suite is given twice under two spellings.")
    asked = dataclasses.asdict(request)
    return Plan(schema_version=SCHEMA_VERSION, request=asked, suites=suites, cells=cells, groups=groups)


def begin_run(path: Path, plan: Plan, command: Sequence[str]) -> RunDirectory:
    """A new run directory that holds its plan. Raises UserError if something is there already."""
    run = RunDirectory.create(path)
    run.write_json("environment.json", machine.environment(command))
    run.write_json("plan.json", plan.to_json(), indent=None)
    return run


def _check(request: RunRequest) -> None:
    for name, value in (("--limit", request.limit), ("--max-new-tokens", request.max_new_tokens)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} is not allowed; it is a whole number of at least 1.")
    if request.protocol not in PROTOCOLS:
        raise unknown("protocol", request.protocol, PROTOCOLS, "mtbench run --help")
    if request.rounds < 1:
        raise UserError(f"--rounds {request.rounds} is not allowed; it is a whole number of at least 1.")
    if not request.batch_size or min(request.batch_size) < 1:
        asked = ",".join(map(str, request.batch_size))
        raise UserError(f"--batch-size {asked!r} is not allowed; it is whole numbers of at least 1, such as 1,8.")
    for batching in request.batching or ("",):
        if batching not in BATCHINGS:
            raise unknown("batching", batching, BATCHINGS, "mtbench run --help")
    if request.dtype not in ("auto", *DTYPES):
        raise UserError(f"--dtype {request.dtype!r} is not known; choose {', '.join(DTYPES)}, or auto.")
    named = [f"--{name}" for name in ("family", "model", "checkpoint", "weights") if getattr(request, name)]
    if request.weights is not None and len(named) > 1:
        raise UserError(
            f"{' and '.join(named)} each name the models; give one of them. (A single role's weights may be random "
            "too: `--checkpoint ROLE=random:SHAPE`.)"
        )
    if not 0 <= request.temperature <= 10:
        raise UserError(
            f"--temperature {request.temperature:g} is not allowed; it is a number from 0, which is greedy, to 10."
        )
    if not 0 < request.accuracy_margin < 1:
        raise UserError(f"--accuracy-margin {request.accuracy_margin} is not allowed; 0.02 means 2 points.")


def _contestants(spec: str, request: RunRequest, acceptance: Acceptance | None) -> tuple[Family, list[Arm]]:
    """Who takes part in a suite. Raises UserError for whatever can be known before anything is fetched."""
    suite = SUITES[spec.partition(":")[0]]
    family = _family(request, suite)
    if asked := [f"--{name} {text}" for name in ("accept", "weights") if (text := getattr(request, name)) is not None]:
        refuse_scored(spec, suite.metric, asked[0])
    if acceptance is not None:
        if acceptance.run and request.fixed_length:
            raise UserError(
                f"--accept {acceptance.source} gives every item the length of a stored answer, --fixed-length the "
                "whole budget; give one of them."
            )
        named = request.family or request.model or request.checkpoint or request.weights
        if not named and not all(Path(families.locate(source)).is_dir() for source in family.roles.values()):
            raise UserError(
                f"--accept {acceptance.source} needs a model, and none is named; any weights will do: add "
                f"`--weights {families.RANDOM}{next(iter(SHAPES))}`, or name one with --family or --model."
            )
    return family, _arms(request, family)


def _family(request: RunRequest, suite: type[Suite]) -> Family:
    """The checkpoints asked for, else the suite's own; random weights fill every role that a method knows."""
    methods = [METHODS[name] for name in METHODS]
    roles = dict.fromkeys(role for method in methods for role in (*method.roles, *roles_of(method, {})))
    return families.family(
        request.family or suite.family, request.model, request.checkpoint, weights=request.weights, roles=roles
    )


def _arms(request: RunRequest, family: Family) -> list[Arm]:
    """Those asked for; else every method's showcase, references first, as far as the family has the checkpoints.

    Raises UserError for an arm that drafts with its own target, or that cannot throw the dice all others throw.
    """
    if request.method:
        arms = parse_arms(request.method, request.engine)
        for arm in arms:
            if arm.on in arm.roles[1:]:
                raise UserError(
                    f"{str(arm)!r}: the role {arm.on!r} cannot draft for itself; name another role, or give its "
                    f"checkpoint one more: `--checkpoint draft={family.checkpoint(arm.on)}`."
                )
            if request.accept is not None and METHODS[arm.method].outside and arm.decoding:
                raise UserError(
                    f"{str(arm)!r} drafts in a loop that is not ours, so no --accept says what it takes; leave that "
                    "`--method` or `--accept` out."
                )
            if request.temperature and METHODS[arm.method].outside:
                raise UserError(
                    f"{str(arm)!r} decodes greedily: its loop is not ours, and would sample by dice of its own; leave "
                    "it or `--temperature` out."
                )
        return arms
    methods = sorted((METHODS[name] for name in METHODS), key=lambda m: (not m.reference, m.name))
    arms = parse_arms([spec for method in methods for spec in method.default_arms], request.engine)
    return [arm for arm in arms if all(role in family.roles for role in arm.roles)]


def _batched(arms: Sequence[Arm], size: int, batching: str) -> list[Arm]:
    """Those that can be batched so: slots are refilled by our loop, and one slot alone is no batch to refill."""
    if batching == "static":
        return list(arms)
    return [arm for arm in arms if arm.engine is not None] if size > 1 else []


def _plan_cell(
    suite: SuitePlan,
    arm: Arm,
    arms: Sequence[Arm],
    family: Family,
    inspected: Mapping[str, Inspected],
    size: int,
    batching: str,
    request: RunRequest,
    acceptance: Acceptance | None,
) -> Cell:
    """The cell of `arm`, one of the `arms` of its group."""
    spec, checkpoints = suite.suite, {role: family.checkpoint(role) for role in arm.roles}
    trained = family.training(arm.on) or (acceptance.trained(arm, spec) if acceptance else {})
    method, untrained = build(METHODS[arm.method], arm.options, trained)
    shortest = min((i for i in suite.items if i.follows is None), key=lambda i: len(i.prompt_ids))
    fault = method_checks.fault(method, {role: inspected[source] for role, source in checkpoints.items()})
    if fault is None and not method.outside:
        _refuse_too_wide(arm, method)
    claims, block = ("lossy", 1) if fault else (method.claims, method.variants[-1].block)
    if len(shortest.prompt_ids) < block:
        raise UserError(
            f"{str(arm)!r} needs prompts of at least one block, here {block} tokens, and {shortest.item} has "
            f"{len(shortest.prompt_ids)}; leave that `--method` out, or lengthen the prompts of `--suite {spec}`."
        )
    accept, simulated = None, mark(checkpoints, acceptance)
    if simulated is not None and fault is None:
        refuse_unmeant(spec, suite.metric, arm, method, simulated)
    if acceptance is not None and simulated is not None and fault is None:
        if acceptance.run is None:
            refuse_unmoved(arm, method)
        accept, note = acceptance.plan(arm, method, arms, spec, len(suite.items), suite.max_new_tokens, request.seed)
        simulated["note"] = note
    # Probabilities say nothing of where an answer ends: every item takes its whole budget.
    fixed_length = request.fixed_length or (acceptance is not None and acceptance.run is None)
    return Cell(
        cell=cell_id(_stem(spec), arm, size, fixed_length=fixed_length, batching=batching),
        suite=spec,
        arm=str(arm),
        method=arm.method,
        options=dataclasses.asdict(method),
        on=arm.on,
        engine=arm.engine,
        family=family.name,
        checkpoints=checkpoints,
        batch_size=size,
        length="fixed" if fixed_length else "natural",
        batching=batching,
        flags=suite.flags + untrained + _unmasked(arm, inspected[checkpoints[arm.on]]) + flags_of(simulated),
        baselines=baselines(arm, arms),
        engine_baselines=engine_baselines(arm, arms),
        held_to=None if simulated else reference_arm(arm, claims, arms),
        claims=claims,
        demonstration=family.domain is not None,
        accept=accept,
        simulated=simulated,
        fault=fault,
    )


def _unmasked(arm: Arm, target: Inspected) -> list[str]:
    """What to mind of an arm that feeds masks to a checkpoint that has never seen any."""
    if METHODS[arm.method].needs_mask and not target.feeds_masks:
        return [f"feeds masks, and {arm.on} was trained by {target.objective}, without any"]
    return []


def _refuse_too_wide(arm: Arm, method: Method) -> None:
    guesses = max(variant.window().guesses for variant in method.variants)
    if guesses > MOST_GUESSES:
        raise UserError(
            f"{str(arm)!r} feeds {guesses:,} guesses in a forward, and at most {MOST_GUESSES:,} are allowed; lower the "
            "option that widens it. See `mtbench ls methods`."
        )


def _blocks(items: Sequence[Item], size: int, seed: int, batching: str = "static") -> list[list[int]]:
    """Items in random order, those of one task together, so that tasks can be timed apart; the tasks take turns.

    Static: as batches, a task's last one short; refilled: alike in size, none too short. Behind a block of first turns
    come those of their later turns.
    """
    chance = random.Random(seed)
    order = [index for index, item in enumerate(items) if item.follows is None]
    later = {item.follows: index for index, item in enumerate(items) if item.follows is not None}
    chance.shuffle(order)
    tasks: dict[str, list[int]] = {}
    for index in order:
        tasks.setdefault(items[index].item.partition("/")[0], []).append(index)
    turns = itertools.zip_longest(*(_cut(of_task, size, batching) for of_task in tasks.values()))
    taken = [[block for block in turn if block is not None] for turn in turns]
    blocks = []
    for block in (block for turn in taken for block in chance.sample(turn, len(turn))):
        while block:
            blocks.append(block)
            block = [later[index] for index in block if index in later]
    return blocks


def _cut(items: Sequence[int], size: int, batching: str) -> list[list[int]]:
    """The blocks of one task."""
    if batching == "static":
        return [list(items[i : i + size]) for i in range(0, len(items), size)]
    blocks = max(1, len(items) // (REFILLS * size))
    return [list(items[i * len(items) // blocks : (i + 1) * len(items) // blocks]) for i in range(blocks)]


def _stem(spec: str) -> str:
    """The suite's part of a cell's id; a file is named by its stem and the hash of what it holds."""
    name, _, rest = spec.partition(":")
    return SUITES[name].stem(rest) if rest else name
