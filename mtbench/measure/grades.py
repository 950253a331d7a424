"""The grade of an arm that promises the tokens of its reference arm.

- `exact`: the tokens of the reference arm, on every item.
- `near-tie`: other answers, and each of their tokens is within ε of the argmax: the arithmetic chose, not the method.
- `divergent`: other answers, and one of their tokens is no near-tie. Or any token, even the same one, whose logit is
  further below the judge's largest than any ε allows: then both arms ran on an engine that computes something else.
- `inconclusive`: other tokens that could not be rescored. In an engine: they differ, unjudged.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mtbench.decoding.output import first_difference
from mtbench.plan.formats import GenerationLine, Grade, RescoringRecord
from mtbench.statistics import EPSILON_CAP, EXACT_EPSILON


class Graded(NamedTuple):
    """The grade of a cell, and its basis. The names are those of results.json."""

    grade: Grade
    items: int
    identical: int
    first_divergence: int | None
    epsilon: float | None
    worst_margin: float | None
    near_ties: float | None


def grade(
    lines: Mapping[str, GenerationLine],
    against: Mapping[str, GenerationLine] | None,
    rescored: RescoringRecord | None,
    dtype: str,
) -> Graded | None:
    """Return the grade of a cell from its generation lines by item, those of the reference arm, and the rescoring.

    against: None: the arm is held to the judge itself. None if the two have no item in common.
    """
    found = {} if rescored is None else rescored.items
    common = sorted(lines.keys() & (found if against is None else against).keys())
    if not common and (against is not None or rescored is None):
        return None
    if against is None:
        firsts = {item: min(map(int, found[item])) for item in common if found[item]}
    else:
        pairs = {item: (lines[item].token_ids, against[item].token_ids) for item in common}
        firsts = {item: first_difference(*pair) for item, pair in pairs.items() if pair[0] != pair[1]}
    epsilon = worst = of_others = near_ties = None
    judged = [item for item in common if item in found]
    if rescored is not None and judged and firsts.keys() <= set(judged):
        short = [shortfall for item in judged for shortfall in found[item].values()]
        epsilon, worst = rescored.epsilon, max(short, default=0.0)
        of_others = max((shortfall for item in firsts for shortfall in found[item].values()), default=0.0)
        near_ties = len(short) / max(1, sum(len(lines[item].token_ids) for item in judged))
    rounded = dtype if rescored is None or rescored.rounding is None else rescored.rounding
    shown = rounded if rescored is None or worst is not None else ""  # a judge that could not run shows nothing
    same = bool(common) and not firsts
    return Graded(
        grade=_grade(worst, of_others, identical=same, epsilon=epsilon, dtype=shown),
        items=len(common),
        identical=len(common) - len(firsts),
        first_divergence=min(firsts.values(), default=None),
        epsilon=epsilon,
        worst_margin=worst,
        near_ties=near_ties,
    )


def _grade(
    worst: float | None, of_others: float | None, *, identical: bool, epsilon: float | None, dtype: str
) -> Grade:
    """Return the grade. None for a distance: not rescored.

    worst: the largest distance of a token's logit below the largest. of_others: in answers that are not those of the
    reference arm.
    """
    if worst is not None and worst > EXACT_EPSILON.get(dtype, EPSILON_CAP):
        return "divergent"
    if identical:
        return "exact"
    if epsilon is not None and of_others is not None:
        return "near-tie" if of_others <= epsilon else "divergent"
    # Not rescored: in exact arithmetic other tokens are wrong, else their grade is unknown.
    return "divergent" if dtype in EXACT_EPSILON else "inconclusive"
