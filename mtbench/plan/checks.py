"""Read a plan, and check more than the types of its fields: known names, references that exist, work within bounds.

A stored plan is untrusted input, and planning ends with the same check. Every finding is a UserError that names the
field, before any work begins.
"""

from collections.abc import Hashable, Iterable

from mtbench import plugins, records
from mtbench.decoding.arms import check_engine, check_options
from mtbench.decoding.method import Method
from mtbench.decoding.method_checks import refuse_too_wide
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, first_line, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import PART
from mtbench.options.classes import check_value, roles_of
from mtbench.options.common import MOST_ROUNDS
from mtbench.options.fields import fields_of
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Race
from mtbench.plan.plan import Cell, Group, Plan, SuitePlan

RACE_ADVICE = "restore it, or start another race with `mtbench choose -o DIR`."
MOST_TURNS = 1000  # of a conversation
ADVICE = "restore it, or start another run with `mtbench run -o DIR`."


def read_plan(run: RunDirectory) -> Plan:
    """Read the plan of a run.

    Raises UserError if it is missing or malformed, if `refuse_faulty` refuses it, or if it needs a plugin file that
    this process has not imported.
    """
    file = run.path / "plan.json"
    try:
        plan = records.read_json(file, Plan, ADVICE)
    except UserError:
        run.refuse_other("run", "choose")  # another command's plan has the same name
        raise
    plugins.refuse_missing(plan.plugins)
    try:
        refuse_faulty(plan)
    except Fault as error:
        raise UserError(f"{file}: {error}; {ADVICE}") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return plan


def read_race(run: RunDirectory, plan: Plan) -> Race | None:
    """Read the looks of a race; None for a run without. Raises UserError if it lacks those of a group."""
    if not run.has("race.json"):
        return None
    file = run.path / "race.json"
    race = records.read_json(file, Race, RACE_ADVICE)
    for group in plan.groups:
        if group.name not in race.looks:
            raise UserError(f"{file}: looks has none of group {group.name!r}; {RACE_ADVICE}")
    return race


class Fault(UserError):
    """The fault of a field of a plan."""


def refuse_faulty(plan: Plan) -> None:
    """Raise UserError for the first wrong field of a plan: an unknown name, a wrong reference, too much work."""
    for number, suite in enumerate(plan.suites):
        _check_items(suite, f"suites[{number}]")
    _refuse_doubled((suite.suite for suite in plan.suites), "suites")
    _refuse_doubled((cell.cell for cell in plan.cells), "cells")
    _refuse_doubled((name for group in plan.groups for name in group.cells), "groups[].cells")
    suites = {suite.suite: suite for suite in plan.suites}
    cells = {cell.cell: cell for cell in plan.cells}
    for number, cell in enumerate(plan.cells):
        _check_cell(cell, suites, f"cells[{number}]")
    for number, group in enumerate(plan.groups):
        _check_group(group, suites, cells, f"groups[{number}]")
    grouped = {name for group in plan.groups for name in group.cells}
    if alone := [name for name in cells if name not in grouped]:
        raise _fault("groups", f"the cell {alone[0]!r} is in none")


def _fault(field: str, finding: str) -> Fault:
    return Fault(f"{field}: {finding}")


def _refuse_doubled(values: Iterable[Hashable], field: str) -> None:
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise _fault(field, f"{value!r:.60} is there twice")
        seen.add(value)


def _check_items(suite: SuitePlan, field: str) -> None:
    if suite.suite.partition(":")[0] not in SUITES:
        raise unknown(f"suite in {field}", suite.suite, SUITES, "mtbench ls suites")
    if not isinstance(suite.task.get("name"), str):
        raise _fault(f"{field}.task", "it has no name")
    _refuse_doubled((item.item for item in suite.items), f"{field}.items[].item")
    turns: list[int] = []  # by item, the number of its turn in the conversation
    for number, item in enumerate(suite.items):
        place = f"{field}.items[{number}]"
        if item.answer_format is not None and item.answer_format >= len(suite.answer_formats):
            raise _fault(f"{place}.answer_format", f"the suite has {len(suite.answer_formats)} answer_formats")
        if item.follows is None:
            turns.append(1)
            if not item.prompt_ids and suite.withheld is None:
                raise _fault(f"{place}.prompt_ids", "an empty prompt cannot be continued")
            continue
        if item.follows >= number:
            raise _fault(f"{place}.follows", f"{item.follows} is not an earlier item")
        before = suite.items[item.follows]
        if item.shared is not None and item.shared > (before.shared or 0) + len(before.prompt_ids):
            raise _fault(f"{place}.shared", f"{item.shared} tokens, over those of the turn before")
        turns.append(turns[item.follows] + 1)
        if turns[-1] > MOST_TURNS:
            raise _fault(f"{place}.follows", f"a conversation has at most {MOST_TURNS:,} turns")


def _check_cell(cell: Cell, suites: dict[str, SuitePlan], field: str) -> None:
    if cell.suite not in suites:
        raise _fault(f"{field}.suite", f"the plan has no suite {cell.suite!r}")
    if cell.method not in METHODS:
        raise unknown(f"method in {field}", cell.method, METHODS, "mtbench ls methods")
    method = METHODS[cell.method]
    if method.outside and cell.engine is not None:
        raise _fault(f"{field}.engine", f"{cell.engine!r:.60} is not null, but {cell.method} is an external engine")
    if not method.outside:
        check_engine(str(cell.engine), f"engine in {field}")
    options = [*fields_of(method)]
    for name, value in cell.options.items():
        if name not in options:
            raise unknown(f"option of {cell.method} in {field}", name, options, "mtbench ls methods")
        try:
            check_value(method, name, value)
        except ValueError as error:
            raise _fault(f"{field}.options.{name}", f"{value!r:.60} is not allowed; it is {error}") from None
    _check_roles(cell, [cell.on, *roles_of(method, cell.options)], f"{field}.checkpoints")
    if cell.fault is None:
        built = check_options(method, cell.options)
        if not method.outside:
            _check_width(cell, built, field)
    _check_script(cell, suites[cell.suite], f"{field}.accept")
    for number, held in enumerate(cell.schedule):
        _check_cell(held, suites, f"{field}.schedule[{number}]")


def _check_roles(cell: Cell, roles: Iterable[str], field: str) -> None:
    for role in roles:
        if role not in cell.checkpoints:
            raise _fault(field, f"the role {role!r} has none")
        source = cell.checkpoints[role]
        if role.startswith(PART) and source != cell.checkpoints[cell.on] + role:
            raise _fault(field, f"{role!r} is {source!r:.80}, no part of the target's checkpoint")


def _check_width(cell: Cell, method: Method, field: str) -> None:
    try:
        refuse_too_wide(cell.arm, method)
    except UserError:
        raise
    except Exception as error:  # a plugin's method may raise any
        raise _fault(f"{field}.options", f"{cell.method} fails: {type(error).__name__}: {first_line(error)}") from None


def _check_script(cell: Cell, suite: SuitePlan, field: str) -> None:
    if cell.accept is None:
        return
    for name, values in (("lengths", cell.accept.lengths), ("scripts", cell.accept.scripts)):
        if values is not None and len(values) != len(suite.items):
            raise _fault(f"{field}.{name}", f"it has {len(values):,} entries for {len(suite.items):,} items")
    if cell.accept.probabilities == []:
        raise _fault(f"{field}.probabilities", "it is empty")


def _check_group(group: Group, suites: dict[str, SuitePlan], cells: dict[str, Cell], field: str) -> None:
    if group.suite not in suites:
        raise _fault(f"{field}.suite", f"the plan has no suite {group.suite!r}")
    for name in group.cells:
        if name not in cells:
            raise _fault(f"{field}.cells", f"the plan has no cell {name!r}")
        for key in ("suite", "batch_size", "batching"):
            if getattr(cells[name], key) != getattr(group, key):
                raise _fault(f"{field}.{key}", f"the cell {name!r} has {getattr(cells[name], key)!r}")
    arms = [cells[name].arm for name in group.cells]
    _refuse_doubled(arms, f"{field}.cells[].arm")
    for name in group.cells:
        for key in ("baselines", "engine_baselines"):
            if lost := sorted({*getattr(cells[name], key)} - {*arms}):
                raise _fault(f"{field}.cells", f"{name!r} has the {key} {lost[0]!r:.60}, which the group does not have")
    _check_blocks(group, len(suites[group.suite].items), field)


def _check_blocks(group: Group, items: int, field: str) -> None:
    for number, block in enumerate(group.blocks):
        if max(block) >= items:
            raise _fault(f"{field}.blocks[{number}]", f"the suite has no item {max(block)}, only {items:,}")
        if group.batching == "static" and len(block) > group.batch_size:
            raise _fault(f"{field}.blocks[{number}]", f"{len(block):,} items exceed the batch size")
    _refuse_doubled((item for block in group.blocks for item in block), f"{field}.blocks")
    if len(group.rounds) > MOST_ROUNDS:
        raise _fault(f"{field}.rounds", f"{len(group.rounds):,} rounds, and at most {MOST_ROUNDS:,} are allowed")
    if max(group.rounds) > len(group.blocks) or max(group.rounds) > group.rounds[0]:
        raise _fault(f"{field}.rounds", "a round runs all blocks or, after round 1, the first of them")
