"""How many items a verdict on accuracy will take, from the plan alone: nothing is decoded yet.

The number depends on how many items are right in one arm only, which the plan cannot know. A share of 5 % is assumed,
and no true difference. `mtbench.statistics.n_needed` computes the number; the results repeat it with what was observed.
"""

from collections import Counter
from dataclasses import dataclass

from mtbench import statistics
from mtbench.runs.plan import Cell, Group, Plan

DIFFERING = 0.05  # assumed share of items that are right in one arm only, half of them in each


@dataclass(frozen=True, slots=True)
class AccuracyNeed:
    """The items that `not worse` takes in one group, and those that the plan has there."""

    group: Group
    place: int  # of the group in the plan
    arms: int  # tested against one baseline
    needed: int | None  # None: more than any run can have
    planned: int

    @property
    def enough(self) -> bool:
        return self.needed is not None and self.planned >= self.needed

    def time_s(self, block_s: float) -> float | None:
        """Return the seconds of a run with the needed items, if a block of this group takes `block_s` seconds."""
        if self.needed is None:
            return None
        per_item_s = block_s * len(self.group.blocks) / self.planned
        return self.needed * per_item_s + sum(self.group.rounds[1:]) * block_s


def accuracy_needs(plan: Plan) -> list[AccuracyNeed]:
    """Return the need of every group that is scored and in which the accuracy of an arm is tested."""
    found = []
    for place, group in enumerate(plan.groups):
        cells = [plan.cell(name) for name in group.cells]
        arms = _tested_arms(cells)
        suite = plan.suite(group.suite)
        if suite.metric is None or not arms or any(cell.length == "fixed" for cell in cells):
            continue
        one_way = round(1000 * DIFFERING / 2)
        needed = statistics.n_needed(one_way, one_way, 1000, plan.request.max_loss / 100, arms=arms)
        items = sum(suite.items[place].scored for block in group.blocks for place in block)
        found.append(AccuracyNeed(group, place, arms, None if needed is None else needed.n, items))
    return found


def _tested_arms(cells: list[Cell]) -> int:
    """Return the largest number of arms that are tested against one baseline.

    An arm that promises the baseline's tokens is not among them: with the same tokens nothing is left to test.
    """
    tested = Counter(
        baseline
        for cell in cells
        if cell.fault is None
        for baseline in cell.baselines
        if cell.claims != "lossless" or cell.lossless_reference != baseline
    )
    return max(tested.values(), default=0)
