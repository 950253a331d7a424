"""Options of serving engines as records: what `--engine-option` gives, and what a server gets. Files hold them as text.

vllm:kv-cache-dtype=auto|fp8   an EngineOption: each alternative makes an arm
kv-cache-dtype=fp8             a ServerOption of such an arm
"""

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mtbench.errors import UserError

ANY = "*"  # in place of an engine: an option that every serving engine has


class _AsText:
    """A record that files and commands hold as text."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the record of a text. Raises ValueError for other text."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def record(value: Any) -> _AsText:
            if not isinstance(value, str | cls):
                raise ValueError("input should be a valid string")
            return cls.read(value) if isinstance(value, str) else value

        text = core_schema.to_string_ser_schema(when_used="always")
        return core_schema.no_info_plain_validator_function(record, serialization=text)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string"}


@dataclass(frozen=True, slots=True, order=True)
class ServerOption(_AsText):
    """An option of an engine's server.

    >>> str(ServerOption.read("seed=1")), ServerOption.read("seed=1").words
    ('seed=1', ('--seed', '1'))
    """

    name: str
    value: str | None = None  # None: it takes none

    @classmethod
    def read(cls, text: str) -> Self:
        name, equals, value = text.partition("=")
        return cls(name, value if equals else None)

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"

    @property
    def words(self) -> tuple[str, ...]:
        """The option in the command that starts the server."""
        return (f"--{self.name}",) if self.value is None else (f"--{self.name}", self.value)


PREFIX_CACHE, NO_PREFIX_CACHE = ServerOption("prefix-cache", "on"), ServerOption("prefix-cache", "off")


@dataclass(frozen=True, slots=True)
class EngineOption(_AsText):
    """An option of one engine's servers, with the values that make an arm each. `engine`: ANY for every engine.

    >>> [str(option) for option in EngineOption.read("vllm:kv-cache-dtype=auto|fp8").alternatives]
    ['kv-cache-dtype=auto', 'kv-cache-dtype=fp8']
    >>> str(EngineOption.read("vllm:enforce-eager"))
    'vllm:enforce-eager'
    """

    engine: str
    alternatives: tuple[ServerOption, ...]

    WRITTEN: ClassVar = re.compile(r"([\w.-]+):([a-z][\w.-]*)(?:=([^|]+(?:\|[^|]+)*))?")

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the option of ENGINE:OPTION or ENGINE:OPTION=A|B|…. Raises ValueError for other text."""
        written = cls.WRITTEN.fullmatch(text)
        if written is None:
            raise ValueError("give ENGINE:OPTION=VALUE, such as `--engine-option vllm:tensor-parallel-size=2`")
        if not text.isprintable():  # it is in names of arms and in commands
            raise ValueError("give a value of one line without control characters")
        engine, name, given = written.groups()
        values = [None] if given is None else given.split("|")
        return cls(engine, tuple(ServerOption(name, value) for value in values))

    def __str__(self) -> str:
        name, values = self.alternatives[0].name, [option.value for option in self.alternatives]
        return f"{self.engine}:{name}" + ("" if None in values else f"={'|'.join(map(str, values))}")


def words_of(options: Iterable[ServerOption]) -> list[str]:
    """Return options in the command that starts the server. mtbench sets the prefix cache itself."""
    return [word for option in options if option != PREFIX_CACHE for word in option.words]


def with_options(engine: str | None, options: Iterable[ServerOption]) -> str:
    """Return the name of an engine with options of its server, as in the name of an arm.

    >>> with_options("NAME", [ServerOption("seed", "1"), ServerOption("enforce-eager")])
    'NAME+seed=1+enforce-eager'
    """
    return "+".join(map(str, (engine, *options)))


def refuse_engine_options(
    used: Collection[tuple[str | None, ServerOption]], asked: Sequence[EngineOption], given: Iterable[EngineOption]
) -> None:
    """Raise UserError for options of engines that this command does not give: they may name code.

    `used`: by engine, those of a plan. `asked`, `given`: those of the plan's request and of this command.
    """

    def each(option: EngineOption) -> set[tuple[str | None, ServerOption]]:
        return {(option.engine, one) for one in option.alternatives}

    new = {pair for pair in used if pair[1] != PREFIX_CACHE}.difference(*map(each, given))  # that one names no code
    if new:
        texts = [str(option) for option in asked if new & each(option)] or [f"{name}:{one}" for name, one in new]
        words = " ".join(f"--engine-option {shlex.quote(text)}" for text in sorted(texts))
        raise UserError(f"the plan gives engines options that this command does not; if you trust it, add `{words}`.")
