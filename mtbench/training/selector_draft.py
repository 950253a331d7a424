"""Training of DFlash 2: a block draft with convolutions in its block, and a selector among each place's candidates.

The owners' package (dflash 0.1.0) decodes and does not train. What it leaves open follows SpecForge (pull request 772,
docs/concepts/DFlash2.md), in brackets where speculators (pull request 1006) differs. To the cross-entropy of the
backbone's logits comes that of the selector's scores after the text's token before; both reach the backbone. A target
that is no candidate teaches the selector nothing (it replaces a candidate). Targets are the text (the base's likeliest
tokens), so train on the base's own answers. Convolutions begin as the identity, the successors' codebook as zeros (as
random numbers), so that an untrained draft is DFlash.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mtbench.options import option
from mtbench.training.draft_objectives import BlockDraft, chunked_losses
from mtbench.training.linear_cross_entropy import TeacherOutput
from mtbench.training.objectives import HeadInput, Losses, Model, Special, TargetStates
from mtbench.training.packing import Packed


@dataclass(frozen=True, kw_only=True)
class SelectorBlockDraft(BlockDraft):
    """DFlash 2: DFlash with convolutions in the block, and a selector, which chooses among a place's best tokens.

    The first place of a block is the anchor and predicts nothing. The loss is the cross-entropy of the logits plus that
    of the selector's scores. Mean over labelled tokens, then over conversations. The checkpoint has z-lab's format.
    """

    name: ClassVar[str] = "dflash2"
    role: ClassVar[str] = "dflash2"
    architecture: ClassVar[str] = "DFlash2DraftModel"
    shares: ClassVar[Sequence[float]] = (1.0, 1.0)
    first: ClassVar[int] = 1

    block_size: int = option(8, "B: places of a block, which predicts B-1 tokens", low=2)
    conv_kernel_size: int = option(2, "places that a convolution reads", low=1)
    conv_group_size: int = option(16, "channels that share a dynamic kernel", low=1)
    selector_rank: int = option(256, "rank of the selector", low=1)
    selector_top_k: int = option(16, "candidates of a place", low=1)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("cross_entropy", "selector")

    def settings(self, special: Special, taps: Sequence[int]) -> Mapping[str, Any]:
        own = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        nested = {"target_layer_ids": taps, "mask_token_id": special.mask}
        return {"dflash_config": nested | {name: getattr(self, name) for name in own}}

    def attach(self, model: Model, special: Special) -> None:
        super().attach(model, special)
        with torch.no_grad():
            for name, parameter in model.draft.named_parameters():
                if "conv." in name or "successor_codebook" in name:
                    parameter.zero_()
                if name.endswith("base_kernel"):
                    parameter[:, 0] = 1

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        hidden, before = self.block_hidden(model, states, batch), batch.ids.flatten()[batch.predictor]
        head, selector = model.get_output_embeddings().weight, model.draft.candidate_selector
        state = selector.start(hidden[None])
        yield HeadInput(
            slice(None), hidden, head, choose=lambda logits, at: selector(logits, before[at], hidden[at], state)[0]
        )

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        return {name.replace("_codebook.weight", "_codebook"): tensor for name, tensor in super().detach(model).items()}

    def losses(self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None = None) -> Losses:
        (inputs,) = self.head_inputs(model, states, batch, None)

        def terms(logits: Tensor, at: slice) -> Tensor:
            """Return the cross-entropy of the logits, and of the selector's scores, (n, 2)."""
            assert inputs.choose is not None
            both = (logits, inputs.choose(logits, at))
            losses = torch.stack([cross_entropy(one, batch.target[at], reduction="none") for one in both], 1)
            return losses.masked_fill(losses.isposinf(), 0)  # of a target that is no candidate

        return chunked_losses(terms, inputs, batch.weight)
