"""Which arms can be raced on some checkpoints, and why the others cannot.

A method names its own arms: `choices`, else `default_arms`, else itself. An arm is a candidate if the family has its
roles, and if planning finds nothing wrong with it on these checkpoints (draft, heads, mask token).
"""

from dataclasses import replace
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from mtbench.decoding.arms import Arm, is_served, parse_arms
from mtbench.decoding.registry import METHODS, SERVING_ENGINES, plain_decoding
from mtbench.errors import UserError, unknown
from mtbench.lineup.lineup import Lineup, family_of
from mtbench.models.families import PART
from mtbench.plan.request import RunRequest


class Candidates(NamedTuple):
    """The arms of a race: first plain decoding on the checkpoint that one would deploy."""

    lineup: Lineup
    refused: dict[str, str]  # method -> why none of its arms can be raced

    def tables(self) -> list[Table]:
        """Return the arms that can be raced, and the methods that cannot with the reason."""
        can = Table("arm", title="Can be raced", box=None, title_justify="left")
        for arm in self.lineup.arms:
            can.add_row(escape(str(arm)))
        if not self.refused:
            return [can]
        cannot = Table(
            "method", "why not", title="Cannot be raced", box=None, title_justify="left", padding=(0, 2, 0, 0)
        )
        cannot.columns[1].overflow = "fold"  # a command in it stays whole
        for method, reason in self.refused.items():
            cannot.add_row(escape(method), escape(reason))
        return [can, cannot]


def candidates(request: RunRequest, *, installed: bool = True) -> Candidates:
    """Return the candidates: every arm of `request.method`, or without it the arms of every method.

    `installed`: not those in serving engines that are not.

    Raises UserError if plain decoding cannot run, for a named arm that cannot be raced, and for a checkpoint in a role
    that no arm has.
    """
    methods = [METHODS[name] for name in METHODS if not METHODS[name].served_only]
    choices = [spec for method in methods for spec in method.choices or method.default_arms or (method.name,)]
    choices += [spec for name in filter(is_served, request.engine) for spec in SERVING_ENGINES[name].choices]
    of_specs = plain_decoding()[:1], [*dict.fromkeys(request.method)], choices
    references, named, every = (parse_arms(specs, request.engine, request.settings) for specs in of_specs)
    roles = {role for arm in (*named, *every) for role in arm.roles if not role.startswith(PART)}
    for role in request.checkpoint:
        if role not in roles:
            raise unknown("role of --checkpoint", role, roles, "mtbench ls arms")
    family = family_of(request, request.suite[0])
    # Plain decoding is on its own role if the family has that, else on the role of the first arm.
    targets = [references[0].on, *(arm.on for arm in named), *family.roles]
    on = next((role for role in targets if role in family.roles), targets[0])
    plain, *others = (replace(arm, on=on) for arm in references)
    lineup = Lineup(family, request, installed=installed)
    beside = [*others, *(arm for arm in named or every if arm.method != plain.method)]
    reasons = {str(arm): why_not(arm, lineup) for arm in (plain, *named, *beside)}
    if reason := reasons[str(plain)]:
        raise UserError(f"plain decoding cannot run: {reason}")
    for arm in named:
        if arm.is_reference and str(arm) != str(plain):
            raise UserError(
                f"{str(arm)!r} cannot be raced: every arm is compared with {plain}; `mtbench run` has both."
            )
        if reason := reasons[str(arm)]:
            raise UserError(f"{str(arm)!r} cannot be raced: {reason}")
        if arm.engine != plain.engine:
            raise UserError(
                f"{str(arm)!r} cannot be raced: all arms have the engine of plain decoding; give `--engine "
                f"{arm.engine}`."
            )
    raced = [plain, *(arm for arm in beside if reasons[str(arm)] is None and not arm.is_reference)]
    methods_raced = {arm.method for arm in raced}
    # Keep the last arm's reason: that of the first may be only about its width.
    of_methods = {arm.method: reason for arm in beside if (reason := reasons[str(arm)]) is not None}
    refused = {name: reason for name, reason in of_methods.items() if name not in methods_raced}
    return Candidates(lineup.of(raced), refused)


def why_not(arm: Arm, lineup: Lineup) -> str | None:
    """Return why an arm cannot be raced on the checkpoints of a family, in one line; None if it can."""
    method = METHODS[arm.method]
    if is_served(arm.engine) and arm.method not in SERVING_ENGINES[arm.engine].methods:
        return f"{SERVING_ENGINES[arm.engine].title} does not have it"
    if method.outside:
        return "it runs in another engine, so its speedup includes the engine; use `mtbench run`"
    for role in arm.roles:
        if role.partition(PART)[0] not in ("", *lineup.family.roles):
            return f"it needs a checkpoint in the role {role!r}: add `--checkpoint {role}=PATH_OR_ID`"
    try:
        return lineup.entrant(arm).fault
    except UserError as error:
        return str(error).rstrip(".")
