"""The definition of a check, the list of all in their order, and their findings, as a record.

A check measures, then judges: a function that returns figures, or a text that says why it has none, and a pure one
whose arguments are the figures.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from mtbench.errors import first_line, is_out_of_memory
from mtbench.records import Record

State = Literal["pass", "warn", "fail", "none"]
SIGNS: dict[State, str] = {"pass": "✓", "warn": "!", "fail": "✗", "none": "–"}
REPORT = "report it with this output"
NO_GPU = "no GPU is used here"
NO_TRITON = "Triton is missing"


class Subject(NamedTuple):
    """The examined parts: a device, cpu or cuda, and a checkpoint. `option`: that of `--device`."""

    device: str
    option: str = "auto"
    model: str | None = None


class Finding(NamedTuple):
    """The result of a check. A warning: something works badly or is missing, and figures can be trusted."""

    state: State
    text: str
    advice: str = ""  # of a warning or a failure: what to do


Figures = dict[str, Any]
Measure = Callable[[Subject], Figures | str]
Judge = Callable[..., Finding]


class Check(NamedTuple):
    """A check. `gpu`: it needs one."""

    name: str
    measure: Measure
    judge: Judge
    gpu: bool = False

    def checked(self, subject: Subject) -> "Checked":
        """Return the record of the check."""
        figures, (state, text, advice) = self.result(subject)
        return Checked(check=self.name, state=state, found=text, advice=advice, figures=_plain(figures))

    def result(self, subject: Subject) -> tuple[Figures, Finding]:
        """Return figures and finding. An error fails: a driver, a compiler or a library may be broken."""
        if self.gpu and subject.device == "cpu":
            return {}, Finding("none", NO_GPU)
        try:
            figures = self.measure(subject)
            return ({}, Finding("none", figures)) if isinstance(figures, str) else (figures, self.judge(**figures))
        except Exception as error:
            if is_out_of_memory(error):
                return {}, Finding("none", f"too little memory: {first_line(error)}")
            return {}, Finding("fail", f"it ends with {type(error).__name__}: {first_line(error)}", REPORT)


MODULES = ("machine", "gpu", "decoding")  # in their order: a check that may hang comes last
CHECKS: list[Check] = []


def check(name: str, measure: Measure, *, gpu: bool = False) -> Callable[[Judge], Judge]:
    """Return a decorator that enters a check by the function that judges its figures."""

    def enter(judge: Judge) -> Judge:
        CHECKS.append(Check(name, measure, judge, gpu))
        return judge

    return enter


def all_checks() -> list[Check]:
    """Return the checks of all modules in order, after importing them."""
    names = [f"{__package__}.{module}" for module in MODULES]
    for name in names:
        importlib.import_module(name)
    return sorted(CHECKS, key=lambda entry: names.index(entry.judge.__module__))


class Checked(Record):
    """A check with its result."""

    check: str = Field(description="its name")
    state: State = Field(
        description="pass; warn: something works badly or is missing; fail: figures measured here cannot be trusted; "
        "none: not measured here"
    )
    found: str = Field(description="what was found, or why it was not measured")
    advice: str = Field(description="what to do about it; empty for pass and none")
    figures: dict[str, Any] = Field(description="the figures it rests on; one that is not finite is a text")


class Diagnosis(Record):
    """The findings of `mtbench doctor`."""

    schema_version: Literal[1] = Field(description="version of this format")
    environment: dict[str, Any] = Field(description="versions and machine, as in environment.json")
    device: str = Field(description="cpu or cuda")
    passed: bool = Field(description="no check failed: figures measured here can be trusted")
    wall_s: float = Field(description="seconds since the first check began")
    checks: list[Checked] = Field(description="in the order in which they ran")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
