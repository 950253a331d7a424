"""The third stage: what the suites say of the stored texts. Needs the suites' libraries, no model and no GPU."""

from mtbench.plan import Plan
from mtbench.planning import open_suite
from mtbench.rundir import RunDirectory


def score(run: RunDirectory, data_dir: str | None = None) -> None:
    """Write scores.json: cell -> item -> score in [0, 1].

    Absent are cells of suites without a metric, and of fixed length, whose answers run on behind their end.

    `data_dir` is where this machine has the data, if elsewhere than the plan says. Raises UserError if a suite's
    data cannot be had.
    """
    plan = Plan.from_json(run.read_json("plan.json"))
    scores: dict[str, dict[str, float]] = {}
    for suite_plan in plan.suites:
        if suite_plan.metric is None:
            continue
        suite = open_suite(suite_plan.suite, {**plan.request, **({"data_dir": data_dir} if data_dir else {})})
        natural = [c.cell for c in plan.cells if c.suite == suite_plan.suite and c.length == "natural"]
        for cell in natural:
            answers = {line["item"]: line["text"] for line in run.lines(f"generations/{cell}.jsonl")}
            if answers:
                scores[cell] = suite.score(answers)
    run.write_json("scores.json", scores)
