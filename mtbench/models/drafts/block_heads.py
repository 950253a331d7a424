"""Heads of block drafts that choose a block's tokens one after the other: each reads the token before.

All are called alike: given the logits of a place (…, V), the token before it (…,), the place's hidden state (…, C) and
the head's state, a head returns the logits to choose from (…, V) and the next state. So a draft is sampled from
softmax(logits to choose from / T), whichever head it has. `start` returns the state before the first draft, (R, S).

R = rows, N = drafts, D = rank, S = size of the state, V = vocabulary, C = hidden size, k = candidates.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """DSpark's term of the logits by the token before: an embedding of rank D, and a product to the vocabulary."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """Return the state before the first draft, (R, S), for hidden states (R, N, C)."""
        return hidden.new_zeros(len(hidden), self.markov_w1.embedding_dim)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return logits + self.markov_w2(self.markov_w1(before)), state


class GatedMarkovHead(MarkovHead):
    """The hidden state gates the embedding of the token before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(before)
        gate = self.gate_proj(torch.cat((hidden, embedded), -1)).sigmoid()
        return logits + self.markov_w2(gate * embedded), state


class RecurrentMarkovHead(MarkovHead):
    """A recurrent state carries all tokens of the block before."""

    def __init__(self, vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.cat((state, self.markov_w1(before), hidden), -1)
        gate, candidate, output = self.joint_proj(read).chunk(3, -1)
        gate = gate.sigmoid()
        return logits + self.markov_w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


class DominoHead(nn.Module):
    """Domino's term: a GRU reads the embeddings of the tokens before, and two products its state and the hidden state.

    `embedding` returns the embedding that the draft reads.
    """

    def __init__(
        self, embedding: Callable[[], nn.Embedding], vocabulary: int, rank: int, width: int, state: int
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.prefix_gru = nn.GRUCell(width, state, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocabulary, bias=False)
        )

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.prefix_gru.hidden_size)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.prefix_gru(self.embedding()(before).flatten(0, -2), state.flatten(0, -2)).view_as(state)
        return logits + self.embed_proj(torch.cat((hidden, state), -1)), state


class CandidateSelector(nn.Module):
    """DFlash 2's head: it chooses among the k tokens of the largest logits, by these and a bilinear term.

    The term of a candidate is its successor's code times the code of the token before and the projected hidden state.
    So drafts are sampled from softmax(scores / T) over the candidates, and a rejected draft's residual is
    max(p − q, 0), where q is 0 for other tokens (`dflash` 0.1.0, model.py: `CandidateSelector`, `_rejection_sample`).
    """

    def __init__(self, vocabulary: int, rank: int, width: int, candidates: int) -> None:
        super().__init__()
        self.candidates = candidates
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), 0)

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        largest, tokens = logits.topk(self.candidates, -1)
        code = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        scores = largest + (self.successor_codebook(tokens) @ code[..., None])[..., 0]
        return torch.full_like(logits, float("-inf")).scatter(-1, tokens, scores), state


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
