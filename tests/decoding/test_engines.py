"""Engines: a replayed graph equals a step, and a compiled decoder equals the decoder, as far as a CPU can show."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding_cases import CONFIGS, READ_LAG, decode_prompts, on, outcomes
from recorded_graphs import Recording, prefills
from small import small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Ernie4_5Config,
    HeliumConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from mtbench.decoding.arms import ENGINES as NAMES
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import UnsupportedArchitecture, build
from mtbench.models.runner import ModelRunner

PROMPTS = [[(7 * i + j) % 30 for j in range(1 + 5 * i % 11)] for i in range(6)]
BUDGET = 20
METHODS_TRIED: list[Method] = [
    METHODS["ar"](),
    METHODS["mars"](tau=0.3),
    METHODS["mars"](tau=0.3, extra=True, confidence="entropy"),
    METHODS["mars"](tau=0.3, cache="block", cache_block=5),
]


@pytest.mark.parametrize("method", METHODS_TRIED)
def test_a_replayed_step_equals_a_plain_step(runner: ModelRunner, method: Method, recorded: list[str]) -> None:
    """A step is recorded once. Replayed for other rows, refills and later batches, it equals plain steps."""
    fast = ENGINES["graph"]().runner(runner.checkpoint)
    runners = ModelRunners("any", {"any": fast})
    captured = Captured(method, runners, 2, 64)
    for prompts in (PROMPTS[:2], PROMPTS[2:4], PROMPTS):
        want, _ = decode_prompts(method, on(runner), prompts, BUDGET, rows=2, make=READ_LAG)
        got, timing = decode_prompts(method, runners, prompts, BUDGET, rows=2, make=lambda *_: captured)
        assert outcomes(got) == outcomes(want)
        assert timing.miscounted == 0
    assert len(recorded) == 2 + prefills(captured)
    assert timing.preparation_s == 0


@pytest.mark.parametrize("name", ["qwen2 sliding, tied", "mistral sliding", "gemma2", "gemma3"])
def test_a_replayed_prefill_keeps_to_sliding_windows(
    name: str, make_runner: Callable[..., ModelRunner], recorded: list[str]
) -> None:
    """In the decoder and in transformers' modules. Chunks begin at the prompt and in it; of one row, four, and all."""
    runner = make_runner(CONFIGS[name])
    runners = on(ENGINES["graph"]().runner(runner.checkpoint))
    prompts = [[(5 * i + j) % 30 for j in range(length)] for i, length in enumerate((150, 72, 85, 80, 12, 17, 30, 2))]
    budgets = [8, 8, 3, 3, 6, 4, 4, 4]
    batch = Captured(METHODS["ar"](), runners, 5, 160)
    got, _ = decode_prompts(batch.method, runners, prompts, budgets, rows=5, make=lambda *_: batch)
    assert outcomes(got) == outcomes(decode_prompts(batch.method, on(runner), prompts, budgets)[0])


def test_the_span_of_a_step_on_the_device_begins_with_its_replay(
    runner: ModelRunner, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the mark and the launch the host does nothing that the device could wait for."""
    events: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            events.append(str(func))
            return func(*args, **(kwargs or {}))

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    runners = ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)})
    method = METHODS["mars"](tau=0.3, block_size="auto")
    batch = Captured(method, runners, 2, 64)
    for _ in range(4):
        decode_prompts(method, runners, PROMPTS[:2], BUDGET, make=lambda *_: batch)
    monkeypatch.setattr(Stopwatch, "mark", logged("mark", Stopwatch.mark))
    monkeypatch.setattr(Recording, "replay", logged("replay", Recording.replay))
    with Log():  # type: ignore[no-untyped-call]
        _, timing = decode_prompts(method, runners, PROMPTS[:2], BUDGET, make=lambda *_: batch)
    assert timing.preparation_s == 0
    begun = [place for place, event in enumerate(events) if event == "mark"][::2]
    assert {events[place + 1] for place in begun} == {"replay"}


WARM = [(rows, 2, view) for rows in (1, 2) for view in (16, 64)]
CHUNKS = [(rows, width, 64) for rows in (1, 2) for width in (16, 32, 64)]


@pytest.mark.parametrize(("work", "first", "second"), [(4e12, 2 * CHUNKS, []), (0, WARM, WARM)])
def test_only_the_first_batch_of_a_shape_feeds_captured_chunks(
    work: float,
    first: list[Any],
    second: list[Any],
    runner: ModelRunner,
    recorded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their graphs serve all methods. Without graphs a batch feeds short ones first, with few and all slots in view.

    Views are multiples of 16, so that a GPU compiles one kernel for them.
    """
    runners = ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)})
    fed: list[tuple[int, int, int]] = []
    forward = ModelRunner.forward

    def record(self: ModelRunner, ids: Tensor, metadata: AttentionMetadata, *args: Any, **kwargs: Any) -> Any:
        if ids.shape[1] in (2, 16, 32, 64):  # no step and no prompt here is as wide
            fed.append((*ids.shape, metadata.view))
        return forward(self, ids, metadata, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", record)
    monkeypatch.setattr("mtbench.decoding.prefill.CAPTURED_WORK", work)
    wide, ar, mars = METHODS["mars"](tau=0.3, block_size=40), METHODS["ar"](), METHODS["mars"](tau=0.3)
    for method, new in ((wide, first), (ar, first), (mars, second)):  # the first has more slots
        batch = Captured(method, runners, 2, 50)
        for _ in range(2):
            got, timing = decode_prompts(method, runners, PROMPTS[3:], BUDGET, rows=2, make=lambda *_, b=batch: b)
        assert outcomes(got) == outcomes(decode_prompts(method, on(runner), PROMPTS[3:], BUDGET)[0])
        assert sorted(fed) == sorted(new)
        assert timing.preparation_s == 0
        fed.clear()


def test_after_memory_moved_steps_are_captured_again(runner: ModelRunner, recorded: list[str]) -> None:
    """If a larger batch moved the cache, captured steps are not replayed on the old cache."""
    method = METHODS["ar"]()
    want = outcomes(decode_prompts(method, on(runner), PROMPTS[:2], BUDGET)[0])
    runners = ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)})
    small, large = Captured(method, runners, 2, 64), Captured(method, runners, 6, 64)
    for batch, prompts in ((small, PROMPTS[:2]), (large, PROMPTS), (small, PROMPTS[:2])):
        gc.collect()
        got, timing = decode_prompts(method, runners, prompts, BUDGET, make=lambda *_, b=batch: b)
        assert outcomes(got[:2]) == want
        assert timing.preparation_s > 0
    assert len(recorded) == 1 + 3 * (1 + 6)  # the first keeps the pool; each batch has a step, and chunks


@pytest.mark.parametrize("config", [HeliumConfig, SmolLM3Config, Ernie4_5Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_architecture_with_the_same_names_but_other_computations_is_refused(
    config: type[PretrainedConfig], dtype: torch.dtype, make_runner: Callable[..., ModelRunner]
) -> None:
    """Another rotary embedding, or layers without one: module names are the same; detection works for each dtype."""
    model = make_runner(small_config(config, head_dim=8, num_hidden_layers=6)).model.to(dtype)
    with pytest.raises(UnsupportedArchitecture, match="compute something else"):
        build(model)


@pytest.mark.parametrize(
    ("config", "layers", "heads", "groups"),
    [(LlamaConfig, 30, 9, 3), (LlamaConfig, 32, 32, 8), (Qwen2Config, 28, 28, 4), (Qwen3Config, 36, 32, 8)],
    ids=["SmolLM2-135M", "Llama-3-8B", "Qwen2.5-7B", "Qwen3-8B"],
)
def test_many_layers_are_no_reason_to_refuse(
    config: type[PretrainedConfig], layers: int, heads: int, groups: int, make_runner: Callable[..., ModelRunner]
) -> None:
    """The check of a deep and wide model allows for the rounding of its norms."""
    sizes = {"hidden_size": 8 * heads, "head_dim": 8, "num_attention_heads": heads, "num_key_value_heads": groups}
    build(make_runner(small_config(config, num_hidden_layers=layers, **sizes)).model)


def test_invariant_in_half_precision_is_refused_on_a_cpu(make_runner: Callable[..., ModelRunner]) -> None:
    """In half precision, libraries on a CPU choose a kernel by the number of rows."""
    runner = make_runner()
    runner.model.to(torch.bfloat16)
    with pytest.raises(UserError, match=r"'invariant' needs a GPU's kernels in bfloat16.*--dtype float32"):
        ENGINES["invariant"]().runner(runner.checkpoint)


def test_the_command_line_names_every_engine() -> None:
    """Arms are parsed with a list that does not import torch; it equals the list of engines."""
    assert list(ENGINES) == list(NAMES)
