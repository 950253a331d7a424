"""Trees of guesses: the parents and ancestors of each guess equal those of a plain walk up to the root."""

from typing import Any

import naive
import pytest
import torch
from hypothesis import given, strategies

from mtbench.decoding.trees import ROOT, Guesses, best, chain, longest, tree, with_masks


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
    offset, sees = with_masks(*tree(chain(drafts)), masks)
    assert len(offset) == drafts + (drafts + 1) * masks
    for group in range(drafts + 1):
        for mask in range(masks):
            guess = drafts + group * masks + mask
            own = range(drafts + group * masks, guess + 1)
            assert sees[guess].nonzero().flatten().tolist() == [*range(group), *own]
            assert offset[guess] == group + mask


@given(strategies.lists(strategies.integers(0, 100), min_size=1, max_size=12), strategies.randoms())
def test_the_longest_path_contains_only_guesses_that_agree(seeds: list[int], random: Any) -> None:
    """All paths are enumerated: none has more correct guesses, and the returned path begins with as many.

    In a tree for all rows and in trees by row, to any depth that is asked for.
    """
    parents = [[random.randrange(-1, i) for i in range(len(seeds))] for _ in range(3)]
    parents[0] = [seed % (i + 1) - 1 for i, seed in enumerate(seeds)]
    agrees = [[random.random() < 0.6 for _ in seeds] for _ in parents]
    depth = 1 + max(int(tree(of)[0].max()) for of in parents)
    own = torch.stack([tree(of)[1] for of in parents])
    for sees, trees in ((own, parents), (own[0], [parents[0]] * 3)):
        accepted, paths = longest(torch.tensor(agrees), sees, depth)
        for right, most, path, of in zip(agrees, accepted.tolist(), paths.tolist(), trees, strict=True):
            ways: dict[int, list[int]] = {ROOT: []}
            for guess, parent in enumerate(of):
                ways[guess] = [*ways[parent], guess]
            correct = [way for way in ways.values() if all(right[guess] for guess in way)]
            assert path[:most] in correct
            assert most == max(map(len, correct))
            assert all(place <= guess < len(seeds) for place, guess in enumerate(path))  # `KVCache.move` needs it
            assert path == sorted(path)


# Trees of the likeliest prefixes.


def prefixes(guesses: Guesses, row: int) -> list[tuple[int, ...]]:
    """The prefixes of a row's guesses, by what each sees, in order; and nothing else is wrong with the tree."""
    ids, sees, offset = (tensor[row] for tensor in guesses)
    found = [tuple(ids[seen].tolist()) for seen in sees]
    assert [len(path) - 1 for path in found] == offset.tolist()
    for guess, seen in enumerate(sees):  # its parent comes before, and sees what it sees but itself
        *ancestors, own = seen.nonzero().flatten().tolist()
        assert own == guess
        assert not ancestors or sees[ancestors[-1]].nonzero().flatten().tolist() == ancestors
    return found


def test_the_likeliest_prefixes_are_those_of_a_heap() -> None:
    """On 1,000 random distributions, flat and steep, in order; each has its parent before it."""
    chance = torch.Generator().manual_seed(0)
    steep = 4 * torch.rand(1000, 4, 1, generator=chance)
    log_p = (steep * torch.randn(1000, 4, 6, generator=chance)).double().log_softmax(-1)
    top = log_p.topk(6)
    found = best(top.indices, top.values, 7)
    for row, each in enumerate(log_p.tolist()):
        want = naive.likeliest_prefixes(lambda path: each[len(path)], 4, 7)  # noqa: B023
        assert prefixes(found, row) == want


@pytest.mark.parametrize("nodes", [1, 3, 50])
@pytest.mark.parametrize("chances", [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5], [float("nan")] * 2])
def test_a_tree_is_whole_whatever_the_probabilities(chances: list[float], nodes: int) -> None:
    """A child of probability 1 ties with its parent; tokens may be impossible, too few, or no numbers."""
    log_p = torch.tensor([chances]).log().expand(2, 3, -1)
    found = best(torch.arange(2).expand(2, 3, -1), log_p, nodes)
    assert found.ids.shape == (2, nodes)
    for row in range(2):
        paths = prefixes(found, row)
        possible = [path for path in paths if all(chances[token] > 0 for token in path)]
        assert len(set(possible)) == min(nodes, sum(sum(p > 0 for p in chances) ** depth for depth in (1, 2, 3)))
