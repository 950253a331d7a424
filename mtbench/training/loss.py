"""A model's forward pass in training: hidden states of the predicting tokens, and the objective's loss from them."""

from collections.abc import Sequence
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.models.runner import watched_hidden_states
from mtbench.training.linear_cross_entropy import TeacherOutput, chunks
from mtbench.training.objectives import Model, Objective, TargetStates
from mtbench.training.packing import AttentionMask, Packed


class PredictionScores(NamedTuple):
    """For each prediction: is the top token the target, and what is the top token's probability?"""

    right: Tensor  # (N,) bool
    confidence: Tensor  # (N,)


@torch.no_grad()
def score_predictions(objective: Objective, model: Model, states: TargetStates, batch: Packed) -> PredictionScores:
    """Score the predictions of a batch, chunk by chunk. One that a head leaves out is wrong, with confidence 0."""
    count = len(batch.target)
    right, confidence = torch.zeros(count, dtype=torch.bool), torch.zeros(count)
    rows = torch.arange(count, device=batch.target.device)
    for head_input in objective.head_inputs(model, states, batch, None):
        for part in chunks(len(head_input.hidden), len(head_input.head)):
            hidden = head_input.hidden[part]
            logits = hidden @ head_input.head.to(hidden.dtype).T
            top = logits.float().softmax(1).max(1)
            indices = rows[head_input.rows][part]
            drafted = top.indices if head_input.ids is None else head_input.ids[top.indices]
            right[indices.cpu()] = (drafted == batch.target[indices]).cpu()
            confidence[indices.cpu()] = top.values.cpu()
    return PredictionScores(right, confidence)


def plain_attention_mask(model: Model, ids: Tensor) -> AttentionMask:
    """Return the causal mask of plain text `ids` (R, T), for one forward pass."""
    position, zero = torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
    empty = torch.empty(0, dtype=torch.long)
    return attention_mask(model, Packed(ids, position, zero, position + 1, zero, zero, empty, empty, empty, empty))


def attention_mask(model: Model, batch: Packed) -> AttentionMask:
    """Return the mask of a packed batch, prepared for the model's layers and the dtype of its scores."""
    text = model.config.get_text_config()
    group = text.num_attention_heads // getattr(text, "num_key_value_heads", text.num_attention_heads)
    device_type = batch.ids.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else model.dtype
    return AttentionMask(batch).prepare({None, getattr(text, "sliding_window", None)}, group, dtype)


def target_states(model: Model, batch: Packed, taps: Sequence[int] = ()) -> TargetStates:
    """Run the model on a batch."""
    features: dict[int, Tensor] = {}
    with watched_hidden_states(model, taps, features.__setitem__):
        output = model.base_model(
            input_ids=batch.ids, position_ids=batch.position, use_cache=False, metadata=attention_mask(model, batch)
        ).last_hidden_state
    return TargetStates(output.flatten(0, 1)[batch.predictor], features)


def attach_loss(model: Model, objective: Objective, teacher: Model | None = None) -> None:
    """Replace `model.forward`: `model(**batch)` then returns the objective's loss and its parts.

    So everything that wraps a model (DDP, FSDP, autocast) wraps the loss. In evaluation mode it also returns the
    prediction scores.
    """

    def forward(model: Model, **tensors: Tensor) -> dict[str, Tensor]:
        batch = Packed(**tensors)
        states = target_states(model, batch, objective.taps(model))
        taught = None
        if teacher is not None:
            vocabulary = len(model.get_output_embeddings().weight)
            taught = teacher_output(teacher, objective.read_by_teacher(model, states, batch), vocabulary)
        total, parts = objective.losses(model, states, batch, taught)
        outputs = {"loss": total, "parts": parts}
        if not model.training:
            outputs |= score_predictions(objective, model, states, batch)._asdict()
        return outputs

    model.forward = MethodType(forward, model)


def teacher_output(teacher: Model, batch: Packed, vocabulary: int | None = None) -> TeacherOutput:
    """Return a teacher's hidden states of the predictions, and its head, cut to the student's vocabulary."""
    with torch.no_grad():
        return target_states(teacher, batch).predicting, teacher.get_output_embeddings().weight[:vocabulary]
