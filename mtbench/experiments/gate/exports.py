"""A gate in the formats of other tools. Every function takes the record and returns the content of a file.

bencher             Bencher Metric Format (bencher.dev/docs/reference/bencher-metric-format)
junit               JUnit XML, as CI systems read it (github.com/testmoapp/junitxml)
step_summary        Markdown for $GITHUB_STEP_SUMMARY
workflow_commands   annotations of GitHub Actions (docs.github.com, "Workflow commands for GitHub Actions")
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple
from xml.etree import ElementTree

from mtbench.document.formatting import listed
from mtbench.document.markdown_text import markdown_table, plain
from mtbench.errors import printable
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.format import STAGES, Finding, Gate, StageName, TimeTest, Verdict
from mtbench.experiments.gate.tables import ALL_CELLS, LEVEL_WORDS, CellRow, findings_of, geometric_mean_s
from mtbench.records import cleaned

NANOSECONDS = 1e9  # unit of Bencher's own measure `latency`
NO_XML = re.compile("[\ufffe\uffff]")  # characters that XML 1.0 has not, besides control characters
COMMANDS = {"fail": "error", "inconclusive": "warning"}
MOST_SUMMARISED = 50  # findings of a step summary: GitHub refuses one of over 1 MiB

Metric = dict[str, float]


def bencher(gate: Gate) -> dict[str, dict[str, Metric]]:
    """Return {cell: {measure: {value, lower_value, upper_value}}}.

    `time-ratio` is head's time over base's with its 95 % interval. `latency` is head's time in nanoseconds, the unit of
    Bencher's own measure of this name: geometric mean, lowest and highest of the pairs.
    """
    measures: dict[str, dict[str, Metric]] = {}
    for cell in gate.timed:
        of_cell = measures.setdefault(cell.cell, {})
        of_cell |= _metric("time-ratio", cell.test.ratio, cell.test.ci_low, cell.test.ci_high)
        latency_s = geometric_mean_s(cell.head_s)
        if latency_s is not None:
            bounds = (min(cell.head_s), max(cell.head_s))
            of_cell |= _metric("latency", *(NANOSECONDS * value for value in (latency_s, *bounds)))
        of_cell |= _metric("speedup-over-reference", cell.head_over_reference)
    for changed in gate.changed_cells:
        of_cell = measures.setdefault(changed.cell, {})
        of_cell |= _metric("items-with-other-tokens", changed.differing)
        of_cell |= _metric(
            "accuracy-difference", changed.accuracy_difference, changed.accuracy_ci_low, changed.accuracy_ci_high
        )
        of_cell |= _metric(
            "tokens-per-forward-ratio",
            changed.tokens_per_forward_ratio,
            changed.tokens_per_forward_ci_low,
            changed.tokens_per_forward_ci_high,
        )
    if gate.all_cells is not None:
        mean = gate.all_cells
        measures[ALL_CELLS] = _metric("time-ratio", mean.ratio, mean.ci_low, mean.ci_high)
    return {name: found for name, found in measures.items() if found}


def _metric(name: str, value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Metric]:
    """Return a measure under its name; nothing if it has no value."""
    if value is None:
        return {}
    bounds = {"lower_value": low, "upper_value": high}
    return {name: {"value": value, **{bound: at for bound, at in bounds.items() if at is not None}}}


class _Case(NamedTuple):
    name: str
    word: Verdict | None  # None: the stage did not judge it
    message: str
    texts: list[str]
    time_s: float


def junit(gate: Gate) -> str:
    """Return JUnit XML: a suite per stage, in it a case per cell that the stage judged.

    FAIL is a failure. INCONCLUSIVE is an error and not skipped: readers count skipped cases as harmless, and the gate
    does not pass, its exit code is 3. Skipped is a cell that was noted and not judged.
    """
    gate = cleaned(gate)
    suites = {stage: _cases(gate, stage) for stage in STAGES}
    root = ElementTree.Element("testsuites", name="mtbench gate")
    every = [case for cases in suites.values() for case in cases]
    root.attrib |= {name: total for name, total in _totals(every).items() if name != "skipped"}  # Jenkins' schema
    for stage, cases in suites.items():
        if cases:
            root.append(_suite(gate, stage, cases))
    ElementTree.indent(root, " ")
    xml: bytes = ElementTree.tostring(root, encoding="UTF-8", xml_declaration=True)
    return f"{xml.decode()}\n"


def _suite(gate: Gate, stage: StageName, cases: Sequence[_Case]) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=f"gate.{stage}", timestamp=gate.started.removesuffix("Z"))
    suite.attrib |= _totals(cases)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("word", gate.word), ("base", gate.base.label), ("head", gate.head.label)):
        ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
    for case in cases:
        element = ElementTree.SubElement(
            suite, "testcase", name=_xml(case.name), classname=f"gate.{stage}", time=f"{case.time_s:.3f}"
        )
        tag = {"FAIL": "failure", "INCONCLUSIVE": "error", None: "skipped"}.get(case.word)
        body = _xml("\n".join(case.texts))
        if tag is not None:
            verdict = ElementTree.SubElement(element, tag, message=_xml(case.message), type=case.word or "not judged")
            verdict.text = body
        elif body:
            ElementTree.SubElement(element, "system-out").text = body
    return suite


def _totals(cases: Sequence[_Case]) -> dict[str, str]:
    def count(word: Verdict | None) -> str:
        return str(sum(case.word == word for case in cases))

    return {
        "tests": str(len(cases)),
        "failures": count("FAIL"),
        "errors": count("INCONCLUSIVE"),
        "skipped": count(None),
        "time": f"{sum(case.time_s for case in cases):.3f}",
    }


def _cases(gate: Gate, stage: StageName) -> list[_Case]:
    """Return the cases of a stage. That the builds are comparable is always a case, so the file is never empty."""
    found = findings_of(gate, stage, None)
    cases = [_case("both builds", found, "PASS")] if found or stage == "comparable" else []
    for row in tables.rows(gate):
        of_cell = findings_of(gate, stage, row.cell)
        if stage == "exact" and (of_cell or row.cell in gate.compared):
            cases.append(_case(row.cell, of_cell, "PASS" if row.cell in gate.compared else None))
        elif stage == "timed" and (of_cell or row.record is not None):
            cases.append(_timed_case(row, of_cell))
        elif stage == "comparable" and of_cell:
            cases.append(_case(row.cell, of_cell, None))
    if stage == "timed" and gate.all_cells is not None:
        cases.append(_mean_case(gate, gate.all_cells))
    return cases


def _mean_case(gate: Gate, mean: TimeTest) -> _Case:
    """Return the case of the mean over all cells. It can fail the gate, but no pass depends on it."""
    status = tables.mean_status(gate, mean)
    word = None if mean.word == "INCONCLUSIVE" else status.word
    return _Case(ALL_CELLS, word, f"{status.text}: {tables.changed_by(mean)}", [], 0.0)


def _case(name: str, found: Sequence[Finding], word: Verdict | None) -> _Case:
    """Return a case with the gravest word of its findings; without one that counts, `word`."""
    grave = LEVEL_WORDS[found[0].level] if found else None
    return _Case(name, grave or word, found[0].text if found else "", _lines(found), 0.0)


def _timed_case(row: CellRow, found: Sequence[Finding]) -> _Case:
    if row.record is None:
        return _case(row.cell, found, None)
    line = f"{row.timed.text}: {tables.changed_by(row.record.test)}"
    time_s = sum(row.record.base_s) + sum(row.record.head_s)
    return _Case(row.cell, row.timed.word, found[0].text if found else line, [line, *_lines(found)], time_s)


def _lines(found: Iterable[Finding]) -> list[str]:
    return [f"{finding.level}, {finding.kind}: {finding.text}" for finding in found]


def _xml(text: str) -> str:
    return NO_XML.sub("\ufffd", text)


def step_summary(gate: Gate) -> str:
    """Return the summary of a GitHub step: the word and why, findings that count, a row per cell."""
    gate = cleaned(gate)
    reason = gate.reason.rstrip(".")
    lines = [f"## {tables.SIGNS[gate.word]} {gate.word}: {plain(reason)}", "", plain(tables.subject(gate)), ""]
    lines += [plain(" ".join(tables.summary(gate))), ""]
    grave = [finding for finding in gate.findings if finding.level != "note"]
    lines += [
        f"- **{LEVEL_WORDS[f.level]}** {f.stage}, {f.kind}: {plain(tables.finding_line(f))}"
        for f in grave[:MOST_SUMMARISED]
    ]
    if len(grave) > MOST_SUMMARISED:
        lines.append(f"- {len(grave) - MOST_SUMMARISED} more in gate.json")
    cells = tables.cells(gate)
    brief = cells.only([n for n, (heading, _) in enumerate(cells.columns) if heading in tables.BRIEF])
    brief = replace(brief, rows=[replace(row, about="", number=None) for row in brief.rows])
    return "\n".join([*lines, "", *(markdown_table(brief) if cells.rows else [])])


def workflow_commands(gate: Gate) -> list[str]:
    """Return `::error` and `::warning`, one for each finding that fails or is inconclusive.

    GitHub shows ten of each kind per step.
    """
    return [
        printable(f"::{COMMANDS[f.level]} title={_property(_title(f))}::{_data(f.text)}")
        for f in gate.findings
        if f.level in COMMANDS
    ]


def _title(finding: Finding) -> str:
    return listed(part for part in (f"mtbench gate: {finding.kind}", finding.cell) if part)


def _data(text: str) -> str:
    """Return the message of a workflow command (escapeData of actions/toolkit, packages/core/src/command.ts)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return a property of a workflow command (escapeProperty, ibid.)."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
