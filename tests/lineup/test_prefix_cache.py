"""`--prefix-cache` makes an arm of a serving engine another one, by its name; arms of mtbench's loop have none."""

import pytest

from mtbench.decoding.arms import parse_arms
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.options import common
from mtbench.options.engine_options import PREFIX_CACHE
from mtbench.plan.request import PlanRequest, RunRequest


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["off"], ["ar@ar/graph", "ar@ar/llamacpp"]),
        (["on"], ["ar@ar/graph", "ar@ar/llamacpp+prefix-cache=on"]),
        (["off", "on"], ["ar@ar/graph", "ar@ar/llamacpp", "ar@ar/llamacpp+prefix-cache=on"]),
    ],
)
def test_a_prefix_cache_is_in_the_name_of_an_arm_that_has_one(given: list[common.OffOn], names: list[str]) -> None:
    arms = parse_arms(["ar"], ["graph", "llamacpp"], PlanRequest(prefix_cache=given).settings)
    assert [str(arm) for arm in arms] == names
    assert [PREFIX_CACHE in arm.settings for arm in arms] == [name.endswith(str(PREFIX_CACHE)) for name in names]
    assert [arm.alternative for arm in arms] == [len(given) > 1 and name.endswith(str(PREFIX_CACHE)) for name in names]


def test_a_prefix_cache_that_no_arm_has_is_refused() -> None:
    request = RunRequest(suite=("arithmetic",), family="tiny", method=("ar",), limit=2, prefix_cache=("off", "on"))
    with pytest.raises(UserError, match="--prefix-cache on: no arm has one"):
        make_plan(request)
