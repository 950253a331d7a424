"""The files of a gate: the record, what people read, and what CI systems read.

junit               JUnit XML, as CI systems read it (github.com/testmoapp/junitxml)
step_summary        Markdown for $GITHUB_STEP_SUMMARY
workflow_commands   annotations of GitHub Actions (docs.github.com, "Workflow commands for GitHub Actions")
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from mtbench import files
from mtbench.document import html_page
from mtbench.document.formatting import listed
from mtbench.document.markdown_text import markdown_table, plain
from mtbench.errors import printable
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.document import document
from mtbench.experiments.gate.format import STAGES, Finding, Gate, StageName, Verdict
from mtbench.experiments.gate.tables import ALL_CELLS, LEVEL_WORDS
from mtbench.records import cleaned, dump

NO_XML = re.compile("[\ufffe\uffff]")  # characters that XML 1.0 has not, besides control characters
COMMANDS = {"fail": "error", "inconclusive": "warning"}
MOST_SUMMARISED = 50  # findings of a step summary: GitHub refuses one of over 1 MiB
BOTH = "both builds"  # name of the case that is of no cell


def write(directory: Path, gate: Gate) -> Path:
    """Write all files of the gate into `directory` and return the path of the page."""
    files.write_json(directory / "gate.json", dump(gate))
    files.write_text(directory / "gate.junit.xml", junit(gate))
    return html_page.write(directory, "gate", document(gate))


@dataclass
class _Case:
    word: Verdict
    lines: list[str] = field(default_factory=list)  # the first is the message
    time_s: float = 0.0


def junit(gate: Gate) -> str:
    """Return JUnit XML: a suite per stage, in it a case per cell that the stage judged.

    FAIL is a failure. INCONCLUSIVE is an error and not skipped: readers count skipped cases as harmless, and the gate
    does not pass, its exit code is 3.
    """
    gate = cleaned(gate)
    root = ElementTree.Element("testsuites", name="mtbench gate")
    for stage in STAGES:
        if cases := _cases(gate, stage):
            root.append(_suite(gate, stage, cases))
    for total in ("tests", "failures", "errors"):
        root.set(total, str(sum(int(suite.attrib[total]) for suite in root)))
    ElementTree.indent(root, " ")
    xml: bytes = ElementTree.tostring(root, encoding="UTF-8", xml_declaration=True)
    return f"{xml.decode()}\n"


def _suite(gate: Gate, stage: StageName, cases: dict[str, _Case]) -> ElementTree.Element:
    words = [case.word for case in cases.values()]
    suite = ElementTree.Element("testsuite", name=f"gate.{stage}", timestamp=gate.started.removesuffix("Z"))
    suite.set("tests", str(len(words)))
    suite.set("failures", str(words.count("FAIL")))
    suite.set("errors", str(words.count("INCONCLUSIVE")))
    for name, case in cases.items():
        named = {"name": name, "classname": f"gate.{stage}", "time": f"{case.time_s:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", named)
        body = NO_XML.sub("\ufffd", "\n".join(case.lines))
        if case.word != "PASS":
            tag = {"FAIL": "failure", "INCONCLUSIVE": "error"}[case.word]
            said = {"message": body.partition("\n")[0], "type": case.word}
            ElementTree.SubElement(element, tag, said).text = body
        elif body:
            ElementTree.SubElement(element, "system-out").text = body
    return suite


def _cases(gate: Gate, stage: StageName) -> dict[str, _Case]:
    """Return the cases of a stage by name. That the builds are comparable is always one, so no file is empty.

    The mean over all cells can fail the gate, but no pass depends on it: it is a case if it has a word.
    """
    cases: dict[str, _Case] = {BOTH: _Case("PASS")} if stage == "comparable" else {}
    if stage == "exact":
        cases |= {cell: _Case("PASS") for cell in gate.compared}
    if stage == "timed":
        cases |= {cell.cell: _Case(cell.test.word, [], sum(cell.base_s + cell.head_s)) for cell in gate.timed}
    for finding in tables.findings_of(gate, stage):
        word = LEVEL_WORDS[finding.level]
        name = finding.cell if finding.cell is not None and (word or finding.cell in cases) else BOTH
        case = cases.setdefault(name, _Case(word or "PASS"))
        if word and not case.lines:
            case.word = word
        case.lines.append(f"{finding.level}, {tables.finding_line(finding)}")
    if stage == "timed":
        for cell in gate.timed:
            cases[cell.cell].lines.append(f"{tables.time_status(cell.test).text}: {tables.changed_by(cell.test)}")
        if gate.all_cells is not None and gate.all_cells.word != "INCONCLUSIVE":
            cases[ALL_CELLS] = _Case(gate.all_cells.word, [tables.changed_by(gate.all_cells)])
    return cases


def step_summary(gate: Gate) -> str:
    """Return the summary of a GitHub step: the word and why, findings that count, a row per cell."""
    gate = cleaned(gate)
    title = f"## {tables.SIGNS[gate.word]} {gate.word}: {plain(gate.reason.rstrip('.'))}"
    lines = [title, "", plain(tables.subject(gate)), "", plain(tables.summary(gate)), ""]
    grave = [finding for finding in gate.findings if finding.level != "note"]
    lines += [f"- **{LEVEL_WORDS[f.level]}** {plain(tables.finding_line(f))}" for f in grave[:MOST_SUMMARISED]]
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
