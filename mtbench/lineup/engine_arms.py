"""Arms in serving engines, for planning: which exist, which are refused, and the flags of their cells."""

from collections.abc import Sequence
from pathlib import Path

from mtbench.clients.serving_engine import Serving, ServingEngine, Setting
from mtbench.decoding.arms import Arm, is_served, parse_arms
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.lineup.simulation import Acceptance
from mtbench.models import families
from mtbench.models.families import Family
from mtbench.plan.plan import RunRequest


def is_there(arm: Arm, method: Method, request: RunRequest, family: Family, acceptance: Acceptance | None) -> bool:
    """Return whether the arm's engine has its method, and can read its checkpoints and simulate their acceptance.

    Raises UserError if it cannot read those of a reference: without plain decoding nothing can be compared.
    """
    engine = _engine(arm)
    try:
        _refuse_checkpoints(arm, engine, family, request.dtype)
        refuse_made_up(arm, method, family, acceptance)
    except UserError:
        if METHODS[arm.method].reference:
            raise
        return False
    return not isinstance(engine.setting(method, family.checkpoints(arm.roles)), str)


def _refuse_checkpoints(arm: Arm, engine: ServingEngine, family: Family, dtype: str) -> None:
    """Raise UserError for a checkpoint that a serving engine cannot take, or not in this dtype."""
    if dtype not in ("auto", *engine.dtypes):
        raise UserError(
            f"{str(arm)!r}: {engine.title} does not compute in {dtype}; give one of {', '.join(engine.dtypes)}."
        )
    engine.refuse_missing(arm.method)
    for role, source in family.checkpoints(arm.roles).items():
        if source.startswith(families.RANDOM):
            raise UserError(f"{str(arm)!r}: {engine.title} reads files, and {source!r} has none; give a checkpoint.")
        if not role.startswith(families.PART):
            engine.refuse(source)


def refuse_made_up(arm: Arm, method: Method, family: Family, acceptance: Acceptance | None) -> None:
    """Raise UserError if a serving engine cannot simulate the acceptance of an arm that drafts."""
    if acceptance is None or not is_served(arm.engine) or not (rates := acceptance.rates(method)):
        return
    engine = _engine(arm)
    setting = engine.setting(method, family.checkpoints(arm.roles))
    made = engine.synthetic(setting, rates) if isinstance(setting, Setting) else setting
    if isinstance(made, str):
        raise UserError(f"{str(arm)!r}: {made} Leave that `--method` or `--simulate-acceptance` out.")


def refuse_in_engine(arm: Arm, method: Method, family: Family, request: RunRequest) -> None:
    """Raise UserError for a method, an option or a checkpoint that a serving engine does not support."""
    engine = _engine(arm)
    setting = engine.setting(method, family.checkpoints(arm.roles))
    if isinstance(setting, str):
        raise UserError(
            f"{str(arm)!r}: {setting} It has {', '.join(engine.methods)}; see `mtbench ls engines {arm.engine}`."
        )
    _refuse_checkpoints(arm, engine, family, request.dtype)
    ours = engine.launch(Path("python"), Serving("MODEL", setting, 1, 1, "float32", 1), 0)
    flags = [word for word in engine.own_options(request.engine_option) if word.startswith("--")]
    if twice := [flag for flag in flags if flag in ours and flag not in engine.overridable]:
        raise UserError(f"--engine-option {twice[0]} is set by mtbench for {engine.title}; leave it out.")
    engine.python()


def engine_flags(arm: Arm, source: str, given: Sequence[str]) -> list[str]:
    """Return flags for options of the arm's engine, which may change its tokens, and for other weights than ours."""
    if not is_served(arm.engine):
        return []
    engine = _engine(arm)
    options, other = " ".join(engine.own_options(given)), engine.other_weights(source)
    return [*([f"{engine.title} with {options}"] if options else []), *([f"another model: {other}"] if other else [])]


def _engine(arm: Arm) -> ServingEngine:
    engine: ServingEngine = SERVING_ENGINES[str(arm.engine)]()
    return engine


def servers_of(request: RunRequest) -> set[str]:
    """Return the servers of the arms of a request. Raises UserError for an arm that cannot be built."""
    specs = request.method or [spec for name in METHODS for spec in METHODS[name].default_arms]
    methods = [METHODS[arm.method](**arm.options) for arm in parse_arms(specs, request.engine)]
    return {method.server for method in methods if isinstance(method, ExternalEngine) and method.server is not None}
