"""Unread answers and the two readings: what is counted, what is said of an arm, and what depends on the reading."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_records import made_results
from made_runs import AR, MARS, Answer, MadeRun
from rich.console import Console
from rich.text import Text
from stages import assemble
from stored import stored_json

import mtbench
from mtbench.plan.directory import RunDirectory
from mtbench.records import dump
from mtbench.report.summary import summary
from mtbench.report.terminal import results_tables
from mtbench.results.format import ResultCell

PLAIN = "ar@ar/graph"
NO_NUMBER, STOPPED, CUT = "no number behind ####", "ended by a stop string", "cut by the budget"
RIGHT, WRONG = (1.0, None, None), (0.0, None, None)
Given = tuple[float, str | None, float | None]  # score, why unread, score by value


def unread(why: str = NO_NUMBER, by_value: float | None = None) -> Given:
    return (0.0, why, by_value)


def found(folder: Path, plain: Sequence[Given], arm: Sequence[Given]) -> list[ResultCell]:
    """The cells of a run with plain decoding and an arm beside it, whose answers are read like this."""

    def answers(of: Sequence[Given], first: int) -> list[Answer]:
        named = [{"unread": why, "by_value": value} for _, why, value in of]
        read = [{key: value for key, value in one.items() if value is not None} for one in named]
        scores = [score for score, _, _ in of]
        return [
            Answer([first + n], [1], score, reading)
            for n, (score, reading) in enumerate(zip(scores, read, strict=True))
        ]

    made = MadeRun({AR: answers(plain, 1), MARS: answers(arm, 500)}, baseline=PLAIN)
    return assemble(RunDirectory(made.write(folder / "run"))).cells


def said(cell: ResultCell) -> list[str]:
    return [flag for flag in cell.flags if "unread" in flag or "by value" in flag]


def test_an_unread_answer_counts_and_its_score_is_in_the_accuracy(tmp_path: Path) -> None:
    """It is in no column of a run without any, which has no such key either; a frame has 0 there."""
    plain, arm = found(tmp_path, [RIGHT] * 40, [*[RIGHT] * 37, unread(), unread(STOPPED), unread()])
    assert arm.unread is not None
    assert dump(arm.unread) == {"answers": 3, "of": 40, "reasons": {NO_NUMBER: 2, STOPPED: 1}}
    assert arm.accuracy is not None
    assert (arm.accuracy.value, arm.accuracy.n) == (37 / 40, 40)
    assert not {"unread", "by_value", "by_value_vs"} & dump(plain).keys()
    assert list(mtbench.read(tmp_path / "run").to_frame()["unread"]) == [0, 3]
    assert list(mtbench.read(tmp_path / "run").items()["unread"].dropna()) == [NO_NUMBER, STOPPED, NO_NUMBER]


MORE = "unread answers: {} of {}, its baseline ar@ar/graph {} of {}: its answers lose their format"


@pytest.mark.parametrize(
    ("plain", "arm", "of", "clearly"),
    [
        (2, 12, 128, True),
        (0, 4, 8, True),
        (10, 30, 60, True),
        (0, 3, 128, False),
        (8, 11, 128, False),
        (30, 10, 60, False),
    ],
)
def test_clearly_more_unread_answers_than_the_baseline_are_said(
    plain: int, arm: int, of: int, clearly: bool, tmp_path: Path
) -> None:
    """By the test of accuracies, on the same items; an arm with fewer has no word, nor has the baseline."""
    cells = found(tmp_path, *([*[unread()] * n, *[RIGHT] * (of - n)] for n in (plain, arm)))
    words = [flag for cell in cells for flag in said(cell) if "lose their format" in flag]
    assert words == ([MORE.format(arm, of, plain, of)] if clearly else [])


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([*[RIGHT] * 95, *[unread(CUT)] * 5], ["5 of 5 wrong"]),
        ([*[RIGHT] * 94, *[unread(CUT)] * 3, *[unread(STOPPED)] * 2, unread()], ["6 of 100 answers", "6 of 6 wrong"]),
        ([*[RIGHT] * 80, *[WRONG] * 10, *[unread()] * 10], ["10 of 100 answers"]),
        ([*[RIGHT] * 80, *[WRONG] * 9, *[unread()] * 11], ["11 of 100 answers", "11 of 20 wrong"]),
        ([*[RIGHT] * 4, *[unread()] * 4], ["4 of 8 answers"]),
        ([*[WRONG] * 8], []),
    ],
)
def test_many_unread_answers_are_said_and_that_they_are_most_of_the_wrong_ones(
    answers: list[Given], words: list[str], tmp_path: Path
) -> None:
    """More than one in twenty; more than half of the wrong ones, if at least five."""
    plain, _ = found(tmp_path, answers, answers)
    assert [flag.partition(" are unread")[0] for flag in said(plain)] == [
        word if "answers" in word else f"{word} answers" for word in words
    ]
    if words[:1] == ["6 of 100 answers"]:
        assert said(plain)[0].endswith(f"unread: 3 {CUT}, 2 {STOPPED}, 1 {NO_NUMBER}")


@pytest.mark.parametrize(
    ("answers", "value", "apart", "word"),
    [
        (
            [*[(1.0, None, 1.0)] * 60, *[unread(by_value=1.0)] * 20, *[unread(by_value=0.0)] * 20],
            0.8,
            (20, 0),
            "20.0 points above",
        ),
        ([*[(1.0, None, 0.0)] * 10, *[(1.0, None, 1.0)] * 90], 0.9, (0, 10), "10.0 points below"),
        ([*[(1.0, None, 0.0)] * 3, *[(0.0, None, 1.0)] * 3, *[(1.0, None, 1.0)] * 94], 0.97, (3, 3), None),
        ([(0.0, None, 1.0), *[(1.0, None, 1.0)] * 99], 1.0, (1, 0), None),
        (
            [*[(0.0, None, 1.0)] * 6, *[RIGHT] * 50, *[WRONG] * 44],
            0.56,
            (6, 0),
            "6.0 points above",
        ),  # some have one only
    ],
)
def test_the_accuracy_by_value_and_whether_it_differs_by_more_than_chance(
    answers: list[Given], value: float, apart: tuple[int, int], word: str | None, tmp_path: Path
) -> None:
    """It is over the same answers as the score, which it does not change; false passes and missed answers are told."""
    plain, _ = found(tmp_path, answers, answers)
    assert plain.by_value is not None
    assert plain.accuracy is not None
    assert (plain.by_value.value, plain.by_value.n) == (value, 100)
    assert (plain.by_value.missed, plain.by_value.false_passes) == apart
    assert plain.accuracy.value == pytest.approx(value - (apart[0] - apart[1]) / 100)
    words = [flag for flag in said(plain) if "by value" in flag]
    assert [flag.partition(", ")[2].partition(" the score")[0] for flag in words] == ([word] if word else [])
    assert plain.by_value.differs == bool(word)


def test_a_verdict_that_depends_on_the_reading_is_said_once_a_group(tmp_path: Path) -> None:
    """On the page and in the terminal, where the readings are named, too; not where all verdicts are the same."""
    right: Given = (1.0, None, 1.0)
    cells = found(tmp_path, [right] * 300, [*[right] * 250, *[unread(by_value=1.0)] * 50])
    [versus] = cells[1].by_value_vs
    assert (versus.verdict.word, versus.lost, versus.n) == ("not worse", 0, 300)
    on_page = " ".join(summary(cells, {}, "it"))
    console = Console(width=300)
    with console.capture() as captured:
        tables, notes = results_tables(made_results(cells), 300)
        console.print(*tables, *map(Text, notes))
    words = "worse than margin by the score, not worse by value."
    assert f"depend on the reading: ar@mars/graph against {PLAIN}: {words}" in on_page
    for text in (on_page, captured.get()):
        assert text.count(words) == 1
        assert text.count("the rule of the benchmark's owner") == 1
    same = [cells[0], cells[1].changed(by_value_vs=cells[1].accuracy_vs)]
    assert "depend on the reading" not in " ".join(summary(same, {}, "it"))
    without: list[Any] = [cell.changed(by_value=None, by_value_vs=[]) for cell in cells]
    assert "owner" not in " ".join(summary(without, {}, "it"))


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_has_the_unread_answers(width: int, tmp_path: Path) -> None:
    cells = found(tmp_path, [RIGHT] * 40, [*[RIGHT] * 30, *[unread(by_value=1.0)] * 10])
    console = Console(width=width)
    with console.capture() as captured:
        console.print(*results_tables(made_results(cells), width)[0])
    assert max(map(len, captured.get().splitlines())) <= width
    rows = [line.split() for line in captured.get().splitlines() if line.startswith("Plain decoding")]
    assert ["0" in rows[0], "10" in rows[1]] == [True, True]
    assert "unread" in captured.get()


def test_a_reading_of_an_item_without_a_score_is_ignored(tmp_path: Path) -> None:
    """A file of another hand may have such items."""
    found(tmp_path, [RIGHT] * 4, [RIGHT] * 4)
    run = RunDirectory(tmp_path / "run")
    run.write_json("readings.json", {AR: {"arithmetic/99/0": {"unread": CUT, "by_value": 1.0}}, "x": {"y": {}}})
    assert [cell.unread for cell in assemble(run).cells] == [None, None]
    assert "by_value" not in stored_json(run, "results.json")["cells"][0]
