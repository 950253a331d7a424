"""The required figures ("bars") of benchmarks/gpu.py, by the name of what is measured."""

from typing import NamedTuple

from mtbench.statistics import EPSILON_CAP


class Required(NamedTuple):
    """A bound of a measurement."""

    bound: float
    most: bool = False  # the bound is a maximum, else a minimum


def _each(what: str, bounds: dict[int, float]) -> dict[str, Required]:
    """Return minima by batch size."""
    return {what.format(size): Required(bound) for size, bound in bounds.items()}


REQUIRED: dict[str, Required] = {
    **_each("AR 7B, batch {}, decode tokens/s", {1: 240, 4: 930, 16: 3500}),
    **_each("AR 0.5B, batch {}, decode tokens/s", {1: 1200}),
    **_each("MARS over AR 7B, batch {}, static, decode", {4: 1.50, 8: 1.45, 16: 1.40}),
    **_each("MARS over AR 7B, batch {}, refill, decode", {4: 1.60, 8: 1.57, 16: 1.50}),
    **_each("cursor over best block 7B, batch {}, static, decode", {4: 1.10, 16: 1.40}),
    "host gap, AR 7B, batch 4": Required(0.03, most=True),
    "host gap, AR 0.5B, batch 1": Required(0.15, most=True),
    # The engine's gain over transformers, no method's.
    "ar graph over hf-generate dynamic, 7B batch 4, wall": Required(5.0),
    "ar graph over hf-generate static, 7B batch 4, wall": Required(1.3),
    "prefill 7B, 8 x 512, share of the matrix peak": Required(0.5),
    "kernels against float64, worst relative error": Required(1e-2, most=True),
    "cells that differ in float32": Required(0, most=True),
    "invariant: share identical at batch 1 and 16, bf16": Required(1.0),
    "bf16 tokens re-scored: worst margin": Required(EPSILON_CAP, most=True),
}
