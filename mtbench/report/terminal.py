"""The tables that the terminal shows when a run is planned or done."""

import re
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtbench.report.formatting import NONE, bounds, counted, interval, listed, number, percent, times
from mtbench.report.phrases import (
    batches,
    disclaimers,
    fewer_items,
    flags_of_measurement,
    floors,
    headline_spreads,
    ungraded,
)
from mtbench.results.comparisons import GroupKey, OwnSpeedups, groups_of, over_fastest_engine, own_speedups
from mtbench.results.format import Accuracy, ResultCell, Results, Speedup, TaskFigures, TaskSpeedup
from mtbench.runs.plan import Plan

ACCURACY, PER_FORWARD, RATE = "accuracy, %", "tokens per\nforward", "tokens/s"
SAME, DEPLOYED, ENGINE, GRADE = "speedup,\nsame model", "speedup,\ndeployed", "incl.\nengine", "lossless"
HEADINGS = (ACCURACY, PER_FORWARD, RATE, SAME, DEPLOYED, ENGINE, GRADE)
LEAST_FIRST = (ENGINE, DEPLOYED, RATE, PER_FORWARD, ACCURACY)  # the columns that a narrow terminal drops, in order
BREAKS = re.compile("(?<=[,:])|(?=[@/])")  # where an arm's name may be broken
ARM_WIDTH = 16  # of a column with an arm as its heading


def plan_table(plan: Plan) -> Table:
    """Return what a run would do: a row per cell."""
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


def results_tables(results: Results, width: int) -> list[Table]:
    """Return a table per suite, batch size and way of batching, with a row per arm.

    95 % intervals and verdicts stand under the values. If `width` columns are too few, the least important ones are
    left out, and lines below the table give the ratios over other engines. A suite of several tasks has a second table,
    with a row per task.
    """
    tables = []
    for group, cells in groups_of(results.cells).items():
        tables.append(_group_table(group, cells, width))
        by_task = _task_table(group, cells, width)
        if by_task is not None:
            tables.append(by_task)
    return tables


def _group_table(group: GroupKey, cells: Sequence[ResultCell], width: int) -> Table:
    own = own_speedups(cells)
    rows = [_row(cell, own) for cell in cells]
    columns = {heading: [row[heading] for row in rows] for heading in HEADINGS}
    if not any(over_fastest_engine(cell) for cell in cells):
        del columns[ENGINE]
    notes = list(dict.fromkeys(note for cell in cells for note in _notes(cell)))
    names = []
    for cell in cells:
        marks = "".join(f"({notes.index(note) + 1})" for note in _notes(cell))
        names.append([*BREAKS.split(cell.arm), f" {marks}"])
    narrowest = max(len(piece) for name in names for piece in name)
    empty_first = sorted(LEAST_FIRST, key=lambda heading: set(columns.get(heading, ())) != {NONE})
    for heading in empty_first:
        if _room(columns, width) < narrowest:
            columns.pop(heading, None)
    caption = disclaimers(cells)
    if ENGINE not in columns:
        caption += _over_engines(cells)
    caption += _spreads(cells, own) + fewer_items(cells) + _inconclusive(cells, own) + floors(cells)
    caption += [f"({place}) {note}" for place, note in enumerate(notes, start=1)]
    title = (
        f"{group.suite}, {batches(group.batch_size, group.batching)}, {counted(max(c.items for c in cells), 'item')}"
    )
    return _framed(title, caption, names, columns, width)


def _task_table(group: GroupKey, cells: Sequence[ResultCell], width: int) -> Table | None:
    """Return a row per task; None if the suite has one task. A line below names the arms that do not fit."""
    own = own_speedups(cells)
    tasks = list(dict.fromkeys(part.task for cell in cells for part in cell.tasks))
    if not tasks:
        return None
    names = [*tasks, "all items"]
    averaged = any(cell.accuracy_macro for cell in cells)
    if averaged:
        names.append("mean of tasks")
    columns: dict[str, list[str]] = {}
    for cell in cells:
        parts = {part.task: part for part in cell.tasks}
        baseline = own.same[cell.arm].baseline if cell.arm in own.same else None
        values = [_task_text(part, baseline) for part in (*map(parts.get, tasks), cell)]
        if averaged:
            values.append(_accuracy(cell.accuracy_macro))
        columns[_lines_of(BREAKS.split(cell.arm), ARM_WIDTH)] = values
    left_out: list[str] = []
    while len(columns) > 1 and _room(columns, width) < max(map(len, names)):
        left_out.insert(0, columns.popitem()[0].replace("\n", ""))
    caption = disclaimers(cells)
    if left_out:
        caption.append(f"on the page: {listed(left_out)}")
    meaning = "tokens per forward; speedup over the same model"
    if any(cell.accuracy for cell in cells):
        meaning = f"accuracy, %; {meaning}"
    title = f"{group.suite}, {batches(group.batch_size, group.batching)}, by task: {meaning}"
    table = _framed(title, caption, [[name] for name in names], columns, width, of="task")
    table.show_lines = False  # one line per task: there may be dozens
    return table


def _task_text(part: TaskFigures | ResultCell | None, baseline: str | None) -> str:
    """Return accuracy, tokens per forward and speedup of a task on one line; the speedup only with an interval."""
    if part is None:
        return NONE
    speedups: Sequence[Speedup | TaskSpeedup] = part.speedup
    values = [_accuracy(part.accuracy), number(part.tokens_per_forward, 2)]
    values += [times(s.value, 2) for s in speedups if s.baseline == baseline and s.ci_low is not None]
    return "  ".join(value for value in values if value != NONE) or NONE


def _framed(
    title: str,
    caption: Sequence[str],
    names: Sequence[Sequence[str]],
    columns: Mapping[str, Sequence[str]],
    width: int,
    of: str = "arm",
) -> Table:
    """Return a table with a row per name; a name is given in the pieces that it may be broken into."""
    table = Table(
        title=escape(title),
        caption=escape("\n".join(caption)),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_lines=True,
        padding=(0, 1, 0, 0),
    )
    table.add_column(of, overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == GRADE else "right", no_wrap=True)
    for name, *row in zip(names, *columns.values(), strict=True):
        table.add_row(*map(escape, [_lines_of(name, _room(columns, width)), *row]))
    return table


def _room(columns: Mapping[str, Sequence[str]], width: int) -> int:
    """Return the characters left for the names; each column has a rule and a space next to it."""
    widths = [max(map(len, "\n".join([heading, *values]).split("\n"))) for heading, values in columns.items()]
    return width - sum(widths) - 2 * (len(widths) + 1) - 1


def _lines_of(pieces: Sequence[str], room: int) -> str:
    """Return a name broken between its pieces, each line as long as possible."""
    lines = [""]
    for piece in pieces:
        if len(lines[-1]) + len(piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def _over_engines(cells: Sequence[ResultCell]) -> list[str]:
    """Return the ratios over the fastest reference by another engine, with those of plain decoding."""
    found: dict[str, dict[str, Speedup]] = {}  # baseline -> arm -> speedup
    for cell in cells:
        speedup = over_fastest_engine(cell)
        if cell.engine and speedup is not None:
            found.setdefault(speedup.baseline, {})[cell.arm] = speedup
    lines = []
    for baseline, speedups in found.items():
        line = f"over {baseline}: {_ratios({arm: s.value for arm, s in speedups.items()})}"
        plain = {s.plain.arm: s.plain.value for s in speedups.values() if s.plain}
        lines.append(f"{line} (plain {_ratios(plain)})" if plain else line)
    return lines


def _ratios(values: Mapping[str, float | None]) -> str:
    return listed(f"{arm} ×{number(value, 2)}" for arm, value in values.items())


def _spreads(cells: Sequence[ResultCell], own: OwnSpeedups) -> list[str]:
    """Return a line per arm with the worst and the best task for its headline figures."""
    found = {cell.arm: headline_spreads(cell, [own.same.get(cell.arm)]) for cell in cells}
    return [f"{arm} by task: {spreads}" for arm, spreads in found.items() if spreads]


def _inconclusive(cells: Sequence[ResultCell], own: OwnSpeedups) -> list[str]:
    """Return why speedups of the table are inconclusive, one line for each kind of reason."""
    reasons: dict[str, set[str]] = {}  # what was needed -> reasons
    for cell in cells:
        for speedup in (own.same.get(cell.arm), own.deployed.get(cell.arm)):
            if speedup is not None and speedup.verdict.startswith("inconclusive: "):
                reason = speedup.verdict.partition(": ")[2]
                reasons.setdefault(reason.rpartition(", ")[2], set()).add(reason)
    lines = []
    for alike in reasons.values():
        example = min(alike)
        lines.append(f"inconclusive: {example}" if len(alike) == 1 else f"inconclusive: for example {example}")
    return lines


def _notes(cell: ResultCell) -> list[str]:
    """Return what a reader must know of a cell: its failure, why it is void, its flags."""
    notes = []
    if cell.error:
        notes.append(f"failed: {cell.error}")
    if cell.status == "partial":
        notes.append("not finished; continue with `--resume`")
    return notes + [f"void: {reason}" for reason in cell.void] + flags_of_measurement(cell)


def _row(cell: ResultCell, own: OwnSpeedups) -> dict[str, str]:
    """Return a cell's values by heading."""
    if cell.status == "failed":
        return dict.fromkeys(HEADINGS, NONE) | {GRADE: "failed"}
    same, deployed = own.same.get(cell.arm), own.deployed.get(cell.arm)
    return {
        ACCURACY: _accuracy_text(cell, same),
        PER_FORWARD: stacked(
            number(cell.tokens_per_forward, 2), interval(cell.tokens_per_forward_ci, digits=2), _accepted(cell)
        ),
        RATE: number(cell.tokens_per_s.value, 0),
        SAME: _speedup_text(same),
        DEPLOYED: _speedup_text(deployed),
        ENGINE: _engine_text(cell),
        GRADE: _grade_text(cell),
    }


def _accuracy_text(cell: ResultCell, same: Speedup | None) -> str:
    """Return the accuracy with its interval, and the verdict against the baseline on the same checkpoint."""
    verdicts = {comparison.baseline: comparison.verdict for comparison in cell.accuracy_vs}
    verdict = None if same is None else _word(verdicts.get(same.baseline))
    limits = None if cell.accuracy is None else interval(bounds(cell.accuracy), 100, 1)
    return stacked(_accuracy(cell.accuracy), limits, verdict)


def _speedup_text(speedup: Speedup | None) -> str:
    if speedup is None:
        return NONE
    return stacked(number(speedup.value, 2), interval(bounds(speedup), digits=2), _word(speedup.verdict))


def _engine_text(cell: ResultCell) -> str:
    """Return the ratio over the fastest reference by another engine, and the part of the arm's own engine."""
    speedup = over_fastest_engine(cell)
    if speedup is None:
        return NONE
    plain = None if speedup.plain is None else f"plain {number(speedup.plain.value, 2)}"
    limits = interval(bounds(speedup), digits=2)
    return stacked(number(speedup.value, 2), limits, plain, f"vs {speedup.baseline}")


def _grade_text(cell: ResultCell) -> str:
    """Return the grade, or why there is none.

    The grade of a lossy arm against an equivalent arm is left out: it promises nothing about the tokens of `ar`.
    """
    if cell.lossless is not None and cell.claims == "lossless":
        return cell.lossless.grade
    if cell.reference or cell.simulated:
        return NONE
    return ungraded(cell).replace("not checked", "unchecked").replace(" ", "\n", 1)


def _accuracy(accuracy: Accuracy | None) -> str:
    return NONE if accuracy is None else percent(accuracy.value)


def _accepted(cell: ResultCell) -> str | None:
    if cell.acceptance is None or cell.acceptance.rate is None:
        return None
    return f"{percent(cell.acceptance.rate, 0)}% accepted"


def _word(verdict: str | None) -> str | None:
    """Return a verdict without its reasons."""
    return None if verdict is None else verdict.partition(":")[0].partition(",")[0]


def stacked(*lines: str | None) -> str:
    """Return the lines that say something, one under the other."""
    return "\n".join(line for line in lines if line and line != NONE) or NONE
