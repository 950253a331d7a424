"""What the terminal shows when a run is planned or done: tables, then the decision."""

import re
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mtbench.document.formatting import NONE, bounds, counted, interval, listed, number, percent
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.decided import decided
from mtbench.report.phrases import (
    REPEATED_FLAG,
    batches,
    cost_per_million,
    disclaimers,
    fewer_items,
    flags_of_measurement,
    short_verdict,
    speed_word,
    spread_over_tasks,
    ungraded,
)
from mtbench.report.summary import warnings
from mtbench.results.comparisons import GroupKey, groups_of, own_speedups
from mtbench.results.decision_format import Decision
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import ResultCell, Results
from mtbench.runs.plan import Plan

ACCURACY, SPEEDUP, PER_FORWARD, GRADE = "accuracy\n%", "speedup", "tokens/\nforward", "lossless"
COST, RATE, BY_TASK = "cost\nper 1M\ntokens", "tokens/s", "speedup by task"
WIDE_ONLY = (BY_TASK, RATE)  # columns that need a wide terminal, the first to be left out first
LEAST_FIRST = (PER_FORWARD, GRADE, ACCURACY, COST)  # then those that a very narrow one drops, in order
LEAST_NAME, ONE_LINE = 16, 28  # letters of an arm; shorter names stay on one line, at the cost of a column
SIGNS = {"faster": "▲", "slower": "▼", "same": "=", "not worse": "▲", "worse": "▼", "inconclusive": "?"}
MOST_NAMED = 4  # arms of a note that are named
KEY = "▲ faster, or not worse; ▼ slower, or worse; = same; ? inconclusive"


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


def results_tables(results: Results, width: int) -> list[Group]:
    """Return a table per suite, batch size and way of batching, with one line per arm.

    A wide terminal has more columns. If `width` columns are too few for the others, the least important are dropped.
    """
    names = arm_names(results.cells)
    return [
        _group_table(key, cells, names, results.price_per_hour, width)
        for key, cells in groups_of(results.cells).items()
    ]


def decision_lines(results: Results, decision: Decision | None = None) -> list[str]:
    """Return what to use, by the decision of a race or by what was measured; before it, what spoils the run."""
    names, found = arm_names(results.cells), decided(results, decision)
    return [in_words(line, names) for line in (*warnings(results.cells), found.headline, *found.beside)]


def note_lines(cells: Sequence[ResultCell], names: Mapping[str, str]) -> list[str]:
    """Return what a reader must know of the cells of a group: each note with its arms, in words."""
    lines = []
    for note, arms in _notes([cell.changed(left=None) for cell in cells]).items():
        several = f"{len(arms)} of {len(cells)} arms" if len(arms) > MOST_NAMED else listed(names[arm] for arm in arms)
        lines.append(f"{'all arms' if len(arms) == len(cells) else several}: {in_words(note, names)}")
    return lines


def _group_table(
    key: GroupKey, cells: Sequence[ResultCell], names: Mapping[str, str], price: float | None, width: int
) -> Group:
    headlines = own_speedups(cells).headline
    rows = [_row(cell, headlines.get(cell.arm), price) for cell in cells]
    columns = {heading: [row[heading] for row in rows] for heading in rows[0]}
    columns = {heading: values for heading, values in columns.items() if set(values) != {NONE}}
    notes = _notes(cells)
    of_all = [note for note, of_note in notes.items() if len(cells) > 1 and len(of_note) == len(cells)]
    marked = [note for note in notes if note not in of_all]
    arms = []
    for cell in cells:
        marks = " ".join(_mark(n) for n, note in enumerate(marked, 1) if cell.arm in notes[note])
        arms.append(f"{names[cell.arm]} {marks}".strip())
    longest = max(map(len, arms))
    least = dict.fromkeys(WIDE_ONLY, longest) | {PER_FORWARD: min(longest, ONE_LINE)}
    for heading in (*WIDE_ONLY, *LEAST_FIRST):
        if _room(columns, width) < least.get(heading, LEAST_NAME):
            columns.pop(heading, None)
    baselines = {speedup.baseline for speedup in headlines.values()}
    over = f", speedup over {names[baselines.pop()]}" if len(baselines) == 1 else ""
    items = counted(max(cell.items for cell in cells), "item")
    title = f"{key.suite}, {batches(key.batch_size, key.batching)}, {items}{over}"
    caption = [*disclaimers(cells)] + ([KEY] if headlines else [])
    caption += [in_words(line, names) for line in fewer_items(cells)]
    caption += [in_words(f"{_mark(n)} {note}", names) for n, note in enumerate(marked, 1)]
    caption += [in_words(f"all arms: {note}", names) for note in of_all]
    return _framed(title, caption, arms, columns)


def _framed(title: str, caption: Sequence[str], arms: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Group:
    """Return a table with a row per arm, between its title and its notes."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("arm", overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in (GRADE, BY_TASK) else "right", no_wrap=True)
    for row in zip(arms, *columns.values(), strict=True):
        table.add_row(*map(escape, row))
    return Group(Text(title, "bold"), table, *map(Text, caption), Text())


def _room(columns: Mapping[str, Sequence[str]], width: int) -> int:
    """Return the characters left for the arms; each column has a rule and a space next to it."""
    widths = [max(map(len, "\n".join([heading, *values]).split("\n"))) for heading, values in columns.items()]
    return width - sum(widths) - 2 * len(widths) - 1


def _mark(number: int) -> str:
    """Return the mark of a note."""
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(number))


def _notes(cells: Sequence[ResultCell]) -> dict[str, list[str]]:
    """Return what a reader must know of the arms, with the arms. Of notes that differ in numbers only, the first."""
    alike: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for note in _notes_of(cell):
            alike.setdefault(re.sub(r"[\d.,]+", "0", note), {}).setdefault(note, []).append(cell.arm)
    found = {}
    for notes in alike.values():
        first = next(iter(notes))
        arms = [arm for of_note in notes.values() for arm in of_note]
        found[first if len(notes) == 1 else f"for example {first}"] = arms
    return found


def _notes_of(cell: ResultCell) -> list[str]:
    """Return a cell's failure, why it is void, and its flags."""
    notes = []
    if cell.error:
        notes.append(f"failed: {cell.error}")
    if cell.status == "partial":
        notes.append("not finished; continue with `--resume`")
    if cell.left is not None:
        notes.append(f"left after {counted(cell.left.block, 'block')}: {cell.left.reason}")
    flags = [flag for flag in flags_of_measurement(cell) if flag != REPEATED_FLAG]
    return notes + [f"void: {reason}" for reason in cell.void] + flags


def _row(cell: ResultCell, speedup: Speedup | None, price: float | None) -> dict[str, str]:
    """Return a cell's values by heading."""
    if cell.status == "failed":
        return dict.fromkeys((ACCURACY, SPEEDUP, PER_FORWARD, GRADE, COST, RATE, BY_TASK), NONE) | {GRADE: "failed"}
    return {
        ACCURACY: _accuracy_text(cell, speedup),
        SPEEDUP: _speedup_text(cell, speedup),
        PER_FORWARD: number(cell.tokens_per_forward, 2),
        GRADE: _grade_text(cell),
        COST: number(cost_per_million(cell, price)),
        RATE: number(cell.tokens_per_s.value, 0),
        BY_TASK: _by_task_text(cell, speedup),
    }


def _accuracy_text(cell: ResultCell, speedup: Speedup | None) -> str:
    """Return the accuracy, with a sign for the verdict against the arm's baseline."""
    if cell.accuracy is None or cell.accuracy.value is None:
        return NONE
    verdicts = {comparison.baseline: comparison.verdict for comparison in cell.accuracy_vs}
    sign = "" if speedup is None else _sign(verdicts.get(speedup.baseline))
    return f"{percent(cell.accuracy.value)} {sign or ' '}"


def _speedup_text(cell: ResultCell, speedup: Speedup | None) -> str:
    if speedup is None or speedup.value is None:
        return NONE
    limits = interval(bounds(speedup), digits=2)
    value = f"{number(speedup.value, 2)} {limits}" if limits else number(speedup.value, 2)
    return f"{value} {_sign(speed_word(cell, speedup))}"


def _sign(verdict: str | None) -> str:
    """Return the sign of a verdict; a verdict between good and bad has the sign of neither."""
    word = short_verdict(verdict) or ""
    if word.startswith("worse") and "less than the margin" in word:
        return "="
    return next((sign for start, sign in SIGNS.items() if word.startswith(start)), "")


def _by_task_text(cell: ResultCell, speedup: Speedup | None) -> str:
    """Return the worst and the best task for the arm's speedup."""
    if speedup is None or cell.void:
        return NONE
    return spread_over_tasks(speedup.spread) or NONE


def _grade_text(cell: ResultCell) -> str:
    """Return the grade, or why there is none.

    The grade of a lossy arm against an equivalent arm is left out: it promises nothing about the tokens of `ar`.
    """
    if cell.lossless is not None and cell.claims == "lossless":
        return cell.lossless.grade
    if cell.reference or cell.simulated:
        return NONE
    return ungraded(cell).removesuffix(" by design").removeprefix("same ").replace("not checked", "unchecked")
