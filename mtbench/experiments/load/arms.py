"""Arms of a load: methods that this command serves, as in `mtbench run --method`."""

from collections.abc import Sequence

from mtbench.decoding.arms import ENGINES, Arm, parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments.load.format import ArmPlan


def parse(specs: Sequence[str], engine: str = ENGINES[0]) -> list[ArmPlan]:
    """Return the arms of several `--method` values, in order.

    Raises UserError for a method or an option that is not allowed, or a method that cannot be served.
    """
    arms = parse_arms(specs, engine)
    for arm in arms:
        if METHODS[arm.method].outside:
            raise UserError(
                f"{arm.method} is an external engine and cannot be served; start its server and give it with "
                "`--url NAME=URL`."
            )
    return [ArmPlan(name=_name(arm), method=_served(arm)) for arm in arms]


def _options(arm: Arm) -> list[str]:
    return [f"{name}={value}" for name, value in arm.changed]


def _name(arm: Arm) -> str:
    """Return the short name of an arm: what differs from the defaults."""
    options = _options(arm)
    if arm.on != METHODS[arm.method].roles[0]:
        options.append(f"on={arm.on}")
    if arm.engine != ENGINES[0]:
        options.append(f"engine={arm.engine}")
    return f"{arm.method}{':' if options else ''}{','.join(options)}"


def _served(arm: Arm) -> str:
    """Return the arm as `mtbench serve --method` reads it."""
    return f"{arm.method}:{','.join([*_options(arm), f'on={arm.on}', f'engine={arm.engine}'])}"
