"""What a gate found, for people: the verdict and why, its findings, the cells, the builds, the noise of the machine.

Everything is made from one record (mtbench/experiments/gate/format.py). It shows, and decides nothing.
"""

from pathlib import Path

from mtbench import document as documents
from mtbench import files
from mtbench.document import Beside, Block, Document, Entry, Notes, Pairs, Part, Points, Row, Section, Table, Text
from mtbench.document.formatting import NONE, count, interval, number, points, times
from mtbench.experiments.gate import exports, tables
from mtbench.experiments.gate.figures import draw
from mtbench.experiments.gate.format import STAGES, Gate, StageName
from mtbench.experiments.gate.tables import LEVEL_WORDS, Status
from mtbench.records import cleaned, dump

NOT_CALIBRATED = (
    "Not calibrated: the smallest slowdown that the gate can find on this machine is not known. This command "
    "calibrates it:"
)
STAGE_NAMES: dict[StageName, str] = {
    "comparable": "Can they be compared?",
    "exact": "Tokens and counts",
    "timed": "Times",
}


def write(directory: Path, gate: Gate) -> Path:
    """Write all files of the gate into `directory` and return the path of the page."""
    files.write_json(directory / "gate.json", dump(gate))
    files.write_text(directory / "gate.junit.xml", exports.junit(gate))
    files.write_json(directory / "bencher.json", exports.bencher(cleaned(gate)))
    return documents.write(directory, "gate", document(gate))


def document(gate: Gate, *, drawn: bool = True) -> Document:
    """Return what a gate shows; the terminal needs no figures."""
    gate = cleaned(gate)
    figures = draw(gate) if drawn else []
    cells, changed, findings = tables.cells(gate), _changed(gate), _findings(gate)
    return Document(
        title=gate.reason.rstrip("."),
        lead=" ".join(tables.summary(gate)),
        subject=f"{tables.subject(gate)}.",
        verdict=tables.verdict(gate),
        source="`gate.json`",
        sections=[
            *([Section("Times", [Beside(figures)])] if figures else []),
            *([Section("Cells", [cells])] if cells.rows else []),
            *([Section("Other tokens, by permission", [changed], link="Other tokens")] if changed.rows else []),
            *([Section("Findings", findings)] if findings else []),
            Section("Builds", [_builds(gate)], folded=True),
            Section("Machine and plan", [Pairs(tables.machine(gate), {"Plan options"})], folded=True, link="Machine"),
            Section("Noise of the machine", _noise(gate), folded=True, link="Noise"),
            Section("How to read it", [Notes(tables.reading(gate))], folded=True),
        ],
    )


def _findings(gate: Gate) -> list[Part]:
    """Return the findings of each stage that has any, the gravest first."""
    found = []
    for stage in STAGES:
        of_stage = [finding for finding in gate.findings if finding.stage == stage]
        of_stage.sort(key=lambda finding: tables.LEVELS.index(finding.level))
        listed = [
            Status(word := LEVEL_WORDS[f.level], word or "note").verdict._replace(
                reason=f"{f.kind}: {tables.finding_line(f)}"
            )
            for f in of_stage
        ]
        found += [Part(STAGE_NAMES[stage], [Points(listed)], folded=False)] if listed else []
    return found


def _changed(gate: Gate) -> Table:
    """Return the cells with other tokens."""
    rows = []
    for cell in gate.changed_cells:
        accuracy, per_forward = None, None
        if cell.accuracy_ci_low is not None and cell.accuracy_ci_high is not None:
            accuracy = interval((cell.accuracy_ci_low, cell.accuracy_ci_high), 100, 1)
        if cell.tokens_per_forward_ci_low is not None and cell.tokens_per_forward_ci_high is not None:
            per_forward = interval((cell.tokens_per_forward_ci_low, cell.tokens_per_forward_ci_high), digits=3)
        entries = [
            Entry(count(cell.items)),
            Entry(count(cell.differing)),
            Entry(points(cell.accuracy_difference), accuracy),
            Entry(times(cell.tokens_per_forward_ratio, 3), per_forward),
        ]
        rows.append(Row(cell.cell, entries))
    columns = [(heading, "") for heading in ("items", "with other tokens", "accuracy, points", "tokens per forward")]
    return Table(columns, rows, "cell", "Head against base on the same items; 95% intervals in brackets")


def _builds(gate: Gate) -> Table:
    rows = [Row(name, [Entry(base), Entry(head)], strong=base != head) for name, base, head in tables.builds(gate)]
    return Table([("base", ""), ("head", "")], rows, "property", "What differs is bold", text=True)


def _noise(gate: Gate) -> list[Block]:
    """Return the calibrated noise, as a whole and by cell, in percent; else the command that calibrates."""
    if gate.floor is None:
        return [Text(NOT_CALIBRATED), Text(tables.calibrate_command(gate), "code")]

    def percents(*shares: float | None) -> list[Entry]:
        return [Entry(NONE if share is None else f"{number(100 * share, 2)}%") for share in shares]

    rows = [
        Row(c.cell, percents(c.pair_sd, c.pair_sd_high, c.block_sd, c.outliers, c.drift_per_pair))
        for c in gate.floor.cells
    ]
    headings = ("pairs", "pairs, upper bound", "rounds of a block", "outliers", "drift per pair")
    caption = "Two processes of one build; standard deviations of log time"
    by_cell = Table([(heading, "") for heading in headings], rows, "cell", caption)
    return [Pairs(tables.floor_facts(gate)), Part("By cell", [by_cell])]
