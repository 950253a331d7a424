"""Medusa: heads on the target's last hidden state predict the tokens after the next one, as a chain or a tree.

Cai et al.: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, arXiv
2401.10774, sections 2.1.1 and 2.1.2. Head k reads the LM head's input at the last accepted token, and predicts the
token k positions after the one that the LM head predicts. The tree is the Cartesian product of each head's top choices;
the longest path that equals the target's own choices is accepted. `mtbench train medusa` trains the heads and stores
them beside the checkpoint. Prefill stores no hidden states, so a row's first forward has no guesses.

R = rows, K = heads, G = guesses, V = vocabulary, C = hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models import sampling
from mtbench.models.loading import Inspected
from mtbench.models.medusa_heads import count_heads, load_heads
from mtbench.options import option


@METHODS.register("medusa")
@dataclass(frozen=True, kw_only=True)
class Medusa(Method):
    """Extra heads predict the tokens after the next one."""

    heads: int = option(4, "K: heads; each predicts one token further", low=1, high=64, trained=True)
    tree: str = option("1", "top choices of each head, such as 3x2; 1 if not listed; `1` is a chain")

    roles = ("medusa",)
    claims = "lossless"

    def __post_init__(self) -> None:
        named = self.tree.split("x")
        if not all(part.isdecimal() and int(part) for part in named) or len(named) > self.heads:
            raise UserError(
                f"medusa: tree={self.tree!r} is not allowed; give the numbers of choices of up to {self.heads} heads, "
                "separated by x, such as 3x2. See `mtbench ls methods`."
            )

    @property
    def branches(self) -> list[int]:
        """Number of choices of each head."""
        named = [int(part) for part in self.tree.split("x")]
        return named + [1] * (self.heads - len(named))

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
        return Window(pending=1, guesses=len(offset), commits=commits, sees=sees, offset=offset, hidden=True)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`read` (R, C): the LM head's input at the last accepted token, if it `has` one; `behind` (R, G): parents."""
        head = load_heads(runners.target.checkpoint)[0].head
        return {
            "read": head.new_zeros(len(rows.known), head.shape[1]),
            "has": torch.zeros_like(rows.done),
            "behind": torch.tensor(trees.products(self.branches), device=head.device).expand(len(rows.known), -1),
        }

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        suppressed = runners.target.checkpoint.suppressed
        heads = load_heads(runners.target.checkpoint)[: self.heads]

        def candidates(hidden: Tensor) -> Tensor:
            """Return each head's top choices, (R, C) to (R, K, most choices)."""
            logits = torch.stack([head(hidden) @ head.head.T for head in heads], 1)  # (R, K, V)
            logits.index_fill_(2, suppressed, float("-inf"))
            if rows.temperature:
                places = rows.known[:, None] + torch.arange(self.heads, device=hidden.device)
                logits = sampling.sampled(logits, rows.temperature, rows.seed, places)
            return logits.topk(max(self.branches), 2).indices

        top, guesses, nodes = runners.target.run_heads(candidates, state["read"]), [], 1
        for head, choices in enumerate(self.branches):
            guesses.append(top[:, head, :choices].repeat(1, nodes))
            nodes *= choices
        return torch.cat(guesses, 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        assert output.hidden is not None
        has = state["has"].clone()
        drafts = output.guess.masked_fill(~has[:, None], NONE)
        accepted, path = trees.longest(output.agrees(drafts, state["behind"]), self.branches)
        columns = torch.cat((torch.zeros_like(path[:, :1]), path + 1), 1)
        last = columns.gather(1, accepted[:, None])
        state["read"].copy_(output.hidden.take_along_dim(last[..., None], 1)[:, 0])
        state["has"].fill_(True)
        moved = path if max(self.branches) > 1 else None
        return Commit(output.choice.gather(1, columns), accepted + 1, accepted, moved, offered=has * self.heads)
