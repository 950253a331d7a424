"""Draft with a model that reads the target's hidden states (mtbench/models/feature_draft.py).

The first forward of a step feeds the entries that are not final yet: positions that the target has decided since. Then
a sequential draft reads its own tokens and features, level by level of a tree of guesses; a chain is a tree whose
levels have one guess (EAGLE, arXiv 2401.15077, section 3). A parallel draft reads masks behind the final entries in the
same forward, and each mask predicts the next depth (P-EAGLE, arXiv 2602.01469); all guesses of a depth have the same
children then.

The cursor `cached` in the method's state counts the draft's final entries. Entries made of the draft's own features, or
of masks, lie behind it; the next step overwrites them. A guess for position p has its entry at p − 1.

R = rows, P = entries fed, G = guesses, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.decoding.draft_trees import DraftTree, taken
from mtbench.decoding.method import ModelRunners, Rows
from mtbench.decoding.trees import Guesses
from mtbench.errors import UnreadableCheckpoint, UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.feature_draft import DraftConfig, DraftRunner
from mtbench.models.loading import Inspected
from mtbench.models.runner import ModelRunner


def refuse_other_drafts(checkpoints: Mapping[str, Inspected], role: str, *, sequential: bool, tree: str = "1") -> None:
    """Raise UnreadableCheckpoint unless the checkpoint in a role is a draft that reads features, of this kind.

    Raises UserError if it drafts a chain only, and the `tree` is none.
    """
    config = checkpoints[role].config
    if isinstance(config, DraftConfig) and config.sequential == sequential:
        if config.modules > 1 and tree != "1":
            raise UserError(
                f"tree={tree} needs a draft of one layer, and {checkpoints[role].source!r} in role {role!r} is "
                f"{config.name}, which draft a chain; leave out tree."
            )
        return
    what = config.name if isinstance(config, DraftConfig) else f"a whole model ({config.model_type})"
    kind = "drafts token by token" if sequential else "drafts a block at once"
    raise UnreadableCheckpoint(
        f"checkpoint {checkpoints[role].source!r} in role {role!r} is {what}, and a draft that {kind} is needed; name "
        f"one with `--checkpoint {role}=PATH_OR_ID`. See `mtbench ls methods`."
    )


def draft_runner(runners: ModelRunners, role: str) -> DraftRunner:
    """Return the runner of a draft that reads features."""
    runner = runners[role]
    assert isinstance(runner, DraftRunner), "planning refuses other checkpoints"
    return runner


def first_entries(rows: Rows, runner: ModelRunner) -> Tensor:
    """Return the number of a draft's final entries after a prefill, (R,): the start of the cursor `cached`."""
    return (rows.known - runner.behind).clamp(min=0)


class Entries(NamedTuple):
    """The entries that a step makes final: what the draft reads, and in which slots."""

    ids: Tensor  # (R, P), or (R, 0) for a block draft
    features: Tensor  # (R, P, T·C)
    slots: Tensor  # (R, P), right-aligned; a short row repeats its first


def new_entries(runner: DraftRunner, runners: ModelRunners, rows: Rows, cached: Tensor) -> Entries:
    """Return the entries between `cached` (R,) and the last decided token; move the cursor behind those now final.

    Of the last ones, modules after the first read drafts in place of decided tokens: the next step makes them again.
    A prompt of a single token has no feature yet; the draft reads zeros.
    """
    last, again = rows.known[:, None] - 1, runner.modules - 1
    fed = max(1, int((last[:, 0] - cached).max())) if runners.tight else runners.commits + again
    slots = torch.maximum(last - fed + torch.arange(fed, device=last.device), cached[:, None])
    features = runner.read(slots).masked_fill((slots >= last)[..., None], 0)
    cached.copy_((last[:, 0] - again).clamp(min=0))
    return Entries(runner.following(rows.tokens, slots), features, slots)


class DraftedTree(NamedTuple):
    """The guesses of a tree, and the logits that they were chosen from."""

    tokens: Tensor | Guesses  # (R, G)
    logits: Tensor  # (R, K, V): of each guess of a chain; of a tree one for all children of a guess, or of a depth


def draft_tree(runners: ModelRunners, role: str, rows: Rows, cached: Tensor, tree: DraftTree) -> DraftedTree:
    """Draft the guesses of a tree; move the draft's cursor `cached` (R,) of final entries."""
    runner, base = draft_runner(runners, role), rows.known - 1
    if runner.parallel:
        return draft_at_once(runner, runners, rows, cached, tree)
    if runner.modules > 1:
        assert tree.chain, "modules draft a chain"
        return draft_in_turn(runner, runners, rows, cached, tree.depth)
    entries = new_entries(runner, runners, rows, cached)
    metadata = AttentionMetadata(entries.slots, entries.slots, base, runners.view)
    out = runner.step(entries.ids, entries.features, metadata, judged=1)
    logits: list[Tensor] = []
    sees = offset = None
    for depth in range(tree.depth):
        places = (rows.known[:, None] + depth).expand(-1, out.logits.shape[1])
        parents = tree.add(rows, out.logits, places)
        chosen, first = tree.tokens[-1], sum(level.shape[1] for level in tree.tokens[:-1])
        logits.append(out.logits)
        if depth + 1 < tree.depth:
            assert out.feature is not None
            if not tree.chain:  # all guesses of a level have entries, also those that the tree does not keep
                own = torch.eye(chosen.shape[1], dtype=torch.bool, device=base.device).expand(len(base), -1, -1)
                sees = own if sees is None else torch.cat((taken(sees, parents), own), 2)
                offset = torch.cat([torch.full_like(level[0], number) for number, level in enumerate(tree.tokens)])
            metadata = AttentionMetadata(
                slots=base[:, None] + first + torch.arange(chosen.shape[1], device=base.device),
                positions=(base[:, None] + depth).expand_as(chosen),
                base=base,
                view=runners.view + tree.room,
                sees=sees,
                offset=offset,
            )
            features = taken(out.feature, parents)
            out = runner.step(chosen, features, metadata, judged=chosen.shape[1], depth=depth + 1)
    return DraftedTree(tree.guesses(), torch.cat(logits, 1))


def draft_in_turn(runner: DraftRunner, runners: ModelRunners, rows: Rows, cached: Tensor, count: int) -> DraftedTree:
    """Draft a chain of `count` tokens as `draft_tree` does, by a draft of several modules, one token by each.

    Module k reads all entries of the step: at position i the token i + k + 1, decided or drafted, and the feature that
    module k - 1 returned there (arXiv 2412.19437, section 2.2). After the last module it is the turn of the first. It
    reads the tokens that were drafted, at the positions that follow, each with the feature that predicted the next.
    """
    text, base = rows.tokens.clone(), rows.known - 1
    _, features, slots = new_entries(runner, runners, rows, cached)
    guesses, logits, returned = list[Tensor](), list[Tensor](), list[Tensor]()
    for depth in range(count):
        module = depth % runner.modules
        if depth and not module:
            slots = slots[:, -1:] + torch.arange(1, runner.modules + 1, device=slots.device)
            features = torch.cat(returned[-runner.modules :], 1)
        metadata = AttentionMetadata(slots, slots, base, runners.view)
        out = runner.step(runner.following(text, slots + module), features, metadata, judged=1, depth=depth)
        assert out.feature is not None
        features = out.feature
        returned.append(features[:, -1:])
        place = rows.known[:, None] + depth
        guesses.append(rows.choose(out.logits, place))
        logits.append(out.logits)
        text.scatter_(1, place, guesses[-1])
    return DraftedTree(torch.cat(guesses, 1), torch.cat(logits, 1))


def draft_at_once(
    runner: DraftRunner, runners: ModelRunners, rows: Rows, cached: Tensor, tree: DraftTree
) -> DraftedTree:
    """Draft a tree as `draft_tree` does, in one forward of a parallel draft; the logits are those of each depth.

    The last final entry predicts the first depth, and a mask each of the others, at the positions that follow.
    """
    draft: Any = runner.draft
    entries = new_entries(runner, runners, rows, cached)
    # A prompt of one token has an entry of zeros at its place, so its masks follow that.
    first = (rows.known - 1).clamp(min=1)
    masks = first[:, None] + torch.arange(tree.depth - 1, device=first.device)
    slots = torch.cat((entries.slots, masks), 1)
    ids = torch.cat((entries.ids, torch.full_like(masks, draft.format.mask_id)), 1)
    features = torch.cat((entries.features, draft.mask_hidden.expand(*masks.shape, -1)), 1)
    metadata = AttentionMetadata(slots, slots, rows.known - 1, runners.view)
    out = runner.step(ids, features, metadata, judged=tree.depth)
    places = rows.known[:, None] + torch.arange(tree.depth, device=first.device)
    return DraftedTree(tree.at_once(rows, out.logits, places), out.logits)
