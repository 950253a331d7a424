"""The commands that start a serving engine with the method that a race recommends. mtbench does not measure them."""

from collections.abc import Sequence
from typing import NamedTuple

from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.models.families import EMBEDDED
from mtbench.options import AUTO
from mtbench.results.decision_format import Recommendation
from mtbench.results.format import ResultCell
from mtbench.runs.plan import Cell


class Command(NamedTuple):
    """The command for one engine."""

    text: str
    differs: str  # what the engine does otherwise, in sentences


def deployment(
    found: Sequence[Recommendation], results: Sequence[ResultCell], planned: Sequence[Cell]
) -> dict[str, dict[str, Command]]:
    """Return the commands for the recommended arms, by arm and engine: one more where a batch size has another."""
    cells = {cell.cell: cell for cell in planned}
    commands_of: dict[str, dict[str, Command]] = {}
    for rec in found:
        group = (rec.suite, rec.batch_size, rec.batching)
        for arm in dict.fromkeys(choice.arm for choice in (rec.same_tokens, rec.within_loss) if choice is not None):
            cell = next(c for c in results if (c.suite, c.batch_size, c.batching, c.arm) == (*group, arm))
            of_arm = commands_of.setdefault(arm, {})
            for engine, command in commands(cells[cell.cell], cell.positions_fed_per_forward).items():
                if of_arm.setdefault(engine, command) != command:
                    of_arm[f"{engine} at batch size {rec.batch_size}"] = command
    return commands_of


def commands(cell: Cell, positions: float | None) -> dict[str, Command]:
    """Return the command of every engine that has an arm's method with its options, by engine.

    `positions`: that the arm fed per forward. Of a width `auto`, the fixed width nearest to it takes the place.
    """
    method: Method = METHODS[cell.method](**cell.options)
    found, note = method, ""
    if len(method.variants) > 1:
        found = min(method.variants, key=lambda fixed: abs(_positions(fixed) - (positions or 0)))
        name = next(name for name, value in cell.options.items() if value == AUTO)
        width = f"{name}={getattr(found, name)}"
        note = f"No engine has {name}=auto: {width} is the fixed width nearest to what was fed."
    settings = found.in_engines({role: _name(source, "DRAFT") for role, source in cell.checkpoints.items()})
    model = _name(cell.checkpoints[cell.on], "MODEL")
    return {s.engine: Command(s.command(model), f"{note} {s.differs}".strip()) for s in settings}


def _positions(method: Method) -> int:
    window = method.window()
    return (window.pending or 1) + window.guesses


def _name(source: str, placeholder: str) -> str:
    """Return a checkpoint's name in a command; an embedded one is not for deployment."""
    return placeholder if source.startswith(EMBEDDED) else source
