"""The requests of a plan's items: prompt, stop strings, budget and seed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mtbench.decoding.request import Request
from mtbench.runs.plan import Plan, SuitePlan


def requests_of(
    plan: Plan,
    suite: SuitePlan,
    items: Sequence[int],
    answered: Mapping[str, Sequence[int]] = MappingProxyType({}),
    max_new_tokens: int | None = None,
) -> list[Request]:
    """Return the requests of some of a suite's items, by number.

    `answered`: by item, the answers that later turns follow. `max_new_tokens`: the suite's by default.
    """
    return [
        Request(
            prompt_ids=suite.prompt(number, answered),
            max_new_tokens=suite.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop=suite.items[number].stop,
            seed=item_seed(plan.request.seed, number),
            item=number,
        )
        for number in items
    ]


def item_seed(run_seed: int, item: int) -> int:
    """Return the random seed of a suite's n-th item: the same for all arms of a run."""
    return ((run_seed << 32) + item) % (1 << 63)
