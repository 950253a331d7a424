"""The document of a gate: the verdict and why, its findings, the cells, the builds, the noise of the machine.

It is made from one record (mtbench/experiments/gate/format.py) and decides nothing.
"""

from mtbench.document.formatting import NONE, counted, listed, number
from mtbench.document.model import Block, Document, Entry, Part, Points, Row, Section, Table, Verdict
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.format import STAGES, BuildRecord, Finding, Gate, NoiseFloor, StageName
from mtbench.experiments.gate.tables import LEVEL_WORDS, Status
from mtbench.records import cleaned

STAGE_NAMES: dict[StageName, str] = {
    "comparable": "Can they be compared?",
    "exact": "Tokens and counts",
    "timed": "Times",
}


def document(gate: Gate) -> Document:
    """Return the document of a gate."""
    gate = cleaned(gate)
    cells, found = tables.cells(gate), [(stage, tables.findings_of(gate, stage)) for stage in STAGES]
    findings: list[Block] = [
        Part(STAGE_NAMES[stage], [Points(list(map(_point, of_stage)))], folded=False)
        for stage, of_stage in found
        if of_stage
    ]
    return Document(
        title=gate.reason.rstrip("."),
        lead=tables.summary(gate),
        subject=f"{tables.subject(gate)}.",
        verdict=Status(gate.word, gate.word).verdict,
        source="`gate.json`",
        sections=[
            *([Section("Cells", [cells])] if cells.rows else []),
            *([Section("Findings", findings)] if findings else []),
            Section("Builds", [_builds(gate)], folded=True),
            *([Section("Noise of the machine", [noise(gate.floor)], folded=True, link="Noise")] if gate.floor else []),
        ],
    )


def noise(floor: NoiseFloor) -> Table:
    """Return the noise of every cell, in percent."""
    rows = [
        Row(cell.cell, [Entry(f"{number(100 * sd, 2)}%") for sd in (cell.pair_sd, cell.pair_sd_high)])
        for cell in floor.cells
    ]
    pairs = f"{counted(floor.pairs, 'pair')} of processes of one build, {floor.measured}"
    caption = f"smallest detectable slowdown {100 * floor.smallest_detectable:.1f}%, from {pairs}"
    return Table([("pairs", "standard deviation of log(time / time)"), ("at most", "")], rows, "cell", caption)


def _point(finding: Finding) -> Verdict:
    word, what = LEVEL_WORDS[finding.level], ": ".join(filter(None, (finding.cell, finding.text)))
    return Status(word, word or "note").verdict._replace(reason=f"{finding.kind}: {what}")


def _builds(gate: Gate) -> Table:
    base, head = _properties(gate.base), _properties(gate.head)
    values = {name: (base.get(name) or NONE, head.get(name) or NONE) for name in base | head}
    rows = [Row(name, [Entry(a), Entry(b)], strong=a != b) for name, (a, b) in values.items() if {a, b} != {NONE}]
    return Table([("base", ""), ("head", "")], rows, "property", "What differs is bold", text=True)


def _properties(build: BuildRecord) -> dict[str, str | None]:
    plugins = listed(f"{path} {sha256[:12]}" for path, sha256 in build.plugins.items())
    return {
        "Label": build.label,
        "Environment": build.env,
        "mtbench": build.mtbench,
        "Commit": build.git,
        "Python": build.python,
        "Plugins": plugins,
        "Serving engine": build.engine,
        **build.packages,
    }
