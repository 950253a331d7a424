"""The commands that start a serving engine with the method that a race recommends.

Those of the race's engine have the options with which it was measured, the others none of dtype.
"""

from collections.abc import Sequence

from mtbench.clients.serving_engine import ServingEngine
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.models import gguf
from mtbench.models.families import EMBEDDED
from mtbench.options import AUTO
from mtbench.results.decision_format import Recommendation
from mtbench.results.format import ResultCell
from mtbench.runs.plan import Cell, Plan

Commands = dict[str, tuple[str, str]]  # engine -> a command, and what the engine does otherwise, in sentences


def deployment(found: Sequence[Recommendation], results: Sequence[ResultCell], plan: Plan) -> dict[str, Commands]:
    """Return the commands for each recommended arm: one more where a batch size has another."""
    of_arms, cells = dict[str, Commands](), {cell.cell: cell for cell in plan.cells}
    for rec in found:
        chosen = {choice.arm for choice in (rec.same_tokens, rec.within_loss) if choice is not None}
        group = (rec.suite, rec.batch_size, rec.batching)
        for result in results:
            if result.arm in chosen and (result.suite, result.batch_size, result.batching) == group:
                of_arm = of_arms.setdefault(result.arm, {})
                measured = result.positions_fed_per_forward, result.dtype, plan.request.engine_option
                for engine, command in commands(cells[result.cell], *measured).items():
                    if of_arm.setdefault(engine, command) != command:
                        of_arm[f"{engine} at batch size {rec.batch_size}"] = command
    return of_arms


def commands(cell: Cell, positions: float | None, dtype: str | None = None, given: Sequence[str] = ()) -> Commands:
    """Return the command of every engine that has an arm's method with its options.

    `positions`: that the arm fed per forward; None: unknown. The fixed width nearest to it, or the smallest one, takes
    the place of a width `auto`. The command of the arm's own engine has what it was measured with: `dtype`, and `given`
    as `--engine-option`.
    """
    method: Method = METHODS[cell.method](**cell.options)
    fixed, note = method, ""
    if len(method.variants) > 1:
        fixed = min(method.variants, key=lambda variant: abs(_positions(variant) - (positions or 0)))
        name = next(name for name, value in cell.options.items() if value == AUTO)
        width = f"{name}={getattr(fixed, name)}"
        chosen = "the smallest fixed width" if positions is None else "the fixed width nearest to what was fed"
        note = f"No engine has {name}=auto: {width} is {chosen}."
    drafts = {role: _name(source, "DRAFT") for role, source in cell.checkpoints.items()}
    model, found = _name(cell.checkpoints[cell.on], "MODEL"), dict[str, tuple[str, str]]()
    for name in SERVING_ENGINES:
        engine: ServingEngine = SERVING_ENGINES[name]()
        if not isinstance(setting := engine.setting(fixed, drafts), str):
            options: tuple[str, ...] = ()
            if cell.engine == name and dtype is not None:
                options = (*engine.computing(dtype), *engine.own_options(given))
            command = engine.command(model, setting, options)
            found[engine.title] = command, f"{note} {engine.note(model, setting)}".strip()
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
