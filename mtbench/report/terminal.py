"""The terminal's output for a planned or finished run: tables, then the decision."""

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mtbench.document.formatting import counted
from mtbench.document.terminal import table_lines
from mtbench.plan.plan import Plan
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.arm_table import named
from mtbench.report.main_table import main_table
from mtbench.report.phrases import batches, disclaimers, fewer_items, readings
from mtbench.report.publication import publication_table, reasons_of
from mtbench.report.summary import decided, warnings
from mtbench.results.comparisons import groups_of, own_speedups
from mtbench.results.decision_format import Decision
from mtbench.results.format import Results


def plan_table(plan: Plan) -> Table:
    """Return the plan of a run: a row per cell."""
    table = Table(title="Plan")
    table.add_column("suite")
    table.add_column("arm")
    for column in ("batch", "items", "blocks in each round"):
        table.add_column(column, justify="right")
    for group in plan.groups:
        batch = str(group.batch_size) if group.batching == "static" else f"{group.batch_size} {group.batching}"
        items, blocks = str(sum(map(len, group.blocks))), "+".join(map(str, group.rounds))
        for name in group.cells:
            row = (group.suite, plan.cell(name).arm, batch, items, blocks)
            table.add_row(*map(escape, row))
    return table


def results_tables(results: Results, width: int) -> list[Group]:
    """Return a table per suite, batch size and way of batching, with one line per arm and its notes below."""
    names = arm_names(results.cells)
    numbers = {arm: number for number, arm in enumerate(names, start=1)}
    groups = []
    for key, cells in groups_of(results.cells).items():
        table = main_table(cells, numbers, own_speedups(cells))
        items = counted(max(cell.items for cell in cells), "item")
        title = f"{key.suite}, {batches(key.batch_size, key.batching)}, {items}"
        beside = [*disclaimers(cells), *(in_words(line, names) for line in [*fewer_items(cells), *readings(cells)])]
        lines = table_lines(named(table, names), width)
        groups.append(Group(Text(title, "bold"), *lines, *map(Text, beside), Text()))
    if results.publication is not None:
        shown = table_lines(publication_table(results.publication), width)
        reasons = (Text(f"({n}) {why}") for n, why in enumerate(reasons_of(results.publication), start=1))
        groups.append(Group(Text("Published figures and ours", "bold"), *shown, *reasons, Text()))
    return groups


def decision_lines(results: Results, decision: Decision | None = None) -> list[str]:
    """Return the recommendations of the race, or of the results; before them, the warnings."""
    names, found = arm_names(results.cells), decided(results, decision)
    return [in_words(line, names) for line in (*warnings(results.cells, decision), found.headline, *found.beside)]
