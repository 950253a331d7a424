"""No state of a method survives in the memory that captured steps allocate (helpers/recorded_graphs.py).

That all methods keep their state elsewhere is tested where they are replayed (tests/methods/test_every_method.py). Here
are two that do not.
"""

from typing import Any, ClassVar

import pytest
from decoding_cases import MANY, READ_LAG, decode_prompts, on
from torch import Tensor

from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import Commit, ModelRunners, Rows, State, TargetOutput
from mtbench.decoding.registry import METHODS
from mtbench.models.runner import ModelRunner

Jacobi: Any = METHODS["jacobi"]


class Keeps(Jacobi):  # type: ignore[misc]
    """Keeps the choices of a step in a place of its own, which is not its state."""

    kept: ClassVar[dict[str, Tensor]] = {}

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        self.kept["choice"] = output.choice
        commit: Commit = super().accept(state, rows, output)
        return commit


class ForTheNextStep(Keeps):
    """Proposes what it kept. A captured step reads the tensor of the step before its capture, again and again."""

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        return self.kept["choice"][:, 1:] if self.kept else super().propose(state, rows, runners)


class ForTheNextRequest(Keeps):
    """Starts with what it kept. That is in the pool, which the last replay leaves to other graphs."""

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        state: State = super().start(rows, runners)
        return {"iterate": self.kept["choice"][:, :1].expand_as(state["iterate"])} if self.kept else state


@pytest.mark.parametrize(("kind", "lost"), [(Jacobi, False), (ForTheNextStep, True), (ForTheNextRequest, True)])
def test_what_a_method_keeps_beside_its_state_is_lost(
    kind: Any, lost: bool, runner: ModelRunner, recorded: list[str]
) -> None:
    """It decodes step by step, but not by replays of a captured step."""
    method, fast = kind(ahead=3), on(ENGINES["graph"]().runner(runner.checkpoint))
    captured = Captured(method, fast, 2, 64)
    found = []
    for runners, make in ((on(runner), READ_LAG), (fast, lambda *_: captured)):
        Keeps.kept.clear()
        try:
            answers = [decode_prompts(method, runners, MANY, 12, rows=2, make=make)[0] for _ in range(2)]
            found.append([generation.commits for generations in answers for generation in generations])
        except IndexError:  # a destroyed number is no token
            found.append([])
    plain, replayed = found
    assert plain
    assert (plain != replayed) == lost
