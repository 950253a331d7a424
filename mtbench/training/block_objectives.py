"""Training objectives of drafts that predict a block: DFlash and DSpark, with the losses of the authors' code.

Chen, Liang, Liu: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark: arXiv 2607.05147.

Letters: R rows, T fed tokens, N predictions, H hidden size, V vocabulary, B block size, A blocks of a row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.checkpoint import checkpoint

from mtbench.options import option
from mtbench.training.draft_attention import DraftMask, StepKeys
from mtbench.training.draft_objectives import DraftObjective
from mtbench.training.linear_cross_entropy import TeacherOutput, chunks
from mtbench.training.objectives import (
    EXACT,
    HeadInput,
    Losses,
    Model,
    Special,
    TargetStates,
    clean_stream,
    first_target,
)
from mtbench.training.packing import Example, Packed, TrainingSequence


@dataclass(frozen=True, kw_only=True)
class BlockDraft(DraftObjective):
    """DFlash: the draft predicts the tokens after random anchors, a block at once, from the hidden states before them.

    A block is the anchor's token and B-1 masks; all of it attends to all tokens before the anchor and to the block. The
    loss of place k has the weight exp(-k/4). Mean over labelled tokens, then over conversations.
    """

    name: ClassVar[str] = "dflash"
    role: ClassVar[str] = "dflash"
    architecture: ClassVar[str] = "Qwen3DSparkModel"
    needs_mask: ClassVar[bool] = True

    layers: int = option(5, "layers of the draft", low=1)
    block_size: int = option(7, "B: tokens that the draft predicts at once", low=1)
    anchors: int = option(512, "blocks of a conversation, at most", low=1)

    shares: ClassVar[Sequence[float]] = (1.0,)  # of the parts in the loss

    @property
    def draft_layers(self) -> int:
        return self.layers

    def settings(self, special: Special, taps: Sequence[int]) -> Mapping[str, Any]:
        return {
            **super().settings(special, taps),
            "block_size": self.block_size,
            "mask_token_id": special.mask,
            "num_anchors": self.anchors,
            "markov_rank": 0,
            "enable_confidence_head": False,
        }

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the sequence. A prediction's predictor is the token before its target, from which the target predicts
        it, too; its block's anchor lies `ahead` - 1 tokens before that.
        """
        anchors = torch.arange(first_target(example.prompt) - 1, len(example.ids) - 1)
        chosen = torch.randperm(len(anchors), generator=random)[: self.anchors].sort().values
        place = torch.arange(self.block_size)
        predictor = anchors[chosen][:, None] + place
        exists = predictor + 1 < len(example.ids)
        decay = torch.exp(-place.to(EXACT) / 4).expand(len(chosen), -1)[exists]
        shares = torch.tensor(self.shares, dtype=EXACT)
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            predictor=predictor[exists],
            target=example.ids[predictor[exists] + 1],
            weight=(decay / decay.sum())[:, None] * shares,
            ahead=(place + 1).expand(len(chosen), -1)[exists],
        )

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        hidden = self.block_hidden(model, states, batch)
        yield HeadInput(slice(None), hidden, model.get_output_embeddings().weight)

    def block_hidden(self, model: Model, states: TargetStates, batch: Packed) -> Tensor:
        """Return the draft's hidden states of all predictions, (N, H)."""
        draft, size, (rows, length) = model.draft, self.block_size, batch.ids.shape
        first = batch.ahead == 1
        anchor = batch.predictor[first]
        row, column = anchor // length, anchor % length
        counts = row.bincount(minlength=rows)
        number = torch.arange(len(anchor), device=anchor.device) - (counts.cumsum(0) - counts)[row]  # in its row
        at = torch.zeros(rows, max(1, int(counts.max())), dtype=torch.long, device=anchor.device)  # (R, A) anchors
        at[row, number] = column
        ids = torch.full((*at.shape, size), draft.format.mask_id, device=at.device)
        ids[..., 0] = batch.ids.gather(1, at)
        positions = (batch.position.gather(1, at)[..., None] + torch.arange(size, device=at.device)).flatten(1)
        block = torch.arange(at.shape[1], device=at.device).repeat_interleave(size)
        same = batch.document[:, None] == batch.document.gather(1, at)[..., None]
        context = same & (torch.arange(length, device=at.device) < at[..., None])  # (R, A, T)
        own = (block[:, None] == block).expand(rows, -1, -1)
        mask = torch.cat((context.repeat_interleave(size, 1), own), -1)
        metadata = DraftMask(torch.cat((batch.position, positions), 1), mask)
        features = torch.cat([states.features[tap] for tap in draft.format.taps], -1)
        hidden = draft.norm(draft.read_block(ids.flatten(1), features, metadata, StepKeys()))
        block_of = first.cumsum(0) - 1  # predictions of a block follow one another
        picked: Tensor = hidden[row[block_of], number[block_of] * size + batch.ahead - 1]
        return picked


@dataclass(frozen=True, kw_only=True)
class MarkovBlockDraft(BlockDraft):
    """DSpark: DFlash, a bias from the token before, and a head that predicts whether a draft will be accepted.

    The loss is 0.1 of the cross-entropy, 0.9 of the L1 distance between the draft's and the target's distribution, and
    the binary cross-entropy of the confidence with the chance of acceptance, 1 - L1/2.
    """

    name: ClassVar[str] = "dspark"
    role: ClassVar[str] = "dspark"
    shares: ClassVar[Sequence[float]] = (0.1, 0.9, 1.0)

    markov_rank: int = option(256, "rank of the bias from the token before", low=1)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("cross_entropy", "l1", "confidence")

    def settings(self, special: Special, taps: Sequence[int]) -> Mapping[str, Any]:
        markov = {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
        return {
            **super().settings(special, taps),
            **markov,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        """Yield the hidden states with the embedding of the token before, and both matrices side by side."""
        hidden = self.block_hidden(model, states, batch)
        markov = model.draft.markov_head
        before = markov.markov_w1(batch.ids.flatten()[batch.predictor])
        head = torch.cat((model.get_output_embeddings().weight, markov.markov_w2.weight), 1)
        yield HeadInput(slice(None), torch.cat((hidden, before), 1), head)

    def losses(self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None = None) -> Losses:
        (inputs,) = self.head_inputs(model, states, batch, None)
        confidence = model.draft.confidence_head["proj"](inputs.hidden).squeeze(1)
        target_hidden, target_head = states.predicting, model.get_output_embeddings().weight

        def terms(logits: Tensor, at: slice) -> Tensor:
            """Return cross-entropy, L1 distance and the confidence's cross-entropy, (n, 3)."""
            target_p = (target_hidden[at] @ target_head.to(target_hidden.dtype).T).to(logits.dtype).softmax(1)
            l1 = (logits.softmax(1) - target_p).abs().sum(1)
            chance = (1 - l1.detach() / 2).clamp(0, 1)
            sure = binary_cross_entropy_with_logits(confidence[at].to(logits.dtype), chance, reduction="none")
            return torch.stack((cross_entropy(logits, batch.target[at], reduction="none"), l1, sure), 1)

        return chunked_losses(terms, inputs, batch.weight)


def chunked_losses(terms: Callable[[Tensor, slice], Tensor], inputs: HeadInput, weight: Tensor) -> Losses:
    """Return the losses of predictions. Given logits (n, V) and their rows, `terms` returns the parts (n, P).

    The logits of one chunk exist at a time. Without predictions too there is one: DDP waits for all gradients.
    """
    hidden, head = inputs.hidden, inputs.head

    def of_chunk(at: slice) -> Tensor:
        return terms((hidden[at] @ head.to(hidden.dtype).T).to(torch.promote_types(hidden.dtype, torch.float32)), at)

    parts = hidden.new_zeros(weight.shape[1])
    for chunk in chunks(max(1, len(weight)), len(head)):
        found = checkpoint(of_chunk, chunk, use_reentrant=False)
        parts = parts + (found * weight[chunk].to(found)).sum(0)
    return Losses(parts.sum(), parts.detach())
