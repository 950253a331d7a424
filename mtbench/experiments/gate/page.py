"""Write what the gate found: gate.json, gate.md, gate.html (one self-contained file), files for other tools.

All of them are made from one record (mtbench/experiments/gate/format.py). They show, and decide nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mtbench import files
from mtbench.document.formatting import NONE, count, interval, number, points, times
from mtbench.experiments.gate import exports, tables
from mtbench.experiments.gate.figures import draw
from mtbench.experiments.gate.format import STAGES, ChangedCell, Finding, Gate, StageName, Verdict
from mtbench.experiments.gate.tables import ALL_CELLS, LEVEL_WORDS, SIGNS, CellRow, Status
from mtbench.records import cleaned, dump
from mtbench.report.markdown import plain
from mtbench.report.write import inline, template

PAGE = "gate.html"
STYLES: dict[Verdict, str] = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
STAGE_NAMES: dict[StageName, str] = {
    "comparable": "Can they be compared?",
    "exact": "Tokens and counts",
    "timed": "Times",
}
COLUMNS = [
    ("tokens and counts", "do both builds emit the same tokens from the same work?"),
    ("time", "head’s time over base’s, less 1; 95% interval in brackets; the word on it"),
    ("pairs", "pairs of processes that timed the cell"),
    ("base", "geometric mean over pairs of base’s time"),
    ("head", "geometric mean over pairs of head’s time"),
    ("prefill", "part of the difference from reading the prompts, as a share of base’s time"),
    ("decoding", "part of the difference from decoding, as a share of base’s time"),
    ("forward passes", "the part of decoding in forward passes"),
    ("host", "the part of decoding outside of forward passes"),
    ("over the reference", "speedup over the reference arm in the same process, base → head; decides nothing"),
]


class Shown(NamedTuple):
    """A row of the table of cells, as text."""

    number: int | None
    name: str
    about: str  # what is shown under the name
    exact: Status | None
    change: str
    interval: str | None
    timed: Status | None
    values: list[str]


def write(directory: Path, gate: Gate) -> Path:
    """Write all files of the gate into `directory` and return the path of the page."""
    files.write_json(directory / "gate.json", dump(gate))
    gate = cleaned(gate)
    files.write_text(directory / "gate.md", _markdown(gate))
    files.write_text(directory / PAGE, _page(gate))
    files.write_text(directory / "gate.junit.xml", exports.junit(gate))
    files.write_json(directory / "bencher.json", exports.bencher(gate))
    return directory / PAGE


def terminal(gate: Gate) -> list[RenderableType]:
    """Return what the terminal shows: the cells, the findings, and at last the word and why."""
    gate = cleaned(gate)
    shown: list[RenderableType] = []
    found = tables.rows(gate)
    if found:
        shown.append(_terminal_table(gate, found))
    for finding in gate.findings:
        word = LEVEL_WORDS[finding.level]
        line = Text(f"{SIGNS[word] if word else '•'} {finding.stage}, {finding.kind}: ", STYLES[word] if word else "")
        shown.append(line.append(tables.finding_line(finding), "not bold default"))
    shown.append(Text(" ".join(tables.summary(gate))))
    shown.append(Text.assemble((f"{SIGNS[gate.word]} {gate.word}", STYLES[gate.word]), f": {gate.reason}"))
    return shown


def _terminal_table(gate: Gate, found: Sequence[CellRow]) -> Table:
    title = escape(tables.subject(gate))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold")
    table.add_column("tokens and counts")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("pairs", justify="right")
    table.add_column("word on time")
    if gate.all_cells is not None:
        status = tables.mean_status(gate, gate.all_cells)
        table.add_row(ALL_CELLS, "", tables.changed_by(gate.all_cells), "", _styled(status))
        table.add_section()
    for row in found:
        time, pairs = NONE, NONE
        if row.record is not None:
            time, pairs = tables.changed_by(row.record.test), str(len(row.record.head_s))
        table.add_row(escape(row.cell), _styled(row.exact), time, pairs, _styled(row.timed))
    return table


def _styled(status: Status) -> Text:
    return Text(f"{status.sign} {status.text}", STYLES[status.word].removeprefix("bold ") if status.word else "")


def _page(gate: Gate) -> str:
    columns, cells = _filled(_cells(gate))
    return template("gate.html.j2").render(
        word=gate.word,
        sign=SIGNS[gate.word],
        tone=tables.TONES[gate.word],
        title=tables.headline(gate),
        reason=gate.reason.rstrip("."),
        subject=tables.subject(gate),
        lead=" ".join(tables.summary(gate)),
        drawn=[(drawing, inline(drawing, drawing.name)) for drawing in draw(gate)],
        stages=_stages(gate),
        columns=columns,
        cells=cells,
        changed=[(cell.cell, _changed(cell)) for cell in gate.changed_cells],
        changed_columns=CHANGED_COLUMNS,
        builds=tables.builds(gate),
        machine=tables.machine(gate),
        floor=tables.floor_facts(gate),
        noise=_noise(gate),
        calibrate=tables.calibrate_command(gate),
        reading=tables.reading(gate),
        signs=SIGNS,
    )


def _stages(gate: Gate) -> list[tuple[str, list[tuple[Finding, Status]]]]:
    """Return the findings of each stage that has any, the gravest first."""
    found = []
    for stage in STAGES:
        of_stage = [finding for finding in gate.findings if finding.stage == stage]
        of_stage.sort(key=lambda finding: tables.LEVELS.index(finding.level))
        if of_stage:
            rows = [(f, Status(LEVEL_WORDS[f.level], LEVEL_WORDS[f.level] or "note")) for f in of_stage]
            found.append((STAGE_NAMES[stage], rows))
    return found


def _cells(gate: Gate) -> list[Shown]:
    shown = []
    if gate.all_cells is not None:
        mean = gate.all_cells
        status, narrow = tables.mean_status(gate, mean), tables.is_narrow(mean)
        time = tables.change(mean.ratio, narrow=narrow)
        blank = [NONE] * (len(COLUMNS) - 2)
        shown.append(Shown(None, ALL_CELLS, "", None, time, tables.change_interval(mean), status, blank))
    return shown + [_cell(row) for row in tables.rows(gate)]


def _filled(cells: Sequence[Shown]) -> tuple[list[tuple[str, str]], list[Shown]]:
    """Return the columns and rows without the columns in which nothing was measured."""
    always = len(COLUMNS) - len(cells[0].values) if cells else 0
    kept = [place for place in range(len(COLUMNS) - always) if any(cell.values[place] != NONE for cell in cells)]
    columns = [*COLUMNS[:always], *(COLUMNS[always + place] for place in kept)]
    return columns, [cell._replace(values=[cell.values[place] for place in kept]) for cell in cells]


def _cell(row: CellRow) -> Shown:
    cell = row.record
    if cell is None:
        return Shown(row.number, row.cell, "", row.exact, NONE, None, row.timed, [NONE] * (len(COLUMNS) - 2))
    values = [
        str(len(cell.head_s)),
        tables.mean_seconds(cell.base_s),
        tables.mean_seconds(cell.head_s),
        *tables.attribution(cell.attribution),
        NONE
        if cell.head_over_reference is None
        else f"{times(cell.base_over_reference, 2)} → {times(cell.head_over_reference, 2)}",
    ]
    test, about = cell.test, f"{cell.arm}, {cell.suite}, batch size\u00a0{cell.batch_size}"
    time = tables.change(test.ratio, narrow=tables.is_narrow(test))
    return Shown(row.number, row.cell, about, row.exact, time, tables.change_interval(test), row.timed, values)


CHANGED_COLUMNS = ("items", "with other tokens", "accuracy, points", "tokens per forward")


def _changed(cell: ChangedCell) -> list[tuple[str, str | None]]:
    """Return the values of a cell with other tokens, each with its interval."""
    accuracy, per_forward = None, None
    if cell.accuracy_ci_low is not None and cell.accuracy_ci_high is not None:
        accuracy = interval((cell.accuracy_ci_low, cell.accuracy_ci_high), 100, 1)
    if cell.tokens_per_forward_ci_low is not None and cell.tokens_per_forward_ci_high is not None:
        per_forward = interval((cell.tokens_per_forward_ci_low, cell.tokens_per_forward_ci_high), digits=3)
    return [
        (count(cell.items), None),
        (count(cell.differing), None),
        (points(cell.accuracy_difference), accuracy),
        (times(cell.tokens_per_forward_ratio, 3), per_forward),
    ]


def _noise(gate: Gate) -> list[tuple[str, list[str]]]:
    """Return the calibrated noise by cell, in percent."""
    if gate.floor is None:
        return []
    return [
        (
            cell.cell,
            [
                f"{100 * cell.pair_sd:.2f}%",
                f"{100 * cell.pair_sd_high:.2f}%",
                NONE if cell.block_sd is None else f"{100 * cell.block_sd:.2f}%",
                f"{number(100 * cell.outliers, 1)}%",
                NONE if cell.drift_per_pair is None else f"{number(100 * cell.drift_per_pair, 3)}%",
            ],
        )
        for cell in gate.floor.cells
    ]


def _markdown(gate: Gate) -> str:
    lines = [f"# {plain(tables.headline(gate))}", "", plain(f"{tables.subject(gate)}."), ""]
    lines += [plain(" ".join(tables.summary(gate))), ""]
    lines += _findings_markdown(gate)
    lines += ["## Cells", "", *(exports.cell_table(gate) or ["No cell was compared or timed.", ""])]
    split = [(row, row.record.attribution) for row in tables.rows(gate) if row.record and row.record.attribution]
    if split:
        lines += ["## Where the difference lies", "", "Shares of base's time.", ""]
        lines += _table(
            ["cell", "whole", "prefill", "decoding", "forward passes", "host"],
            [[row.cell, tables.share(parts.total), *tables.attribution(parts)] for row, parts in split],
        )
    if gate.changed_cells:
        lines += ["## Other tokens, by permission", ""]
        lines += _table(
            ["cell", *CHANGED_COLUMNS],
            [[c.cell, *(" ".join(filter(None, value)) for value in _changed(c))] for c in gate.changed_cells],
        )
    lines += ["## Builds", "", *_table(["", "base", "head"], tables.builds(gate))]
    lines += ["## Machine", "", *(f"- {name}: {plain(value)}" for name, value in tables.machine(gate)), ""]
    facts = tables.floor_facts(gate)
    lines += ["## Noise of the machine", "", *(f"- {name}: {plain(value)}" for name, value in facts)]
    if not facts:
        lines += ["Not calibrated. This command calibrates it:", "", f"    {tables.calibrate_command(gate)}"]
    lines += ["", "## How to read it", "", *(f"- **{name}.** {plain(text)}" for name, text in tables.reading(gate))]
    return "\n".join([*lines, ""])


def _findings_markdown(gate: Gate) -> list[str]:
    lines = []
    for stage, found in _stages(gate):
        lines += [f"## {stage}", ""]
        for finding, status in found:
            text = plain(tables.finding_line(finding))
            lines.append(f"- {status.sign} **{status.text}**, {finding.kind}: {text}")
        lines.append("")
    return lines


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose first column is text."""
    lines = [f"| {' | '.join(headings)} |", "|:--|" + "--:|" * (len(headings) - 1)]
    return [*lines, *(f"| {' | '.join(map(plain, row))} |" for row in body), ""]
