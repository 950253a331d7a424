"""What to use, for the page and the terminal: the decision of a race if the run has one, else that of its results."""

from collections.abc import Sequence
from typing import NamedTuple

from mtbench.results.comparisons import GroupKey
from mtbench.results.decision import headline, recommend
from mtbench.results.decision_format import FILE, Decision, Recommendation
from mtbench.results.decision_text import beside
from mtbench.results.format import Results
from mtbench.runs.directory import RunDirectory


class Decided(NamedTuple):
    """What to use, as sentences with the ids of arms."""

    headline: str
    of_groups: dict[GroupKey, str]  # what to use on a suite at a batch size
    beside: list[str]  # what the headline leaves out: arms that are as good, and arms that are open


def read_decision(run: RunDirectory) -> Decision | None:
    """Return the decision of a race; None if the run is no race, or one that is not decided yet."""
    return run.read(FILE, Decision) if run.has(FILE) else None


def decided(results: Results, decision: Decision | None) -> Decided:
    """Return what a race decided; without a decision, what the results recommend."""
    if decision is None:
        found = recommend(results.cells, max_loss=results.statistics.accuracy_margin)
        said = headline(found)
    else:
        found, said = decision.recommendations, decision.headline
    texts = {GroupKey(r.suite, r.batch_size, r.batching): r.text for r in found}
    return Decided(said, texts, _beside(found, said))


def _beside(recommendations: Sequence[Recommendation], said: str) -> list[str]:
    lines = ((found.batch_size, " ".join(beside(found))) for found in recommendations)
    return [f"Batch size {size}: {line}" for size, line in lines if line and line not in said]
