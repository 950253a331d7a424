"""Cross-entropy after a linear head, in chunks: the full tensor of predictions times vocabulary is never built.

Loss and gradients are computed together, chunk by chunk, so nothing is computed twice (the idea of Liger Kernel, arXiv
2410.10989, and of Cut Cross-Entropy, arXiv 2411.09009, in plain PyTorch). Each prediction has a weight per part of the
loss. In distillation the target is a teacher's distribution instead of a token.

Letters: N predictions, H hidden size, V vocabulary, P parts of the loss.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 26  # elements of a chunk's logits: 256 MiB in float32

TeacherOutput = tuple[Tensor, Tensor]  # a teacher's hidden states (N, H') and its head (V, H')


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, teacher_output: TeacherOutput | None
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total_weight = weight.sum(1).to(exact)
        parts = torch.zeros(weight.shape[1], dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=exact) if head.requires_grad else None
        weights = head.to(hidden.dtype)
        for part in chunks(len(hidden), len(head)):
            part_output = None if teacher_output is None else (teacher_output[0][part], teacher_output[1])
            loss, gradient = _loss_and_gradient(
                (hidden[part] @ weights.T).to(exact), target[part], total_weight[part], part_output
            )
            parts += loss @ weight[part].to(exact)
            gradient = gradient.to(hidden.dtype)
            grad_hidden[part] = gradient @ weights
            if grad_head is not None and grad_head.dtype == gradient.dtype:
                torch.addmm(
                    grad_head, gradient.T, hidden[part], out=grad_head
                )  # avoids a second tensor of the head's size
            elif grad_head is not None:
                grad_head += gradient.T @ hidden[part]
            del gradient  # before the next chunk's logits are made
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(parts)
        return parts.sum(), parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_head is not None:
            grad_head.mul_(grad)  # in place to save memory; `once_differentiable` forbids a second pass
        return grad_hidden * grad, grad_head, None, None, None


def _loss_and_gradient(
    logits: Tensor, target: Tensor, weight: Tensor, teacher_output: TeacherOutput | None
) -> tuple[Tensor, Tensor]:
    """Return the losses (n,) of logits (n, V) and the gradient of the logits, scaled by `weight` (n,).

    The gradient overwrites the logits.
    """
    log_p = logits.log_softmax(1)
    rows = torch.arange(len(log_p), device=log_p.device)
    if teacher_output is None:
        loss = -log_p[rows, target]
        gradient = torch.exp(log_p, out=logits)
        gradient[rows, target] -= 1
    else:
        log_q = (teacher_output[0] @ teacher_output[1].to(teacher_output[0].dtype).T).to(logits.dtype).log_softmax(1)
        loss = (log_q.exp() * (log_q - log_p)).sum(1)
        gradient = torch.exp(log_p, out=logits).sub_(log_q.exp_())
    return loss, gradient.mul_(weight[:, None])


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, teacher_output: TeacherOutput | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of weighted cross-entropies of `hidden @ head.T`, and its parts (P,), which carry no gradient.

    hidden (N, H), head (V, H), target (N,), weight (N, P). With `teacher_output`, the Kullback-Leibler divergence from
    the teacher's distribution (teacher first) replaces the cross-entropy. Under autocast, products are computed in the
    autocast dtype; sums and softmax are at least float32.
    """
    hidden = _in_autocast(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        total, parts = _LinearCrossEntropy.apply(hidden, head, target, weight, teacher_output)  # type: ignore[no-untyped-call]
    return total, parts


def _in_autocast(hidden: Tensor) -> Tensor:
    """Return hidden states in the dtype of autocast, if that is on."""
    device_type = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else hidden


@torch.no_grad()
def top_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the likeliest token of each prediction, (N,). hidden (N, H), head (V, H)."""
    hidden = _in_autocast(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        weights = head.to(hidden.dtype)
        found = [(hidden[part] @ weights.T).argmax(1) for part in chunks(len(hidden), len(head))]
    return torch.cat([torch.empty(0, dtype=torch.long, device=hidden.device), *found])


def chunks(predictions: int, vocabulary: int) -> Iterator[slice]:
    """Yield slices of the predictions whose logits fit into a chunk."""
    step = max(1, CHUNK // vocabulary)
    for start in range(0, predictions, step):
        yield slice(start, start + step)
