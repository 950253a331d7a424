"""Arms: a method with options, on a checkpoint, with an engine; how they are written, named and compared.

mars:tau=0.95|0.8,cache=block   two arms; bars separate alternatives of a value
mars:tau=0.95@mars/graph        an arm's string: options that differ from their defaults, role, engine
mars-tau0.95.mars.graph         the same in a file's name
hf-generate:cache=static@ar     an external engine (mtbench/decoding/external.py) uses none of ours
ar@ar/vllm+seed=1+quantization=fp8   a serving engine, with options of its server (`--engine-option`)
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError, first_line, unknown
from mtbench.options.classes import arm_options, decoding_options, parse_option, roles_of
from mtbench.options.engine_options import ANY, NO_PREFIX_CACHE, EngineOption, ServerOption, with_options
from mtbench.options.fields import fields_of, option_of
from mtbench.options.texts import shown
from mtbench.records import LONGEST_NAME

ENGINES = ("graph", "eager", "invariant")  # ours, those of mtbench/decoding/engines.py; the default first


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of a run. `options`: given options, by name. `copy`: 1, or 2, 3 … for an arm given again.

    `settings`: options of its engine's server. `alternative`: plain decoding, the reference there, has others.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: str = ""
    engine: str | None = ENGINES[0]  # None: an external engine
    copy: int = 1
    settings: tuple[ServerOption, ...] = ()
    alternative: bool = False

    @property
    def machinery(self) -> tuple[Any, ...]:
        """The code that runs its forwards: an engine of ours, or an external engine with its settings.

        Arms with different machinery differ in more than the decoding method.
        """
        if self.engine:
            return (self.engine,)
        return (self.method, *(option for option in self.changed if option[0] not in self.decoding))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of its checkpoints, the target's first."""
        return (self.on, *roles_of(METHODS[self.method], self.options))

    @property
    def decoding(self) -> list[str]:
        """The given options of the decoding method: all but the settings of an external engine."""
        return decoding_options(METHODS[self.method], self.options)

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with it: without decoding options; those of an external engine do not matter."""
        return METHODS[self.method].reference and not self.decoding and not self.alternative

    @property
    def changed(self) -> list[tuple[str, str]]:
        """The given options, in declaration order, as text. (Parsing keeps those that differ from their defaults.)"""
        declared = fields_of(METHODS[self.method])
        return [(name, shown(self.options[name])) for name in declared if name in self.options]

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.changed)
        copy = f"#{self.copy}" if self.copy > 1 else ""
        engine = f"/{with_options(self.engine, self.settings)}" if self.engine else ""
        return f"{self.method}{':' if options else ''}{options}@{self.on}{engine}{copy}"

    @property
    def file_id(self) -> str:
        """The arm's part of a cell's id."""
        options = "".join(f"-{name}{value}" for name, value in self.changed)
        copy = f"_{self.copy}" if self.copy > 1 else ""
        engine = f".{safe(with_options(self.engine, self.settings))}" if self.engine else ""
        return f"{safe(self.method + options)}.{safe(self.on)}{engine}{copy}"

    @property
    def equivalent_arm(self) -> "Arm | None":
        """The arm with one option set back to its default that promises the same output, or None."""
        for name, declared in fields_of(METHODS[self.method]).items():
            value = self.options.get(name, declared.default)
            if value != declared.default and value in option_of(declared).same_output:
                return replace(self, options={k: v for k, v in self.options.items() if k != name}, copy=1)
        return None


def parse_arms(
    specs: Sequence[str], engines: Sequence[str] = ENGINES[:1], engine_options: Sequence[EngineOption] = ()
) -> list[Arm]:
    """Return the arms of several `--method` values, in order, in each engine; an arm given twice appears twice.

    `engine_options`: the alternatives of each make an arm each. Raises UserError for an unknown method, option or
    engine, or a value that is not allowed.
    """
    for option in engine_options:
        if option.engine != ANY and option.engine not in SERVING_ENGINES:
            raise unknown("engine of --engine-option", option.engine, SERVING_ENGINES, "mtbench ls engines")
    arms: list[Arm] = []
    parsed = itertools.chain.from_iterable(_parse(spec, engines) for spec in specs)
    for arm in itertools.chain.from_iterable(_with_settings(arm, engine_options) for arm in parsed):
        arms.append(replace(arm, copy=1 + sum(str(replace(a, copy=1)) == str(arm) for a in arms)))
    return arms


def _parse(spec: str, engines: Sequence[str]) -> list[Arm]:
    name, _, rest = spec.partition(":")
    method: type[Method] = METHODS[name]
    values: dict[str, list[Any]] = {"on": [method.roles[0]], "engine": [None] if method.outside else [*engines]}
    given: set[str] = set()
    for pair in filter(None, rest.split(",")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(
                f"{spec!r}: {pair!r} is not `option=value`; options of {name}: "
                f"{', '.join([*fields_of(method), *arm_options(method)])}. "
                f"See `mtbench ls methods {name}`."
            )
        if key == "engine" and method.outside:
            raise UserError(
                f"{spec!r}: {name} is an external engine, so `engine={text}` does not apply; leave it out. "
                "See `mtbench ls methods`."
            )
        if key in given:
            raise UserError(f"{spec!r}: {key} is given twice; separate alternatives of a value by bars, `{key}=a|b`.")
        given.add(key)
        alternatives = text.split("|")
        values[key] = alternatives if key in ("on", "engine") else [parse_option(method, key, t) for t in alternatives]
    for chosen in values["engine"]:
        if chosen is not None:
            check_engine(chosen)
    # The default of a trained option is the checkpoint's value, so a given value is always kept.
    defaults = {name: field.default for name, field in fields_of(method).items() if not option_of(field).trained}
    arms = []
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        on, engine = options.pop("on"), options.pop("engine")
        check_options(method, options)
        changed = {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}
        arms.append(Arm(name, changed, on, engine))
    return arms


def _with_settings(arm: Arm, engine_options: Sequence[EngineOption]) -> list[Arm]:
    """Return an arm with each combination of its engine's options; the first is that of plain decoding."""
    names = (arm.engine, ANY) if is_served(arm.engine) else (arm.engine,)
    of_engine = (option.alternatives for option in engine_options if option.engine in names)
    chosen = (tuple(s for s in some if s != NO_PREFIX_CACHE) for some in itertools.product(*of_engine))
    return [replace(arm, settings=settings, alternative=n > 0) for n, settings in enumerate(chosen)]


def is_ours(engine: str | None) -> bool:
    """Return whether an arm with this engine decodes in mtbench's loop."""
    return engine in ENGINES


def is_served(engine: str | None) -> TypeGuard[str]:
    """Return whether an arm with this engine decodes in a server of a serving engine."""
    return engine is not None and not is_ours(engine)


def check_engine(name: str, what: str = "engine") -> None:
    """Raise UserError for a name that is neither an engine of ours nor a serving engine."""
    if not is_ours(name) and name not in SERVING_ENGINES:
        raise unknown(what, name, [*ENGINES, *SERVING_ENGINES], "mtbench ls engines")


def check_options(method: type[Method], options: Mapping[str, Any]) -> Method:
    """Return the method with these options. Raise UserError for a combination of values that the method refuses."""
    try:
        return method(**options)
    except UserError:
        raise
    except Exception as error:  # a plugin's method may raise any
        given = ",".join(f"{name}={shown(value)}" for name, value in options.items())
        raise UserError(
            f"{method.name}:{given} is refused: {type(error).__name__}: {first_line(error)}. "
            f"See `mtbench ls methods {method.name}`."
        ) from error


def _check_default_arms(method: type[Method]) -> None:
    """Raise UserError unless the arms that the method names can be parsed."""
    parse_arms((*method.default_arms, *method.choices))


METHODS.checks.append(_check_default_arms)


def _references(arms: Sequence[Arm]) -> list[Arm]:
    return [a for a in arms if a.is_reference and a.copy == 1]


def _nearest(arm: Arm, references: Sequence[Arm]) -> list[str]:
    """Return the references on the arm's own checkpoint (gain of decoding), then those on the reference's default role
    (gain of deployment).
    """
    same = [a for a in references if a.on == arm.on]
    deployment = [a for a in references if a.on == METHODS[a.method].roles[0]]
    return [name for name in dict.fromkeys(str(a) for a in same + deployment) if name != str(arm)]


def baselines(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    """Return the baselines of the arm's decoding: references on the same engine."""
    return _nearest(arm, [a for a in _references(arms) if a.machinery == arm.machinery])


def engine_baselines(arm: Arm, arms: Sequence[Arm]) -> list[str]:
    """Return references on other engines; a ratio to them includes the gain of the engine."""
    return _nearest(arm, [a for a in _references(arms) if a.machinery != arm.machinery])


def reference_arm(arm: Arm, claims: str, arms: Sequence[Arm]) -> str | None:
    """Return the arm of the run whose tokens this arm promises, or None.

    A lossless arm promises the tokens of the plain reference on the same checkpoint: on its own engine if the run has
    that arm, else on `eager`. The plain reference promises the tokens of the plain reference on `eager`; that of a
    serving engine, of any engine of ours.
    """
    if arm.equivalent_arm in arms:
        return str(arm.equivalent_arm)
    if claims != "lossless":
        return None
    plain = [a for a in _references(arms) if a.engine and a.on == arm.on]
    if arm in plain:
        judges = [a for a in plain if is_ours(a.engine) and (a.engine == "eager" or not is_ours(arm.engine))]
        plain = [a for a in judges if a.engine != arm.engine]
    nearest = sorted(plain, key=lambda a: (a.engine != arm.engine, a.engine != "eager"))
    return str(nearest[0]) if nearest else None


def safe(text: str) -> str:
    """Return `text` with every character that is not safe in a file name replaced by an underscore."""
    return re.sub(r"[^A-Za-z0-9.=+-]", "_", text)


def cell_id(suite: str, arm: Arm, batch_size: int, *, ignore_eos: bool = False, batching: str = "static") -> str:
    """Return the name of a cell's files: `suite.method[-optVALUE…].on.engine.[fixed.][refill.]bN`.

    Raises UserError if it is too long for the name of a file.
    """
    length = "fixed." if ignore_eos else ""
    batches = "" if batching == "static" else f"{batching}."
    name = f"{safe(suite)}.{arm.file_id}.{length}{batches}b{batch_size}"
    if len(name) > LONGEST_NAME:
        raise UserError(
            f"the files of {str(arm)!r} on {suite!r} would have a name of {len(name)} characters, and at most "
            f"{LONGEST_NAME} are allowed; use a suite or a file with a shorter name, or fewer options in an arm."
        )
    return name
