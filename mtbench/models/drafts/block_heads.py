"""Heads of a block draft: a term of its logits that depends on the token before, and the chance of acceptance.

DSpark (arXiv 2607.05147, github.com/deepseek-ai/DeepSpec). The hidden states of a block are computed together, so none
of them knows which tokens the block has. A Markov head adds that: the tokens are chosen one after the other, and each
changes the logits of the next. The confidence head estimates the chance that a draft is accepted, given those before.

R = rows, K = drafts, V = vocabulary, C = hidden size, D = rank of the Markov head.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """The term of the logits by the token before: an embedding of rank D, and a product to the vocabulary."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """Return the state before the first draft, (R, D), for hidden states (R, K, C)."""
        return hidden.new_zeros(len(hidden), self.markov_w1.embedding_dim)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the term (R, V) and the next state, by the token before (R,), the hidden state (R, C), the state."""
        term: Tensor = self.markov_w2(self.markov_w1(before))
        return term, state


class GatedMarkovHead(MarkovHead):
    """The hidden state gates the embedding of the token before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(before)
        gate = self.gate_proj(torch.cat((hidden, embedded), -1)).sigmoid()
        return self.markov_w2(gate * embedded), state


class RecurrentMarkovHead(MarkovHead):
    """A recurrent state carries all tokens of the block before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.cat((state, self.markov_w1(before), hidden), -1)
        gate, candidate, output = self.joint_proj(read).chunk(3, -1)
        gate = gate.sigmoid()
        return self.markov_w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(nn.Module):
    """The chance that a draft is accepted, by its hidden state, and with a rank by the token before too."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)

    def forward(self, read: Tensor) -> Tensor:
        """Return the chances (R, K) in float32."""
        chance: Tensor = self.proj(read)[..., 0].float().sigmoid()
        return chance
