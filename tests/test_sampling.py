"""The sampling and acceptance rules."""

import pytest
import torch

from mtbench import sampling

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
