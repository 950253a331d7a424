"""Planning: choose arms, lay out cells and blocks over the suites' prompts, and refuse what cannot run."""

import dataclasses
import itertools
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from mtbench import plugins
from mtbench.clients.serving_engine import Setting
from mtbench.decoding.arms import Arm, baselines, cell_id, engine_baselines, is_ours, is_served, reference_arm
from mtbench.decoding.method import Claims, Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Suite
from mtbench.hardware import machine
from mtbench.lineup.acceptance_file import AcceptanceFile
from mtbench.lineup.engine_arms import engine_flags, other_tokens
from mtbench.lineup.lineup import Entrant, Lineup, line_up
from mtbench.lineup.model_sampling import with_sampling
from mtbench.lineup.simulation import (
    Acceptance,
    flags_of,
    refuse_unknown_acceptance,
    refuse_unscriptable,
    simulated_parts,
)
from mtbench.models import chat_template
from mtbench.models.auto import fastest_dtype
from mtbench.models.families import Family
from mtbench.models.inspection import Inspections
from mtbench.models.vocabularies import vocabulary_flags
from mtbench.options import AUTO
from mtbench.plan.checks import refuse_faulty
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Race
from mtbench.plan.plan import (
    APART,
    FREE,
    LEARNS,
    OTHER_RULE,
    SCHEMA_VERSION,
    Batching,
    Cell,
    Group,
    Item,
    Plan,
    RunRequest,
    Script,
    Simulated,
    SuitePlan,
)
from mtbench.plan.prompts import open_suites, plan_suite
from mtbench.plan.request import REFILLS, TIMED_BLOCKS
from mtbench.records import dump
from mtbench.statistics import UNITS_NEEDED

SPEED_BLOCKS = 24  # blocks of the smaller batch sizes: they measure speed; the largest measures accuracy, too


def make_plan(
    request: RunRequest,
    opened: Mapping[str, Suite] | None = None,
    lineup: Lineup | None = None,
    *,
    here: bool = True,
) -> Plan:
    """Get the suites' prompts, tokenise them, lay out cells and blocks. Raises UserError for any bad request.

    opened: the suites of the request, if they are open already. lineup: its arms, if they are resolved already. here:
    this machine decodes the plan; False: that which decodes it decides what `--dtype auto` means.
    """
    _refuse_contradictions(request)
    request = request if lineup else with_sampling(request)
    text, variables = request.simulate_acceptance, request.chat_template_kwargs
    acceptance = None if text is None else AcceptanceFile.read(text, variables) or Acceptance.of(text)
    inspections = Inspections(offline=request.offline)
    lineups = {spec: lineup or line_up(spec, request, acceptance, inspections) for spec in request.suite}
    opened = opened or open_suites(request)
    today = os.environ.get(chat_template.DATE) or date.today().isoformat()  # no time: the plans of a day are equal
    dated = request.changed(chat_template_date=request.chat_template_date or today)
    suites: list[SuitePlan] = []
    cells: list[Cell] = []
    groups: list[Group] = []
    for spec, chosen in lineups.items():
        suite_plan = plan_suite(spec, opened[spec], chosen.family, chosen.checkpoints, dated, chosen.readers)
        suites.append(suite_plan)
        for size, batching in itertools.product(sorted(set(request.batch_size)), dict.fromkeys(request.batching)):
            # Refill needs mtbench's own loop and at least two slots.
            refillable = [entrant for entrant in chosen.entrants if size > 1 and is_ours(entrant.arm.engine)]
            entrants = chosen.entrants if batching == "static" else refillable
            if not entrants:
                continue
            planner = _GroupPlanner(suite_plan, chosen.family, entrants, size, batching, request, acceptance)
            cells_of_group = planner.cells()
            cells += cells_of_group
            groups.append(planner.group(cells_of_group))
    if not groups:
        raise UserError(
            "--batching refill leaves nothing to run: it needs a batch size of at least 2 and a method that runs in "
            "mtbench's loop; add `--batching static,refill` or `--batch-size 8`."
        )
    if "on" in request.prefix_cache and not any(cell.prefix_cache for cell in cells):
        raise UserError("--prefix-cache on: no arm has one; give `--engine` (`mtbench ls engines`), or leave it out.")
    used = [METHODS[cell.method] for cell in cells] + [SUITES[spec.partition(":")[0]] for spec in lineups]
    used += [SERVING_ENGINES[cell.engine] for cell in cells if is_served(cell.engine)]
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        request=dated if any("template_date" in suite.task for suite in suites) else request,
        suites=suites,
        cells=cells,
        groups=groups,
        plugins=plugins.files_of(used),
    )
    refuse_faulty(plan)
    return with_dtype(plan) if here else plan


def with_dtype(plan: Plan, decoded_in: str | None = None) -> Plan:
    """Return a plan with the dtype that `auto` means on this machine. decoded_in: that of an earlier session."""
    request = plan.request
    if request.dtype != AUTO:
        return plan
    sources = {source for cell in plan.cells if cell.built.needs_weights for source in cell.checkpoints.values()}
    dtype = decoded_in or fastest_dtype(request.device, sources, offline=request.offline)
    return plan.changed(request=request.changed(dtype=dtype))


def write_plan(run: RunDirectory, plan: Plan, command: Sequence[str], race: Race | None = None) -> None:
    """Write the environment, of a race its looks, and last the plan."""
    run.write_json("environment.json", machine.environment(command))
    if race is not None:
        run.write_json("race.json", dump(race))
    run.write_json("plan.json", dump(plan), indent=None)


def _refuse_contradictions(request: RunRequest) -> None:
    named = [f"--{name}" for name in ("family", "model", "checkpoint", "weights") if getattr(request, name)]
    if request.weights is not None and len(named) > 1:
        raise UserError(
            f"{' and '.join(named)} each name the models; give one of them. (One role can have random weights, too: "
            "`--checkpoint ROLE=random:SHAPE`.)"
        )
    if request.apart and request.rounds < UNITS_NEEDED["round"]:
        raise UserError(
            f"--apart has intervals over rounds, and {request.rounds} are too few; give `--rounds "
            f"{UNITS_NEEDED['round']}` or more."
        )


@dataclass(frozen=True, slots=True)
class _GroupPlanner:
    """Lays out the cells and the blocks of one group."""

    suite: SuitePlan
    family: Family
    entrants: Sequence[Entrant]
    batch_size: int
    batching: Batching
    request: RunRequest
    acceptance: Acceptance | None

    def cells(self) -> list[Cell]:
        """Return one cell per arm."""
        return [self._cell(entrant) for entrant in self.entrants]

    def group(self, cells: Sequence[Cell]) -> Group:
        """Return the group of these cells with its blocks and rounds."""
        blocks = _blocks(self.suite.items, self.batch_size, self.request.seed, self.batching)
        if self.batch_size < max(self.request.batch_size):
            blocks = blocks[:SPEED_BLOCKS]
        return Group(
            suite=self.suite.suite,
            batch_size=self.batch_size,
            batching=self.batching,
            blocks=blocks,
            rounds=[len(blocks)] + [min(TIMED_BLOCKS, len(blocks))] * (self.request.rounds - 1),
            cells=[cell.cell for cell in cells],
        )

    def _cell(self, entrant: Entrant) -> Cell:
        spec, arms = self.suite.suite, [other.arm for other in self.entrants]
        arm, method, inspected, fault = entrant.arm, entrant.method, entrant.checkpoints, entrant.fault
        checkpoints = self.family.checkpoints(arm.roles)
        claims: Claims = "lossy" if fault else method.claims
        flags = [*self.suite.flags, *entrant.target.flags, *entrant.untrained]
        if METHODS[arm.method].needs_mask and not entrant.target.feeds_masks:
            flags.append(f"feeds masks, and {arm.on} was trained by {entrant.target.objective}, without any")
        setting = SERVING_ENGINES[arm.engine]().setting(method, checkpoints) if is_served(arm.engine) else None
        learns = isinstance(setting, Setting) and setting.learns
        if learns and self.request.rounds > 1 and not self.request.apart:
            raise UserError(
                f"{str(arm)!r} drafts from earlier answers of its server, and later rounds repeat the prompts; give "
                "`--rounds 1`, or `--apart --rounds 5`."
            )
        if claims == "lossless" and self.request.temperature and (setting is not None or method.outside):
            # Its random numbers are its own.
            claims, others_law = self._law(arm, method, setting)
            flags += others_law
        flags += [LEARNS] if learns else []
        lossless_reference = reference_arm(arm, claims, arms)
        if others := other_tokens(arm, arms, self.request.dtype):
            claims = "lossy"
        self._refuse_short_prompts(arm, 1 if fault else method.variants[-1].block)
        script, simulated = self._simulation(arm, method, simulated_parts(checkpoints, self.acceptance), fault)
        # A scripted acceptance has no ends of answers, so every item takes its whole budget.
        ignore_eos = self.request.ignore_eos or self.acceptance is not None
        if fault is None:
            flags += vocabulary_flags(inspected, arm.on) if method.translates else []
        flags += [APART] if self.request.apart else []
        flags += [FREE] if self.suite.schemas and not self.suite.constrained(arm.engine) else []
        return Cell(
            cell=cell_id(_stem(spec), arm, self.batch_size, ignore_eos=ignore_eos, batching=self.batching),
            suite=spec,
            arm=str(arm),
            method=arm.method,
            options=dataclasses.asdict(method),  # type: ignore[call-overload]  # methods are dataclasses by contract
            on=arm.on,
            engine=arm.engine,
            family=self.family.name,
            checkpoints=checkpoints,
            batch_size=self.batch_size,
            length="fixed" if ignore_eos else "natural",
            batching=self.batching,
            flags=[*flags, *engine_flags(arm, checkpoints[arm.on]), *flags_of(simulated)],
            baselines=baselines(arm, arms),
            engine_baselines=engine_baselines(arm, arms),
            lossless_reference=None if simulated else lossless_reference,
            claims=claims,
            demonstration=self.family.domain is not None,
            accept=script,
            simulated=simulated,
            fault=fault,
            engine_options=[*arm.settings],
            other_tokens=others,
            alternative=arm.alternative,
            revision=getattr(entrant.target.config, "_commit_hash", None),
        )

    def _law(self, arm: Arm, method: Method, setting: Setting | str | None) -> tuple[Claims, list[str]]:
        """Return what a sampled arm of another loop claims, with flags: another order of filters is another law."""
        if not isinstance(setting, Setting):
            return ("distribution" if method.outside else "lossy"), []
        filtering = SERVING_ENGINES[str(arm.engine)]().other_filtering(setting, self.request.sampling)
        flags = [*filter(None, [filtering]), *([] if setting.unbiased else [OTHER_RULE])]
        return ("lossy" if flags else "distribution"), flags

    def _refuse_short_prompts(self, arm: Arm, block: int) -> None:
        first_turns = [item for item in self.suite.items if item.follows is None]
        shortest = min(first_turns, key=lambda item: len(item.prompt_ids))
        if len(shortest.prompt_ids) < block:
            raise UserError(
                f"{str(arm)!r} needs prompts of at least one block of {block} tokens, and {shortest.item} has "
                f"{len(shortest.prompt_ids)}; leave that `--method` out, or lengthen the prompts of "
                f"`--suite {self.suite.suite}`."
            )

    def _simulation(
        self, arm: Arm, method: Method, simulated: Simulated | None, fault: str | None
    ) -> tuple[Script | None, Simulated | None]:
        if simulated is None or fault is not None:
            return None, simulated
        refuse_unknown_acceptance(arm, method, simulated)
        if self.acceptance is None:
            return None, simulated
        refuse_unscriptable(arm, method)
        items, budget = len(self.suite.items), self.suite.max_new_tokens
        acceptance = self.acceptance.of_arm(arm, method)
        script = acceptance.script(arm, method, items, budget, self.request.seed)
        return script, simulated.changed(accept=acceptance.source, note=acceptance.note)


def _blocks(items: Sequence[Item], size: int, seed: int, batching: str = "static") -> list[list[int]]:
    """Cut the items, in random order, into blocks of indices.

    A block holds items of one task, so that tasks can be timed apart; the tasks alternate. A static block is a batch,
    and a task's last one may be short. Refilled blocks have similar sizes, and none is too short. A block of first
    turns is followed by the blocks of their later turns.
    """
    chance = random.Random(seed)
    order = [index for index, item in enumerate(items) if item.follows is None]
    next_turn = {item.follows: index for index, item in enumerate(items) if item.follows is not None}
    chance.shuffle(order)
    tasks: dict[str, list[int]] = {}
    for index in order:
        tasks.setdefault(items[index].item.partition("/")[0], []).append(index)
    blocks = []
    for blocks_of_tasks in itertools.zip_longest(*(_cut(of_task, size, batching) for of_task in tasks.values())):
        present = [block for block in blocks_of_tasks if block is not None]
        for block in chance.sample(present, len(present)):
            turn = block
            while turn:
                blocks.append(turn)
                turn = [next_turn[index] for index in turn if index in next_turn]
    return blocks


def _cut(items: Sequence[int], size: int, batching: str) -> list[list[int]]:
    if batching == "static":
        return [list(items[i : i + size]) for i in range(0, len(items), size)]
    blocks = max(1, len(items) // (REFILLS * size))
    return [list(items[i * len(items) // blocks : (i + 1) * len(items) // blocks]) for i in range(blocks)]


def _stem(spec: str) -> str:
    """Return the suite's part of a cell's id. A suite made from a file has the file's stem and a hash of its text."""
    name, _, rest = spec.partition(":")
    return SUITES[name].cell_prefix(rest) if rest else name
