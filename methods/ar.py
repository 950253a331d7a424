"""Autoregressive decoding: one token per forward, chosen by the model. Every method is compared with it."""

from dataclasses import dataclass

import torch

from mtbench.decoding.method import Commit, Method, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS


@METHODS.register("ar")
@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """One token per forward."""

    title = "Plain decoding"
    roles = ("ar",)
    reference = True
    default_arms = ("ar",)
    claims = "lossless"

    def window(self) -> Window:
        return Window(pending=1, guesses=0, commits=1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        return Commit(output.choice, count=torch.ones_like(rows.known), kept=torch.zeros_like(rows.known))
