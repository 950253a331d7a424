"""Arms in serving engines, for planning: which exist, which are refused, and the flags of their cells."""

from collections.abc import Sequence
from pathlib import Path

from mtbench.clients.serving_engine import Serving, ServingEngine
from mtbench.decoding.arms import Arm, is_served, parse_arms, reference_arm
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.lineup.simulation import Acceptance
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.options.engine_options import PREFIX_CACHE, ServerOption
from mtbench.plan.plan import RunRequest


def refuse_in_engine(
    arm: Arm, method: Method, family: Family, request: RunRequest, acceptance: Acceptance | None
) -> None:
    """Raise UserError for a method, a dtype, a checkpoint or a simulated acceptance that its engine lacks.

    Also for options of its server that mtbench sets.
    """
    engine, checkpoints = _engine(arm), family.checkpoints(arm.roles)
    setting = engine.setting(method, checkpoints)
    if isinstance(setting, str):
        raise UserError(
            f"{str(arm)!r}: {setting} It has {', '.join(engine.methods)}; see `mtbench ls engines {arm.engine}`."
        )
    if request.dtype not in ("auto", *engine.dtypes):
        raise UserError(
            f"{str(arm)!r}: {engine.title} does not compute in {request.dtype}; give one of {', '.join(engine.dtypes)}."
        )
    if (lacks := engine.lacking(setting, request.sampling)) is not None:
        raise UserError(f"{str(arm)!r}: {lacks}")
    engine.refuse_missing(setting.name)
    for role, source in checkpoints.items():
        if source.startswith(families.RANDOM):
            raise UserError(f"{str(arm)!r}: {engine.title} reads files, and {source!r} has none; give a checkpoint.")
        if not role.startswith(families.PART):
            engine.refuse(source)
    rates = acceptance.of_arm(arm, method).rates(method) if acceptance is not None else None
    if rates and isinstance(reason := engine.synthetic(setting, rates), str):
        raise UserError(f"{str(arm)!r}: {reason} Leave that `--method` or `--simulate-acceptance` out.")
    if PREFIX_CACHE in arm.settings and not engine.caches:
        caching = ", ".join(name for name in SERVING_ENGINES if SERVING_ENGINES[name].caches)
        raise UserError(
            f"{str(arm)!r}: mtbench has no setting for a prefix cache of {engine.title}; give --engine {caching}, or "
            "leave `--prefix-cache on` out."
        )
    ours = engine.launch(Path("python"), Serving("MODEL", setting, 1, 1, "float32", 1), 0)
    flags = [option.words[0] for option in arm.settings if option != PREFIX_CACHE]
    taken = set(map(_option, ours)) - set(map(_option, engine.overridable))
    if twice := [flag for flag in flags if _option(flag) in taken]:
        raise UserError(f"--engine-option {twice[0]} is set by mtbench for {engine.title}; leave it out.")


def _option(flag: str) -> str:
    """Return a flag's option: engines take `--no-a-b`, `--a-b` and `--a_b` as values of one."""
    return flag.replace("_", "-").replace("--no-", "--")


def engine_flags(arm: Arm, source: str) -> list[str]:
    """Return a flag for other weights than ours."""
    other = _engine(arm).other_weights(source) if is_served(arm.engine) else None
    return [f"another model: {other}"] if other else []


def other_tokens(arm: Arm, arms: Sequence[Arm], dtype: str) -> list[ServerOption]:
    """Return the options of an arm's engine that may give it other tokens than those of its reference.

    Of alternatives, plain decoding in the engine has the first; and no arm of ours has an option of an engine.
    """
    reference = next((other for other in arms if str(other) == reference_arm(arm, "lossless", arms)), None)
    if reference is None or not arm.settings:
        return []
    shared = reference.settings if reference.engine == arm.engine else ()
    return [s for s in arm.settings if s not in shared and _engine(arm).may_change_tokens(s, dtype)]


def _engine(arm: Arm) -> ServingEngine:
    engine: ServingEngine = SERVING_ENGINES[str(arm.engine)]()
    return engine


def servers_of(request: RunRequest) -> set[str]:
    """Return the servers of the arms of a request. Raises UserError for an arm that cannot be built."""
    specs = request.method or [spec for name in METHODS for spec in METHODS[name].default_arms]
    methods = [METHODS[arm.method](**arm.options) for arm in parse_arms(specs, request.engine)]
    return {method.server for method in methods if isinstance(method, ExternalEngine) and method.server is not None}
