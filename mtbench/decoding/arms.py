"""Arms: a method with its options, on a checkpoint, by an engine; how they are written, named and compared.

mars:tau=0.95|0.8,cache=block   two arms; alternatives of a value stand between bars
mars:tau=0.95@mars/graph        an arm's string: options that differ from their defaults, role, engine
mars-tau0.95.mars.graph         the same in a file's name
hf-generate:cache=static@ar     a method that is an engine of its own (mtbench/decoding/external.py) has none of ours
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError, first_line, unknown
from mtbench.options import common, decoding_options, options_of, parse_option, roles_of, show

ENGINES = ("graph", "eager", "invariant")  # as mtbench/decoding/engines.py has them; the first is the default


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant. `options` are those given, by name; `copy` counts from 1 when an arm is entered twice."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: str = ""
    engine: str | None = ENGINES[0]  # None: the method's loop is not ours
    copy: int = 1

    @property
    def machinery(self) -> tuple[Any, ...]:
        """What runs its forwards: an engine of ours, or an outside method as it is set.

        Arms that differ in it differ in more than in how they decode.
        """
        return (self.engine,) if self.engine else (self.method, *(o for o in self.changed if o[0] not in self.decoding))

    @property
    def roles(self) -> tuple[str, ...]:
        """Of the checkpoints it runs on, the target's first."""
        return (self.on, *roles_of(METHODS[self.method], self.options))

    @property
    def decoding(self) -> list[str]:
        """The options given that say how it decodes: all but those of an outside engine's own machinery."""
        return decoding_options(METHODS[self.method], self.options)

    @property
    def changed(self) -> list[tuple[str, str]]:
        """The options given, in declaration order, as text. (Parsing keeps those that differ from their defaults.)"""
        declared = options_of(METHODS[self.method])
        return [(o.name, show(self.options[o.name])) for o in declared if o.name in self.options]

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.changed)
        again = f"#{self.copy}" if self.copy > 1 else ""
        engine = f"/{self.engine}" if self.engine else ""
        return f"{self.method}{':' if options else ''}{options}@{self.on}{engine}{again}"

    @property
    def file_id(self) -> str:
        """The arm's part of a cell's id."""
        options = "".join(f"-{name}{value}" for name, value in self.changed)
        again = f"_{self.copy}" if self.copy > 1 else ""
        engine = f".{safe(self.engine)}" if self.engine else ""
        return f"{safe(self.method + options)}.{safe(self.on)}{engine}{again}"

    @property
    def equivalent_arm(self) -> "Arm | None":
        """The arm that computes the same output another way: an option back at its default, where that is promised."""
        for option in options_of(METHODS[self.method]):
            value = self.options.get(option.name, option.default)
            if value != option.default and value in option.same_output:
                return replace(self, options={k: v for k, v in self.options.items() if k != option.name}, copy=1)
        return None


def parse_arms(specs: Sequence[str], engine: str = ENGINES[0]) -> list[Arm]:
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
    values: dict[str, list[Any]] = {"on": [method.roles[0]], "engine": [None if method.outside else engine]}
    given: set[str] = set()
    for pair in filter(None, rest.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(
                f"{spec!r}: {pair!r} is not `option=value`; options of {name}: "
                f"{', '.join([*(o.name for o in options_of(method)), *common(method)])}. See `mtbench ls methods`."
            )
        if key == "engine" and method.outside:
            raise UserError(
                f"{spec!r}: {name} is an engine of its own, so `engine={text}` says nothing of it; leave it out. "
                "See `mtbench ls methods`."
            )
        if key in given:
            raise UserError(f"{spec!r}: {key} is given twice; alternatives of a value stand between bars, `{key}=a|b`.")
        given.add(key)
        alternatives = text.split("|")
        values[key] = alternatives if key in ("on", "engine") else [parse_option(method, key, t) for t in alternatives]
    for chosen in values["engine"]:
        if chosen not in (None, *ENGINES):
            raise unknown("engine", chosen, ENGINES, "mtbench run --help")
    # A trained option's default is the checkpoint's, so a value given is always one of its own.
    same = {o.name: o.default for o in options_of(method) if not o.trained}
    arms = []
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        on, by = options.pop("on"), options.pop("engine")
        _try(method, options)
        arms.append(Arm(name, {k: v for k, v in options.items() if k not in same or v != same[k]}, on, by))
    return arms


def _try(method: type[Method], options: Mapping[str, Any]) -> None:
    """Raise UserError for a combination of values that the method does not take."""
    try:
        method(**options)
    except UserError:
        raise
    except Exception as error:  # a stranger's method says so in its own way
        said = ",".join(f"{name}={show(value)}" for name, value in options.items())
        raise UserError(
            f"{method.name}:{said} is refused: {type(error).__name__}: {first_line(error)}. See `mtbench ls methods`."
        ) from error


def _check_default_arms(method: type[Method]) -> None:
    """Raise UserError unless the arms that a method enters by itself can be read."""
    parse_arms(method.default_arms)


METHODS.checks.append(_check_default_arms)


def _references(arms: Sequence[Arm]) -> list[Arm]:
    """Those that others are compared with: as they come, except that an outside engine counts however it is set."""
    return [a for a in arms if METHODS[a.method].reference and a.copy == 1 and not a.decoding]


def _near(arm: Arm, references: Sequence[Arm]) -> list[str]:
    """Of these references the one on the arm's own checkpoint (what decoding gains), then the one on the reference's
    own role (deployment).
    """
    same = [a for a in references if a.on == arm.on]
    deployment = [a for a in references if a.on == METHODS[a.method].roles[0]]
    return [name for name in dict.fromkeys(str(a) for a in same + deployment) if name != str(arm)]


def baselines(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    """What its decoding is compared with: references by the same engine."""
    return _near(arm, [a for a in _references(arms) if a.machinery == arm.machinery])


def engine_baselines(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    """References by any other engine: the ratio is that of engine and method together."""
    return _near(arm, [a for a in _references(arms) if a.machinery != arm.machinery])


def reference_arm(arm: Arm, claims: str, arms: Sequence[Arm]) -> str | None:
    """Whose tokens this arm promises, among the arms of the run.

    A lossless one promises those of our plain loop on the same checkpoint, by its own engine if it runs there, else
    by the eager one; the plain loop itself promises those of the eager one.
    """
    if arm.equivalent_arm in arms:
        return str(arm.equivalent_arm)
    if claims != "lossless":
        return None
    plain = [a for a in _references(arms) if a.engine and a.on == arm.on]
    if arm in plain:
        plain = [a for a in plain if a.engine == "eager" != arm.engine]
    nearest = sorted(plain, key=lambda a: (a.engine != arm.engine, a.engine != "eager"))
    return str(nearest[0]) if nearest else None


def safe(text: str) -> str:
    """`text` with every character that has no place in a file's name turned into an underscore."""
    return re.sub(r"[^A-Za-z0-9.=+-]", "_", text)


def cell_id(suite: str, arm: Arm, batch_size: int, *, fixed_length: bool = False, batching: str = "static") -> str:
    """The name of a cell's files: `suite.method[-optVALUE…].on.engine.[fixed.][refill.]bN`."""
    length, batches = "fixed." if fixed_length else "", "" if batching == "static" else f"{batching}."
    return f"{safe(suite)}.{arm.file_id}.{length}{batches}b{batch_size}"
