"""The compiled operations of a step outside its forward: the same tensors as the plain ones, for every method."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding_cases import READ_LAG, decode_prompts, outcomes
from small import small_checkpoint
from thinned import one_in

from mtbench.decoding import cuda_graph
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.decoding.run_state import RunState
from mtbench.models.runner import ModelRunner

PROMPTS = [[(7 * i + j) % 30 for j in range(4 + 5 * i % 11)] for i in range(4)]
BUDGET = 16
FEW: list[tuple[str, dict[str, Any]]] = [
    ("mars", {"tau": 0.15, "block_size": "auto"}),
    ("lookahead", {}),
    ("speculative", {"ahead": 3}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("mars", {"tau": 0.3}),
    ("mars", {"tau": 0.3, "confidence": "entropy", "cache": "block", "cache_block": 5}),
    ("block-diffusion", {"block_size": 3, "tau": 0.3}),
    ("jacobi", {"ahead": 3}),
    ("prompt-lookup", {}),
    ("mars-selfspec", {"ahead": 2}),
]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]  # tracing takes seconds each


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the compiled functions so far, by their operations."""
    made: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        made.append(str(graph.graph))
        return torch.compile(graph, fullgraph=True, dynamic=False, backend=request.param)

    monkeypatch.setattr(cuda_graph, "compile_graph", compile_graph)
    return made


class Uncaptured(Captured):
    """Runs every step after the first ones by its compiled operations, without a graph."""

    def shape(self, run: RunState) -> Shape:
        return Batch.shape(self, run)

    def advance(self, run: RunState, shape: Shape) -> None:
        self._prepared[shape] = self._prepared.get(shape, 0) + 1
        self.step(shape)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("temperature", one_in(2, [0.0, 1.0]))
def test_compiled_operations_emit_the_same_tokens(
    name: str, options: dict[str, Any], temperature: float, runner: ModelRunner, compiled: list[str]
) -> None:
    """For every method, in rows that are refilled."""
    if temperature and name != "lookahead":
        pytest.skip("one is enough")
    method, engine = METHODS[name](**options), ENGINES["graph"]()
    models = {"target": runner} | ({"draft": ModelRunner(small_checkpoint(seed=3))} if name == "speculative" else {})
    runners = ModelRunners("target", {role: engine.runner(model.checkpoint) for role, model in models.items()})
    batch = Uncaptured(method, runners, 2, 64)
    batch.fuses = True
    how: Any = {"rows": 2, "temperature": temperature}
    want, _ = decode_prompts(method, ModelRunners("target", models), PROMPTS, BUDGET, make=READ_LAG, **how)
    got, timing = decode_prompts(method, runners, PROMPTS, BUDGET, make=lambda *_: batch, **how)
    assert outcomes(got) == outcomes(want)
    assert timing.miscounted == 0
    functions = 2 if name == "speculative" else 3  # drafting runs a model, which has kernels of its own
    assert len(compiled) == functions * len({shape for _, shape in batch._fused})


def test_a_step_is_captured_after_it_was_compiled(
    runner: ModelRunner, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph must not capture a compilation; replayed, it emits the same tokens."""
    events: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        def call(*tensors: Any) -> Any:
            events.append("call")
            return graph(*tensors)

        events.append("compile")
        return call

    monkeypatch.setattr(cuda_graph, "compile_graph", compile_graph)
    method, runners = (
        METHODS["mars"](tau=0.3),
        ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)}),
    )
    batch = Captured(method, runners, 2, 64)
    batch.fuses = True
    want, _ = decode_prompts(method, ModelRunners("any", {"any": runner}), PROMPTS, BUDGET, make=READ_LAG, rows=2)
    for _ in range(2):
        got, timing = decode_prompts(method, runners, PROMPTS, BUDGET, make=lambda *_: batch, rows=2)
        assert outcomes(got) == outcomes(want)
    assert timing.preparation_s == 0
    assert events == ["compile"] * 3 + ["call"] * 6  # one step runs what is compiled, the next one is captured
    assert len(recorded) == 2


def test_a_step_that_does_not_compile_says_so_in_every_timing(
    runner: ModelRunner, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slower than the arm would be, and its tokens are the same."""
    monkeypatch.setattr(cuda_graph, "compile_graph", lambda graph: lambda *_: 1 / 0)
    method, runners = METHODS["ar"](), ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)})
    batch = Captured(method, runners, 2, 64)
    batch.fuses = True
    want, plain = decode_prompts(method, ModelRunners("any", {"any": runner}), PROMPTS, BUDGET, make=READ_LAG, rows=2)
    assert plain.uncompiled is None
    for _ in range(2):
        with warnings.catch_warnings(action="ignore"):
            got, timing = decode_prompts(method, runners, PROMPTS, BUDGET, make=lambda *_: batch, rows=2)
        assert outcomes(got) == outcomes(want)
        assert timing.uncompiled == "propose: division by zero"
