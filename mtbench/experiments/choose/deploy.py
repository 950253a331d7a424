"""The commands that start a server with the method that a race recommends.

First that of the race's own engine, which was run. Those of other engines were not run.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from mtbench import plugins
from mtbench.clients.openai_wire import drawn
from mtbench.clients.serving_engine import ServingEngine, Setting
from mtbench.decoding.arms import is_served
from mtbench.decoding.method import Method
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import counted
from mtbench.errors import UserError
from mtbench.models import families, gguf
from mtbench.models.families import EMBEDDED
from mtbench.options import AUTO
from mtbench.options.fields import as_words
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.request import RunRequest
from mtbench.results.decision_format import Recommendation
from mtbench.results.format import ResultCell
from mtbench.sampling import GREEDY, Sampling
from mtbench.serving.engine import MtbenchServe

DRAWN = "Send {fields} with each request: its server has other defaults."
LIMITS = "As in the race, it takes {rows} at a time, of up to {room:,} tokens each with its answer."
Commands = dict[str, tuple[str, str]]  # engine -> a command, and the engine's differences, in sentences


class Placed(NamedTuple):
    """An arm in a serving engine."""

    engine: ServingEngine
    model: str
    setting: Setting
    note: str  # what is not the arm's

    def command(self) -> tuple[str, str]:
        """Return the command of its server, and the engine's differences."""
        command = self.engine.command(self.model, self.setting)
        return command, f"{self.note} {self.engine.note(self.model, self.setting)}".strip()


def deployment(
    recommendations: Sequence[Recommendation], results: Sequence[ResultCell], plan: Plan, servers: Mapping[str, str]
) -> dict[str, Commands]:
    """Return the commands for each recommended arm: one more where a batch size has another.

    `servers`: by cell, the command that started its server, where it is stored. The race's own engine comes first, with
    the command at the largest batch size of the arm. In a serving engine plain decoding is deployed where no arm is
    better.
    """
    of_arms = dict[str, Commands]()
    for rec in sorted(recommendations, key=lambda rec: rec.word != "use"):
        chosen = [choice.arm for choice in (rec.same_tokens, rec.within_loss) if choice is not None]
        plain = [rec.baseline] if rec.baseline and is_served(rec.engine) else []
        for arm in dict.fromkeys(chosen or plain):
            group = (rec.suite, rec.batch_size, rec.batching)
            [result] = [r for r in results if r.arm == arm and (r.suite, r.batch_size, r.batching) == group]
            cell = plan.cell(result.cell)
            of_arm = of_arms.setdefault(arm, {})
            in_engines = placed(cell, result.positions_fed_per_forward, plan.request.sampling)
            room = plan.suite(cell.suite).room
            limits = LIMITS.format(rows=counted(cell.batch_size, "request"), room=room)
            if is_served(cell.engine):
                own = in_engines.pop(SERVING_ENGINES[cell.engine].title)
                limits += " Prompts are cached, as in the race." if cell.prefix_cache else ""
                note = f"{limits} {own.setting.differs}".strip()
                if cell.cell in servers:
                    of_arm.setdefault(own.engine.title, (servers[cell.cell], note))
            else:
                of_arm.setdefault(MtbenchServe.title, (_serve(cell, result.dtype, plan.request, room), limits))
            for engine, there in in_engines.items():
                if of_arm.setdefault(engine, command := there.command()) != command:
                    of_arm[f"{engine} at batch size {rec.batch_size}"] = command
    return of_arms


def _serve(cell: Cell, dtype: str | None, request: RunRequest, room: int) -> str:
    """Return the command of `mtbench serve` for an arm that decoded in mtbench's own loop. room: positions."""
    options = cell.arm.rpartition("@")[0]
    given = request.model_dump(include={"checkpoint", "device", *asdict(GREEDY)}, exclude_defaults=True)
    source = ("--family", cell.family) if request.model is None else ("--model", families.absolute(request.model))
    method = f"{options}{',' if ':' in options else ':'}on={cell.on},engine={cell.engine}"
    files = [word for file in plugins.loaded() for word in ("--plugin", file.path)]
    return shlex.join(
        [
            *("mtbench", "serve", *source, "--method", method, *as_words(given, RunRequest)),
            *(() if dtype is None else ("--dtype", dtype)),
            *("--max-num-seqs", str(cell.batch_size), "--max-length", str(room), *files),
        ]
    )


def placed(cell: Cell, positions: float | None, sampling: Sampling = GREEDY) -> dict[str, Placed]:
    """Return an arm in every engine that has its method with its options, and the sampling's filters, by its title.

    `positions`: that the arm fed per forward; None: unknown. The fixed width nearest to it, or the smallest one, takes
    the place of a width `auto`.
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
    model, engines = _name(cell.checkpoints[cell.on], "MODEL"), dict[str, Placed]()
    for name in SERVING_ENGINES:
        engine: ServingEngine = SERVING_ENGINES[name]()
        shown = cell.engine == name or (engine.start and not method.served_only)
        setting = engine.setting(fixed, drafts)
        if not shown or isinstance(setting, str) or engine.lacking(setting, sampling) is not None:
            continue
        if sampling.temperature:
            other = engine.other_filtering(setting, sampling)
            sent = {**drawn(sampling), **engine.fields}
            fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in sent.items())
            setting = setting.but(f"{other}. " * bool(other) + DRAWN.format(fields=fields))
        engines[engine.title] = Placed(engine, model, setting, note)
    return engines


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
