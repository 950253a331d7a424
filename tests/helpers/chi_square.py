"""Whether sampled texts have a distribution: by chi-square, and models small enough that it takes many texts.

V = tokens of such a model; it emits the ids 0 … V−1.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from small import VOCABULARY, ScriptedModel, small_checkpoint, small_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from mtbench.decoding.method import ModelRunners
from mtbench.models.loading import prepare
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling


class MarkovModel(ScriptedModel):
    """Predicts the next token from the last one, by a table of probabilities (V, V)."""

    def __init__(self, table: Tensor, size: int) -> None:
        """`size`: what counts as its number of parameters."""
        super().__init__(torch.zeros(0), torch.zeros(0))
        self.size = size
        tokens = len(table)
        self.table = torch.full((VOCABULARY, VOCABULARY), float("-inf"), dtype=torch.double)
        self.table[:tokens, :tokens] = table.log()
        self.table[tokens:, 0] = 0.0

    def num_parameters(self) -> int:
        return self.size

    def forward(self, position_ids: Tensor, logits_to_keep: int, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[given["input_ids"][:, -logits_to_keep:]])


def markov_pair(seed: int, tokens: int, spread: float = 1.0) -> tuple[Tensor, ModelRunners]:
    """Return the target's table (V, V), and runners of a target and of a draft that agree partly."""
    noise = torch.Generator().manual_seed(seed)
    common = torch.randn(tokens, tokens, generator=noise, dtype=torch.double)
    tables = [(common + spread * torch.randn(common.shape, generator=noise).double()).softmax(1) for _ in range(2)]
    models = [MarkovModel(table, size) for table, size in zip(tables, (1000, 1), strict=True)]
    target, draft = (ModelRunner(prepare(model, small_tokenizer(), source="made")) for model in models)
    return tables[0], ModelRunners("any", {"any": target, "draft": draft})


class Fit(NamedTuple):
    """A chi-square test of counts: the statistic, its degrees of freedom, and the chance of so large a one."""

    statistic: float
    freedom: int
    p: float


def fit(counts: Tensor, expected: Tensor) -> Fit:
    """Test counts by Pearson's chi-square. What is expected less than 5 times is pooled."""
    often = expected >= 5
    seen, wanted = (torch.cat((x[often], x[~often].sum()[None])) for x in (counts, expected))
    statistic, freedom = float(((seen - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()), int(often.sum())
    if often.all():
        freedom -= 1  # nothing is pooled
    p = torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double())
    return Fit(statistic, freedom, float(p))


def numbers(texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Return the number of each text of ids 0 … `tokens`−1, all of a length, in `exact_law`'s order."""
    places = tokens ** torch.arange(len(texts[0]) - 1, -1, -1)
    return (torch.tensor(texts) * places).sum(1)


@cache
def processors(settings: Sampling) -> LogitsProcessorList:
    """Return the processors by which transformers' `generate` draws, in its order."""
    config = GenerationConfig(do_sample=True, **asdict(settings))
    return small_checkpoint().model._get_logits_processor(config)


def filtered_law(logits: Tensor, settings: Sampling) -> Tensor:
    """Return the probabilities of the tokens, (R, V) float64, that transformers' `generate` draws from."""
    kept: Tensor = processors(settings)(torch.zeros(len(logits), 1, dtype=torch.long), logits.double())
    return kept.softmax(1)


def exact_law(chances: Callable[[tuple[int, ...]], Tensor], tokens: int, length: int) -> Tensor:
    """Return the probability of each text of a length, (tokens^length,). `chances`: of the token behind a text."""
    law = torch.ones(1, dtype=torch.double)
    for place in range(length):
        behind = torch.stack([chances(text) for text in product(range(tokens), repeat=place)])
        law = (law[:, None] * behind).flatten()
    return law
