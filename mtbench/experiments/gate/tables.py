"""What a gate found as text: the rows and sentences that the page, the terminal and other tools' files share.

Nothing is decided here. A ratio of times is written as people read it: 1.031 is +3.1%.
"""

import shlex
from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

from mtbench import document
from mtbench.document import Entry, Row, Table, Tone
from mtbench.document.formatting import NONE, counted, listed, number, seconds, times
from mtbench.experiments.gate.format import (
    EXIT_CODES,
    Attribution,
    BuildRecord,
    Finding,
    Gate,
    Level,
    StageName,
    TimedCell,
    TimeTest,
    Verdict,
)
from mtbench.report.phrases import suite_name

ORDERS = {True: "take turns block by block", False: "one process after the other"}  # of the processes of a pair
NOT_COMPARED = "not compared"
ALL_CELLS = "mean of all cells"  # has spaces, so no cell has this name
SIGNS: dict[Verdict, str] = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "?"}
TONES: dict[Verdict, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "plain"}
LEVEL_WORDS: dict[Level, Verdict | None] = {"fail": "FAIL", "inconclusive": "INCONCLUSIVE", "note": None}
LEVELS: tuple[Level, ...] = ("fail", "inconclusive", "note")  # the gravest first
EXPECTED = ("slower", "undecided")  # kinds that say no more than the word on a time
NARROW = 0.004  # intervals below this width are written with two decimals


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
BRIEF = ("time", "tokens and counts", "pairs")


class Status(NamedTuple):
    """What a stage says of a cell. Without a word it says nothing that counts."""

    word: Verdict | None
    text: str

    @property
    def verdict(self) -> document.Verdict:
        return (
            document.Verdict(self.text, tone=TONES[self.word], sign=SIGNS[self.word])
            if self.word
            else document.Verdict(self.text)
        )


class CellRow(NamedTuple):
    """A cell that was compared, timed, or that a finding names."""

    number: int
    cell: str
    exact: Status
    timed: Status
    record: TimedCell | None


def sentence(text: str) -> str:
    """Return a text that ends with a full stop."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def verdict(gate: Gate) -> document.Verdict:
    """Return the verdict on the whole."""
    return Status(gate.word, gate.word).verdict


def change(ratio: float | None, *, narrow: bool = False) -> str:
    """Return a ratio of times as a difference in percent.

    >>> change(1.031), change(0.99961), change(1.0004, narrow=True)
    ('+3.1%', '0.0%', '+0.04%')
    """
    return NONE if ratio is None else f"{_signed(100 * (ratio - 1), 2 if narrow else 1)}%"


def change_interval(test: TimeTest) -> str | None:
    """Return the 95 % interval of a difference in percent; None if there is none."""
    if test.ci_low is None or test.ci_high is None:
        return None
    digits = 2 if is_narrow(test) else 1
    low, high = (_signed(100 * (bound - 1), digits).removeprefix("+") for bound in (test.ci_low, test.ci_high))
    return f"[{low}, {high}]"


def changed_by(test: TimeTest) -> str:
    """Return a difference in percent with its interval."""
    return " ".join(filter(None, (change(test.ratio, narrow=is_narrow(test)), change_interval(test))))


def is_narrow(test: TimeTest) -> bool:
    """Return whether the interval is so narrow that one decimal would hide it."""
    return test.ci_low is not None and test.ci_high is not None and test.ci_high - test.ci_low < NARROW


def attribution(found: Attribution | None) -> list[str]:
    """Return the parts of a difference: prefill, decoding, of the latter forward passes and host."""
    if found is None:
        return [NONE] * 4
    return list(map(share, (found.prefill, found.total - found.prefill, found.forward, found.host)))


def share(value: float | None) -> str:
    """Return a share of base's time as a difference in percent."""
    return NONE if value is None else percent(100 * value)


def percent(value: float) -> str:
    """Return a percentage with its sign and one decimal."""
    return f"{_signed(value, 1)}%"


def percent_tick(value: float) -> str:
    """Return a percentage with its sign and as few digits as it has; 0 has no sign."""
    return f"{value:+g}%".replace("-", "−") if round(value, 9) else "0%"


def _signed(value: float, digits: int) -> str:
    rounded = round(value, digits) + 0.0  # −0.0 + 0.0 is 0.0
    return (f"{rounded:+.{digits}f}" if rounded else f"{rounded:.{digits}f}").replace("-", "−")


def cells(gate: Gate) -> Table:
    """Return a row per cell with its words, times and parts of the difference; first the mean of all cells."""
    shown = []
    if gate.all_cells is not None:
        time = _time(gate.all_cells, mean_status(gate, gate.all_cells))
        shown.append(Row(ALL_CELLS, [Entry(""), time, *[Entry()] * (len(COLUMNS) - 2)], strong=True))
    for row in rows(gate):
        exact, cell = Entry("", verdict=row.exact.verdict), row.record
        if cell is None:
            untimed = Entry(verdict=row.timed.verdict)
            shown.append(Row(row.cell, [exact, untimed, *[Entry()] * (len(COLUMNS) - 2)], row.number))
            continue
        over = (cell.base_over_reference, cell.head_over_reference)
        values = [
            str(len(cell.head_s)),
            mean_seconds(cell.base_s),
            mean_seconds(cell.head_s),
            *attribution(cell.attribution),
            NONE if over[1] is None else f"{times(over[0], 2)} → {times(over[1], 2)}",
        ]
        about = f"{cell.arm}, {cell.suite}, batch size\u00a0{cell.batch_size}"
        entries = [exact, _time(cell.test, row.timed), *map(Entry, values)]
        shown.append(Row(row.cell, entries, row.number, about))
    return Table(COLUMNS, shown, "cell", "Head against base; 95% intervals in brackets", brief=BRIEF).filled()


def _time(test: TimeTest, status: Status) -> Entry:
    return Entry(change(test.ratio, narrow=is_narrow(test)), change_interval(test), status.verdict)


def rows(gate: Gate) -> list[CellRow]:
    """Return a row per cell, in the order of the times, then of the comparison, then of the findings."""
    timed = {cell.cell: cell for cell in gate.timed}
    named = (finding.cell for finding in gate.findings if finding.cell is not None)
    names = list(dict.fromkeys((*timed, *gate.compared, *named)))
    return [
        CellRow(
            place,
            name,
            exact_status(gate, name),
            timed_status(gate, timed.get(name), name),
            timed.get(name),
        )
        for place, name in enumerate(names, start=1)
    ]


def distinct(gate: Gate, cell: TimedCell) -> list[str]:
    """Return a cell's suite and batch size where the timed cells differ in them."""
    parts = []
    if len({other.suite for other in gate.timed}) > 1:
        parts.append(suite_name(cell.suite))
    if len({other.batch_size for other in gate.timed}) > 1:
        parts.append(f"b{cell.batch_size}")
    return parts


def findings_of(gate: Gate, stage: StageName, cell: str | None) -> list[Finding]:
    """Return the findings of a stage on a cell, or on no cell; the gravest first."""
    found = [finding for finding in gate.findings if (finding.stage, finding.cell) == (stage, cell)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def exact_status(gate: Gate, cell: str) -> Status:
    """Return how the tokens and counts of a cell compare, or why they cannot be compared."""
    found = findings_of(gate, "exact", cell) or findings_of(gate, "comparable", cell)
    kinds = listed(dict.fromkeys(finding.kind for finding in found))
    if found:
        word = LEVEL_WORDS[found[0].level]
        return Status(word, kinds if word else f"noted: {kinds}")
    return Status("PASS", "same") if cell in gate.compared else Status(None, NOT_COMPARED)


def timed_status(gate: Gate, cell: TimedCell | None, name: str) -> Status:
    """Return the word on a cell's times, and why there is none."""
    found = findings_of(gate, "timed", name)
    if cell is None:
        word = LEVEL_WORDS[found[0].level] if found else None
        return Status(word, found[0].kind if word else "not timed")
    return _word_on(gate, cell.test, found)


def mean_status(gate: Gate, mean: TimeTest) -> Status:
    """Return the word on the mean of all cells."""
    return _word_on(gate, mean, [finding for finding in findings_of(gate, "timed", None) if finding.kind in EXPECTED])


def _word_on(gate: Gate, test: TimeTest, found: Sequence[Finding]) -> Status:
    """Return the word of the findings on a time, since the gate's word follows from them; without any, the test's.

    A test that fails in a gate that does not was not confirmed.
    """
    finding = next((finding for finding in found if finding.level != "note"), None)
    word: Verdict = (finding and LEVEL_WORDS[finding.level]) or test.word
    if test.word == "FAIL" and (word == "INCONCLUSIVE" or gate.word != "FAIL"):
        return Status("INCONCLUSIVE", "INCONCLUSIVE: not confirmed")
    text = word if finding is None or finding.kind in EXPECTED else f"{word}: {finding.kind}"
    if test.pairs_needed is not None:
        text = f"{text}, {counted(test.pairs_needed, 'pair')} needed"
    return Status(word, text)


def summary(gate: Gate) -> list[str]:
    """Return what was compared and timed, in sentences."""
    sentences = [_compared(gate), _timed(gate)]
    if gate.confirmation_pairs:
        sentences.append(f"The slowdown was tested once more in {counted(gate.confirmation_pairs, 'fresh pair')}.")
    if gate.same_build:
        sentences.append("Base and head are one build, so a FAIL is a false alarm.")
    sentences.append(f"The command ends with exit code {EXIT_CODES[gate.word]}.")
    return [text for text in sentences if text]


def _compared(gate: Gate) -> str:
    statuses = [row.exact for row in rows(gate) if row.exact.text != NOT_COMPARED]
    if not statuses:
        return "No tokens were compared."
    return f"Tokens and counts of {counted(len(statuses), 'cell')}: {_tally(statuses, 'the same')}."


def _timed(gate: Gate) -> str:
    if not gate.timed:
        return "Nothing was timed: only counts were asked for." if gate.request.counts_only else "Nothing was timed."
    statuses = [row.timed for row in rows(gate) if row.record is not None]
    cells, pairs = counted(len(statuses), "cell"), counted(gate.pairs, "pair")
    return f"Times of {cells} in {pairs} of processes: {_tally(statuses, 'PASS')}."


def _tally(statuses: Sequence[Status], good: str) -> str:
    """Return how many cells have each word; the gravest first.

    >>> _tally([Status("PASS", ""), Status("FAIL", "")], "the same"), _tally([Status("PASS", "")], "the same")
    ('1 FAIL, 1 the same', 'the same')
    """
    names = {"FAIL": "FAIL", "INCONCLUSIVE": "INCONCLUSIVE", None: "noted", "PASS": good}
    counts = {name: sum(status.word == word for status in statuses) for word, name in names.items()}
    found = {name: n for name, n in counts.items() if n}
    if len(found) == 1:
        return next(iter(found)) if len(statuses) == 1 else f"all {next(iter(found))}"
    return listed(f"{n} {name}" for name, n in found.items())


def finding_line(finding: Finding) -> str:
    """Return a finding with the cell that it concerns."""
    return f"{finding.cell}: {finding.text}" if finding.cell is not None else finding.text


def build_name(build: BuildRecord) -> str:
    """Return the label of a build, with its commit if the label does not have it."""
    if build.git is None or build.git[:7] in build.label:
        return build.label
    commit, dash, dirty = build.git.partition("-")
    return f"{build.label} ({commit[:12]}{dash}{dirty[:5]})"


def subject(gate: Gate) -> str:
    """Return which builds were compared, and how."""
    margin = f"margin {100 * gate.request.margin:g}%"
    return listed((f"{build_name(gate.head)} against {build_name(gate.base)}", margin, gate.started))


def builds(gate: Gate) -> list[tuple[str, str, str]]:
    """Return the properties of base and head, side by side."""
    base, head = gate.base, gate.head
    pairs: list[tuple[str, str | None, str | None]] = [
        ("Label", base.label, head.label),
        ("Environment", base.env, head.env),
        ("mtbench", base.mtbench, head.mtbench),
        ("Commit", base.git, head.git),
        ("Python", base.python, head.python),
        ("Plugins", _plugins(base), _plugins(head)),
    ]
    names = dict.fromkeys((*base.packages, *head.packages))
    pairs += [(name, base.packages.get(name), head.packages.get(name)) for name in names]
    return [(name, a or NONE, b or NONE) for name, a, b in pairs if a or b]


def _plugins(build: BuildRecord) -> str:
    return listed(f"{path} {sha256[:12]}" for path, sha256 in build.plugins.items())


def machine(gate: Gate) -> list[tuple[str, str]]:
    """Return the machine that both builds ran on."""
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


def calibrate_command(gate: Gate) -> str:
    """Return the command that calibrates this machine on this plan."""
    asked = gate.request
    interleave = ["--interleave"] if asked.interleave else []
    files = [word for file in asked.plugins for word in ("--plugin", file)]
    words = [*files, *asked.plan_arguments, "--blocks", str(asked.blocks), *interleave]
    return shlex.join(["mtbench", "gate", "calibrate", *words])


def floor_facts(gate: Gate) -> list[tuple[str, str]]:
    """Return the calibrated noise of the machine; empty if it is not calibrated."""
    floor = gate.floor
    if floor is None:
        return []
    noisiest = max(floor.cells, key=lambda cell: cell.pair_sd_high, default=None)
    facts = [
        ("Smallest detectable slowdown", f"{100 * floor.smallest_detectable:.1f}%"),
        ("Measured", f"{floor.measured}, {counted(floor.pairs, 'pair')} of processes of one build"),
    ]
    if noisiest is not None:
        noise = f"{100 * noisiest.pair_sd:.2f}%, upper bound {100 * noisiest.pair_sd_high:.2f}%"
        facts.append(("Noisiest cell", f"{noisiest.cell}: standard deviation of pairs {noise}"))
    if floor.interleave != gate.request.interleave:
        facts.append(("Turns", "the calibration and this gate ordered the processes of a pair differently"))
    return facts


def geometric_mean_s(values: Sequence[float]) -> float | None:
    """Return the geometric mean of seconds; None if there is none or one is 0."""
    return geometric_mean(values) if values and min(values) > 0 else None


def mean_seconds(values: Sequence[float]) -> str:
    return seconds(geometric_mean_s(values))


def reading(gate: Gate) -> list[tuple[str, str]]:
    """Return how to read the page, each note with its heading."""
    values = {
        "margin": f"{100 * gate.request.margin:g}%",
        "looks": f" after {listed(gate.looks)} pairs" if gate.looks else "",
    }
    needed = {
        "Looks": bool(gate.looks and gate.timed),
        "Where the difference lies": any(cell.attribution for cell in gate.timed),
        "Over the reference": any(cell.head_over_reference for cell in gate.timed),
        "Other tokens": bool(gate.changed_cells),
    }
    return [(heading, note.format(**values)) for heading, note in NOTES.items() if needed.get(heading, True)]


NOTES = {
    "Pairs": (
        "A pair is one process of each build. Base begins in one half of the pairs and head in the other, in the order "
        "ABBA. Two processes of one build differ by more than the blocks inside a process, so the pair is the unit of "
        "every interval. The time of a cell in a process is the sum over blocks of the median over rounds."
    ),
    "Percent": (
        "Head's time over base's, less 1. +3.1% [2.2, 4.0] means that head takes 3.1% longer, with a 95% interval from "
        "2.2% to 4.0%. The mean of pairs is geometric."
    ),
    "FAIL": (
        "Time: a cell, or the mean of all cells, is slower by at least {margin}, the margin, as an estimate; its lower "
        "bound is above 0; and fresh pairs confirm it. The bound has an error of 1% over all looks and cells (Holm). "
        "Without timing: other tokens, more work for the same tokens, more memory, or a cell that only head lost."
    ),
    "PASS": (
        "Tokens and counts agree, and every timed cell has an upper bound below {margin}, the margin, with an error of "
        "2.5% over all looks. The mean of all cells can fail the gate, but a pass does not need it."
    ),
    "INCONCLUSIVE": (
        "Neither. It is not a pass. If a number of pairs is given, so many would decide if estimate and noise stayed. "
        "The gate ends with it early where the noise of the pairs leaves no hope for the last look."
    ),
    "Looks": (
        "The times are tested{looks}, and no further once they decide. Each look has an equal share of the error."
    ),
    "Where the difference lies": (
        "Shares of base's time that add up to the whole difference: prefill (reading the prompts), forward passes, "
        "and decoding outside of them (host). Arithmetic means over pairs. No word depends on them."
    ),
    "Over the reference": (
        "The speedup over the reference arm of the same process, base → head. No word depends on it: it hides a change "
        "that the reference shares."
    ),
    "Other tokens": (
        "The cells whose tokens may differ by permission. The difference of accuracy is on the same items; the ratio "
        "of tokens per forward is over blocks."
    ),
    "Exit codes": "0 PASS, 1 FAIL, 2 the builds cannot be compared or an option is wrong, 3 INCONCLUSIVE.",
}
