"""Arms of a load: methods that this command serves, and servers that are given by their URL.

mars:tau=0.95            a fixed option, written as in `mtbench run --method`
mars:tau=1|0.95|0.8      three arms
mars:tau=0.95..0.7       one arm whose server adapts tau between 0.95 (idle) and 0.7 (full)
vllm=http://HOST:8000/v1 a server that runs already
vllm=http://HOST:8000/v1=KEY   the same, and the environment variable KEY has the key that it wants
"""

from collections.abc import Sequence

from mtbench.decoding.arms import ENGINES, Arm, parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments.load.format import ArmPlan
from mtbench.options import parse_option

RANGE = ".."


def parse(specs: Sequence[str], engine: str = ENGINES[0]) -> list[ArmPlan]:
    """Return the arms of several `--method` values, in order.

    Raises UserError for a method or an option that is not allowed, or a method that cannot be served.
    """
    found = []
    for spec in specs:
        fixed, adaptive = _without_range(spec)
        for arm in parse_arms([fixed], engine):
            method = METHODS[arm.method]
            if method.outside:
                raise UserError(
                    f"--method {spec!r}: {arm.method} is an external engine and cannot be served; start its server and "
                    "give it with `--url NAME=URL`."
                )
            if adaptive is not None:
                option, _, text = adaptive.partition("=")
                for end in text.split(RANGE):
                    parse_option(method, option, end)
            found.append(ArmPlan(name=_name(arm, adaptive), method=_served(arm), adaptive=adaptive))
    return found


def refuse_twins(names: Sequence[str]) -> None:
    """Raise UserError if two arms have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two arms have the name {name!r}; give each arm once.")


def _without_range(spec: str) -> tuple[str, str | None]:
    """Return a method without its range, and the range.

    >>> _without_range("mars:tau=0.95..0.7,cache=block")
    ('mars:cache=block', 'tau=0.95..0.7')
    """
    name, _, rest = spec.partition(":")
    pairs = rest.split(",") if rest else []
    ranges = [pair for pair in pairs if RANGE in pair]
    if len(ranges) > 1:
        raise UserError(f"--method {spec!r}: a server adapts one option; give one range, such as `tau=0.95..0.7`.")
    fixed = ",".join(pair for pair in pairs if pair not in ranges)
    return f"{name}:{fixed}" if fixed else name, ranges[0] if ranges else None


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
