"""Trees of guesses: the parents and ancestors of each guess equal those of a plain walk up to the root."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies

from mtbench.decoding.trees import ROOT, longest, mask_groups, products, tree


@given(strategies.lists(strategies.integers(0, 100), max_size=12))
def test_a_guess_attends_to_its_ancestors_and_follows_its_parent(seeds: list[int]) -> None:
    """For any tree, depth and ancestors equal those of a walk up to the root."""
    parents = [seed % (i + 1) - 1 for i, seed in enumerate(seeds)]
    offset, sees = tree(parents)
    for guess in range(len(parents)):
        walked, at = [], guess
        while at != ROOT:
            walked.append(at)
            at = parents[at]
        assert sorted(walked) == sees[guess].nonzero().flatten().tolist()
        assert offset[guess] == len(walked) - 1


@pytest.mark.parametrize(("drafts", "masks"), [(1, 1), (3, 2), (2, 4)])
def test_group_j_continues_the_first_j_drafts(drafts: int, masks: int) -> None:
    offset, sees = tree(mask_groups(drafts, masks))
    assert len(offset) == drafts + (drafts + 1) * masks
    for group in range(drafts + 1):
        for mask in range(masks):
            guess = drafts + group * masks + mask
            own = range(drafts + group * masks, guess + 1)
            assert sees[guess].nonzero().flatten().tolist() == [*range(group), *own]
            assert offset[guess] == group + mask


@given(
    strategies.lists(strategies.integers(1, 3), min_size=1, max_size=4),
    strategies.integers(0, 5),
    strategies.randoms(use_true_random=False),
)
def test_the_longest_path_contains_only_guesses_that_agree(branches: list[int], first: int, random: Any) -> None:
    """All paths are enumerated: none has more correct guesses, and the returned path has as many."""
    parents = [parent - first if parent != ROOT else ROOT for parent in products(branches, first)]
    agrees = [[random.random() < 0.6 for _ in parents] for _ in range(3)]
    accepted, paths = longest(torch.tensor(agrees), branches)
    for right, most, path in zip(agrees, accepted.tolist(), paths.tolist(), strict=True):
        ways = [[ROOT]]
        for _ in branches:
            ways = [[*way, guess] for way in ways for guess, parent in enumerate(parents) if parent == way[-1]]
        taken = {tuple(way[1:]): [right[guess] for guess in way[1:]] for way in ways}
        lengths = {way: ([*agreed, False]).index(False) for way, agreed in taken.items()}
        assert len(path) == len(branches)
        assert lengths[tuple(path)] == most == max(lengths.values())
