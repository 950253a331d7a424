"""The check of our kernels on the device that runs them: wrong and crashing ones are replaced by PyTorch's.

The definitions of the operations stand for the kernels here; in Triton's interpreter, the kernels themselves run.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_cases import ar, on, outcomes, run
from kernel_checks import DEVICE, divided, two_layers
from planted_kernels import FAULTS, Fault, planted_operations
from small import small_checkpoint, small_config
from torch import Tensor
from transformers import Qwen3Config

from mtbench import kernels
from mtbench.decoding.engines import ENGINES
from mtbench.errors import UserError
from mtbench.models import fused_decoder
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Decoder, _attention_arguments, build
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner
from mtbench.models.self_check import Check, modules_logits

CheckOf = Callable[[kernels.Operations], str | None]
INTERPRETING = "TRITON_INTERPRET" in os.environ
of_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs on a GPU or in the interpreter")
CONFIG = two_layers(Qwen3Config, head_dim=16)
QUICK = {"the sum without its first part"}
HIDDEN = {  # bits that depend on order, or what this model lacks; tests/helpers/kernel_checks.py finds them
    "a sum that depends on who arrives last",
    "both halves have the first one's rows",
    "halves share a place",
    "the parts of the first half",
    "a part more than there are",
    "positions of the next slice",
    "a whole group is finished twice",
    "squares of one half twice",
    "shares depend on the positions",
    "squares of another tile",
    "no bias",
    "queries' norm for keys",
    "slots behind the length",
}
SEEN = [
    pytest.param(fault, marks=() if fault.name in QUICK else pytest.mark.slow, id=fault.name)
    for fault in FAULTS
    if fault.name not in HIDDEN
]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_off", [])


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the decoder take the definitions, some of them replaced, for its kernels."""

    def use(**replaced: Callable[..., Any]) -> None:
        monkeypatch.setattr(kernels, "operations", lambda *_: kernels.PLAIN._replace(**replaced))

    return use


def checkpoint(dtype: torch.dtype = torch.float32) -> Checkpoint:
    made = small_checkpoint(CONFIG)
    made.model.to(dtype)
    return made


def wrong(*arguments: Any) -> Tensor:
    return 1.1 * kernels.norm_swiglu_plain(*arguments)


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> CheckOf:
    """Return the check of kernels in few rows, since the interpreter is slow. The inputs of one product are split."""
    monkeypatch.setattr("mtbench.models.self_check.SHAPES", ((1, 1), (2, 3)))
    model = small_checkpoint(
        small_config(Qwen3Config, num_hidden_layers=1, head_dim=16, intermediate_size=600)
    ).model.half()
    check, attention = Check(model.to(DEVICE)), _attention_arguments(model)

    def fault(run: kernels.Operations) -> str | None:
        with divided(run, 128, 4):
            return check.fault(Decoder(model, attention, operations=run).all_logits)

    return fault


@of_kernels
def test_the_kernels_pass(small_check: CheckOf) -> None:
    from mtbench.kernels import triton_device, triton_kernels

    run = kernels.Operations(*(getattr(triton_kernels, name) for name in kernels.Operations._fields))
    assert small_check(run) is None
    assert kernels.at_rest()
    with torch.inference_mode():
        next(iter(triton_device.counters.values()))[3] = 1
    assert not kernels.at_rest()
    triton_device.counters.clear()


@of_kernels
@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_planted_in_a_kernel_is_found_by_logits(fault: Fault, small_check: CheckOf, tmp_path: Path) -> None:
    assert "logits are wrong" in (small_check(planted_operations(fault, tmp_path)) or "")


def test_plain_operations_that_are_right_run(use: Callable[..., None]) -> None:
    use()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert build(checkpoint(dtype).model).operations is not None
        assert kernels.off() is None


def raised(error: Exception) -> Callable[..., Any]:
    def operation(*_: Any) -> Any:
        raise error

    return operation


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (wrong, "logits are wrong by 0.0"),
        (lambda *arguments: kernels.norm_swiglu_plain(*arguments) * torch.nan, "logits are wrong by nan"),
        (raised(RuntimeError("out of resource: shared memory")), "RuntimeError: out of resource: shared memory"),
    ],
    ids=["plain wrong", "plain nan", "plain crash"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_a_kernel_that_is_wrong_or_crashes_pytorch_computes_the_same(
    operation: Callable[..., Any], said: str, dtype: torch.dtype, use: Callable[..., None]
) -> None:
    made = checkpoint(dtype)
    want = run(ar(), ModelRunner(made))
    use(norm_swiglu=operation)
    engine = ENGINES["graph"]()
    runner = engine.runner(made)
    assert runner.decoder is not None
    assert runner.decoder.operations is None
    assert (kernels.off() or "").startswith(said)
    assert engine.layers(made) == "mtbench's decoder"
    if dtype == torch.float32:
        assert outcomes(run(ar(), runner)) == outcomes(want)
    with pytest.raises(UserError, match=r"'invariant' needs mtbench's kernels.*engine=graph"):
        ENGINES["invariant"]().batch(ar(), on(runner), 1, 16)


def test_plain_counters_that_are_not_zero_are_a_fault(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    device = SimpleNamespace(counters={0: torch.tensor([0, 1])})
    monkeypatch.setitem(sys.modules, "mtbench.kernels.triton_device", device)
    assert build(checkpoint().model).operations is None
    assert kernels.off() == "counters of a product are not zero after it"


def test_a_plain_decoder_that_is_wrong_too_is_not_used(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules run then, and the page says so."""
    use(norm_swiglu=wrong)
    after = fused_decoder.after_attention
    made = checkpoint()
    build(made.model)  # the check of the architecture is kept
    monkeypatch.setattr(kernels, "_off", [])
    monkeypatch.setattr(fused_decoder, "after_attention", lambda *arguments: 1.1 * after(*arguments))
    engine = ENGINES["graph"]()
    assert engine.runner(made).decoder is None
    assert engine.layers(made).startswith("transformers' modules (without mtbench's kernels too, logits are wrong by")


def test_a_plain_crash_that_loses_the_gpu_ends_the_command(use: Callable[..., None]) -> None:
    use(norm_swiglu=raised(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")))
    with pytest.raises(UserError, match=r"crashed the GPU.*MTBENCH_KERNELS=off"):
        build(checkpoint().model)


def test_wrong_plain_attention_of_modules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels of attention alone, as for architectures that the decoder does not compute."""
    attend = AttentionMetadata.attend

    def wrong(self: AttentionMetadata, *arguments: Any) -> Tensor:
        return attend(self, *arguments) * (1.0 if kernels.off() else 1.1)

    made = checkpoint(torch.bfloat16)
    run = lambda *inputs: modules_logits(made.model, *inputs)  # noqa: E731
    assert Check(made.model).fault(run) is None
    monkeypatch.setattr(AttentionMetadata, "attend", wrong)
    assert "logits are wrong" in (Check(made.model).fault(run) or "")


def test_the_plain_check_leaves_the_weights_as_they_were() -> None:
    """Also where a module fails: each has its own tensors again, of the same type."""
    model = checkpoint(torch.float16).model
    before = [(parameter.data_ptr(), parameter.dtype) for parameter in model.parameters()]
    assert not Check(model).failure
    model.model.layers[1].mlp.register_forward_pre_hook(raised(ValueError("no such layer")))
    assert Check(model).failure == "nothing to compare with (no such layer)"
    assert [(parameter.data_ptr(), parameter.dtype) for parameter in model.parameters()] == before
