"""Figures that are compared: with a required bound ("bar"), and with those of the first contact with a GPU.

first_contact.json: measured on 2026-11-26 with the code of that day and, for whole steps, with the library's products.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtbench.statistics import INCONCLUSIVE

FIRST_CONTACT: dict[str, Any] = json.loads(Path(__file__).with_name("first_contact.json").read_text())


class Bar(NamedTuple):
    """A bound of a figure, and the step that measures it."""

    step: str
    bound: float
    most: bool = False  # the bound is a maximum, else a minimum

    def verdict(self, low: float, high: float) -> str:
        """Return whether an interval meets the bound."""
        if self.most:
            low, high, bound = -high, -low, -self.bound
        else:
            bound = self.bound
        return "met" if low >= bound else "missed" if high < bound else INCONCLUSIVE


BARS: Mapping[str, Bar] = {
    "kernels against float64, worst relative error": Bar("operations", 1e-2, most=True),
    "cells that differ or fail in float32": Bar("equality", 0, most=True),
    **{f"AR 7B, batch {n}, decode tokens/s": Bar(f"static-{n}", x) for n, x in ((1, 240), (16, 3500), (4, 930))},
    **{f"MARS over AR 7B, batch {n}, decode": Bar(f"static-{n}", x) for n, x in ((16, 1.4), (8, 1.45), (4, 1.5))},
    "host gap, AR 7B, batch 4": Bar("static-4", 0.03, most=True),
    "MARS over AR 7B, batch 16, refill, decode": Bar("refill-16", 1.5),
    # The engine's gain over transformers, no method's.
    "ar graph over hf-generate dynamic, 7B batch 4, wall": Bar("hf-dynamic", 5.0),
    "invariant: share identical at batch 1 and 16, bf16": Bar("invariant", 1.0),
    "prefill SmolLM2-135M, 1 x 64, ms": Bar("prompt", 5.0, most=True),
    "prefill 7B, 8 x 512, share of the matrix peak": Bar("prefill", 0.5),
}


class Figure(NamedTuple):
    """A measurement. `verdict`: whether it meets its bar, or why that is not known; empty without a bar."""

    what: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    beside: str = ""  # the same measured by another clock
    verdict: str = ""

    def judged(self, doubt: str | None) -> "Figure":
        """Return the figure with its verdict. `doubt`: why the interval decides nothing."""
        if self.value is None:
            return self._replace(verdict=f"not measured: {doubt or 'no time was counted'}")
        if (bar := BARS.get(self.what)) is None:
            return self
        if doubt or self.low is None or self.high is None:
            return self._replace(verdict=f"{INCONCLUSIVE}: {doubt or 'no interval'}")
        return self._replace(verdict=bar.verdict(self.low, self.high))

    def row(self) -> tuple[str, ...]:
        """Return the row of the closing table."""
        bar, then = BARS.get(self.what), FIRST_CONTACT["figures"].get(self.what, "")
        asked = "" if bar is None else f"{'≤' if bar.most else '≥'} {bar.bound:g}"
        return self.what, asked, interval(self.value, self.low, self.high), self.beside, then, self.verdict


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    return number(value) + ("" if low is None or low == high else f" [{number(low)}, {number(high)}]")
