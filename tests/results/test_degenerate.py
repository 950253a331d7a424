"""Degenerate answers: which ones end in a loop, what the other answers show, and that every reader sees it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_records import cell_data, generation_line
from stages import assemble

from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine
from mtbench.results import degenerate
from mtbench.results.figure_formats import Degenerate

LOOP = [7, 8] * 32
TEXT = list(range(100, 164))


@pytest.mark.parametrize("period", range(1, 33))
def test_a_loop_repeats_within_sixteen_tokens(period: int) -> None:
    """It is there at least four times in the last 64 tokens, whatever came before."""
    loop = (list(range(period)) * 64)[:64]
    assert degenerate.repeats([*TEXT, *loop]) is (period <= 16)


@pytest.mark.parametrize(
    "token_ids",
    [
        LOOP[1:],  # 63 tokens
        [5, *LOOP[1:]],  # the loop has 63 tokens
        [*LOOP, 5],  # it ended
        [token for line in range(16) for token in (1, 2, 3, 100 + line)],  # a list with numbers
        TEXT,
        [],
    ],
    ids=["short", "begins late", "ended", "list", "text", "empty"],
)
def test_what_does_not_repeat_is_no_loop(token_ids: list[int]) -> None:
    assert not degenerate.repeats(token_ids)


def test_only_an_answer_that_the_budget_cut_is_degenerate() -> None:
    """A model that ends its loop was not stuck."""
    reasons = ("length", "end", "stop")
    found = [degenerate.is_degenerate(generation_line(token_ids=LOOP, finish_reason=reason)) for reason in reasons]
    assert found == [True, False, False]


def answers(commits: Sequence[tuple[list[int], list[int]]]) -> list[GenerationLine]:
    """An answer for each (tokens, commits), with three guesses offered in each forward."""
    return [
        generation_line(
            item=f"a/{n}/0", token_ids=ids, commits=of_ids, forwards=len(of_ids), drafted=3 * len(of_ids), block=n
        )
        for n, (ids, of_ids) in enumerate(commits)
    ]


def test_the_other_answers_have_figures_of_their_own() -> None:
    """A loop of 64 tokens in 16 forwards; the others have 12 tokens in 6 forwards, one of which committed nothing."""
    lines = answers([(LOOP, [4] * 16), (TEXT[:8], [4, 0, 3, 1]), (TEXT[:4], [2, 2])])
    assert degenerate.of_cell(cell_data(lines, [])) == Degenerate(answers=1, share=1 / 3, tokens_per_forward=2.0)


def test_an_external_engine_has_a_share_and_no_figures() -> None:
    """Its tokens are known, its forwards are not."""
    lines = [generation_line(item=f"a/{n}/0", token_ids=ids) for n, ids in enumerate((LOOP, TEXT, TEXT, TEXT))]
    assert degenerate.of_cell(cell_data(lines, [])) == hidden(1, 0.25)


def test_a_hidden_answer_hides_the_figures() -> None:
    """The rest alone would be the figures of other answers."""
    lines = [*answers([(LOOP, [4] * 16), (TEXT[:8], [4, 4])]), generation_line(item="a/2/0", token_ids=TEXT)]
    assert degenerate.of_cell(cell_data(lines, [])) == hidden(1, 1 / 3)


def test_without_a_text_of_a_model_there_is_nothing_to_say() -> None:
    """No answer, or simulated weights or acceptance."""
    simulated = {"weights": None, "accept": "0.8", "note": None}
    assert degenerate.of_cell(cell_data([], [])) is None
    assert degenerate.of_cell(cell_data(answers([(LOOP, [4] * 16)]), [], simulated=simulated)) is None


def hidden(number: int, share: float) -> Degenerate:
    return Degenerate(answers=number, share=share, tokens_per_forward=None)


@pytest.mark.parametrize(
    ("found", "per_forward", "flags"),
    [
        (None, 1.9, []),
        (hidden(1, 0.05), 1.9, []),
        (hidden(2, 0.06), None, ["6% of the answers end in a loop"]),
        (hidden(2, 1.0), 1.9, ["100% of the answers end in a loop"]),
        (hidden(2, 0.1).changed(tokens_per_forward=1.0), 1.0, ["10% of the answers end in a loop"]),
        (
            hidden(2, 0.125).changed(tokens_per_forward=1.63),
            1.91,
            ["12% of the answers end in a loop (1.91 tokens per forward, 1.63 without them)"],
        ),
    ],
    ids=["not known", "few", "hidden forwards", "all", "no difference", "many"],
)
def test_more_than_a_twentieth_is_flagged(
    found: Degenerate | None, per_forward: float | None, flags: list[str]
) -> None:
    """One sentence, with tokens per forward of all answers and of the others if they differ."""
    assert degenerate.flags(found, per_forward) == flags


def test_a_run_whose_answers_loop_is_flagged(
    small_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arms that the budget cut have the share in results.json. The answers are too short for a real loop."""
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))
    assert {found.answers for cell in assemble(run).cells if (found := cell.degenerate)} == {0}
    monkeypatch.setattr(degenerate, "repeats", lambda token_ids: True)
    cells = assemble(run).cells
    assert any(cell.finish.length for cell in cells)
    for cell in cells:
        assert cell.degenerate is not None
        assert cell.degenerate.answers == cell.finish.length
        flagged = any("of the answers end in a loop" in flag for flag in cell.flags)
        assert flagged is (cell.finish.length / cell.items > degenerate.FLAGGED_SHARE)
