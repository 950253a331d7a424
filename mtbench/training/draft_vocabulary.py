"""The trimmed vocabulary of a draft: the tokens most frequent in the answers that it learns.

Zhao et al.: "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", arXiv
2502.14856; EAGLE-3 (arXiv 2503.01840) calls it `draft_vocab_size`. A draft then computes fewer logits; a token outside
is never drafted, and costs a forward of the target. A draft that was trained without one gets a token map.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.files import refuse_existing
from mtbench.models import token_map
from mtbench.models.loading import inspect
from mtbench.training.conversations import prepare
from mtbench.training.packing import Examples

LONGEST = 1 << 20  # tokens of a conversation that are counted


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


def write_token_map(base: str, data: Sequence[str], out: Path, *, size: int, offline: bool = False) -> float:
    """Write the `size` ids most frequent in the answers of `data` to `out`; return the share of them that it covers.

    `base`: the checkpoint whose tokenizer reads the answers. Raises UserError for a suite: a map that knows what is
    measured would be too good.
    """
    refuse_existing(out)
    if suites := [name for name in data if name.partition(":")[0] in SUITES]:
        raise UserError(
            f"--data {suites[0]} is a suite, and a token map comes from other texts; give a file of answers."
        )
    found = inspect(base, offline=offline)
    read = prepare(data, None, found.tokenizer, max_length=LONGEST, seed=0, options=None, offline=offline)
    examples = read.examples
    ids = most_frequent(examples, size, found.vocabulary)
    token_map.write(out, ids.tolist())
    return coverage(ids, examples, found.vocabulary)
