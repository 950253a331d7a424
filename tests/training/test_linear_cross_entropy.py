"""The chunked cross-entropy against PyTorch's own, which computes all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mtbench.training.linear_cross_entropy as module
from mtbench.training.linear_cross_entropy import TeacherOutput, linear_cross_entropy

N, H, V, PARTS = 11, 5, 13, 3


def tensors(dtype: torch.dtype = torch.float64, n: int = N, v: int = V) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.rand(n, PARTS) * (torch.rand(n, PARTS) < 0.6)  # some predictions have no weight in a part
    return {
        "hidden": torch.randn(n, H, dtype=dtype).requires_grad_(),
        "head": torch.randn(v, H, dtype=dtype).requires_grad_(),
        "target": torch.randint(v, (n,)),
        "weight": weight.to(dtype),
    }


def a_teacher(dtype: torch.dtype = torch.float64) -> TeacherOutput:
    """Its hidden size is 7, the student's is 5."""
    torch.manual_seed(1)
    return torch.randn(N, 7, dtype=dtype), torch.randn(V, 7, dtype=dtype)


def plain(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, teacher_output: TeacherOutput | None = None
) -> Tensor:
    """The parts of the loss, (P,), computed directly."""
    logits = hidden @ head.T
    if teacher_output is None:
        each = cross_entropy(logits, target, reduction="none")
    else:
        log_q = (teacher_output[0] @ teacher_output[1].T).log_softmax(1)
        each = kl_div(logits.log_softmax(1), log_q, reduction="none", log_target=True).sum(1)
    return each @ weight


def with_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("teacher_output", [None, a_teacher()], ids=["text", "teacher"])
@pytest.mark.parametrize("chunk", [1, 2 * V, 4 * V + 1, N * V, 1 << 26])
def test_loss_parts_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int, teacher_output: TeacherOutput | None
) -> None:
    """In float64 to 1e-9, for any chunk size; a factor after the loss scales the gradients."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    given = tensors()
    total, parts = linear_cross_entropy(**given, teacher_output=teacher_output)
    expected = plain(**given, teacher_output=teacher_output)
    torch.testing.assert_close(parts, expected.detach(), rtol=1e-9, atol=1e-9)
    found = with_gradients(3 * total, given["hidden"], given["head"])
    for ours, theirs in zip(found, with_gradients(3 * expected.sum(), given["hidden"], given["head"]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not parts.requires_grad


def test_a_frozen_head_gets_no_gradient() -> None:
    """The gradient of the hidden states is the same."""
    given = tensors()
    free = with_gradients(linear_cross_entropy(**given)[0], given["hidden"])
    given["head"] = given["head"].detach()
    for ours, theirs in zip(with_gradients(linear_cross_entropy(**given)[0], given["hidden"]), free, strict=True):
        assert torch.equal(ours, theirs)


def test_predictions_of_weight_0_change_nothing() -> None:
    """Without any predictions, loss and gradients are 0."""
    given = tensors()
    given["weight"] = torch.zeros(N, PARTS)
    for some in (given, {name: t if name == "head" else t[:0] for name, t in given.items()}):
        total, parts = linear_cross_entropy(**some)
        gradients = torch.autograd.grad(total, (some["hidden"], some["head"]))
        assert not any(t.any() for t in (total, parts, *gradients))


@pytest.mark.parametrize("teacher_output", [None, a_teacher(torch.float32)], ids=["text", "teacher"])
def test_under_autocast_products_are_bfloat16_and_sums_float32(teacher_output: TeacherOutput | None) -> None:
    """The loss is near that of float32; a gradient has the dtype of its tensor."""
    given = tensors(torch.float32)
    expected = with_gradients(plain(**given, teacher_output=teacher_output).sum(), given["hidden"], given["head"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, parts = linear_cross_entropy(**given, teacher_output=teacher_output)
    assert total.dtype == parts.dtype == torch.float32
    for ours, theirs in zip(with_gradients(total, given["hidden"], given["head"]), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is computed."""

    elements = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return made


@pytest.mark.parametrize("teacher_output", [False, True])
def test_no_tensor_of_predictions_times_vocabulary_is_computed(
    monkeypatch: pytest.MonkeyPatch, teacher_output: bool
) -> None:
    """No tensor is larger than a chunk, the head or the hidden states, forward and backward."""
    n, v = 200, 50
    monkeypatch.setattr(module, "CHUNK", 20 * v)
    given = tensors(n=n, v=v)
    teacher = (
        (torch.randn(n, H, dtype=torch.float64), torch.randn(v, H, dtype=torch.float64)) if teacher_output else None
    )
    with Largest() as largest:
        linear_cross_entropy(**given, teacher_output=teacher)[0].backward()
    assert n * H <= largest.elements == 20 * v
    assert all(given[name].grad is not None for name in ("hidden", "head"))
