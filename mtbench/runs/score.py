"""The third stage: what the suites say of the stored texts. Needs the suites' libraries, no model and no GPU."""

from collections.abc import Mapping, Sequence

from mtbench.errors import first_line
from mtbench.evaluation.suite import Suite
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import read_plan
from mtbench.runs.prompts import open_suite

STAGE = "score"  # of a failure that scoring anew may mend


def score(run: RunDirectory, data_dir: str | None = None, *, unsandboxed: bool = False) -> None:
    """Write scores.json: cell -> item -> score in [0, 1].

    Absent are cells of suites without a metric, and of fixed length, whose answers run on behind their end. A suite
    that breaks costs its own cells, until it is mended.

    `data_dir` is where this machine has the data, if elsewhere than the plan says; `unsandboxed` lets generated
    programs run where nothing confines them. Raises UserError if a suite's data cannot be had.
    """
    plan = read_plan(run)
    request = plan.request
    if data_dir:
        request = request.changed(data_dir=data_dir)
    if unsandboxed:
        request = request.changed(allow_unsandboxed_code=True)
    scores: dict[str, dict[str, float]] = {}
    failures = [f for f in run.lines("failures.jsonl") if f.get("stage") != STAGE]
    for suite_plan in plan.suites:
        if suite_plan.metric is None:
            continue
        suite = open_suite(suite_plan.suite, request)
        cuts = {item.item: item.cut for item in suite_plan.items if item.cut}
        natural = [c.cell for c in plan.cells if c.suite == suite_plan.suite and c.length == "natural"]
        for cell in natural:
            lines = run.lines(f"generations/{cell}.jsonl")
            answers = {line["item"]: before(line["text"], cuts.get(line["item"], ())) for line in lines}
            if answers:
                try:
                    scores[cell] = _scores(suite, answers)
                except Exception as error:  # a suite's own fault, whatever it is
                    why = f"suite {suite_plan.suite!r} could not score it: {type(error).__name__}: {first_line(error)}"
                    failures.append({"cell": cell, "error": why, "stage": STAGE})
    run.write_json("scores.json", scores)
    run.keep_lines("failures.jsonl", failures)


def due(run: RunDirectory) -> bool:
    """Whether something was generated since it was last scored, or could not be scored then."""
    scores = run.path / "scores.json"
    if not scores.is_file() or any(f.get("stage") == STAGE for f in run.lines("failures.jsonl")):
        return True
    return any(file.stat().st_mtime > scores.stat().st_mtime for file in (run.path / "generations").glob("*.jsonl"))


def before(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of some strings.

    >>> before("18 apples. Q: And", ["Q:", "A:"])
    '18 apples. '
    """
    return text[: min((place for s in strings if (place := text.find(s)) >= 0), default=len(text))]


def _scores(suite: Suite, answers: Mapping[str, str]) -> dict[str, float]:
    """Raises ValueError unless every answer gets a score from 0 to 1."""
    scores = {item: value for item, value in suite.score(answers).items() if item in answers}
    for item in answers:
        if item not in scores:
            raise ValueError(f"no score of {item}")
        if not isinstance(scores[item], float | int) or not 0 <= scores[item] <= 1:
            raise ValueError(f"{item} has the score {scores[item]!r}, not 0 to 1")
    return scores
