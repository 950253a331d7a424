"""Medusa: heads on the target's last hidden state predict the tokens after the next one, as a chain or a tree.

Cai et al.: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, arXiv
2401.10774, sections 2.1.1 and 2.1.2. Head k reads the LM head's input at the position before the last decided token,
and predicts the token k positions after the last decided one. The tree is the Cartesian product of each head's top
choices, or the likeliest prefixes; the longest path that equals the target's own choices is accepted. `mtbench train
medusa` trains the heads and stores them beside the checkpoint.

R = rows, K = heads, G = guesses, V = vocabulary, C = hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.draft_trees import DraftTree, parse_tree
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import Guesses
from mtbench.decoding.verification import TREE, verify_tree
from mtbench.errors import UserError
from mtbench.models.loading import Inspected
from mtbench.models.medusa_heads import count_heads, load_heads
from mtbench.options import option


@METHODS.register("medusa")
@dataclass(frozen=True, kw_only=True)
class Medusa(Method):
    """Extra heads predict the tokens after the next one."""

    heads: int = option(4, "K: heads; each predicts one token further", low=1, high=64, trained=True)
    tree: str = option("1", TREE)

    title = "Medusa"
    roles = ("medusa",)
    claims = "lossless"
    choices = ("medusa:tree=1|3x2",)

    def __post_init__(self) -> None:
        parse_tree(self.tree, self.heads, f"{self.name}: tree={self.tree!r}")

    def new_tree(self) -> DraftTree:
        """Return the tree of a step, without guesses yet."""
        return parse_tree(self.tree, self.heads)

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        target = next(iter(checkpoints.values()))
        trained = count_heads(target.source, target.offline)
        if trained < self.heads:
            raise UserError(
                f"medusa: heads={self.heads}, but checkpoint {target.source!r} has {trained}; use `heads={trained}`, "
                "or train more with `mtbench train medusa`."
            )

    def window(self) -> Window:
        return self.new_tree().window

    def taps(self, runners: ModelRunners) -> list[int]:
        return [runners.target.model.config.get_text_config().num_hidden_layers]

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        load_heads(runners.target.checkpoint)
        return {}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | Guesses:
        suppressed = runners.target.checkpoint.suppressed
        heads = load_heads(runners.target.checkpoint)[: self.heads]

        def guesses(hidden: Tensor) -> Tensor | Guesses:
            """Return the guesses by hidden states (R, C)."""
            logits = torch.stack([head(hidden) @ head.head.T for head in heads], 1)  # (R, K, V)
            logits.index_fill_(2, suppressed, float("-inf"))
            places = rows.known[:, None] + torch.arange(self.heads, device=hidden.device)
            return self.new_tree().at_once(rows.unfiltered, logits, places)

        read = runners.target.cache.features(self.taps(runners), (rows.known[:, None] - 2).clamp(min=0))[:, 0]
        return runners.target.run_heads(guesses, read)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        has = rows.known >= 2  # a prompt of one token has no hidden state before its last token
        drafts = output.guess.masked_fill(~has[:, None], NONE)
        tree = self.new_tree()
        tokens, accepted, path = verify_tree(output, drafts, tree.depth)
        return Commit(tokens, accepted + 1, accepted, None if tree.chain else path, offered=has * output.depth)
