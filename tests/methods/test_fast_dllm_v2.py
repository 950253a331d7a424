"""Fast-dLLM v2 against a reference that recomputes everything, in float64; and its checkpoints."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from decoding_cases import decode_prompts, no_waiting, requests_for
from mtp_checkpoints import change_config
from small import END, MASK, save_small, small_tokenizer
from thinned import one_in
from torch import Tensor

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models.loading import inspect, load
from mtbench.models.runner import ModelRunner

FastDllmV2: Any = METHODS["fast-dllm-v2"]
BUDGET, SURE = 13, 0.8  # a threshold that few choices reach
LATE = partial(Batch, tight=False)  # the fixed shapes and late looks of a GPU's host
SHAPES = [(4, 2), (6, 3), (8, 2)]
ASKED = [[(11 * n + 7 * i + i * i) % 34 for i in range(n)] for n in (8, 9, 11, 12, 13, 16)]  # end in a block or with it
Outcome = list[tuple[list[int], list[int] | None]]


@pytest.fixture(scope="module")
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    """A random model that is sure now and then, and that ends some answers."""
    runner = make_runner(seed=3)
    runner.model.lm_head.weight.data.mul_(2)
    return runner


@cache
def naive_logits(runner: ModelRunner, size: int) -> Callable[..., Tensor]:
    """The model's own eager attention over the whole sequence, by blocks, and over tokens of a block fed again."""
    model = runner.model

    @torch.no_grad()
    def logits(ids: list[int], again: list[int] | None = None, at: int = 0) -> Tensor:
        places = torch.tensor([*range(len(ids)), *range(at, at + len(again or []))])
        hidden = (places // size)[None, :] > (places // size)[:, None]
        hidden[: len(ids), len(ids) :] = True
        hidden[len(ids) :, at : at + len(again or [])] = True
        bias = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, float("-inf"))
        fed = {"attention_mask": bias[None, None], "position_ids": places[None], "use_cache": False}
        model.set_attn_implementation("eager")
        out: Tensor = model(torch.tensor([ids + (again or [])]), **fed).logits[0]
        model.set_attn_implementation("mtbench")
        out.index_fill_(-1, runner.checkpoint.suppressed, float("-inf"))
        return out if again is None else out[len(ids) :]

    return logits


@cache
def recomputed(runner: ModelRunner, block: int, sub: int, tau: float, dual: bool) -> Outcome:
    logits = naive_logits(runner, block)
    how: dict[str, Any] = {"mask": MASK, "block": block, "sub": sub, "tau": tau, "dual": dual}
    return [naive.fast_dllm_v2(logits, prompt, BUDGET, END, **how) for prompt in ASKED]


def run(
    runner: ModelRunner,
    shape: tuple[int, int],
    tau: float,
    dual: bool,
    asked: Any = ASKED,
    budget: int = BUDGET,
    **how: Any,
) -> Outcome:
    method = FastDllmV2(block_size=shape[0], sub_block=shape[1], tau=tau, dual_cache=dual)
    generations, timing = decode_prompts(method, ModelRunners("any", {"any": runner}), asked, budget, **how)
    assert timing.miscounted == 0
    return [(g.token_ids, g.commits) for g in generations]


@pytest.mark.parametrize(("shape", "tau", "dual"), one_in(4, product(SHAPES, (0.3, 1.0), (True, False))))
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_it_equals_a_recomputation(
    runner: ModelRunner, engine: str, shape: tuple[int, int], tau: float, dual: bool
) -> None:
    """Tokens and commits, ragged in a batch and refilled, tight and with fixed shapes."""
    fast, want = ENGINES[engine]().runner(runner.checkpoint), recomputed(runner, *shape, tau, dual)
    assert run(fast, shape, tau, dual, make=LATE if engine == "eager" else None) == want
    assert run(fast, shape, tau, dual, make=None if engine == "eager" else LATE, rows=2) == want


def test_the_sub_block_cache_changes_tokens(runner: ModelRunner) -> None:
    """So it belongs to the method."""
    once, dual = (recomputed(runner, 8, 4, SURE, dual) for dual in (False, True))
    assert sum(a != b for a, b in zip(once, dual, strict=True)) > 1


def test_a_step_never_waits_for_the_host(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        runners = ModelRunners("any", {"any": runner})
        batch = Batch(FastDllmV2(block_size=8, sub_block=4, dual_cache=True), runners, len(ASKED), 50, tight=False)
        run = batch.begin(requests_for(ASKED, BUDGET))
        with no_waiting(monkeypatch):
            for _ in range(3):
                batch.advance(run, batch.shape(run))


def test_a_sub_block_divides_the_block() -> None:
    with pytest.raises(UserError, match=r"sub_block=5 does not divide block_size=32; give a divisor"):
        FastDllmV2(sub_block=5)


def test_a_released_checkpoint_loads_without_its_code(tmp_path: Path) -> None:
    """It is Qwen2 by another name; the mask is `|<MASK>|`, though the tokenizer calls no token its mask."""
    folder = save_small(tmp_path / "small")
    change_config(
        folder,
        model_type="Fast_dLLM_Qwen",
        architectures=["Fast_dLLM_QwenForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
        bd_size=32,
    )
    tokenizer = small_tokenizer()
    inner = tokenizer.backend_tokenizer.to_str().replace("<|mask|>", "|<MASK>|")
    (folder / "tokenizer.json").write_text(inner)
    settings = (folder / "tokenizer_config.json").read_text().replace("<|mask|>", "|<MASK>|")
    (folder / "tokenizer_config.json").write_text(settings)
    assert inspect(str(folder), needs_mask=True).mask_id == MASK
    checkpoint = load(str(folder), dtype=torch.float64)
    assert checkpoint.model.config.model_type == "qwen2"
    assert checkpoint.mask_id == MASK
    assert MASK in checkpoint.suppressed
