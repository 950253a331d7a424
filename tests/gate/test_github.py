"""What a workflow of GitHub shows of a gate, whatever strangers wrote into the record."""

from made_gates import HOSTILE, changed, finding, gate, slower

from mtbench.experiments.gate import experiment


def test_commands_are_one_for_each_finding_that_counts() -> None:
    first, second = experiment.workflow_commands(slower())
    assert first == (
        "::error title=mtbench gate%3A slower%2C gsm8k.mars-tau0.9.graph.b1::"
        "head takes 3.4%25 longer [2.6, 4.2] in 14 pairs, and in 9 fresh pairs too"
    )
    assert second.startswith("::warning title=mtbench gate%3A undecided%2C ")
    assert experiment.workflow_commands(gate()) == []
    assert len(experiment.workflow_commands(changed())) == 3  # the notes are none


def test_no_text_starts_a_command_of_its_own() -> None:
    """A finding is one line, whatever it holds, and the runner reads its text again as it was."""
    text = "100%\r\n::set-output name=a::b\x1b[2J %0A,:"
    (line,) = experiment.workflow_commands(gate(findings=[finding(text=text)]))
    assert line.splitlines() == [line]
    assert line.isprintable()
    _, _, message = line.partition("slower::")
    read_again = message.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")  # as actions/runner does
    assert read_again == text.replace("\x1b", "\\x1b")


def test_the_step_summary_stays_small() -> None:
    """Its text is that of gate.md. GitHub refuses one of over 1 MiB."""
    noisy = gate(word="FAIL", findings=[finding(text=f"{HOSTILE}{'–' * 1000}") for _ in range(3000)])
    assert experiment.step_summary(noisy).startswith("# FAIL: ")
    assert len(experiment.step_summary(noisy).encode()) <= 1_000_000
