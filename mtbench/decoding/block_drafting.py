"""Draft with a model that predicts a block of tokens in one forward (mtbench/models/drafts/dflash.py).

The forward caches the entries that are not final yet, positions that the target has decided since, and reads the block:
the last decided token and masks. The block is as long as the draft was trained with, also if fewer drafts are wanted:
its positions attend to each other. With a Markov head (DSpark) its tokens are then chosen one after the other.

R = rows, K = drafts, B = positions of a block, V = vocabulary, C = hidden size.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.feature_drafting import draft_runner, new_entries, refuse_other_drafts
from mtbench.decoding.method import ModelRunners, Rows
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.drafts.dflash import BlockDraft, BlockDraftConfig
from mtbench.models.loading import Inspected


def refuse_other_blocks(checkpoints: Mapping[str, Inspected], role: str, ahead: int, confidence: float) -> None:
    """Raise UserError unless the checkpoint in a role drafts blocks of so many tokens, and can say how sure it is."""
    refuse_other_drafts(checkpoints, role, sequential=False)
    source, config = checkpoints[role].source, checkpoints[role].config
    assert isinstance(config, BlockDraftConfig)
    if ahead > config.predicts:
        raise UserError(
            f"ahead={ahead}, but draft {source!r} in role {role!r} ({config.name}) predicts {config.predicts} tokens "
            f"in a block; use `ahead={config.predicts}` or less."
        )
    if confidence and not config.confidence:
        raise UserError(
            f"confidence={confidence:g} needs a confidence head, and draft {source!r} in role {role!r} "
            f"({config.name}) has none; leave out confidence, or name a draft that has one with "
            f"`--checkpoint {role}=PATH_OR_ID`."
        )


class Block(NamedTuple):
    """The drafts of a block."""

    tokens: Tensor  # (R, K)
    logits: Tensor  # (R, K, V) that they were chosen from
    sure: Tensor  # (R,) leading drafts that are likely enough to be accepted


def draft_block(
    runners: ModelRunners, role: str, rows: Rows, cached: Tensor, ahead: int, confidence: float = 0.0
) -> Block:
    """Draft the next `ahead` tokens with the model in `role`; move its cursor `cached` (R,) of final entries.

    `confidence`: the least chance of acceptance of a sure draft; 0: all are sure.
    """
    runner, base = draft_runner(runners, role), rows.known - 1
    draft = runner.draft
    assert isinstance(draft, BlockDraft), "planning refuses other drafts"
    size, mask = draft.format.block, draft.format.mask_id
    entries = new_entries(runner, runners, rows, cached)
    anchor = base[:, None]
    # A row without a new entry, such as a prompt of one token, writes a slot that nothing sees.
    context = torch.where(entries.slots < anchor, entries.slots, anchor + size)
    slots = torch.cat((context, anchor + torch.arange(size, device=base.device)), 1)
    last = rows.tokens.gather(1, anchor)
    ids = torch.cat((last, torch.full_like(last, mask).expand(-1, size - 1)), 1)
    metadata = AttentionMetadata(slots, slots, base, runners.view + runner.room, sees=_everything(size, base.device))
    out = runner.step(ids, entries.features, metadata, judged=ahead)
    assert out.feature is not None
    choose = partial(_chosen, draft, rows, out.logits, out.feature, last, confidence)
    return runner.run_heads(choose) if draft.format.heads else choose()


@cache
def _everything(size: int, device: torch.device) -> Tensor:
    """Return that each position of a block sees the whole block. Made once, as tensors of windows are."""
    return torch.ones(size, size, dtype=torch.bool, device=device)


def _chosen(draft: BlockDraft, rows: Rows, logits: Tensor, hidden: Tensor, last: Tensor, confidence: float) -> Block:
    """Choose the tokens of a block from logits (R, K, V) and hidden states (R, K, C), after the `last` token (R, 1)."""
    places = rows.known[:, None] + torch.arange(logits.shape[1], device=logits.device)
    if draft.format.markov is None:
        tokens = rows.choose(logits, places)
    else:
        tokens, logits = _chosen_in_turn(draft, rows, logits, hidden, last, places)
    sure = torch.full_like(rows.known, logits.shape[1])
    if confidence:
        before = torch.cat((last, tokens[:, :-1]), 1)
        sure = sampling.prefix_length(draft.chances(hidden, before) >= confidence)
    return Block(tokens, logits, sure)


def _chosen_in_turn(
    draft: BlockDraft, rows: Rows, logits: Tensor, hidden: Tensor, last: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens (R, K), each chosen with the Markov head's term by the token before it, and those logits."""
    tokens, judged, state = [last], [], draft.markov_head.start(hidden)
    for k in range(logits.shape[1]):
        term, state = draft.markov_head(tokens[-1][:, 0], hidden[:, k], state)
        judged.append((logits[:, k] + term)[:, None])
        tokens.append(rows.choose(judged[-1], places[:, k : k + 1]))
    return torch.cat(tokens[1:], 1), torch.cat(judged, 1)
