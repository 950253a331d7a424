"""Every option of every experiment, method, objective and training takes what its field allows, and nothing else."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from annotated_types import Ge, Le

from mtbench.cli.train import CheckpointOptions
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments.registry import KINDS, records_of
from mtbench.options.classes import parse_option
from mtbench.options.fields import allowed, bounds, choices, fields_of, flag_of, number_of, option_of, read_options
from mtbench.options.texts import absolute, seconds, shown
from mtbench.training.registry import OBJECTIVES
from mtbench.training.trainer import Settings

RECORDS = [kind for name in KINDS for kind in records_of(name)]
CLASSES = [METHODS[name] for name in METHODS]
HOLDERS = [*RECORDS, CheckpointOptions, Settings, *OBJECTIVES.values(), *CLASSES]


class Given(NamedTuple):
    """A text for an option, and what the line that refuses it must say; nothing if the option takes it."""

    holder: Any
    name: str
    text: str
    says: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.holder.__name__}.{self.name}={self.text}"

    def read(self) -> object:
        if self.holder in CLASSES:
            return parse_option(self.holder, self.name, self.text)
        needed = {name: "a" for name, field in fields_of(self.holder).items() if field.is_required()}
        return read_options(needed | {self.name: self.text}, self.holder, "mtbench --help")


def texts_of(holder: Any) -> Iterator[Given]:
    """Yield texts on each bound of each option and behind it, and one that is no choice, no number, of no form."""
    for name, field in fields_of(holder).items():
        option, unit = option_of(field), 1 if number_of(field) is int else 0.001
        flag = name if holder in CLASSES else flag_of(name, field)
        for bound, way in zip(bounds(field), (-unit, unit), strict=True):
            if bound is not None:
                value = getattr(bound, type(bound).__name__.lower())
                inside, outside = (value, value + way) if isinstance(bound, Ge | Le) else (value - way, value)
                yield Given(holder, name, shown(inside))
                if outside >= 0 or option.parse is not seconds:
                    yield Given(holder, name, shown(outside), (flag, "is not allowed", allowed(field)))
        if choices(field) and number_of(field) is None:
            yield Given(holder, name, "?", (flag.removeprefix("--"), "'?'", *choices(field)))
        elif (option.parse or option.parse_all) not in (None, absolute):
            yield Given(holder, name, "?", (f"{flag} '?' is not ",))
        elif number_of(field) in (int, float):
            yield Given(holder, name, "nan", (flag, "'nan' is not allowed", allowed(field)))


EVERY = {str(given): given for holder in HOLDERS for given in texts_of(holder)}


@pytest.mark.parametrize("given", EVERY.values(), ids=EVERY)
def test_an_option_takes_what_its_field_allows(given: Given) -> None:
    """One line refuses any other text; it has the flag, the value and what is allowed."""
    line = ""
    try:
        given.read()
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert bool(line) == bool(given.says), line
    assert all(part in line for part in given.says), line


def test_each_number_has_a_least_value() -> None:
    """Also in a list. Seeds have none; the check of workers has the cores of the machine."""
    options = [(name, field) for holder in HOLDERS for name, field in fields_of(holder).items()]
    numbers = [(name, field) for name, field in options if number_of(field) in (int, float)]
    assert {name for name, field in numbers if bounds(field)[0] is None} == {"seed", "workers"}
