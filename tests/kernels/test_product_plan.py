"""How products are divided among programs: each step once, each part in a place of its own, and little traffic.

The division is arithmetic on integers, so every program of many plans is enumerated. That the kernel computes the same
numbers is a matter of test_operations.py, which runs it.
"""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtbench.kernels.product_plan import GROUPS, PADDED, TILE, Plan, plan

LARGE = {
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}
SMALL = {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864), "head": (151936, 896)}
PROCESSORS = (16, 46, 58, 68, 72, 82, 84, 92, 104, 108, 114, 128, 132, 142, 144, 148, 160, 170, 188)


def check(divided: Plan) -> None:
    """Follow every share as the kernel does: the steps that it adds, where it stores a part, and who reads that."""
    steps, share = divided.steps, divided.share
    covered: Counter[int] = Counter()
    stored: dict[int, list[int]] = {}
    places: set[int] = set()
    for program in range(divided.shares):
        begin, end = program * share, min((program + 1) * share, divided.groups * steps)
        assert begin < end, "a program without a step"
        for group in range(begin // steps, -(-end // steps)):
            first, last = max(begin - group * steps, 0), min(end - group * steps, steps)
            assert first < last
            covered[group] += last - first
            if last - first < steps:
                leader = group * steps // share
                place = 2 * program + (program == leader)
                assert place not in places, "two parts in one place"
                places.add(place)
                stored.setdefault(group, []).append(place)
    assert covered == Counter(dict.fromkeys(range(divided.groups), steps))
    for group in range(divided.groups):
        leader, last_share = group * steps // share, (group * steps + steps - 1) // share
        read = [2 * part + (part == leader) for part in range(leader, last_share + 1)] if last_share > leader else []
        assert read == stored.get(group, []), "the parts that are added are those that were stored, in order"
        assert divided.parts(group) == last_share - leader + 1


@pytest.mark.parametrize("shapes", [LARGE, SMALL], ids=["7B", "0.5B"])
def test_every_share_of_the_models_on_every_gpu(shapes: dict[str, tuple[int, int]]) -> None:
    for (outputs, inputs), processors in product(shapes.values(), PROCESSORS):
        check(plan(outputs, inputs, processors))


@given(st.integers(1, 3000), st.integers(1, 5000), st.sampled_from(GROUPS), st.integers(1, 200))
def test_every_share_of_any_plan(outputs: int, inputs: int, rows: int, share: int) -> None:
    check(Plan(outputs, inputs, rows, share))


@given(st.integers(1, 100_000), st.integers(1, 20_000), st.integers(1, 200))
def test_there_is_a_plan_for_every_weight(outputs: int, inputs: int, processors: int) -> None:
    """With no more programs for each multiprocessor than its steps keep busy, and never for a number of positions."""
    divided = plan(outputs, inputs, processors)
    assert divided.rows in GROUPS
    assert divided.share >= min(4, divided.steps)
    assert divided.shares * divided.share >= divided.groups * divided.steps


def test_a_narrower_tile_halves_a_group() -> None:
    """So the parts of a sum are the same at few positions and at many."""
    for rows, positions in product(GROUPS, (16, 32, 64, 128)):
        tile = Plan(1000, 1000, rows, 3).tile(positions)
        assert rows % tile == 0
        assert tile <= TILE or positions > 64


def budget(divided: Plan, positions: int) -> float:
    """Return the L2 traffic of a product relative to weight and positions, each read once."""
    return divided.l2_bytes(positions) / (2 * divided.inputs * (divided.outputs + positions))


@pytest.mark.parametrize("processors", [108, 132, 148])
def test_the_traffic_of_products_keeps_to_its_budget(processors: int) -> None:
    """To 16 positions, 1.3 times the least; at 128, half of what tiles of 128 rows need, in the three large products.

    At 128 positions a program that reads each weight once needs 128 KB of sums for 256 rows, half of the registers. It
    reads half as many bytes of positions as of weights, so 1.5 is the least without multicast. The weights of
    attention are too small for large groups: more programs read more positions.
    """
    for name, shape in LARGE.items():
        divided = plan(*shape, processors)
        assert budget(divided, 16) < 1.3
        if name in ("down", "head"):
            assert budget(divided, 128) < 1.6
        assert budget(divided, 128) < (2.1 if name == "gate_up" else 3)


def test_a_plan_is_the_fastest_by_its_own_estimate() -> None:
    """Tiles of 128 rows in equal shares for two programs a processor were the only plan once."""
    for outputs, inputs in LARGE.values():
        steps, groups = -(-inputs // 64), -(-outputs // 128)
        once = Plan(outputs, inputs, 128, -(-steps * groups // 264))
        chosen = plan(outputs, inputs, 132)
        for positions in PADDED:
            assert chosen.time_s(positions, 132) <= 1.01 * once.time_s(positions, 132)
