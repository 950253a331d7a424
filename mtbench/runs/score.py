"""Stage 3 of a run: score the stored texts. Needs the suites' libraries, but no model and no GPU."""

from collections.abc import Mapping, Sequence

from mtbench.errors import first_line
from mtbench.evaluation.suite import Suite
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import read_plan
from mtbench.runs.prompts import open_suite

STAGE = "score"  # marks failures that another scoring may repair


def score(run: RunDirectory, data_dir: str | None = None, *, unsandboxed: bool = False) -> None:
    """Write scores.json: cell -> item -> score in [0, 1].

    Cells of suites without a metric have no scores. Nor have cells of fixed length, whose answers continue after their
    end. If a suite raises an error, its cells fail until they are scored again.

    `data_dir` is where this machine has the data, if not where the plan says. `unsandboxed` allows to run generated
    programs without a sandbox. Raise UserError if the data of a suite are not available.
    """
    plan = read_plan(run)
    request = plan.request
    if data_dir:
        request = request.changed(data_dir=data_dir)
    if unsandboxed:
        request = request.changed(allow_unsandboxed_code=True)
    scores: dict[str, dict[str, float]] = {}
    failures = [failure for failure in run.lines("failures.jsonl") if failure.get("stage") != STAGE]
    for suite_plan in plan.suites:
        if suite_plan.metric is None:
            continue
        suite = open_suite(suite_plan.suite, request)
        cuts = {item.item: item.cut for item in suite_plan.items if item.cut}
        for cell in plan.cells:
            if cell.suite != suite_plan.suite or cell.length != "natural":
                continue
            lines = run.lines(f"generations/{cell.cell}.jsonl")
            answers = {line["item"]: before(line["text"], cuts.get(line["item"], ())) for line in lines}
            if not answers:
                continue
            try:
                scores[cell.cell] = _checked_scores(suite, answers)
            except Exception as error:  # a suite may raise anything
                reason = f"suite {suite_plan.suite!r} could not score it: {type(error).__name__}: {first_line(error)}"
                failures.append({"cell": cell.cell, "error": reason, "stage": STAGE})
    run.write_json("scores.json", scores)
    run.keep_lines("failures.jsonl", failures)


def due(run: RunDirectory) -> bool:
    """Return whether there are new generations since the last scoring, or whether that scoring had failures."""
    scores = run.path / "scores.json"
    if not scores.is_file() or any(failure.get("stage") == STAGE for failure in run.lines("failures.jsonl")):
        return True
    return any(file.stat().st_mtime > scores.stat().st_mtime for file in (run.path / "generations").glob("*.jsonl"))


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
