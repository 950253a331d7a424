"""The document of a gate: the verdict and why, its findings, the cells, the builds, the noise of the machine.

It is made from one record (mtbench/experiments/gate/format.py) and decides nothing.
"""

import shlex

from mtbench.document.formatting import NONE, counted, listed, number
from mtbench.document.model import Block, Document, Entry, Notes, Pairs, Part, Points, Row, Section, Table, Verdict
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.figures import forest
from mtbench.experiments.gate.format import STAGES, BuildRecord, Finding, Gate, NoiseFloor, StageName
from mtbench.experiments.gate.tables import LEVEL_WORDS, LEVELS, Status
from mtbench.records import cleaned

STAGE_NAMES: dict[StageName, str] = {
    "comparable": "Can they be compared?",
    "exact": "Tokens and counts",
    "timed": "Times",
}
ORDERS = {True: "take turns block by block", False: "one process after the other"}  # of the processes of a pair


def document(gate: Gate, *, drawn: bool = True) -> Document:
    """Return the document of a gate; the terminal needs no figure."""
    gate = cleaned(gate)
    values = {"accepted": f"{gate.request.max_slowdown:g}%", "looks": listed(gate.looks)}
    words, notes = ([(name, text.format(**values)) for name, text in of.items()] for of in (WORDS, NOTES))
    cells, gravest = tables.cells(gate), sorted(gate.findings, key=lambda finding: LEVELS.index(finding.level))
    findings: list[Block] = [
        Part(STAGE_NAMES[stage], [Points(list(map(_point, of_stage)))], folded=False)
        for stage in STAGES
        if (of_stage := [finding for finding in gravest if finding.stage == stage])
    ]
    return Document(
        title=gate.reason.rstrip("."),
        lead=tables.summary(gate),
        subject=f"{tables.subject(gate)}.",
        verdict=Status(gate.word, gate.word).verdict,
        source="`gate.json`",
        sections=[
            *([Section("Times", [forest(gate), Pairs(words)])] if drawn and gate.timed else []),
            *([Section("Cells", [cells])] if cells.rows else []),
            *([Section("Findings", findings)] if findings else []),
            Section("Builds", [_builds(gate)], folded=True),
            Section("Machine and plan", [Pairs(_machine(gate), {"Plan options"})], folded=True, link="Machine"),
            *([Section("Noise of the machine", [noise(gate.floor)], folded=True, link="Noise")] if gate.floor else []),
            Section("How to read it", [Notes(notes)], folded=True),
        ],
    )


def noise(floor: NoiseFloor) -> Table:
    """Return the noise of every cell, in percent."""
    rows = [
        Row(cell.cell, [Entry(f"{number(100 * sd, 2)}%") for sd in (cell.pair_sd, cell.pair_sd_high)])
        for cell in floor.cells
    ]
    caption = f"{counted(floor.pairs, 'pair')} of processes of one build, {floor.measured}"
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


def _machine(gate: Gate) -> list[tuple[str, str]]:
    key = gate.key
    values = {
        "GPU": key.gpu_uuid or "none: decoded on the processor",
        "Driver": key.driver,
        "Power cap": None if key.power_cap_w is None else f"{number(key.power_cap_w, 0)} W",
        "Processor": key.processor,
        "Kernel": key.kernel,
        "torch": key.torch,
        "Plan": f"{key.plan_sha256[:16]}…",
        "Plan options": shlex.join(gate.request.plan_arguments) or "none",
        "Process pairs": f"{ORDERS[gate.request.interleave]}, order by seed {gate.request.seed}",
    }
    return [(name, value) for name, value in values.items() if value is not None]


WORDS = {  # a line each
    "PASS": "Circle: the upper bound is below {accepted}, the accepted slowdown.",
    "FAIL": "Square: slower by {accepted} or more, the lower bound is above 0, and fresh pairs confirm it.",
    "INCONCLUSIVE": "Hollow diamond: neither is shown, so it is no pass.",
}
NOTES = {
    "Pairs": (
        "A pair is one process of each build, and the unit of every interval: two processes of one build differ by "
        "more than the blocks inside a process. Base and head begin in the order ABBA. The time of a cell in a process "
        "is the sum over blocks of the median over rounds."
    ),
    "Bounds": (
        "The lower bound has an error of 1% over all looks and cells (Holm), the upper bound of 2.5% over all looks. "
        "Every cell must pass. The mean of all cells can fail the gate, but a pass does not need it."
    ),
    "Without timing": "Other tokens, more work for the same tokens, more memory, or a cell that only head lost: FAIL.",
    "Looks": (
        "The times are tested after {looks} pairs, each time with an equal share of the error. If a number of pairs is "
        "given, so many would decide if estimate and noise stayed. The gate ends at the look that decides, or at one "
        "where the noise of the pairs leaves no hope for the last look."
    ),
}
