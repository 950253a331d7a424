"""What tests of the decode loop share: prompts, models, requests, and what a step must not do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import naive
import pytest
import torch
from small import small_config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from mtbench.decoding.external import ExternalEngine, run_outside
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request, in_batch
from mtbench.models.loading import Checkpoint, Inspected
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling

PROMPTS = [[3], [5, 9, 1, 7, 2], list(range(20)), [30, 31]]
BUDGET = 24
MANY = [[(7 * i + j) % 30 for j in range(1 + 5 * i % 11)] for i in range(9)]  # more prompts than rows
BUDGETS = [8 + 3 * i for i in range(5)]  # of the first five of MANY
READ_LAG = partial(Batch, tight=False)  # the fixed shapes and late reads of a GPU's host
REFILLED: list[dict[str, Any]] = [{"rows": 2}, {"rows": 4, "make": READ_LAG}]
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": small_config(),
    "qwen2 sliding, tied": small_config(
        use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": small_config(Qwen3Config, head_dim=16),
    "llama": small_config(LlamaConfig),
    "mistral sliding": small_config(MistralConfig, sliding_window=6),
    "gemma2": small_config(Gemma2Config, head_dim=16, sliding_window=6),
    "gemma3": small_config(Gemma3TextConfig, head_dim=16, sliding_window=6),
}
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select"}
WRITES = {"tensor", "as_tensor", "from_numpy"}


def requests_for(
    prompts: Sequence[Sequence[int]],
    budget: int | Sequence[int],
    *,
    stop: Sequence[Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Request]:
    """One budget for all, or one per prompt; by default a request's seed is its number."""
    budgets = [budget] * len(prompts) if isinstance(budget, int) else budget
    stops = [()] * len(prompts) if stop is None else stop
    numbers = range(len(prompts)) if seeds is None else seeds
    return [
        Request(prompt_ids=prompt, max_new_tokens=most, stop=strings, seed=seed)
        for prompt, most, strings, seed in zip(prompts, budgets, stops, numbers, strict=True)
    ]


def on(runner: ModelRunner) -> ModelRunners:
    return ModelRunners("any", {"any": runner})


def decode_prompts(
    method: Method,
    runners: ModelRunners,
    prompts: Sequence[Sequence[int]],
    budget: int | Sequence[int],
    *,
    stop: Sequence[Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
    **how: Any,
) -> tuple[list[Generation], Timing]:
    """`how`: arguments of `decode`, and settings of `Sampling` by their names."""
    return decode(method, runners, requests_for(prompts, budget, stop=stop, seeds=seeds), **sampled(how))


def sampled(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in which `sampling` has the settings that are named among them."""
    names = how.keys() & Sampling.__dataclass_fields__
    return {k: v for k, v in how.items() if k not in names} | {"sampling": Sampling(**{k: how[k] for k in names})}


def run(
    method: Method,
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    budget: int | Sequence[int] = BUDGET,
    **how: Any,
) -> list[Generation]:
    """The answers of a method that needs one model."""
    return decode_prompts(method, on(runner), prompts, budget, **how)[0]


def run_external(
    method: ExternalEngine,
    checkpoints: Mapping[str, Checkpoint | Inspected],
    prompts: Sequence[Sequence[int]],
    budget: int | Sequence[int],
    *,
    stop: Sequence[Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
    **how: Any,
) -> tuple[list[Generation], Timing]:
    return run_outside(method, checkpoints, requests_for(prompts, budget, stop=stop, seeds=seeds), **sampled(how))


def outcomes(generations: Sequence[Generation]) -> list[tuple[Any, ...]]:
    """Tokens, commits and reasons."""
    return [(g.token_ids, g.commits, g.finish_reason) for g in generations]


def ar() -> Method:
    method: Method = METHODS["ar"]()
    return method


def mars(**options: Any) -> Method:
    method: Method = METHODS["mars"](**options)
    return method


@cache
def naive_logits(runner: ModelRunner) -> naive.Logits:
    """Logits by the model's own eager attention over the whole sequence. Each sequence is computed once.

    The weights of the runner must not change between two calls.
    """
    model = runner.model

    @cache
    @torch.no_grad()
    def logits(ids: tuple[int, ...]) -> Tensor:
        model.set_attn_implementation("eager")
        out: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        model.set_attn_implementation("mtbench")
        return out.index_fill(-1, runner.checkpoint.suppressed, float("-inf"))

    return lambda ids: logits(tuple(ids))


class NoReads(TorchDispatchMode):
    """Fails at an operation that makes a GPU's host wait for a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name} reads from the device"
        if name == "index":  # by a mask, it counts the true elements first
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index reads"
        return func(*args, **(kwargs or {}))


class NoCopies(TorchFunctionMode):
    """Fails at a copy between host and device, which waits unless the host's memory is pinned.

    The device is a stand-in: a tensor made without naming a device is on the host, every other one on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: list[Tensor] = []  # kept, so that no other tensor gets the same identity

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_host = [any(tensor is other for other in self.host) for tensor in tensors]
        named = any(isinstance(leaf, torch.device) for leaf in leaves)
        mixed = any(on_host) and (named or not all(on_host))
        copies = mixed or (named and func.__name__ in WRITES)
        assert not copies, f"{func.__name__} copies between host and device"
        out = func(*args, **(kwargs or {}))
        if all(on_host) and not named:
            self.host += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return out


@contextmanager
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a GPU's host would wait for the device."""
    with monkeypatch.context() as patch, NoReads(), NoCopies():  # type: ignore[no-untyped-call]
        for name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, lambda *_: pytest.fail("the host reads from the device"))
        yield


def check_step_never_waits(runners: ModelRunners, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two snapshots the host neither reads from the device nor writes to it, for every width, filtered."""
    with torch.inference_mode():
        batch = Batch(method, runners, len(PROMPTS), 50, tight=False)
        run = batch.begin(
            in_batch(requests_for(PROMPTS, BUDGET), sampling=Sampling(1.0, 5, 0.9, 0.05), ignore_eos=False)
        )
        with no_waiting(monkeypatch):
            shape = batch.shape(run)
            for variant in range(len(batch.variants)):
                batch.advance(run, shape._replace(variant=variant))
