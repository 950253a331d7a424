"""Arms of a load: methods that this command serves, and servers that are given by their URL.

mars:tau=0.95            a fixed option, written as in `mtbench run --method`
mars:tau=1|0.95|0.8      three arms
mars:tau=0.95..0.7       one arm whose server adapts tau between 0.95 (idle) and 0.7 (full)
vllm=http://HOST:8000/v1 a server that runs already
vllm=http://HOST:8000/v1=KEY   the same, and the environment variable KEY has the key that it wants
"""

import itertools
from collections.abc import Sequence

from mtbench.decoding.arms import ENGINES, Arm, parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments.load.format import ArmPlan
from mtbench.options import parse_option

RANGE = ".."


def parse(specs: Sequence[str], engine: str = ENGINES[0]) -> list[ArmPlan]:
    """Return the arms of several `--method` values, in order.

    Raises UserError for a method or an option that is not allowed, a method that cannot be served, or an arm that is
    given twice.
    """
    arms = [_arm(fixed, ranges, spec, engine) for spec in specs for fixed, ranges in _alternatives(spec)]
    refuse_twins([arm.name for arm in arms])
    return arms


def refuse_twins(names: Sequence[str]) -> None:
    """Raise UserError if two arms have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms have the name {name!r}; give each arm once.")


def _alternatives(spec: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return for each arm of `spec` its text without ranges, and its ranges as (option, text)."""
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    choices = [[(key, equals, value) for value in text.split("|")] for key, equals, text in pairs]
    found = []
    for chosen in itertools.product(*choices):
        fixed = ",".join(key + equals + value for key, equals, value in chosen if RANGE not in value)
        ranges = [(key, value) for key, _, value in chosen if RANGE in value]
        found.append((f"{name}:{fixed}" if fixed else name, ranges))
    return found


def _arm(fixed: str, ranges: Sequence[tuple[str, str]], spec: str, engine: str) -> ArmPlan:
    [arm] = parse_arms([fixed], engine)
    method = METHODS[arm.method]
    if method.outside:
        raise UserError(
            f"--method {spec!r}: {arm.method} is an external engine and cannot be served; start its server and give it "
            "with `--url NAME=URL`."
        )
    if len(ranges) > 1:
        raise UserError(f"--method {spec!r}: a server adapts one option; give one range, such as `tau=0.95..0.7`.")
    for option, text in ranges:
        low, _, high = text.partition(RANGE)
        for end in (low, high):
            parse_option(method, option, end)
        if option in arm.options:
            raise UserError(f"--method {spec!r}: {option} is given twice.")
    adaptive = "=".join(ranges[0]) if ranges else None
    return ArmPlan(name=_name(arm, adaptive), method=_served(arm), adaptive=adaptive)


def _options(arm: Arm) -> list[str]:
    return [f"{name}={value}" for name, value in arm.changed]


def _name(arm: Arm, adaptive: str | None) -> str:
    """Return the short name of an arm: what differs from the defaults."""
    options = _options(arm) + ([adaptive] if adaptive else [])
    if arm.on != METHODS[arm.method].roles[0]:
        options.append(f"on={arm.on}")
    if arm.engine != ENGINES[0]:
        options.append(f"engine={arm.engine}")
    return f"{arm.method}{':' if options else ''}{','.join(options)}"


def _served(arm: Arm) -> str:
    """Return the arm as `mtbench serve --method` reads it."""
    return f"{arm.method}:{','.join([*_options(arm), f'on={arm.on}', f'engine={arm.engine}'])}"
