"""Self-distillation: mask tokens learn what the frozen base would say after the model's own tokens.

Kirchenbauer et al., "Multi-Token Prediction via Self-Distillation", arXiv 2602.06019v2, sections 3.3, 4.1 to 4.5 and
A.1. A span is an anchor, a clean token of the text, and k - 1 masks behind it: its k outputs predict k tokens at once.
The student's choices, not the text, follow the anchor in the teacher's input, and each output learns the teacher's
judgement at its place. As in the released code, spans lie 2·B + 1 - k tokens apart from a random first place, so that a
text with its masks is cut into regions of 2·B tokens, and a step's loss is a mean over the predictions for one k. The
decoding of the paper, ConfAdapt, is the method `mars`: leading predictions of at least τ, the first always.

The paper is silent, or its code is bound to its own batches, on three points. Here k and the first place are drawn for
each conversation, since conversations of several k are packed into one row. A prediction weighs (2·B + 1 - k) / k, so
that every k weighs as much as in steps of one k, and the divisor is the number of labels. Anchors lie in the answer
and in the last token of the prompt.

Letters: L tokens of a conversation, M spans, N predictions, B the largest k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from mtbench.options import option
from mtbench.training.linear_cross_entropy import TeacherOutput, top_tokens
from mtbench.training.objectives import (
    EXACT,
    Losses,
    Model,
    Objective,
    Special,
    TargetStates,
    clean_stream,
    first_target,
    joined,
)
from mtbench.training.packing import Example, Examples, Packed, Stream, TrainingSequence


@dataclass(frozen=True, kw_only=True)
class SelfDistill(Objective):
    """Spans of masks learn the frozen base's judgement of the model's own tokens (MTP via self-distillation)."""

    name: ClassVar[str] = "self-distill"
    role: ClassVar[str] = "self_distill"
    needs_mask: ClassVar[bool] = True
    taught_by_base: ClassVar[bool] = True

    block_size: int = option(16, "B: the largest k; a span predicts a random k of 2 … B tokens at once", low=2)
    target: Literal["hard", "soft"] = option("hard", "the teacher's likeliest token, or its distribution")

    def max_fed_tokens(self, length: int, prompt: int) -> int:
        spans = -(-self.divisor_share(length, prompt) // (self.block_size + 1))  # the most: of the largest k
        return length - 1 + spans * (self.block_size - 1)

    def divisor_share(self, length: int, prompt: int) -> int:
        return length - first_target(prompt)

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the text up to the last anchor, and the masks of each span. Predictions are in order, span by span."""
        assert special.mask is not None
        k = int(torch.randint(2, self.block_size + 1, (), generator=random))
        apart = 2 * self.block_size + 1 - k
        first = first_target(example.prompt) - 1 + int(torch.randint(apart, (), generator=random))
        anchor = torch.arange(first, max(first, len(example.ids) - 1), apart)  # (M,)
        fed = int(anchor[-1]) + 1 if len(anchor) else 0
        position = (anchor[:, None] + torch.arange(1, k)).flatten()  # of the masks
        span, known = (of.repeat_interleave(k - 1) for of in (torch.arange(len(anchor)) + 1, anchor + 1))
        noisy = Stream(torch.full_like(position, special.mask), position, span, known, position)
        mask = fed + torch.arange(len(position)).view(len(anchor), k - 1)
        place = anchor[:, None] + torch.arange(1, k + 1)  # (M, k) of the tokens that are predicted
        text = torch.nn.functional.pad(example.ids, (0, k), value=special.end)
        ahead = torch.arange(1, k + 1) * (place < len(example.ids))
        return TrainingSequence(
            *joined(clean_stream(example.ids[:fed]), noisy),
            predictor=torch.cat((anchor[:, None], mask), 1).flatten(),
            target=text[place.flatten()],  # of the evaluation
            weight=torch.full((place.numel(), 1), apart / k, dtype=EXACT),
            ahead=ahead.flatten(),
        )

    def note(self, model: Model, data: Sequence[Examples]) -> str | None:
        labels = data[0].lengths - data[0].prompts
        short = int((labels < self.block_size).sum())
        return (
            f"{short:,} of {len(labels):,} answers are shorter than --block-size {self.block_size}" if short else None
        )

    def read_by_teacher(self, model: Model, states: TargetStates, batch: Packed) -> Packed:
        """Return the batch with the student's choices in the place of the masks.

        The prediction before a mask's own, in the same span, is of the mask's token.
        """
        chosen = top_tokens(states.predicting, model.get_output_embeddings().weight)
        ids, own = batch.ids.flatten().clone(), batch.predictor[1:]
        ids[own] = torch.where(batch.segment.flatten()[own] == 0, ids[own], chosen[:-1])
        return batch._replace(ids=ids.view_as(batch.ids))

    def losses(self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None = None) -> Losses:
        assert teacher is not None
        if self.target == "soft":  # the entropy of the teacher, which equation 3 omits, has no gradient
            return super().losses(model, states, batch, teacher)
        return super().losses(model, states, batch._replace(target=top_tokens(*teacher)))
