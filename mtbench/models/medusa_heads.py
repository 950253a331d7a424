"""The prediction heads of Medusa-1 (arXiv 2401.10774, section 2.1.1). Training fits them, decoding runs them.

n = positions, C = hidden size, V = vocabulary.
"""

from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from mtbench.errors import UserError, first_line
from mtbench.models.families import RANDOM, locate
from mtbench.models.loading import Checkpoint

HEADS = "medusa.safetensors"  # beside the model's own weights
PARTS = 3  # tensors of each head: hidden.weight, hidden.bias, head


class ResidualHead(torch.nn.Module):
    """One head of Medusa-1: a residual block x + silu(Wx + b) and a projection `head` (V, C).

    W and b start at zero and `head` as a copy of the target's LM head, so it starts with the target's logits.
    """

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(head.shape[1], head.shape[1], dtype=head.dtype, device=head.device)
        torch.nn.init.zeros_(self.hidden.weight)
        torch.nn.init.zeros_(self.hidden.bias)
        self.head = torch.nn.Parameter(head.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the residual block's output, (n, C) to (n, C); the caller applies `head`."""
        return hidden + torch.nn.functional.silu(self.hidden(hidden))


_loaded: WeakKeyDictionary[Checkpoint, list[ResidualHead]] = WeakKeyDictionary()


def count_heads(source: str, offline: bool) -> int:
    """Return how many heads a checkpoint has. Raises UserError if it has none."""
    file = _file(source, offline)
    try:
        with safe_open(file, "pt") as heads:
            return len(heads.keys()) // PARTS
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not a safetensors file: {first_line(error)}; train the heads again.") from None


def load_heads(checkpoint: Checkpoint) -> list[ResidualHead]:
    """Return a checkpoint's heads on its device and in its dtype; they are read once."""
    if checkpoint not in _loaded:
        weight = checkpoint.model.get_output_embeddings().weight
        file = _file(checkpoint.source, offline=True)  # planning has fetched it
        tensors = {name: tensor.to(weight) for name, tensor in load_file(file).items()}
        try:
            heads = [ResidualHead(tensors[f"{k}.head"]) for k in range(len(tensors) // PARTS)]
            torch.nn.ModuleList(heads).load_state_dict(tensors)
        except (KeyError, IndexError, RuntimeError) as error:
            raise UserError(f"{file} holds no heads of this model ({first_line(error)}); train them again.") from None
        _loaded[checkpoint] = heads
    return _loaded[checkpoint]


def _file(source: str, offline: bool) -> str:
    try:
        if source.startswith(RANDOM):
            raise OSError("random weights have none")
        return str(cached_file(locate(source), HEADS, local_files_only=offline))
    except OSError:
        raise UserError(
            f"medusa needs heads, and checkpoint {source!r} has no {HEADS}; make it with `mtbench train medusa --base "
            f"{source}`, and give the new folder with `--checkpoint medusa=PATH`."
        ) from None
