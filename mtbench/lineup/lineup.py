"""The lineup: each arm of a request on the checkpoints of a family, resolved once. Strings end here.

Planning, a race, a server and `mtbench ls arms` get an arm's method, its checkpoints and its faults from it.
"""

import copy
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import NamedTuple, Self

from mtbench.decoding import method_checks
from mtbench.decoding.arms import Arm, is_served, parse_arms
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UnreadableCheckpoint, UserError
from mtbench.evaluation.registry import SUITES
from mtbench.lineup.engine_arms import refuse_in_engine
from mtbench.lineup.simulation import Acceptance
from mtbench.models import families
from mtbench.models.families import SHAPES, Family
from mtbench.models.inspection import Inspections
from mtbench.models.loading import Inspected
from mtbench.options.classes import build, roles_of
from mtbench.plan.request import RunRequest
from mtbench.programs import network


class Entrant(NamedTuple):
    """An arm, resolved. With a `fault` its cells are planned and fail."""

    arm: Arm
    method: Method
    checkpoints: dict[str, Inspected]  # by role, the target's first; without drafts that only its engine reads
    untrained: list[str]  # a remark for each option that differs from the checkpoint's training
    fault: str | None  # of the method: only its own cells fail

    @property
    def target(self) -> Inspected:
        """The checkpoint whose tokens it emits."""
        return self.checkpoints[self.arm.on]

    @property
    def readers(self) -> list[Inspected]:
        """The checkpoints that read the target's token ids."""
        return [self.target] if self.method.translates else [*self.checkpoints.values()]


class Lineup:
    """The arms of a request on the checkpoints of a family.

    `inspections`: data of checkpoints that is read already. `installed`: refuse arms in serving engines that are not.
    """

    def __init__(
        self,
        family: Family,
        request: RunRequest,
        arms: Iterable[Arm] = (),
        acceptance: Acceptance | None = None,
        inspections: Inspections | None = None,
        *,
        installed: bool = True,
    ) -> None:
        self.family, self.request, self.arms, self.acceptance = family, request, tuple(arms), acceptance
        self._inspections, self._installed = inspections or Inspections(offline=request.offline), installed
        self._passed = set[str]()
        self._methods: dict[str, tuple[Method, list[str]]] = {}
        self._entrants: dict[str, Entrant] = {}

    def of(self, arms: Iterable[Arm]) -> Self:
        """Return the lineup of other arms, with the data that is read already."""
        other = copy.copy(self)
        other.arms = tuple(arms)
        return other

    @property
    def entrants(self) -> list[Entrant]:
        """Its arms, resolved. Raises UserError as `entrant`."""
        return [self.entrant(arm) for arm in self.arms]

    @property
    def checkpoints(self) -> list[Inspected]:
        """The checkpoints of its arms, each once; the first arm's target first."""
        every = (checkpoint for entrant in self.entrants for checkpoint in entrant.checkpoints.values())
        return [*{checkpoint.source: checkpoint for checkpoint in every}.values()]

    @property
    def readers(self) -> set[str]:
        """The sources of those that read the target's token ids."""
        return {checkpoint.source for entrant in self.entrants for checkpoint in entrant.readers}

    def method(self, arm: Arm) -> tuple[Method, list[str]]:
        """Return the method of an arm, built once, and a remark for each option that differs from the training."""
        if str(arm) not in self._methods:
            self._methods[str(arm)] = build(METHODS[arm.method], arm.options, self.family.training(arm.on))
        return self._methods[str(arm)]

    def entrant(self, arm: Arm) -> Entrant:
        """Return an arm with its method and checkpoints. Raises UserError for one that cannot run as requested."""
        if str(arm) not in self._entrants:
            self.refuse(arm)
            served, masked = is_served(arm.engine), METHODS[arm.method].needs_mask
            here = METHODS[arm.method].needs_weights and not served
            sources = self.family.checkpoints(arm.roles)
            checkpoints = self._inspections.of_roles(sources, arm.on, masked=masked, here=here, served=served)
            method, untrained = self.method(arm)
            fault = None
            if len(checkpoints) == len(arm.roles):
                with suppress(UnreadableCheckpoint) if served else nullcontext():
                    fault = method_checks.fault(method, checkpoints)
            if fault is None and not method.outside:
                method_checks.refuse_too_wide(str(arm), method)
            self._entrants[str(arm)] = Entrant(arm, method, checkpoints, untrained, fault)
        return self._entrants[str(arm)]

    def refuse(self, arm: Arm) -> None:
        """Raise UserError for an arm that cannot run as requested, before anything is read of its checkpoints."""
        request, family = self.request, self.family
        if str(arm) in self._passed:
            return
        if arm.on in arm.roles[1:]:
            raise UserError(
                f"{str(arm)!r}: the role {arm.on!r} cannot draft for itself; name another role, or give its checkpoint "
                f"a second role: `--checkpoint draft={family.checkpoint(arm.on)}`."
            )
        checkpoint, part = families.split_part(family.checkpoint(arm.on))
        if part:
            raise UserError(
                f"{str(arm)!r}: {part!r} is a part of {checkpoint!r} that drafts, and a whole model is needed; leave "
                f"out `{families.PART}{part}`. See `mtbench ls methods {arm.method}`."
            )
        if METHODS[arm.method].served_only and not is_served(arm.engine):
            having = [name for name in SERVING_ENGINES if arm.method in SERVING_ENGINES[name].methods]
            raise UserError(f"{str(arm)!r} runs in a serving engine only; give `--engine` {' or '.join(having)}.")
        if is_served(arm.engine):
            refuse_in_engine(arm, self.method(arm)[0], family, request, self.acceptance)
            if self._installed:
                SERVING_ENGINES[arm.engine].python()
        if request.simulate_acceptance is not None and arm.engine is None and arm.decoding:
            raise UserError(
                f"{str(arm)!r} drafts in an external engine, so --simulate-acceptance cannot script what it accepts; "
                "leave that `--method` or `--simulate-acceptance` out."
            )
        if request.temperature and not METHODS[arm.method].draws:
            raise UserError(f"{str(arm)!r} decodes greedily; leave that `--method` out, or give `--temperature 0`.")
        self._passed.add(str(arm))


def line_up(
    spec: str, request: RunRequest, acceptance: Acceptance | None, inspections: Inspections | None = None
) -> Lineup:
    """Return the lineup of a suite. Raises UserError for known faults before any download."""
    family = family_of(request, spec)
    lineup = Lineup(family, request, (), acceptance, inspections)
    lineup = lineup.of(_arms(lineup))
    if request.apart and (ours := [str(arm) for arm in lineup.arms if not is_served(arm.engine)]):
        raise UserError(
            f"{ours[0]!r} decodes in mtbench's process, and --apart is for servers that do not fit together; leave "
            "--apart out, or give only arms in serving engines (`--engine vllm`)."
        )
    return lineup


def _refuse_simulated(suite: str, family: Family, request: RunRequest) -> None:
    """Raise UserError if a suite with a metric would run simulated: a simulation has no accuracy."""
    simulated = [f"weights {source!r}" for source in family.roles.values() if source.startswith(families.RANDOM)]
    if request.simulate_acceptance is not None:
        simulated = [f"--simulate-acceptance {request.simulate_acceptance}"]
    if simulated and SUITES[suite.partition(":")[0]].metric is not None:
        speed_only = ", ".join(name for name in SUITES if SUITES[name].metric is None)
        raise UserError(
            f"suite {suite!r} scores accuracy, and {simulated[0]} has none; choose a suite that measures speed only: "
            f"{speed_only}. See `mtbench ls suites`."
        )


def family_of(request: RunRequest, spec: str) -> Family:
    """Return the requested checkpoints, else the suite's own. Random weights fill every role that a method names.

    Raises UserError if a suite with a metric would run simulated.
    """
    methods = [METHODS[name] for name in METHODS]
    named = dict.fromkeys(role for method in methods for role in (*method.roles, *roles_of(method, {})))
    roles = [role for role in named if not role.startswith(families.PART)]
    family = families.family(
        request.family or SUITES[spec.partition(":")[0]].family,
        request.model,
        request.checkpoint,
        weights=request.weights,
        roles=roles,
    )
    _refuse_simulated(spec, family, request)
    _refuse_absent(spec, family, request)
    return family


def _refuse_absent(spec: str, family: Family, request: RunRequest) -> None:
    """Raise UserError if no model is named, and that of the suite is neither here nor on a hub that can be reached."""
    if request.family or request.model or request.checkpoint or request.weights or families.is_here(family):
        return
    here = [name for name, known in families.FAMILIES.items() if families.is_here(known)]
    add = ["--family", here[-1], "--time-budget", "10m"]  # a suite takes hours on a CPU
    reason = "--offline" if request.offline else network.hub_refusal()
    if request.simulate_acceptance is not None:
        add, reason = ["--weights", families.RANDOM + next(iter(SHAPES))], "any weights do for --simulate-acceptance"
    if reason:
        raise UserError(
            f"no model is named, and {family.name}, that of {spec}, is not on this machine ({reason}); add `--model "
            f"PATH` (a folder or GGUF file) or `{' '.join(add[:2])}`",
            add,
        )


def _arms(lineup: Lineup) -> list[Arm]:
    """Return the requested arms. Default: the default arms of every method whose checkpoints the family has.

    If these are references only, every method that needs no training is added. References come first. Raises UserError
    for an arm that cannot run as requested.
    """
    request, family = lineup.request, lineup.family

    def there(arm: Arm) -> bool:
        try:
            if is_served(arm.engine):
                refuse_in_engine(arm, lineup.method(arm)[0], family, request, lineup.acceptance)
        except UserError:
            if METHODS[arm.method].reference:  # without plain decoding nothing can be compared
                raise
            return False
        return True

    if request.method:
        arms = parse_arms(request.method, request.engine, request.settings)
        for arm in arms:
            lineup.refuse(arm)
        return arms
    methods = sorted((METHODS[name] for name in METHODS), key=lambda m: (not m.reference, m.name))
    specs = [spec for method in methods for spec in method.default_arms]
    arms = parse_arms(specs, request.engine, request.settings)
    arms = [arm for arm in arms if all(role in family.roles for role in arm.roles) and there(arm)]
    if arms and all(METHODS[arm.method].reference for arm in arms):
        # An external engine refuses a simulation, and has no place beside serving engines.
        inside = request.simulate_acceptance or all(map(is_served, request.engine))
        named = {arm.method for arm in arms} | {m.name for m in methods if m.served_only}  # those need options
        named |= {m.name for m in methods if (m.outside and inside) or (request.temperature and not m.draws)}
        more = [m.name for m in methods if is_untrained(m) and m.name not in named]
        arms += filter(there, parse_arms(more, request.engine, request.settings))
    return arms


def is_untrained(method: type[Method]) -> bool:
    """Return whether the method runs on any checkpoint alone: it needs no mask token, draft, heads or server."""
    references = [METHODS[name].roles for name in METHODS if METHODS[name].reference]
    alone = method.roles in references and not roles_of(method, {})
    return alone and method.needs_weights and not method.needs_mask
