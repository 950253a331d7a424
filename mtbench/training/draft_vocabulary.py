"""The trimmed vocabulary of a draft: the tokens most frequent in the answers that it learns.

Zhao et al.: "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", arXiv
2502.14856; EAGLE-3 (arXiv 2503.01840) calls it `draft_vocab_size`. A draft then computes fewer logits; a token outside
is never drafted, and costs a forward of the target.
"""

import torch
from torch import Tensor

from mtbench.errors import UserError
from mtbench.training.packing import Examples


def answer_counts(examples: Examples, vocabulary: int) -> Tensor:
    """Return how often each token id is in the answers, (V,)."""
    tokens = examples.lengths - examples.prompts
    first = (examples.starts + examples.prompts).repeat_interleave(tokens)
    before = (tokens.cumsum(0) - tokens).repeat_interleave(tokens)
    place = torch.arange(len(first), device=first.device) - before  # in its answer
    return torch.bincount(examples.ids[first + place].long(), minlength=vocabulary)


def most_frequent(examples: Examples | None, count: int, vocabulary: int) -> Tensor:
    """Return the `count` ids most frequent in the answers, (count,), ascending; of equally frequent ones the lowest.

    Without examples all are equally frequent. Raises UserError if there are not more ids than `count`.
    """
    if count >= vocabulary:
        raise UserError(
            f"a draft vocabulary of {count:,} leaves nothing out of {vocabulary:,} tokens; give a smaller one, or none."
        )
    if examples is None:
        return torch.arange(count)
    ranked = answer_counts(examples, vocabulary).sort(descending=True, stable=True).indices
    return ranked[:count].sort().values


def coverage(ids: Tensor, examples: Examples, vocabulary: int) -> float:
    """Return the share of the answers' tokens that are among `ids`; NaN if there are none."""
    counts = answer_counts(examples, vocabulary)
    return float(counts[ids.cpu()].sum() / counts.sum())
