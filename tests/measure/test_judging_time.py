"""How long judging is expected to take: each text that is yet to be read counts once."""

import shutil
from pathlib import Path

import pytest

from mtbench.measure.judging_time import expected_judging_s
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run


def test_what_is_yet_to_be_read_is_expected_at_the_pace_of_prefill(small_run: RunDirectory, tmp_path: Path) -> None:
    """Nothing where all is judged. Arms with the same answers share them, and batch sizes share prompts."""
    shutil.copytree(small_run.path, tmp_path / "run")
    run = Run.open(RunDirectory(tmp_path / "run"))
    assert expected_judging_s(run, run.plan) == 0
    shutil.rmtree(run.directory.path / "lossless")
    cells = [cell for cell in run.plan.cells if cell.claims == "lossless" and cell.lossless_reference]
    lines = [(cell.suite, line) for cell in cells for line in run.answers[cell.cell]]
    prompts = {(suite, line.item): line.prompt_tokens for suite, line in lines}
    answers = {(suite, line.item, *line.token_ids) for suite, line in lines}
    tokens = sum(prompts.values()) + sum(len(answer) - 2 for answer in answers)
    timed = [[t for t in of if t.prefill_s] for of in run.timings.values()]
    token_s = min(sum(t.prefill_s or 0 for t in of) / sum(t.prompt_tokens for t in of) for of in timed)
    assert expected_judging_s(run, run.plan) == pytest.approx(tokens * token_s)
    for cell in cells:
        del run.answers[cell.cell][len(run.answers[cell.cell]) // 2 :]
    assert expected_judging_s(run, run.plan) < expected_judging_s(run, run.plan, rest=1.0)
