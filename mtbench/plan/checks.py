"""Read a plan, and check its names and options: another version of mtbench, or a missing plugin, may not know them.

Planning ends with the same check. Every finding is a UserError that names the field, before any work begins.
"""

from mtbench import plugins, records
from mtbench.decoding.arms import check_engine, check_options
from mtbench.decoding.method_checks import refuse_too_wide
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, unknown
from mtbench.evaluation.registry import SUITES
from mtbench.options.classes import check_value
from mtbench.options.fields import fields_of
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Race
from mtbench.plan.plan import Cell, Plan

RACE_ADVICE = "restore it, or start another race with `mtbench choose -o DIR`."
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


def refuse_faulty(plan: Plan) -> None:
    """Raise UserError for the first wrong field of a plan: an unknown name, an option that is not allowed."""
    for number, suite in enumerate(plan.suites):
        if suite.suite.partition(":")[0] not in SUITES:
            raise unknown(f"suite in suites[{number}]", suite.suite, SUITES, "mtbench ls suites")
    for number, cell in enumerate(plan.cells):
        _check_cell(cell, f"cells[{number}]")


def _check_cell(cell: Cell, field: str) -> None:
    method = METHODS[cell.method]
    if not method.outside:
        check_engine(str(cell.engine), f"engine in {field}")
    options = [*fields_of(method)]
    for name, value in cell.options.items():
        if name not in options:
            raise unknown(f"option of {cell.method} in {field}", name, options, "mtbench ls methods")
        try:
            check_value(method, name, value)
        except ValueError as error:
            raise UserError(f"{field}.options.{name}: {value!r:.60} is not allowed; it is {error}.") from None
    if cell.fault is None:
        built = check_options(method, cell.options)
        if not method.outside:
            refuse_too_wide(cell.arm, built)
    for number, held in enumerate(cell.schedule):
        _check_cell(held, f"{field}.schedule[{number}]")
