"""Training of P-EAGLE: a draft that predicts all tokens of a step in one forward.

Hui, Huang, Campos Salas, Sun, Pemberton, Song, Khetan, Karypis: "P-EAGLE: Parallel-Drafting EAGLE with Scalable
Training", arXiv 2602.01469. Where the paper is open, it follows speculators (c05b95b, `models/peagle`): which masks are
kept, their attention, and the loss. The paper's partition of long sequences is not here: a row's mask is dense. The
paper and speculators train a copy of the embedding, too; here embedding and LM head are the target's.

Letters: R rows, T fed tokens, M masks of a row, N predictions, C hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mtbench.models.drafts.eagle_draft import LAYER_IDS, PARALLEL, PEAGLE
from mtbench.models.drafts.loading import recognised
from mtbench.models.feature_draft import DraftConfig
from mtbench.options import option
from mtbench.training.draft_attention import DraftMask, StepKeys
from mtbench.training.draft_objectives import DraftObjective, tapped_layers
from mtbench.training.linear_cross_entropy import TeacherOutput
from mtbench.training.objectives import EXACT, HeadInput, Model, Special, TargetStates, clean_stream, first_target
from mtbench.training.packing import AttentionMask, Example, Packed, TrainingSequence


class Masks(NamedTuple):
    """The masks of a batch: each continues the entry of an anchor."""

    number: Tensor  # (m,) of each mask in its row
    anchor: Tensor  # (R, M) place of the anchor; −1: none, since the row has fewer masks
    depth: Tensor  # (R, M) 1: the mask right after the anchor


@dataclass(frozen=True, kw_only=True)
class ParallelEagle(DraftObjective):
    """P-EAGLE: masks learn the target's distributions, each at its depth, beside the entries that learn the next.

    Conditional drop: depth d keeps `keep` to the power of d of the places, at least `keep_least`, drawn from those
    that continue what depth d - 1 kept. A mask attends to the entries up to its anchor and to the anchor's masks up to
    itself. The loss is the divergence from the target's distribution, all predictions alike. Mean over predictions,
    then over conversations. The checkpoint has the layout of speculators.
    """

    name: ClassVar[str] = "peagle"
    role: ClassVar[str] = "eagle"
    needs_mask: ClassVar[bool] = True

    steps: int = option(8, "depths: tokens that the draft learns to draft in one forward", low=1)
    layers: int = option(4, "layers of the draft", low=1)
    keep: float = option(0.7, "share of the places that each depth keeps of the one before", low=0.0, high=1.0)
    keep_least: float = option(0.2, "least share of all places that a depth keeps", low=0.0, high=1.0)

    @property
    def draft_layers(self) -> int:
        return self.layers

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"depth_{depth}" for depth in range(self.steps))

    def format(self, model: Model, special: Special) -> DraftConfig:
        config = model.config.get_text_config()
        greedy = {"proposal_type": "greedy", "speculative_tokens": self.steps}
        verifier = {"name_or_path": model.config.name_or_path, "architectures": model.config.architectures or []}
        found = recognised(
            {
                "architectures": [PARALLEL],
                "speculators_model_type": PEAGLE,
                "speculators_config": {
                    "algorithm": PEAGLE,
                    "default_proposal_method": greedy["proposal_type"],
                    "proposal_methods": [greedy],
                    "verifier": verifier,
                },
                "transformer_layer_config": self.layer_config(config),
                "draft_vocab_size": config.vocab_size,
                "norm_before_residual": False,
                LAYER_IDS: [layer + 1 for layer in tapped_layers(config.num_hidden_layers)],
                "mask_token_id": special.mask,
            }
        )
        assert found is not None
        return found

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the sequence. A prediction's predictor is the token before its target, from which the target predicts
        it, too; depth d = `ahead` - 1 makes it from the entry `ahead` tokens before that.
        """
        count = len(example.ids)
        places = torch.arange(max(first_target(example.prompt), 2) - 1, count - 1)
        kept, candidates = [places], places[places > 1]
        for depth in range(1, self.steps):
            size = int((len(places) - depth) * max(self.keep**depth, self.keep_least))
            chosen = candidates[torch.randperm(len(candidates), generator=random)[: max(0, size)]].sort().values
            kept.append(chosen)
            candidates = chosen[chosen + 1 < count - 1] + 1
        predictor = torch.cat(kept)
        depths = torch.arange(self.steps).repeat_interleave(torch.tensor([len(one) for one in kept]))
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            predictor=predictor,
            target=example.ids[predictor + 1],
            weight=torch.eye(self.steps, dtype=EXACT)[depths] / max(1, len(predictor)),
            ahead=depths + 1,
        )

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        draft, length = model.draft, batch.ids.shape[1]
        masks = masks_of(batch)
        at = masks.anchor.clamp(min=0)
        metadata = DraftMask(
            torch.cat((batch.position, batch.position.gather(1, at) + masks.depth), 1),
            seen(AttentionMask(batch).dense(), masks),
        )
        ids = torch.cat((batch.ids.roll(-1, 1), torch.full_like(at, draft.format.mask_id)), 1)
        feature = torch.cat([states.features[tap] for tap in draft.format.taps], -1)
        feature = torch.cat((feature, draft.mask_hidden.to(feature).expand(*at.shape, -1)), 1)
        read, _ = draft.advance(ids, feature, metadata, StepKeys(), ids.shape[1], depth=0)
        column = batch.predictor % length - 1
        column[batch.ahead > 1] = length + masks.number
        hidden = read[batch.predictor // length, column]
        wanted = states.predicting, model.get_output_embeddings().weight
        yield HeadInput(slice(None), hidden, draft.get_output_embeddings().weight, wanted)


def masks_of(batch: Packed) -> Masks:
    """Return the masks of a batch: one for each prediction that is made more than one token ahead."""
    rows, length = batch.ids.shape
    predictor, ahead = (column[batch.ahead > 1] for column in (batch.predictor, batch.ahead))
    row = predictor // length
    counts = row.bincount(minlength=rows)
    number = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    anchor = torch.full((rows, int(counts.max())), -1, device=row.device)
    depth = torch.zeros_like(anchor)
    anchor[row, number], depth[row, number] = predictor % length - ahead, ahead - 1
    return Masks(number, anchor, depth)


def seen(clean: Tensor, masks: Masks) -> Tensor:
    """Return the attention of entries and masks, (R, T+M, T+M) bool, given that of entries, (R, T, T)."""
    anchor, depth = masks.anchor, masks.depth
    context = clean.gather(1, anchor.clamp(min=0)[..., None].expand(-1, -1, clean.shape[2]))
    same, shallower = anchor[:, :, None] == anchor[:, None], depth[:, :, None] >= depth[:, None]
    entries = torch.nn.functional.pad(clean, (0, anchor.shape[1]))
    return torch.cat((entries, torch.cat((context, same & shallower), -1)), 1)
