"""Arms: a method with its options, on a checkpoint, by an engine; how they are written and how they are named.

mars:tau=0.95|0.8,cache=block   two arms; alternatives of a value stand between bars
mars:tau=0.95@mars/eager        an arm's string: options that differ from their defaults, role, engine
mars-tau0.95.mars.eager         the same in a file's name
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtbench.errors import UserError, unknown
from mtbench.method import Method
from mtbench.options import options_of, parse_option, show
from mtbench.registry import METHODS

ENGINES = ("eager",)


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant. `options` are those given, by name; `copy` counts from 1 when an arm is entered twice."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: str = ""
    engine: str = "eager"
    copy: int = 1

    @property
    def changed(self) -> list[tuple[str, str]]:
        """The options given, in declaration order, as text. (Parsing keeps those that differ from their defaults.)"""
        declared = options_of(METHODS[self.method])
        return [(o.name, show(self.options[o.name])) for o in declared if o.name in self.options]

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.changed)
        again = f"#{self.copy}" if self.copy > 1 else ""
        return f"{self.method}{':' if options else ''}{options}@{self.on}/{self.engine}{again}"

    @property
    def file_id(self) -> str:
        """The arm's part of a cell's id."""
        options = "".join(f"-{name}{value}" for name, value in self.changed)
        again = f"_{self.copy}" if self.copy > 1 else ""
        return f"{safe(self.method + options)}.{safe(self.on)}.{safe(self.engine)}{again}"

    @property
    def twin(self) -> "Arm | None":
        """The arm that computes the same output another way: an option back at its default, where that is promised."""
        for option in options_of(METHODS[self.method]):
            value = self.options.get(option.name, option.default)
            if value != option.default and value in option.same_output:
                return replace(self, options={k: v for k, v in self.options.items() if k != option.name}, copy=1)
        return None


def parse_arms(specs: Sequence[str], engine: str = "eager") -> list[Arm]:
    """The arms of several `--method`s, in order; an arm given twice is entered twice.

    Raises UserError for an unknown method, option or engine, or a value that is not allowed.
    """
    arms: list[Arm] = []
    for arm in itertools.chain.from_iterable(_parse(spec, engine) for spec in specs):
        arms.append(replace(arm, copy=1 + sum(str(replace(a, copy=1)) == str(arm) for a in arms)))
    return arms


def _parse(spec: str, engine: str) -> list[Arm]:
    name, _, rest = spec.partition(":")
    method: type[Method] = METHODS[name]
    values: dict[str, list[Any]] = {"on": [method.roles[0]], "engine": [engine]}
    for pair in filter(None, rest.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(
                f"{spec!r}: {pair!r} is not `option=value`; options of {name}: "
                f"{', '.join([*(o.name for o in options_of(method)), 'on', 'engine'])}. See `mtbench ls methods`."
            )
        alternatives = text.split("|")
        values[key] = alternatives if key in ("on", "engine") else [parse_option(method, key, t) for t in alternatives]
    for chosen in values["engine"]:
        if chosen not in ENGINES:
            raise unknown("engine", chosen, ENGINES, "mtbench run --help")
    # A trained option's default is the checkpoint's, so a value given is always one of its own.
    same = {o.name: o.default for o in options_of(method) if not o.trained}
    arms = []
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        on, by = options.pop("on"), options.pop("engine")
        method(**options)  # a combination of values that is not allowed is refused here
        arms.append(Arm(name, {k: v for k, v in options.items() if k not in same or v != same[k]}, on, by))
    return arms


def safe(text: str) -> str:
    """`text` with every character that has no place in a file's name turned into an underscore."""
    return re.sub(r"[^A-Za-z0-9.=+-]", "_", text)


def cell_id(suite: str, arm: Arm, batch_size: int, *, fixed_length: bool = False) -> str:
    """The name of a cell's files: `suite.method[-optVALUE…].on.engine.[fixed.]bN`."""
    return f"{safe(suite)}.{arm.file_id}.{'fixed.' if fixed_length else ''}b{batch_size}"
