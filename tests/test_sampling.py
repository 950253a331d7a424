"""The sampling and acceptance rules."""

from functools import partial
from itertools import product

import pytest
import torch
from chi_square import processors
from torch import Tensor

from mtbench import sampling
from mtbench.sampling import Filters, Sampling

SURE = torch.tensor([0.8, 0.1, 0.1]).log()
TORN = torch.tensor([0.45, 0.45, 0.1]).log()


@pytest.mark.parametrize(
    ("metric", "threshold", "sure", "torn"),
    [
        ("probability", 0.8, True, False),
        ("probability", 0.45, True, True),
        ("probability", 0.81, False, False),
        ("margin", 0.69, True, False),
        ("margin", 0.71, False, False),
        ("margin", 0.0, True, True),
        ("entropy", 0.64, True, False),
        ("entropy", 0.95, True, True),
    ],
)
def test_confidence_by_metric(metric: sampling.Metric, threshold: float, sure: bool, torn: bool) -> None:
    """p₁ or p₁ − p₂ at least, entropy at most the threshold; the threshold itself passes."""
    if metric != "entropy":
        threshold -= 1e-6  # the probabilities are rounded
    assert sampling.sure(torch.stack((SURE, TORN)), metric, threshold).tolist() == [sure, torn]


def test_prefix_length_counts_up_to_the_first_false() -> None:
    """A position after a rejected one is rejected too."""
    pattern = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert sampling.prefix_length(pattern).tolist() == [2, 0, 4]


def test_kept_tokens_stop_at_the_end_token_count_and_room() -> None:
    """The end token is kept and nothing after it; at most `count` and `room` tokens are kept."""
    ends = torch.zeros(10, dtype=torch.bool)
    ends[9] = True
    tokens = torch.tensor([[1, 9, 3, 9], [1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]])
    count, room = torch.tensor([4, 3, 4, 3, 4]), torch.tensor([9, 9, 9, 2, 0])
    endless = torch.zeros(5, dtype=torch.bool)
    kept, ended = sampling.keep(tokens, count, room, ends, endless)
    assert kept.tolist() == [2, 3, 1, 2, 0]
    assert ended.tolist() == [True, False, True, False, False]
    assert sampling.keep(tokens, count, room, ends, ~endless)[0].tolist() == [4, 3, 4, 2, 0]


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("offered", [0, 1])
def test_a_missing_draft_is_never_accepted_and_changes_no_distribution(offered: int, broken: bool, block: bool) -> None:
    """Behind the drafts that are offered, a token is sampled from the target's distribution as if there were none.

    A draft from a distribution that is no number, as activations that overflow give it, is missing too.
    """
    count = 4000
    q, p = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    seed, position = torch.arange(count), torch.arange(3).expand(count, -1)
    draft = sampling.choose(sampling.sampled(q.log().expand(count, 2, 3), 1.0, seed, position[:, :2]))
    among = q.repeat(count, 2, 1)
    if broken:
        among[:, offered:] = float("nan")
    said = None if broken else torch.full((count,), offered)
    tokens, accepted = sampling.rejection_sample(draft, among, p.expand(count, 3, 3), seed, position, said, block=block)
    assert int(accepted.max()) == offered
    behind = tokens[accepted == offered, offered]
    torch.testing.assert_close(behind.bincount(minlength=3) / len(behind), p.float(), atol=0.04, rtol=0)


SETTINGS = [Sampling(*each) for each in product((0.3, 1.0, 1.7), (0, 1, 5), (1.0, 0.9, 0.5, 1e-9), (0.0, 0.05))]
SETTINGS += [Sampling(1.0, top_k=100), Sampling(1.0, min_p=1.0), Sampling(0.6, 20, 0.95), Sampling(0.7, 4, 0.9, 0.3)]
EACH = 140  # rows of each of the 76 settings: 10,640


def some_rows(count: int, vocabulary: int = 40) -> Tensor:
    """Return logits (count, V) float64: random, with ties, all equal, steep, with suppressed ids, with one token."""
    noise = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.double) * 3
    kinds = [noise, noise.round(), noise.sign(), noise * 0, noise * 300, noise * 1e-9]
    kinds += [
        noise.masked_fill(noise < -1, float("-inf")),
        noise.masked_fill(noise < noise.amax(1, keepdim=True), -1e30),
    ]
    return torch.stack([kinds[n % len(kinds)][n] for n in range(count)])


def removed(logits: Tensor, settings: list[Sampling]) -> Tensor:
    """Return which tokens the filters of rows (R, V) remove, by one call, (R, V) bool; suppressed ids do not count."""
    wide = logits.double().isinf()
    by = Filters(
        top_k=torch.tensor([each.top_k for each in settings]),
        top_p=torch.tensor([each.top_p for each in settings], dtype=torch.double),
        min_p=torch.tensor([each.min_p for each in settings], dtype=torch.double),
    )
    temperature = torch.tensor([each.temperature for each in settings], dtype=torch.double)
    return sampling.filtered(logits[:, None], temperature, by)[:, 0].isinf() & ~wide


def removed_by_transformers(logits: Tensor, settings: Sampling) -> Tensor:
    """Return the same, of rows with one setting, by transformers."""
    kept: Tensor = processors(settings)(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return kept.isinf() & ~logits.isinf()


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
def test_filters_keep_the_tokens_that_those_of_transformers_keep(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all settings in one call, ties and extremes included: the same sets by its processors in float64.

    `generate` runs them in float32. Where that keeps another token, a sum or a share is within its rounding of the
    threshold. They sort by a sort that is not stable; a stable one takes its place here.
    """
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    settings = [each for each in SETTINGS for _ in range(EACH)]
    logits = some_rows(len(settings))
    got = removed(logits, settings)
    assert 0.2 < float(got.double().mean()) < 0.9
    for n, each in enumerate(SETTINGS):
        rows = logits[n * EACH : (n + 1) * EACH]
        want = removed_by_transformers(rows.to(dtype), each)
        for row, token in (want != got[n * EACH : (n + 1) * EACH]).nonzero().tolist():
            assert dtype == torch.float, (each, rows[row])
            assert at_a_threshold(rows[row], token, each), (each, rows[row], token)


def at_a_threshold(logits: Tensor, token: int, settings: Sampling, rounding: float = 1e-5) -> bool:
    """Whether rounding to float32 decides if a token is kept."""
    scaled = logits / settings.temperature
    if settings.top_k:
        k = min(settings.top_k, len(logits))
        if 0 < abs(float(scaled[token] - scaled.sort().values[-k])) < rounding * (1 + float(scaled[token].abs())):
            return True
        scaled = scaled.masked_fill(scaled < scaled.sort().values[-k], float("-inf"))
    chances = scaled.softmax(0)
    below = chances[chances < chances[token] - rounding].sum() + torch.arange(len(logits)) * chances[token]
    top_p = bool(((below + chances[token] - (1 - settings.top_p)).abs() < rounding).any())
    return top_p or abs(float(chances[token] / chances.max()) - settings.min_p) < rounding


def test_a_row_at_temperature_zero_keeps_all_and_a_row_without_filters_too() -> None:
    """Beside a row that has filters; also ids whose probability is below every float64, which top-p 1 keeps."""
    logits = torch.tensor([0.0, 1.0, 1.0, 1000.0]).expand(3, -1)
    assert removed(logits, [Sampling(0.0, 1, 0.1, 0.9), Sampling(1.0), Sampling(1.0, top_p=0.9)]).sum(1).tolist() == [
        0,
        0,
        3,
    ]


def test_logits_that_are_no_numbers_stay_so() -> None:
    """The loop must see them; the choice among them is an id of the vocabulary."""
    logits = torch.zeros(3, 1, 5)
    logits[0, 0, 2], logits[1, 0, 2] = float("nan"), float("inf")
    logits[2] = float("-inf")
    by = Filters(torch.tensor([2] * 3), torch.tensor([0.9] * 3).double(), torch.tensor([0.1] * 3).double())
    found = sampling.filtered(logits, torch.ones(3).double(), by)
    assert sampling.numbers(found)[:, 0].tolist() == [False, False, True]
