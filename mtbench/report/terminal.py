"""The terminal's output for a planned or finished run: the decision, then tables and notes."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mtbench import plugins
from mtbench.document.console import Terminal
from mtbench.document.formatting import counted
from mtbench.document.model import Row
from mtbench.document.terminal import notes_of, table_lines
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.arm_table import named
from mtbench.report.main_table import main_table
from mtbench.report.phrases import batches, disclaimers, fewer_items, readings
from mtbench.report.publication import publication_table, reasons_of
from mtbench.report.race import steps
from mtbench.report.summary import decided, read_decision, warnings
from mtbench.report.text import has_begun, not_begun, timed, weights
from mtbench.results.comparisons import groups_of, own_speedups
from mtbench.results.format import Results

MOST_NOTES = 3  # below the tables; the page has all


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


def show_results(run: RunDirectory, results: Results, console: Terminal, *, others: bool = False) -> None:
    """Print what to use and to do next, the tables, and the gravest notes. others: also for engines not raced."""
    names, decision = arm_names(results.cells), read_decision(run)
    found = decided(results, decision)
    console.print(Text(in_words(found.headline, names)))
    for words, command in [] if decision is None else steps(decision, run.path, plugins.as_options(), others=others):
        console.print(Text(in_words(words, names)))
        if command:
            console.say(command)  # unwrapped, so that it can be copied
    tables, of_arms = results_tables(results, console.width)
    console.print(*map(Text, disclaimers(results.cells)), "", *tables, sep="\n")
    beside = [f"Batch size {key.batch_size}: {text}" for key, text in found.beside.items()]
    made = [
        f"Weights: {of}; an engine that computes with the quantised weights has other times." for of in weights(results)
    ]
    notes = [*warnings(results.cells, decision), *beside, *of_arms, *made]
    for note in notes[:MOST_NOTES]:
        console.print(Text(in_words(note, names)))
    if (more := len(notes) - MOST_NOTES) > 0:
        console.say(f"{counted(more, 'more note')} {'is' if more == 1 else 'are'} on the page")


def results_tables(results: Results, width: int) -> tuple[list[Group], list[str]]:
    """Return a table per suite, batch size and way of batching, with one line per arm that has begun; and all notes."""
    names, rows, remarks = arm_names(results.cells), list[Row](), list[str]()
    groups = []
    for key, cells in groups_of(results.cells).items():
        title, begun = f"{key.suite}, {batches(key.batch_size, key.batching)}", [*filter(has_begun, cells)]
        lines: list[RenderableType] = [Text(in_words(line, names)) for line in not_begun(cells)]
        if begun:
            title += f", {counted(max(cell.items for cell in begun), 'item')}, {timed(begun)}"
            table = named(main_table(begun, dict.fromkeys(names, 1), own_speedups(begun)), names)
            lines = [*table_lines(table, width), *lines]
            rows += table.rows
        remarks += [*fewer_items(cells), *readings(cells)]
        groups.append(Group(Text(title, "bold"), *lines, Text()))
    if results.publication is not None:
        shown = table_lines(publication_table(results.publication), width)
        reasons = (Text(f"({n}) {why}") for n, why in enumerate(reasons_of(results.publication), start=1))
        groups.append(Group(Text("Published figures and ours", "bold"), *shown, *reasons, Text()))
    return groups, [*notes_of(rows, "arm"), *dict.fromkeys(remarks)]
