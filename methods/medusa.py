"""Medusa: heads on the target's last hidden state predict the tokens after the next one, as a chain or a tree.

Cai et al.: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, arXiv
2401.10774, sections 2.1.1 and 2.1.2. Head k reads the LM head's input at the position before the last decided token,
and predicts the token k positions after the last decided one. The tree is the Cartesian product of each head's top
choices; the longest path that equals the target's own choices is accepted. `mtbench train medusa` trains the heads and
stores them beside the checkpoint.

R = rows, K = heads, G = guesses, V = vocabulary, C = hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import verify_tree
from mtbench.errors import UserError
from mtbench.models.loading import Inspected
from mtbench.models.medusa_heads import count_heads, load_heads
from mtbench.options import option


@METHODS.register("medusa")
@dataclass(frozen=True, kw_only=True)
class Medusa(Method):
    """Extra heads predict the tokens after the next one."""

    heads: int = option(4, "K: heads; each predicts one token further", low=1, high=64, trained=True)
    tree: str = option("1", "top choices of each head, such as 3x2; 1 if not listed; `1` is a chain")

    title = "Medusa"
    roles = ("medusa",)
    claims = "lossless"
    choices = ("medusa:tree=1|3x2",)

    def __post_init__(self) -> None:
        trees.parse_branches(self.tree, self.heads, f"{self.name}: tree={self.tree!r}")

    @property
    def branches(self) -> list[int]:
        """Number of choices of each head."""
        return trees.parse_branches(self.tree, self.heads)

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        target = next(iter(checkpoints.values()))
        trained = count_heads(target.source, target.offline)
        if trained < self.heads:
            raise UserError(
                f"medusa: heads={self.heads}, but checkpoint {target.source!r} has {trained}; use `heads={trained}`, "
                "or train more with `mtbench train medusa`."
            )

    def window(self) -> Window:
        offset, sees = trees.tree(trees.products(self.branches))
        commits = self.heads + 1
        return Window(pending=1, guesses=len(offset), commits=commits, sees=sees, offset=offset)

    def taps(self, runners: ModelRunners) -> list[int]:
        return [runners.target.model.config.get_text_config().num_hidden_layers]

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`behind` (R, G): parents of the guesses."""
        load_heads(runners.target.checkpoint)
        parents = torch.tensor(trees.products(self.branches), device=rows.known.device)
        return {"behind": parents.expand(len(rows.known), -1)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        suppressed = runners.target.checkpoint.suppressed
        heads = load_heads(runners.target.checkpoint)[: self.heads]

        def candidates(hidden: Tensor) -> Tensor:
            """Return each head's top choices, (R, C) to (R, K, most choices)."""
            logits = torch.stack([head(hidden) @ head.head.T for head in heads], 1)  # (R, K, V)
            logits.index_fill_(2, suppressed, float("-inf"))
            places = rows.known[:, None] + torch.arange(self.heads, device=hidden.device)
            return rows.unfiltered.best(logits, places, max(self.branches))

        read = runners.target.cache.features(self.taps(runners), (rows.known[:, None] - 2).clamp(min=0))[:, 0]
        return trees.same_children(runners.target.run_heads(candidates, read), self.branches)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        has = rows.known >= 2  # a prompt of one token has no hidden state before its last token
        drafts = output.guess.masked_fill(~has[:, None], NONE)
        tokens, accepted, path = verify_tree(output, drafts, state["behind"], self.branches)
        moved = path if max(self.branches) > 1 else None
        return Commit(tokens, accepted + 1, accepted, moved, offered=has * self.heads)
