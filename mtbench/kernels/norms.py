"""RMS norms whose two factors are applied apart: the weight before a product, the root mean square after it.

With W the product's weight, g the norm's and r = (mean x² + eps)^-½ of a row, W·(r·x∘g) = r·W·(x∘g). What computes x
also stores x∘g, rounded to x's type, and sums of x²; the product multiplies its sums by r. transformers rounds x·r, and
then its product with g; here one rounding is left.

N = rows, C = hidden size.
"""

import math
from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMS norm. `power`: a power of two above the magnitudes of its weight."""

    weight: Tensor  # (C,)
    eps: float
    power: float

    @staticmethod
    def make(weight: Tensor, eps: float) -> "Norm":
        """Return the norm of a weight, after reading the weight's largest magnitude."""
        return Norm(weight, eps, 2.0 ** math.frexp(float(weight.detach().abs().max()))[1])


class NormInput(NamedTuple):
    """A row x on its way through a norm into a product."""

    weighted: Tensor  # (N, C): x∘g / power. |g| < power, so it is in range where x is, also in float16
    squares: Tensor  # (parts, N), at least float32: sums of x² over parts of C, added in order
