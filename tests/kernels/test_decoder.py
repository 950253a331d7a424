"""The decoder against transformers' modules in float64, by the definitions and by the kernels, and the check of it.

test_kernels.py starts the process of Triton's interpreter in which the kernels run.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from decoding_cases import ar, on, outcomes, run
from interpreted import DEVICE, HALF, definition, definitions, of_floats, of_kernels, running
from small import small_checkpoint, small_config
from thinned import one_in
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from mtbench import kernels
from mtbench.decoding.engines import ENGINES
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Decoder, _attention_arguments, build
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner
from mtbench.models.self_check import Check, modules_logits

EPS = 0.3  # large, so that a norm without it differs
two_layers = partial(small_config, num_hidden_layers=2)
LAYERS: dict[str, PretrainedConfig] = {
    "qwen3: norms of queries and keys": two_layers(Qwen3Config, head_dim=16),
    "qwen2: biases of queries, keys and values": two_layers(
        Qwen2Config, num_attention_heads=7, hidden_size=112, num_key_value_heads=1
    ),
    "mistral: a sliding window": two_layers(MistralConfig, head_dim=16, sliding_window=4),
    "llama: all biases of attention, own eps": two_layers(
        LlamaConfig, head_dim=16, attention_bias=True, rms_norm_eps=EPS
    ),
    "llama: gelu": two_layers(LlamaConfig, head_dim=16, hidden_act="gelu"),
}
CONFIG = LAYERS["qwen3: norms of queries and keys"]


def apart(dtype: torch.dtype, config: PretrainedConfig, decoder_class: type[Decoder] = Decoder) -> float:
    """How far logits and features are from transformers' modules in float64: a prefill, ragged steps, a tree."""
    checkpoint, generator = small_checkpoint(config), torch.Generator().manual_seed(0)
    for parameter in checkpoint.model.to(DEVICE).parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(DEVICE)
    other = copy.copy(checkpoint)
    object.__setattr__(other, "model", copy.deepcopy(checkpoint.model).to(dtype))
    decoder = decoder_class(other.model, _attention_arguments(other.model))
    runners = ModelRunner(checkpoint), ModelRunner(other, decoder)
    ids = torch.randint(30, (3, 12), generator=generator).to(DEVICE)
    lengths = torch.tensor([5, 3, 4], device=DEVICE)[:, None]
    fed = [torch.arange(5).repeat(3, 1), torch.tensor([0, 1]), torch.tensor([2, 3, 4])]
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)  # a root and two children
    depths, found = torch.tensor([0, 1, 1], device=DEVICE), 0.0
    for runner in runners:
        runner.reserve(3, 12, taps=(0, 1, 2))
    for new, tree in zip(fed, (None, None, sees), strict=True):
        slots = new.to(DEVICE) if new.ndim == 2 else new.to(DEVICE) + lengths
        positions = slots if tree is None else slots[:, :1] + depths
        metadata = AttentionMetadata(slots, positions, slots[:, 0], 10, sees=tree)
        with torch.inference_mode():
            logits = [runner.forward(ids[:, : slots.shape[1]], metadata, 2).logits for runner in runners]
        features = [runner.cache.features((0, 1, 2), slots) for runner in runners]
        for reference, result in (logits, features):
            finite = reference.isfinite()
            assert torch.equal(result.isfinite(), finite)
            found = max(found, float((result[finite].double() - reference[finite]).norm() / reference[finite].norm()))
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_the_decoder_of_plain_operations_gives_the_logits_of_transformers(name: str) -> None:
    assert apart(torch.float64, LAYERS[name]) < 1e-6


@of_kernels
@pytest.mark.parametrize("name", one_in(len(LAYERS), LAYERS))
def test_the_decoder_of_kernels_gives_the_logits_of_transformers(name: str) -> None:
    with running(of_floats):
        assert apart(torch.float32, LAYERS[name]) < 1e-5


# --- The check before the first token ---------------------------------------------------------------------------------


def checkpoint(dtype: torch.dtype = torch.float32) -> Checkpoint:
    made = small_checkpoint(CONFIG)
    made.model.to(dtype)
    return made


def swiglu(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda both: factor * definition("swiglu")(both)


def raised(error: Exception) -> Callable[..., Any]:
    def operation(*_: Any) -> Any:
        raise error

    return operation


@of_kernels
def test_the_kernels_pass() -> None:
    model = small_checkpoint(two_layers(Qwen3Config, head_dim=16, num_hidden_layers=1)).model.to(HALF)
    with running(of_floats), mock.patch("mtbench.models.self_check.SHAPES", ((1, 1), (2, 3))):
        check, decoder = Check(model.to(DEVICE)), Decoder(model, _attention_arguments(model))
        assert check.fault(decoder.all_logits) is None


def test_plain_operations_that_are_right_run() -> None:
    with definitions():
        build(checkpoint(torch.bfloat16).model)
        assert kernels.off() is None


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (swiglu(1.3), "logits are wrong by 0."),
        (swiglu(torch.nan), "logits are wrong by nan"),
        (raised(RuntimeError("out of resource: shared memory")), "RuntimeError: out of resource: shared memory"),
    ],
    ids=["plain wrong", "plain nan", "plain crash"],
)
def test_without_a_kernel_that_is_wrong_or_crashes_pytorch_computes_the_same(
    operation: Callable[..., Any], said: str
) -> None:
    made = checkpoint()
    want = run(ar(), ModelRunner(made))
    with definitions(swiglu=operation):
        engine = ENGINES["graph"]()
        runner = engine.runner(made)
        assert runner.decoder is not None
        assert (kernels.off() or "").startswith(said)
        assert engine.layers(made) == "mtbench's decoder"
        assert outcomes(run(ar(), runner)) == outcomes(want)
        with pytest.raises(UserError, match=r"'invariant' needs mtbench's kernels.*engine=graph"):
            ENGINES["invariant"]().batch(ar(), on(runner), 1, 16)


def test_a_plain_decoder_that_is_wrong_too_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' modules run then, and the page says so."""
    made, right = checkpoint(), Decoder.forward
    build(made.model)  # the check of the architecture is kept
    monkeypatch.setattr(Decoder, "forward", lambda *arguments: 1.1 * right(*arguments))
    with definitions(swiglu=swiglu(1.3)):
        engine = ENGINES["graph"]()
        assert engine.runner(made).decoder is None
    assert engine.layers(made).startswith("transformers' modules (without mtbench's kernels too, logits are wrong by")


def test_plain_attention_that_does_not_compile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs before the check: the decoder learns its arguments from modules that run without ours."""
    attend = kernels.attend

    def broken(*arguments: Any) -> Tensor:
        if kernels.off() is None:
            raise TypeError("a kernel does not compile")
        return attend(*arguments)

    with definitions():
        monkeypatch.setattr(kernels, "attend", broken)
        build(checkpoint().model)
        assert kernels.off() == "TypeError: a kernel does not compile"


def test_a_plain_crash_that_loses_the_gpu_ends_the_command() -> None:
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with definitions(swiglu=raised(error)), pytest.raises(UserError, match=r"crashed the GPU.*MTBENCH_KERNELS=off"):
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

    def no_such_layer(_: Any, __: Any, output: Tensor) -> None:
        if output.dtype in wrong:
            raise ValueError("no such layer")

    wrong = {torch.float32}  # the wider type
    model.model.layers[1].mlp.gate_proj.register_forward_hook(no_such_layer)
    assert Check(model).failure == "nothing to compare with (no such layer)"
    wrong.add(torch.float16)
    with pytest.raises(UserError, match=r"do not run .*no such layer"):
        Check(model)
    assert [(parameter.data_ptr(), parameter.dtype) for parameter in model.parameters()] == before


def test_the_check_reads_the_keys_and_values_of_the_model_itself() -> None:
    """With noise in their place SmolLM2 in bfloat16 loses all precision, and right kernels were switched off."""
    model = checkpoint().model
    check = Check(model)
    ids, metadata, cache = check._inputs(2, 3)
    modules_logits(model, ids, metadata, cache)
    fed = torch.arange(len(check.context.index)) >= int(metadata.base[1])
    for store, own in zip(cache.layers[1], check.context.layers[1], strict=True):
        first, second = store.unflatten(0, (2, -1))
        assert torch.equal(first[:-3], own[:-3])
        assert torch.equal(second[~fed], own[~fed])
        assert not torch.equal(second[fed], own[fed])


def test_the_plain_check_stays_within_the_positions_of_a_model() -> None:
    """A table of positions that is read behind its end would lose the GPU."""
    model = checkpoint().model
    model.config.max_position_embeddings = 64
    _, metadata, _ = Check(model)._inputs(16, 33)
    assert int(metadata.positions.max()) == 63
    assert int(metadata.positions.min()) >= 0
