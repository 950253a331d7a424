"""A gate in the formats of other tools: what each tool reads, it finds, whatever strangers wrote into the record."""

import pytest
from junitparser import Error, Failure, JUnitXml, TestCase
from made_gates import (
    GATES,
    HOSTILE,
    changed,
    counts_only,
    finding,
    gate,
    hostile,
    inconclusive,
    slower,
    time_test,
    timed_cell,
)

from mtbench.experiments.gate import exports
from mtbench.experiments.gate.format import Gate
from mtbench.experiments.gate.tables import ALL_CELLS

EVERY = pytest.mark.parametrize("made", [pytest.param(make(), id=name) for name, make in GATES.items()])


def read(xml: str) -> dict[tuple[str, str], TestCase]:
    """The cases of a JUnit file by suite and name, as a reader of such files finds them."""
    suites = JUnitXml.fromstring(xml.encode())
    return {(suite.name, case.name): case for suite in suites for case in suite}


def kinds(case: TestCase) -> list[type]:
    return [type(result) for result in case.result]


@EVERY
def test_junit_is_read_and_counts_its_cases(made: Gate) -> None:
    """A failed build fails in the file too, and no file is empty: readers take that for a broken step."""
    suites = JUnitXml.fromstring(exports.junit(made).encode())
    cases = [case for suite in suites for case in suite]
    assert len(cases) == len(read(exports.junit(made))) > 0
    for part in (*suites, suites):
        stated = (part.tests, part.failures, part.errors)
        part.update_statistics()
        assert stated == (part.tests, part.failures, part.errors)
    results = {kind for case in cases for kind in kinds(case)}
    expected: dict[str, set[type]] = {"PASS": set(), "FAIL": {Failure}, "INCONCLUSIVE": {Error}}
    assert expected[made.word] <= results
    assert made.word == "FAIL" or Failure not in results
    assert made.word != "PASS" or Error not in results


def test_junit_has_a_case_for_each_cell_and_stage() -> None:
    cases = read(exports.junit(slower()))
    cells = [cell.cell for cell in slower().timed]
    both = [("gate.exact", cell) for cell in cells] + [("gate.timed", cell) for cell in cells]
    assert set(cases) == {("gate.comparable", "both builds"), *both}
    failed, undecided = cases["gate.timed", cells[1]], cases["gate.timed", cells[2]]
    assert kinds(failed) == [Failure]
    assert slower().findings[0].text in failed.result[0].message
    assert "+3.4% [2.6, 4.2]" in failed.result[0].text
    assert kinds(undecided) == [Error]
    assert "61 pairs needed" in undecided.result[0].text
    assert kinds(cases["gate.exact", cells[1]]) == []
    assert failed.time == pytest.approx(sum(slower().timed[1].base_s) + sum(slower().timed[1].head_s), abs=1e-3)


def test_junit_fails_the_stage_that_failed() -> None:
    cases = read(exports.junit(changed()))
    names = changed().compared
    assert kinds(cases["gate.exact", names[0]]) == []  # a note
    assert kinds(cases["gate.exact", names[1]]) == [Failure]
    assert cases["gate.exact", names[2]].result[0].text.startswith("fail, more work: gsm8k")
    assert kinds(cases["gate.comparable", "gsm8k.echo.graph.b1"]) == [Failure]
    assert kinds(cases["gate.timed", "both builds"]) == []


def test_the_gravest_finding_of_a_cell_is_its_result() -> None:
    """A note that came first does not hide a failure, and every finding is in the text."""
    cell = timed_cell(0).cell
    note = finding(stage="exact", kind="unstable", level="note", cell=cell, text="first")
    fails = finding(stage="exact", kind="memory", cell=cell, text="second")
    case = read(exports.junit(gate(word="FAIL", findings=[note, fails])))["gate.exact", cell]
    assert kinds(case) == [Failure]
    assert case.result[0].message.endswith("second")
    assert case.result[0].text.splitlines() == [f"fail, memory: {cell}: second", f"note, unstable: {cell}: first"]


def test_junit_counts_only_has_the_compared_cells() -> None:
    cases = read(exports.junit(counts_only()))
    assert {name for suite, name in cases if suite == "gate.exact"} == set(counts_only().compared)
    assert not any(suite == "gate.timed" for suite, _ in cases)


def test_a_mean_that_is_undecided_is_no_case() -> None:
    """The mean of all cells can fail a gate; a gate that passes does not need it."""
    made = gate(all_cells=time_test(0.01, 0.02, word="INCONCLUSIVE"))
    assert ("gate.timed", ALL_CELLS) not in read(exports.junit(made))
    made = gate(word="FAIL", all_cells=time_test(0.03, 0.002, word="FAIL"))
    assert kinds(read(exports.junit(made))["gate.timed", ALL_CELLS]) == [Failure]


def test_junit_survives_what_xml_cannot_hold() -> None:
    """Markup is text; control characters and noncharacters cannot be in an XML file at all."""
    text = f"{HOSTILE}\ufffe\uffff"
    xml = exports.junit(gate(word="FAIL", findings=[finding(text=text, cell=timed_cell(0).cell)]))
    message = read(xml)["gate.timed", timed_cell(0).cell].result[0].message
    assert "]]>" in message
    assert "</script><script>broken=1</script>" in message
    assert "\\x1b[2J\\u202e\\x00" in message
    assert message.endswith("\ufffd\ufffd")


def test_commands_are_one_for_each_finding_that_counts() -> None:
    first, second = exports.workflow_commands(slower())
    assert first == (
        "::error title=mtbench gate%3A slower%2C gsm8k.mars-tau0.9.graph.b1::"
        "head takes 3.4%25 longer [2.6, 4.2] in 14 pairs, and in 9 fresh pairs too"
    )
    assert second.startswith("::warning title=mtbench gate%3A undecided%2C ")
    assert exports.workflow_commands(gate()) == []
    assert len(exports.workflow_commands(changed())) == 3  # the notes are none


def test_no_text_starts_a_command_of_its_own() -> None:
    """A finding is one line, whatever it holds, and the runner reads its text again as it was."""
    text = "100%\r\n::set-output name=a::b\x1b[2J %0A,:"
    (line,) = exports.workflow_commands(gate(findings=[finding(text=text)]))
    assert line.splitlines() == [line]
    assert line.isprintable()
    _, _, message = line.partition("slower::")
    read_again = message.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")  # as actions/runner does
    assert read_again == text.replace("\x1b", "\\x1b")


def test_the_step_summary_says_the_word_first() -> None:
    text = exports.step_summary(slower())
    first, *rest = text.splitlines()
    assert first.startswith("## ✗ FAIL: gsm8k.mars-tau0.9.graph.b1 is slower")
    assert any(line.startswith("- **FAIL** slower: ") for line in rest)
    assert "| gsm8k.mars-tau0.9.graph.b1 | ✓ same | +3.4% \\[2.6, 4.2\\], FAIL | 14 |" in rest
    assert exports.step_summary(inconclusive()).startswith("## ? INCONCLUSIVE: ")
    assert exports.step_summary(gate()).startswith("## ✓ PASS: ")


def test_the_step_summary_escapes_markup_and_stays_small() -> None:
    text = exports.step_summary(hostile())
    assert "<" not in text
    assert "\x1b" not in text
    assert len(text.splitlines()) < 20
    noisy = gate(word="FAIL", findings=[finding(text=f"{HOSTILE}{'x' * 1000}") for _ in range(3000)])
    summary = exports.step_summary(noisy)
    assert len(summary.encode()) < 1 << 20
    assert "2950 more in gate.json" in summary
