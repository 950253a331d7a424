"""DFlash, DFlash 2 and DSpark: a draft on the target's hidden states predicts a block of tokens in one forward.

Chen, Liang, Liu: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark: arXiv 2607.05147.
The forward caches the entries that are not final yet, and reads the block: the last decided token and masks
(mtbench/models/drafts/dflash.py). The block is as long as the draft was trained with, also if fewer drafts are wanted:
its positions attend to each other. DSpark and DFlash 2 choose the tokens of the block one after the other, by logits
that depend on the token before: name them by `draft=dspark` and `draft=dflash2`. DSpark adds a term; DFlash 2 scores
the likeliest tokens (mtbench/models/drafts/block_heads.py). DSpark may estimate a draft's chance of acceptance, too.

A tree takes each position's best choices. No hidden state of a block knows its tokens, so the tree is the product of
these choices, or its likeliest paths (DDTree, arXiv 2604.12989); with a head that reads the token before each guess has
children of its own.

Domino (Huang et al., arXiv 2605.29707) has a GRU over the embeddings of the tokens before as its head. JetSpec (Hu et
al., arXiv 2606.18394) has blocks with causal attention; its authors verify the likeliest paths, not a product.

`confidence` shortens a row's drafts: the first whose chance is below it and those behind it are not offered. Here the
chance is that of the confidence head (mtbench/decoding/verification.py has the rule of other drafts). It depends on the
token before the draft, not on the draft. A threshold saves no time here; an engine that packs rows would save it.

R = rows, K = drafts, D = depth of a tree, B = positions of a block, V = vocabulary, C = hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.draft_trees import Products, taken
from mtbench.decoding.feature_drafting import draft_runner, first_entries, new_entries, refuse_other_drafts
from mtbench.decoding.method import ModelRunners, Rows, State, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import Guesses
from mtbench.decoding.verification import FILTER_DRAFT, TREE, VERIFY, TreeMethod, Verify
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.drafts.dflash import BlockDraft, BlockDraftConfig
from mtbench.models.loading import Inspected
from mtbench.options import option


class Block(NamedTuple):
    """The drafts of a block, or the guesses of a tree."""

    tokens: Tensor | Guesses  # (R, K)
    logits: Tensor  # (R, K, V) that they were chosen from; of a tree one for all children of a guess, or of a depth
    sure: Tensor  # (R,) leading drafts that are likely enough to be accepted


@METHODS.register("dflash")
@dataclass(frozen=True, kw_only=True)
class DFlash(TreeMethod):
    """A draft on the target's hidden states predicts a block; the target accepts what it would have chosen itself."""

    ahead: int = option(
        7, "K: tokens drafted for each forward, at most what the draft's block predicts; depth of a tree", low=1
    )
    tree: str = option("1", TREE)
    draft: str = option("dflash", "role of the checkpoint that drafts", role=True)
    confidence: float = option(
        0.0, "least chance of acceptance of a draft that is offered, by the draft's confidence head", low=0.0, high=1.0
    )
    verify: Verify = option("match", VERIFY)
    filter_draft: bool = option(False, FILTER_DRAFT)

    title = "DFlash"
    roles = ("ar",)
    choices = ("dflash:draft=dflash|dflash2|dspark,ahead=3|7", "dflash:draft=dflash|dflash2|dspark,tree=3x2")

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_other_drafts(checkpoints, self.draft, sequential=False)
        config = checkpoints[self.draft].config
        assert isinstance(config, BlockDraftConfig)
        named = f"draft {checkpoints[self.draft].source!r} in role {self.draft!r} ({config.name})"
        if self.ahead > config.predicts:
            raise UserError(
                f"ahead={self.ahead}, but {named} predicts {config.predicts} tokens in a block; use "
                f"`ahead={config.predicts}` or less."
            )
        tree = self.new_tree()
        if config.candidates and isinstance(tree, Products) and max(tree.branches) > config.candidates:
            raise UserError(
                f"tree={self.tree} takes {max(tree.branches)} choices at a depth, and {named} has {config.candidates} "
                "candidates; take fewer."
            )
        if self.confidence and not config.confidence:
            raise UserError(
                f"confidence={self.confidence:g} needs a confidence head, and {named} has none; leave out confidence, "
                f"or name a draft that has one with `--checkpoint {self.draft}=PATH_OR_ID`."
            )

    def window(self) -> Window:
        return self.tree_window(at_once=True)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft's final entries."""
        return {"cached": first_entries(rows, runners[self.draft]), **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | Guesses:
        block = self.draft_block(self.drawing(rows), runners, state["cached"])
        self.keep_offer(state, rows, block.logits, block.sure)
        return block.tokens

    def draft_block(self, rows: Rows, runners: ModelRunners, cached: Tensor) -> Block:
        """Draft the next tokens; move the draft's cursor `cached` (R,) of final entries."""
        runner, base = draft_runner(runners, self.draft), rows.known - 1
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
        metadata = AttentionMetadata(slots, slots, base, runners.view + runner.room)
        out = runner.step(ids, entries.features, metadata, judged=self.ahead)
        assert out.feature is not None
        choose = partial(self._chosen, draft, rows, out.logits, out.feature, last)
        return runner.run_heads(choose) if draft.format.heads else choose()

    def _chosen(self, draft: BlockDraft, rows: Rows, logits: Tensor, hidden: Tensor, last: Tensor) -> Block:
        """Choose tokens from logits (R, D, V) and hidden states (R, D, C), after the `last` token (R, 1).

        A head that reads the token before each gives the logits to choose from: in a tree, those behind a parent.
        """
        places = rows.known[:, None] + torch.arange(self.ahead, device=logits.device)
        head, tree = draft.choosing_head, self.new_tree()
        if head is None:
            tokens = tree.at_once(rows, logits, places)
        else:
            before, judged, state = last, [], head.start(hidden)[:, None]
            for k in range(tree.depth):
                place, read = (x[:, k, None].expand(-1, before.shape[1], -1) for x in (logits, hidden))
                behind, state = head(place, before, read, state)
                judged.append(behind if k >= draft.format.uncorrected else place)
                state = taken(state, tree.add(rows, judged[-1], places[:, k, None].expand_as(before)))
                before = tree.tokens[-1]
            tokens, logits = tree.guesses(), torch.cat(judged, 1)
        sure = torch.full_like(rows.known, self.ahead)
        if self.confidence:
            assert isinstance(tokens, Tensor), "of a chain"
            before = torch.cat((last, tokens[:, :-1]), 1)
            sure = sampling.prefix_length(draft.chances(hidden, before) >= self.confidence)
        return Block(tokens, logits, sure)
