"""Stage 3 of a run: score the stored texts. Needs the suites' libraries, but no model and no GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from mtbench.decoding.output import first_of, with_special
from mtbench.errors import first_line
from mtbench.evaluation.suite import Reading, Suite
from mtbench.models.thinking import reasoning_in
from mtbench.plan.formats import FailureLine, GenerationLine, Scores
from mtbench.plan.plan import Cell, Plan, SuitePlan
from mtbench.plan.prompts import open_suite
from mtbench.plan.run import Run

STAGE: Literal["score"] = "score"  # marks failures that another scoring may repair
# Why no result is read in an answer: what ended it before there was one
INSIDE, STOPPED, CUT = "inside its reasoning", "ended by a stop string", "cut by the budget"


def score(run: Run, data_dir: str | None = None, *, unsandboxed: bool = False) -> None:
    """Write scores.json: cell -> item -> score in [0, 1], and readings.json: what else the suite read.

    Cells of suites without a metric have no scores. Nor have cells of fixed length, whose answers continue after their
    end. If a suite raises an error, its cells fail until they are scored again.

    `data_dir` is where this machine has the data, if not in the plan's folder. `unsandboxed` allows to run generated
    programs without a sandbox; the plan's own permission is ignored, since it may be foreign. Raise
    UserError if the data of a suite are not available.
    """
    plan = run.plan
    request = plan.request.changed(allow_unsandboxed_code=unsandboxed, data_dir=data_dir or plan.request.data_dir)
    scores: dict[str, dict[str, float]] = {}
    others: dict[str, dict[str, dict[str, Any]]] = {}
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
                readings = readings_of(suite, suite_plan, lines)
            except Exception as error:  # a suite may raise anything
                reason = f"suite {suite_plan.suite!r} could not score it: {type(error).__name__}: {first_line(error)}"
                failures.append(FailureLine(cell=cell.cell, error=reason, stage=STAGE))
                continue
            scores[cell.cell] = {item: reading.score for item, reading in readings.items()}
            others[cell.cell] = {item: stored for item, reading in readings.items() if (stored := _stored(reading))}
    run.write_environment(run.environment.changed(scored_as=tasks))
    run.directory.write_json("readings.json", others)
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
    return {line.item: wanted.fault(answer_of(line, cut).text) for line, cut, wanted in answers}


class Answer(NamedTuple):
    """What is scored of a stored answer."""

    text: str  # without its reasoning
    cause: str | None  # why no result may be in it; None: it is complete


def answer_of(line: GenerationLine, cut: Sequence[str] = ()) -> Answer:
    """Return what is scored of an answer: the text behind its reasoning, up to the first of the strings that cut it."""
    text = before(line.text, cut, line.special or ())
    rest = behind(text, line.reasoning)
    if text and not rest:
        return Answer("", INSIDE)
    stopped = line.finish_reason == "stop" or len(text) < len(line.text)
    return Answer(rest, STOPPED if stopped else CUT if line.finish_reason == "length" else None)


def behind(text: str, reasoning: int | None) -> str:
    """Return the text behind its reasoning, of so many letters; None: as the text's marks say."""
    begin = reasoning_in(text) if reasoning is None else reasoning
    return text[begin:].lstrip() if begin else text


def readings_of(suite: Suite, plan: SuitePlan, lines: Sequence[GenerationLine]) -> dict[str, Reading]:
    """Return the readings by item of the answers that get a score. Raises the suite's errors."""
    cuts = {item.item: item.cut for item in plan.items if item.cut}
    answers = {line.item: answer_of(line, cuts.get(line.item, ())) for line in lines if line.item in plan.scored_items}
    readings = _checked(suite, {item: answer.text for item, answer in answers.items()})
    return {item: _with_cause(reading, answers[item].cause) for item, reading in readings.items()}


def _with_cause(reading: Reading, cause: str | None) -> Reading:
    if cause == INSIDE:
        return Reading(0.0, INSIDE, None if reading.by_value is None else 0.0)
    return replace(reading, unread=cause) if reading.unread and cause else reading


def _stored(reading: Reading) -> dict[str, Any]:
    return {name: value for name, value in asdict(reading).items() if name != "score" and value is not None}


def _scored_cells(plan: Plan, suite: SuitePlan) -> list[Cell]:
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


def before(text: str, strings: Sequence[str], special: Sequence[tuple[int, str]] = ()) -> str:
    """Return the text up to the first occurrence of any of the strings, which may hold the `special` tokens inside it.

    >>> before("18 apples. Q: And", ["Q:", "A:"])
    '18 apples. '
    """
    found = first_of(with_special(text, special), strings)
    if found is None:
        return text
    end, _ = found
    for at, token in special:  # its letters before the end are not in the text
        end -= min(len(token), max(0, end - at))
    return text[:end]


def _checked(suite: Suite, answers: Mapping[str, str]) -> dict[str, Reading]:
    """Return the suite's readings. Raise ValueError unless every answer has a score from 0 to 1."""
    readings = {item: reading for item, reading in suite.read(answers).items() if item in answers}
    for item in answers:
        if item not in readings:
            raise ValueError(f"no score of {item}")
        score = readings[item].score
        if not isinstance(score, float | int) or not 0 <= score <= 1:
            raise ValueError(f"{item} has the score {score!r}, not 0 to 1")
    return readings
