"""MARS with a fault: tests/helpers/planted.py installs this file in two environments, in one of them with a fault."""

import importlib
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtbench import METHODS, State
from mtbench.decoding.method import Rows, TargetOutput
from mtbench.options import option

FAULT = ""
Mars: Any = METHODS._classes["mars"]  # the registry is being filled: a look-up would fill it again
loop: Any = importlib.import_module("mtbench.decoding.loop")
ballast: list[torch.Tensor] = []
ended = [time.perf_counter()]

if FAULT == "slow start":
    time.sleep(3)
if FAULT == "prefill":
    prefill = loop.prefill

    def twice_as_long(*arguments: Any) -> None:
        begun = time.perf_counter()
        prefill(*arguments)
        spin(time.perf_counter() - begun)

    loop.prefill = twice_as_long


def spin(duration_s: float) -> None:
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        pass


class Faulty(Mars):  # type: ignore[misc]
    """MARS, in which each method that a fault concerns knows it."""

    def window(self) -> Any:
        if FAULT == "no cache":
            return replace(self, cache="none")._plain_window()
        return self._plain_window()

    def _plain_window(self) -> Any:
        return super().window()

    def final(self, state: State, rows: Rows) -> Any:
        if FAULT == "no cache":
            return torch.zeros_like(rows.known)
        return super().final(state, rows)

    def start(self, rows: Rows, runners: Any) -> Any:
        ended[0] = time.perf_counter()  # waiting for a turn is no work
        return {**super().start(rows, runners), "begun": torch.zeros_like(rows.done)}

    def _sure(self, rows: Rows, output: TargetOutput) -> Any:
        if FAULT == "strict" and self.tau < 1:
            return output.confidence.gt(self.tau)
        return super()._sure(rows, output)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Any:
        if FAULT == "fails":
            raise ValueError("planted")
        if FAULT == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if FAULT.startswith("work "):
            spin((time.perf_counter() - ended[0]) * float(FAULT.split()[1]) if ended[0] else 0.0)
        if FAULT == "host wait":
            time.sleep(0.001)
        if FAULT == "memory" and not ballast:
            ballast.append(torch.ones(4 << 20))  # 16 MiB
        commit = super().accept(state, rows, output)
        if FAULT == "one more forward":
            commit = replace(commit, count=torch.where(state["begun"], commit.count, 0))
            state["begun"].fill_(True)
        ended[0] = time.perf_counter()
        return commit


if FAULT != "vanished":

    @METHODS.register("planted")
    @dataclass(frozen=True, kw_only=True)
    class Planted(Faulty):
        """MARS with a fault."""

        tau: float = option(0.8 if FAULT == "default" else 0.95, "threshold of the confidence", low=0.0, high=1.0)

        default_arms = ()
