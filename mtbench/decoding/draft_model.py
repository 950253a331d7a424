"""A draft model predicts the tokens that speculative decoding verifies.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al.,
arXiv 2302.01318. The draft model has its own KV cache. The cursor `cached` in the method's state counts the decided
tokens in it. The loop caches the prompt except its last token, as for the target.

R = rows, K = drafts, M = drafts per forward of the draft model, V = the target's vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.decoding.method import ModelRunners, Rows
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.feature_draft import DraftConfig
from mtbench.models.loading import Inspected


def refuse_other_models(checkpoints: Mapping[str, Inspected], role: str) -> None:
    """Raise UserError unless the checkpoint in a role is a whole model that can read every token of the target."""
    config, target = checkpoints[role].config, next(iter(checkpoints.values()))
    if isinstance(config, DraftConfig):
        raise UserError(
            f"checkpoint {checkpoints[role].source!r} in role {role!r} is {config.name}, which reads the target's "
            f"hidden states, and a whole model is needed; name one with `--checkpoint {role}=PATH_OR_ID`. See "
            "`mtbench ls methods`."
        )
    rows = checkpoints[role].vocabulary
    if checkpoints[role] is not target and rows <= target.largest_id:
        raise UserError(
            f"checkpoint {checkpoints[role].source!r} in role {role!r} has {rows:,} embedding rows, and "
            f"{target.source!r} emits token ids up to {target.largest_id:,}; name a draft with its vocabulary by "
            f"`--checkpoint {role}=PATH_OR_ID`."
        )


def refuse_draft(checkpoints: Mapping[str, Inspected], role: str, per_forward: int) -> None:
    """Raise UserError if the checkpoint in a role cannot draft `per_forward` tokens in one forward."""
    refuse_other_models(checkpoints, role)
    checkpoint = checkpoints[role]
    if per_forward == 1 or (checkpoint.mask_id is not None and checkpoint.feeds_masks):
        return
    reason = "has no mask token"
    if checkpoint.mask_id is not None:
        reason = f"was trained by {checkpoint.objective!r}, which feeds no mask tokens"
    raise UserError(
        f"per_forward={per_forward} needs mask tokens, and {checkpoint.source!r} in role {role!r} {reason}; name a "
        "MARS draft, such as `draft=draft_mars`, or leave per_forward at 1."
    )


def forwards(ahead: int, per_forward: int) -> int:
    """Return the number of forwards that the draft model needs for `ahead` tokens."""
    return -(-ahead // per_forward)


class Drafted(NamedTuple):
    """Draft tokens and the logits that they were chosen from."""

    tokens: Tensor  # (R, K)
    logits: Tensor  # (R, K, V)


def draft(
    runners: ModelRunners, role: str, rows: Rows, cached: Tensor, ahead: int, per_forward: int = 1, behind: int = 0
) -> Drafted:
    """Draft the next `ahead` tokens with the model in `role`, `per_forward` at a time; move its cursor `cached` (R,).

    In each forward the last token predicts the first draft; masks after it predict the others, which needs a model
    trained like MARS (arXiv 2604.07023, table 6). The draft model chooses tokens like the target (`Rows.choose`), with
    the same random numbers. The method must lower `cached` to the end of the accepted drafts. `behind`: tokens that
    the method may commit after the accepted drafts and the next token.
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
