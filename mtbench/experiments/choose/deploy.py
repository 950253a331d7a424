"""The commands that start a serving engine with the method that a race recommends.

Commands of the race's engine have the measured options; those of other engines have no option of dtype.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtbench.clients.serving_engine import ServingEngine, Setting
from mtbench.decoding.method import Method
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.models import gguf
from mtbench.models.families import EMBEDDED
from mtbench.options import AUTO
from mtbench.plan.plan import Cell, Plan
from mtbench.results.decision_format import Recommendation
from mtbench.results.format import ResultCell

Commands = dict[str, tuple[str, str]]  # engine -> a command, and the engine's differences, in sentences
SCHEDULED = "The number of drafts of a batch size holds up to the next one that was measured."


class Placed(NamedTuple):
    """An arm in a serving engine."""

    engine: ServingEngine
    model: str
    setting: Setting
    options: tuple[str, ...]  # with which it was measured
    note: str  # what is not the arm's

    def command(self) -> tuple[str, str]:
        """Return the command of its server, and the engine's differences."""
        command = self.engine.command(self.model, self.setting, self.options)
        return command, f"{self.note} {self.engine.note(self.model, self.setting)}".strip()


def deployment(found: Sequence[Recommendation], results: Sequence[ResultCell], plan: Plan) -> dict[str, Commands]:
    """Return the commands for each recommended arm: one more where a batch size has another."""
    of_arms = dict[str, Commands]()
    for rec in found:
        for arm in dict.fromkeys(choice.arm for choice in (rec.same_tokens, rec.within_loss) if choice is not None):
            of_arm = of_arms.setdefault(arm, {})
            for engine, placed in _placed(rec, arm, results, plan).items():
                if of_arm.setdefault(engine, command := placed.command()) != command:
                    of_arm[f"{engine} at batch size {rec.batch_size}"] = command
    for arm, commands in _at_every_batch_size(found, results, plan).items():
        of_arms[arm] |= commands
    return of_arms


def _at_every_batch_size(
    found: Sequence[Recommendation], results: Sequence[ResultCell], plan: Plan
) -> dict[str, Commands]:
    """Return by arm a command with which an engine decodes as recommended at each batch size, where they differ."""
    of_arms = dict[str, Commands]()
    for place in dict.fromkeys((rec.suite, rec.batching, rec.engine) for rec in found):
        recs = [rec for rec in found if (rec.suite, rec.batching, rec.engine) == place]
        arms = [rec.same_tokens.arm if rec.same_tokens else rec.word == "plain" and rec.baseline for rec in recs]
        used = [rec.same_tokens.arm for rec in recs if rec.same_tokens]
        if not used or not all(arms):
            continue
        placed = {rec.batch_size: _placed(rec, str(arm), results, plan) for rec, arm in zip(recs, arms, strict=True)}
        for title, first in _placed(recs[arms.index(used[0])], used[0], results, plan).items():
            settings = {size: at[title].setting for size, at in placed.items() if title in at}
            models = {at[title].model for at in placed.values() if title in at}
            alike = len(settings) == len(recs) and len(models) == 1
            scheduled = first.engine.scheduled(settings) if alike else None
            if scheduled is not None:
                command, note = first._replace(setting=scheduled).command()
                of_arms.setdefault(used[0], {})[f"{title} at every batch size"] = command, f"{SCHEDULED} {note}".strip()
    return of_arms


def _placed(rec: Recommendation, arm: str, results: Sequence[ResultCell], plan: Plan) -> dict[str, Placed]:
    """Return an arm of a recommendation's group in each engine that has its method."""
    group = (rec.suite, rec.batch_size, rec.batching)
    [result] = [r for r in results if r.arm == arm and (r.suite, r.batch_size, r.batching) == group]
    [cell] = [cell for cell in plan.cells if cell.cell == result.cell]
    return placed(cell, result.positions_fed_per_forward, result.dtype)


def placed(cell: Cell, positions: float | None, dtype: str | None = None) -> dict[str, Placed]:
    """Return an arm in every engine that has its method with its options, by the engine's title.

    `positions`: that the arm fed per forward; None: unknown. The fixed width nearest to it, or the smallest one, takes
    the place of a width `auto`. In the arm's own engine it has what it was measured with: `dtype`, and its options.
    """
    method = cell.built
    fixed, note = method, ""
    if len(method.variants) > 1:
        fixed = min(method.variants, key=lambda variant: abs(_positions(variant) - (positions or 0)))
        name = next(name for name, value in cell.options.items() if value == AUTO)
        width = f"{name}={getattr(fixed, name)}"
        chosen = "the smallest fixed width" if positions is None else "the fixed width nearest to what was fed"
        note = f"No engine has {name}=auto: {width} is {chosen}."
    drafts = {role: _name(source, "DRAFT") for role, source in cell.checkpoints.items()}
    model, found = _name(cell.checkpoints[cell.on], "MODEL"), dict[str, Placed]()
    for name in SERVING_ENGINES:
        engine: ServingEngine = SERVING_ENGINES[name]()
        if not isinstance(setting := engine.setting(fixed, drafts), str):
            options: tuple[str, ...] = ()
            if cell.engine == name and dtype is not None:
                options = (*engine.computing(dtype), *engine.own_options(cell.engine_options))
            found[engine.title] = Placed(engine, model, setting, options, note)
    return found


def _positions(method: Method) -> int:
    window = method.window()
    return (window.pending or 1) + window.guesses


def _name(source: str, placeholder: str) -> str:
    """Return a checkpoint's name in a command: an embedded one is not for deployment, one of a package is a file."""
    if not source.startswith(gguf.PACKAGE):
        return placeholder if source.startswith(EMBEDDED) else source
    try:
        return str(gguf.file_of(source))
    except UserError:  # the package is not on the machine that writes the report
        return source.rpartition("/")[2]
