"""Stage 3 of a run: score the stored texts. Needs the suites' libraries, but no model and no GPU."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mtbench.errors import first_line
from mtbench.evaluation.suite import Suite
from mtbench.plan.formats import FailureLine, GenerationLine, Scores
from mtbench.plan.plan import Cell, Plan, SuitePlan
from mtbench.plan.prompts import open_suite
from mtbench.plan.run import Run

STAGE: Literal["score"] = "score"  # marks failures that another scoring may repair


def score(run: Run, data_dir: str | None = None, *, unsandboxed: bool = False) -> None:
    """Write scores.json: cell -> item -> score in [0, 1].

    Cells of suites without a metric have no scores. Nor have cells of fixed length, whose answers continue after their
    end. If a suite raises an error, its cells fail until they are scored again.

    `data_dir` is where this machine has the data, if not in the plan's folder. `unsandboxed` allows to run generated
    programs without a sandbox; the plan's own permission is ignored, since it may be foreign. Raise
    UserError if the data of a suite are not available.
    """
    plan = run.plan
    request = plan.request.changed(allow_unsandboxed_code=unsandboxed, data_dir=data_dir or plan.request.data_dir)
    scores: dict[str, dict[str, float]] = {}
    tasks: dict[str, dict[str, Any]] = {}
    failures = [failure for failure in run.failures if failure.stage != STAGE]
    for suite_plan in plan.suites:
        if suite_plan.metric is None:
            continue
        suite = open_suite(suite_plan.suite, request)
        tasks[suite_plan.suite] = dict(suite.task)
        for cell in _scored_cells(plan, suite_plan):
            lines = run.answers[cell.cell]
            if not any(line.item in suite_plan.scored_items for line in lines):
                continue
            try:
                scores[cell.cell] = scores_of(suite, suite_plan, lines)
            except Exception as error:  # a suite may raise anything
                reason = f"suite {suite_plan.suite!r} could not score it: {type(error).__name__}: {first_line(error)}"
                failures.append(FailureLine(cell=cell.cell, error=reason, stage=STAGE))
    run.write_environment(run.environment.changed(scored_as=tasks))
    run.directory.write_json("scores.json", scores)
    run.keep_failures(failures)


def validate(run: Run) -> None:
    """Write valid.json: cell -> item -> 1.0 if the answer is what it must be, else 0.0; nothing if all may be any."""
    cells = [cell for cell in run.plan.cells if cell.length == "natural"]
    valid = {cell.cell: {item: float(wrong is None) for item, wrong in faults(run, cell).items()} for cell in cells}
    if any(valid.values()):
        run.directory.write_json("valid.json", valid)


def faults(run: Run, cell: Cell) -> dict[str, str | None]:
    """Return by item what is wrong with each answer that must have a format; None: nothing."""
    suite = run.plan.suite(cell.suite)
    of = {i.item: (i.cut, suite.answer_formats[i.answer_format]) for i in suite.items if i.answer_format is not None}
    answers = [(line, *of[line.item]) for line in run.answers[cell.cell] if line.item in of]
    return {line.item: wanted.fault(before(line.text, cut)) for line, cut, wanted in answers}


def scores_of(suite: Suite, plan: SuitePlan, lines: Sequence[GenerationLine]) -> dict[str, float]:
    """Return the scores by item of the answers that get one. Raises the suite's errors."""
    cuts = {item.item: item.cut for item in plan.items if item.cut}
    scored = [line for line in lines if line.item in plan.scored_items]
    return _checked_scores(suite, {line.item: before(line.text, cuts.get(line.item, ())) for line in scored})


def _scored_cells(plan: Plan, suite: SuitePlan) -> list[Cell]:
    """Return the cells of a suite that have scores."""
    if suite.metric is None:
        return []
    return [cell for cell in plan.cells if cell.suite == suite.suite and cell.length == "natural"]


def due(run: Run) -> bool:
    """Return whether the scored items are not the answered ones, or whether the last scoring had failures."""
    if any(failure.stage == STAGE for failure in run.failures) or not run.directory.has("scores.json"):
        return True
    scores = run.directory.read("scores.json", Scores).root
    return any(
        {line.item for line in run.answers[cell.cell]} & suite.scored_items != scores.get(cell.cell, {}).keys()
        for suite in run.plan.suites
        for cell in _scored_cells(run.plan, suite)
    )


def before(text: str, strings: Sequence[str]) -> str:
    """Return the text up to the first occurrence of any of the strings.

    >>> before("18 apples. Q: And", ["Q:", "A:"])
    '18 apples. '
    """
    positions = [text.find(string) for string in strings]
    return text[: min((position for position in positions if position >= 0), default=len(text))]


def _checked_scores(suite: Suite, answers: Mapping[str, str]) -> dict[str, float]:
    """Return the suite's scores. Raise ValueError unless every answer has a score from 0 to 1."""
    scores = {item: score for item, score in suite.score(answers).items() if item in answers}
    for item in answers:
        if item not in scores:
            raise ValueError(f"no score of {item}")
        if not isinstance(scores[item], float | int) or not 0 <= scores[item] <= 1:
            raise ValueError(f"{item} has the score {scores[item]!r}, not 0 to 1")
    return scores
