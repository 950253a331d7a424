"""A draft model predicts the tokens that speculative decoding verifies.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al.,
arXiv 2302.01318. A model that was trained with mask tokens drafts several tokens in a forward: MARS (arXiv 2604.07023,
table 6), or PARD (arXiv 2504.18583), whose config.json names the mask token in `pard_token`. The draft model has its
own KV cache. The cursor `cached` in the method's state counts the decided tokens in it. The loop caches the prompt
except its last token, as for the target.

R = rows, K = drafts, M = drafts per forward of the draft model, V = the target's vocabulary.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtbench.decoding.method import ModelRunners, Rows
from mtbench.errors import UserError
from mtbench.models import vocabularies
from mtbench.models.attention import AttentionMetadata
from mtbench.models.feature_draft import DraftConfig
from mtbench.models.loading import Inspected

PerForward = int | Literal["all"]
PER_FORWARD = "drafts per forward of the draft model; above 1 it must be a MARS or PARD model; all: K"  # help
Vocabulary = Literal["same", "intersection"]
VOCABULARY = "token ids of the draft: the target's, or other ones; it then drafts the tokens that both have"


def refuse_other_models(checkpoints: Mapping[str, Inspected], role: str, vocabulary: Vocabulary = "same") -> None:
    """Raise UserError unless the checkpoint in a role is a whole model that can read every token of the target."""
    config, target = checkpoints[role].config, next(iter(checkpoints.values()))
    if isinstance(config, DraftConfig):
        raise UserError(
            f"checkpoint {checkpoints[role].source!r} in role {role!r} is {config.name}, which reads the target's "
            f"hidden states, and a whole model is needed; name one with `--checkpoint {role}=PATH_OR_ID`. See "
            "`mtbench ls methods`."
        )
    if vocabulary == "intersection":
        _refuse_intersection(checkpoints[role], target, role)
        return
    rows = checkpoints[role].vocabulary
    if checkpoints[role] is not target and rows <= target.largest_id:
        raise UserError(
            f"checkpoint {checkpoints[role].source!r} in role {role!r} has {rows:,} embedding rows, and "
            f"{target.source!r} emits token ids up to {target.largest_id:,}; name a draft with its vocabulary by "
            f"`--checkpoint {role}=PATH_OR_ID`."
        )
    if (other := vocabularies.other_token(target.tokenizer, checkpoints[role].tokenizer)) is not None:
        raise UserError(
            f"checkpoint {checkpoints[role].source!r} in role {role!r} has other token ids than {target.source!r}, as "
            f"of {other!r:.60}; name a draft with its vocabulary by `--checkpoint {role}=PATH_OR_ID`, or give "
            "`vocabulary=intersection` to a method that has it (`mtbench ls methods`)."
        )


def _refuse_intersection(draft: Inspected, target: Inspected, role: str) -> None:
    """Raise UserError for a draft that has the target's vocabulary, or no token of it."""
    if not vocabularies.differ(target, draft):
        raise UserError(
            f"checkpoint {draft.source!r} in role {role!r} has the token ids of {target.source!r}; leave "
            "`vocabulary=intersection` out."
        )
    if not vocabularies.shared_by(target, draft):
        raise UserError(
            f"checkpoint {draft.source!r} in role {role!r} has no token with the bytes of one of {target.source!r}; "
            f"name another draft by `--checkpoint {role}=PATH_OR_ID`."
        )


def refuse_draft(
    checkpoints: Mapping[str, Inspected], role: str, per_forward: PerForward, vocabulary: Vocabulary = "same"
) -> None:
    """Raise UserError if the checkpoint in a role cannot draft `per_forward` tokens in one forward."""
    refuse_other_models(checkpoints, role, vocabulary)
    checkpoint = checkpoints[role]
    if per_forward == 1:
        return
    if checkpoint.mask_id is None:
        reason = "has no mask token"
    elif not checkpoint.feeds_masks:
        reason = f"was trained by {checkpoint.objective!r}, which feeds no mask tokens"
    elif per_forward == "all" and not checkpoint.declares_masks:
        reason = "does not say that it was trained with some (a `pard_token` in config.json, or a training record)"
    else:
        return
    raise UserError(
        f"per_forward={per_forward} needs mask tokens, and {checkpoint.source!r} in role {role!r} {reason}; name a "
        "MARS or PARD draft, such as `draft=draft_mars`, or leave per_forward at 1."
    )


def at_once(ahead: int, per_forward: PerForward) -> int:
    """Return how many of `ahead` tokens the draft model drafts in a forward."""
    return ahead if per_forward == "all" else min(per_forward, ahead)


def forwards(ahead: int, per_forward: PerForward) -> int:
    """Return the number of forwards that the draft model needs for `ahead` tokens."""
    return -(-ahead // at_once(ahead, per_forward))


class Drafted(NamedTuple):
    """Draft tokens and the logits that they were chosen from."""

    tokens: Tensor  # (R, K)
    logits: Tensor  # (R, K, V)


def draft(
    runners: ModelRunners,
    role: str,
    rows: Rows,
    cached: Tensor,
    ahead: int,
    per_forward: PerForward = 1,
    behind: int = 0,
) -> Drafted:
    """Draft the next `ahead` tokens with the model in `role`, `per_forward` at a time; move its cursor `cached` (R,).

    In each forward the last token predicts the first draft; masks after it predict the others. The next step writes
    over the keys of masks, as of drafts: what was accepted is fed again. The draft model chooses tokens like the target
    (`Rows.choose`), with the same random numbers. A method that commits more than the accepted drafts and the next
    token must lower `cached` to the end of the accepted drafts. `behind`: tokens that it may commit after those.
    """
    runner, tokens = runners[role], rows.tokens
    each, before = at_once(ahead, per_forward), at_once(runners.commits - 1, per_forward)
    known = runner.length(tokens, rows.known, ahead)
    torch.minimum(cached, runner.length(tokens, rows.known - 1, ahead + 1), out=cached)
    pending = int((known - cached).max()) if runners.tight else before + runner.longest + behind
    view = int(known.max()) + ahead if runners.tight else runner.cache.slots
    arange = torch.arange(max(pending, each), device=known.device)
    slots = torch.maximum(known[:, None] + arange[:pending] - pending, cached[:, None])
    ids = runner.text(tokens, slots)
    drafts: list[Tensor] = []
    logits: list[Tensor] = []
    for begin in range(0, ahead, each):
        drafted = begin + arange[: min(each, ahead - begin)]
        places = known[:, None] + drafted
        masks = places[:, :-1]
        if masks.shape[1]:
            assert runner.checkpoint.mask_id is not None, "planning refuses a draft without one"
            ids = torch.cat((ids, torch.full_like(masks, runner.checkpoint.mask_id)), 1)
        fed = torch.cat((slots, masks), 1)
        metadata = AttentionMetadata(fed, fed, known, view)
        out = runner.forward(ids, metadata, judged=places.shape[1]).logits
        logits.append(out[..., : runners.target.checkpoint.vocabulary])
        drafts.append(rows.choose(logits[-1], rows.known[:, None] + drafted))
        slots, ids = places, runner.own(drafts[-1])
    cached.copy_(known + begin)
    return Drafted(torch.cat(drafts, 1), torch.cat(logits, 1))
