"""A model's forward in training: hidden states of the tokens that predict, and the objective's loss from them."""

from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.training.linear_cross_entropy import TeacherOutput, chunks
from mtbench.training.objectives import Model, Objective, losses
from mtbench.training.packing import AttentionMask, Packed


class Verdicts(NamedTuple):
    """Of each prediction: is the likeliest token the right one, and how likely is it?"""

    right: Tensor  # (N,) bool
    confidence: Tensor  # (N,)


@torch.no_grad()
def verdicts(objective: Objective, model: Model, hidden: Tensor, batch: Packed) -> Verdicts:
    """Read off the predictions of the hidden states (N, H)."""
    right, confidence = torch.zeros(len(hidden), dtype=torch.bool), torch.zeros(len(hidden))
    rows = torch.arange(len(hidden), device=hidden.device)
    for reading in objective.read(model, hidden, batch, None):
        for part in chunks(len(reading.hidden), len(reading.head)):
            states = reading.hidden[part]
            top = (states @ reading.head.to(states.dtype).T).float().softmax(1).max(1)
            where = rows[reading.rows][part]
            right[where.cpu()] = (top.indices == batch.target[where]).cpu()
            confidence[where.cpu()] = top.values.cpu()
    return Verdicts(right, confidence)


def plain_attention_mask(model: Model, ids: Tensor) -> AttentionMask:
    """Sight of a plain text, for one forward."""
    place, zero = torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
    nothing = torch.empty(0, dtype=torch.long)
    return attention_mask(model, Packed(ids, place, zero, place + 1, zero, zero, nothing, nothing, nothing, nothing))


def attention_mask(model: Model, batch: Packed) -> AttentionMask:
    text = model.config.get_text_config()
    group = text.num_attention_heads // getattr(text, "num_key_value_heads", text.num_attention_heads)
    kind = batch.ids.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
    return AttentionMask(batch).prepare({None, getattr(text, "sliding_window", None)}, group, dtype)


def hidden_states(model: Model, batch: Packed) -> Tensor:
    """The last hidden states of the tokens that predict, (N, H)."""
    out = model.base_model(
        input_ids=batch.ids, position_ids=batch.place, use_cache=False, metadata=attention_mask(model, batch)
    ).last_hidden_state
    told: Tensor = out.flatten(0, 1)[batch.at]
    return told


def attach_loss(model: Model, objective: Objective, teacher: Model | None = None) -> None:
    """From now on `model(**batch)` is the objective's loss and its parts, so that whatever wraps a model wraps this.

    In evaluation it also tells which predictions are right, and how sure they are.
    """

    def forward(model: Model, **tensors: Tensor) -> dict[str, Tensor]:
        batch = Packed(**tensors)
        hidden = hidden_states(model, batch)
        vocabulary = len(model.get_output_embeddings().weight)
        total, parts = losses(objective, model, hidden, batch, teacher_output(teacher, batch, vocabulary))
        told = {"loss": total, "parts": parts}
        return told if model.training else told | verdicts(objective, model, hidden, batch)._asdict()

    model.forward = MethodType(forward, model)


def teacher_output(teacher: Model | None, batch: Packed, vocabulary: int | None = None) -> TeacherOutput | None:
    """A teacher's hidden states where predictions are made, and its head, as far as the student's vocabulary goes."""
    if teacher is None:
        return None
    with torch.no_grad():
        return hidden_states(teacher, batch), teacher.get_output_embeddings().weight[:vocabulary]
