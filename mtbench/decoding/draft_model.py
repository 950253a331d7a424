"""A second lane runs ahead of the decided tokens: what speculative decoding verifies.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al.,
arXiv 2302.01318. A draft lane has the cache of its own; how much of it stands on decided tokens is a cursor in the
method's state, `cached`: the loop caches the prompt but for its last token, as for the target.

R = rows, K = drafts, M = drafts per forward of the draft lane, V = vocabulary, as far as the target has it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.decoding.method import ModelRunners, Rows
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.loading import Inspected


def refuse_draft(checkpoints: Mapping[str, Inspected], role: str, per_forward: int) -> None:
    """Raise UserError if the checkpoint in a role cannot draft so many tokens in a forward."""
    if per_forward > 1 and checkpoints[role].mask_id is None:
        raise UserError(
            f"per_forward={per_forward} drafts by masks, and {checkpoints[role].source!r} in the role {role!r} has no "
            "mask token; name a MARS draft, such as `draft=draft_mars`, or leave per_forward at 1."
        )
    if per_forward > 1 and not checkpoints[role].feeds_masks:
        raise UserError(
            f"per_forward={per_forward} drafts by masks, and {checkpoints[role].source!r} in the role {role!r} was "
            f"trained by {checkpoints[role].objective!r}, which feeds none; name a MARS draft, such as "
            "`draft=draft_mars`, or leave per_forward at 1."
        )


def forwards(ahead: int, per_forward: int) -> int:
    """Of the draft lane, for so many tokens."""
    return -(-ahead // per_forward)


class Drafted(NamedTuple):
    """What a lane guesses to come next, and how it came to that."""

    tokens: Tensor  # (R, K)
    logits: Tensor  # (R, K, V)


def draft(
    runners: ModelRunners, role: str, rows: Rows, cached: Tensor, ahead: int, per_forward: int = 1, behind: int = 0
) -> Drafted:
    """The next `ahead` tokens by the lane `role`, `per_forward` of them at a time; moves its cursor `cached` (R,).

    Of those of one forward the first is predicted by the last token, the others by masks behind it, as models trained
    like MARS can (arXiv 2604.07023, table 6). Every lane chooses as the target does (`Rows.choose`), by the same dice.
    The method has yet to bring `cached` down to what it accepts. `behind`: tokens it may commit behind accepted drafts
    and the next token.
    """
    runner, known = runners[role], rows.known[:, None]
    torch.minimum(cached, rows.known - 1, out=cached)
    pending = int((rows.known - cached).max()) if runners.tight else per_forward + 1 + behind
    arange = torch.arange(max(pending, per_forward), device=known.device)
    slots = torch.maximum(known + arange[:pending] - pending, cached[:, None])
    ids = rows.tokens.gather(1, slots)
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for begin in range(0, ahead, per_forward):
        places = known + begin + arange[: min(per_forward, ahead - begin)]
        masks = places[:, :-1]
        if masks.shape[1]:
            assert runner.checkpoint.mask_id is not None, "planning refuses a draft without one"
            ids = torch.cat((ids, torch.full_like(masks, runner.checkpoint.mask_id)), 1)
        fed = torch.cat((slots, masks), 1)
        metadata = AttentionMetadata(fed, fed, rows.known, runners.view)
        out = runner.forward(ids, metadata, judged=places.shape[1]).logits
        logits.append(out[..., : runners.target.checkpoint.vocabulary])
        tokens.append(rows.choose(logits[-1], places))
        slots, ids = places, tokens[-1]
    cached.copy_(rows.known + begin)
    return Drafted(torch.cat(tokens, 1), torch.cat(logits, 1))
