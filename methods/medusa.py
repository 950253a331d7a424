"""Medusa: heads on the target's last hidden state guess the tokens behind the next, as a chain or a tree.

Cai et al.: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, arXiv
2401.10774, sections 2.1.1 and 2.1.2. Head k reads what the LM head read at the last accepted token, and guesses the
token k places behind the one that the LM head said. The tree is the Cartesian product of each head's first choices; the
longest path through it that is the target's own choice is kept. Heads are trained by `mtbench train medusa` and stand
beside the checkpoint. Of the prompt nothing was read, so that a row's first forward guesses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from mtbench.decoding import trees
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models import sampling
from mtbench.models.families import RANDOM, locate
from mtbench.models.loading import Checkpoint, Inspected
from mtbench.models.medusa_heads import ResidualHead
from mtbench.options import option

HEADS = "medusa.safetensors"  # beside the model's own weights
PARTS = 3  # tensors of each: hidden.weight, hidden.bias, head
_heads: WeakKeyDictionary[Checkpoint, list[ResidualHead]] = WeakKeyDictionary()


@METHODS.register("medusa")
@dataclass(frozen=True, kw_only=True)
class Medusa(Method):
    """Heads of its own guess what comes behind the next token."""

    heads: int = option(4, "K: heads that guess, one token further each", low=1, trained=True)
    tree: str = option("1", "choices of each head, such as 3x2; of the heads it leaves out, 1: a chain")

    roles = ("medusa",)
    claims = "lossless"

    def __post_init__(self) -> None:
        named = self.tree.split("x")
        if not all(part.isdecimal() and int(part) for part in named) or len(named) > self.heads:
            raise UserError(
                f"medusa: tree={self.tree!r} is not allowed; tree is numbers of choices of up to {self.heads} heads "
                "with an x between, such as 3x2. See `mtbench ls methods`."
            )

    @property
    def branches(self) -> list[int]:
        """Choices of each head."""
        named = [int(part) for part in self.tree.split("x")]
        return named + [1] * (self.heads - len(named))

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        checkpoint = next(iter(checkpoints.values()))
        source = checkpoint.source
        with safe_open(_file(source, checkpoint.offline), "pt") as file:
            trained = len(file.keys()) // PARTS
        if trained < self.heads:
            raise UserError(
                f"medusa: heads={self.heads}, and checkpoint {source!r} has {trained}; say `heads={trained}`, or train "
                "more with `mtbench train medusa`."
            )

    def window(self) -> Window:
        offset, sees = trees.tree(trees.products(self.branches))
        commits = self.heads + 1
        return Window(pending=1, guesses=len(offset), commits=commits, sees=sees, offset=offset, hidden=True)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """What the LM head `read` at the last accepted token (R, C), if it `has`; what guesses stand behind (R, G)."""
        head = _load(runners.target.checkpoint)[0].head
        return {
            "read": head.new_zeros(len(rows.known), head.shape[1]),
            "has": torch.zeros_like(rows.done),
            "behind": torch.tensor(trees.products(self.branches), device=head.device).expand(len(rows.known), -1),
        }

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        checkpoint = runners.target.checkpoint
        heads = _load(checkpoint)[: self.heads]

        def candidates(hidden: Tensor) -> Tensor:
            logits = torch.stack([head(hidden) @ head.head.T for head in heads], 1)  # (R, K, V)
            logits.index_fill_(2, checkpoint.suppressed, float("-inf"))
            if rows.temperature:
                places = rows.known[:, None] + torch.arange(self.heads, device=hidden.device)
                logits = sampling.sampled(logits, rows.temperature, rows.seed, places)
            return logits.topk(max(self.branches), 2).indices

        likely, guesses, nodes = runners.target.run_heads(candidates, state["read"]), [], 1
        for head, choices in enumerate(self.branches):
            guesses.append(likely[:, head, :choices].repeat(1, nodes))
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


def _file(source: str, offline: bool) -> str:
    """Where a checkpoint's heads are. Raises UserError if it has none."""
    try:
        if source.startswith(RANDOM):
            raise OSError("random weights have none")
        return str(cached_file(locate(source), HEADS, local_files_only=offline))
    except OSError:
        raise UserError(
            f"medusa needs heads, and checkpoint {source!r} has no {HEADS}; make it with `mtbench train medusa --base "
            f"{source}`, and give the new folder with `--checkpoint medusa=PATH`."
        ) from None


def _load(checkpoint: Checkpoint) -> list[ResidualHead]:
    """A checkpoint's heads, on its device and in its type; read once."""
    if checkpoint not in _heads:
        weight = checkpoint.model.get_output_embeddings().weight
        file = _file(checkpoint.source, offline=True)  # planning has fetched it
        tensors = {name: tensor.to(weight) for name, tensor in load_file(file).items()}
        heads = [ResidualHead(tensors[f"{k}.head"]) for k in range(len(tensors) // PARTS)]
        torch.nn.ModuleList(heads).load_state_dict(tensors)
        _heads[checkpoint] = heads
    return _heads[checkpoint]
