"""P-EAGLE against plain Python: all drafts of one forward, in both layouts."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from decoding_cases import BUDGET, BUDGETS, MANY, PROMPTS, READ_LAG, decode_prompts
from eagle_cases import Pair, eagle
from parallel_eagle_cases import FORMATS, make_pair
from thinned import one_in
from torch import Tensor

from mtbench.decoding import feature_drafting
from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.method import ModelRunners, Rows
from mtbench.decoding.registry import METHODS

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A target and a draft in a layout."""
    return cache(lambda name: make_pair(tmp_path_factory.mktemp("pair"), FORMATS[name]))


@pytest.fixture(scope="module")
def pair(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("peagle")


class Forward(NamedTuple):
    """What a row drafted in one forward."""

    text: list[int]
    logits: Tensor  # (K, V)


class Watched:
    """Decodes, and keeps what each row drafted and what its cache held of it."""

    def __init__(self, pair: Pair, options: dict[str, Any], patch: Patch, **how: Any) -> None:
        self.runners, self.forwards = pair.runners(), list[Forward]()
        self.reference: Any = pair.reference
        self.off = 0.0  # the farthest that keys and values of final entries were from those written out
        right = feature_drafting.draft_tree

        def drafting(runners: ModelRunners, role: str, rows: Rows, cached: Tensor, branches: Any) -> Any:
            before = cached.clone()
            drafted = right(runners, role, rows, cached, branches)
            for row in (~rows.done).nonzero().flatten().tolist():
                text = rows.tokens[row, : int(rows.known[row])].tolist()
                self.forwards.append(Forward(text, drafted.logits[row].clone()))
                self.check_cache(row, text, int(before[row]))
            return drafted

        with patch.context() as inner:
            inner.setattr(f"{METHODS['eagle'].__module__}.draft_tree", drafting)
            prompts, budget = how.pop("prompts", PROMPTS), how.pop("budget", BUDGET)
            got, self.timing = decode_prompts(eagle(**options), self.runners, prompts, budget, **how)
        self.generations, self.said = got, [(g.token_ids, g.commits) for g in got]

    def check_cache(self, row: int, text: list[int], before: int) -> None:
        """Entries up to the text's end are those written out: what masks left there was overwritten."""
        assert before <= len(text) - 1
        if len(text) == 1:
            return
        kept = self.reference.layers(self.reference.final(text))[1]
        cache = self.runners["eagle"].cache
        for index, (key, value) in enumerate(kept):
            for ours, theirs in zip(cache.view(index), (key, value), strict=True):
                found = ours[row].transpose(0, 1)[: len(text) - 1]
                self.off = max(self.off, float((found - theirs).abs().max()))


@pytest.mark.parametrize(
    ("how", "form"), one_in(2, product([{"rows": 2}, {"rows": 2, "make": READ_LAG}, {}], FORMATS)), ids=str
)
def test_logits_and_cache_of_every_forward_are_those_written_out(
    pairs: Callable[[str], Pair], form: str, how: dict[str, Any], monkeypatch: Patch
) -> None:
    """After each verification, in rows of different lengths that are refilled, also in the shapes of a GPU."""
    pair = pairs(form)
    watched = Watched(pair, {}, monkeypatch, prompts=MANY[:5], budget=BUDGETS, **how)
    check_logits(watched, pair.reference)
    assert watched.off < 1e-5
    assert len(watched.forwards) > 25


def check_logits(watched: Watched, reference: Any) -> None:
    for text, logits in watched.forwards:
        torch.testing.assert_close(logits, reference.drafted(text, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("options", "width"), [({}, 4), ({"ahead": 3, "tree": "3x3x2"}, 3), ({"ahead": 7}, 7)])
def test_one_forward_drafts_all(pair: Pair, options: dict[str, Any], width: int, monkeypatch: Patch) -> None:
    """It is counted as one, and the cost of a width that `ahead=auto` chooses by has one, too."""
    watched = Watched(pair, options, monkeypatch, ignore_eos=True)
    assert all(g.draft_forwards == g.forwards for g in watched.generations)
    assert {len(forward.logits) for forward in watched.forwards} == {width}
    windows = [variant.window() for variant in eagle(ahead="auto").variants]
    widths = Widths(windows, None, 1, torch.device("cpu"))
    widths.set_costs(watched.runners.target, watched.runners)
    share = watched.runners["eagle"].model.num_parameters() / watched.runners.target.model.num_parameters()
    torch.testing.assert_close(widths.cost - 1 - widths.fed / 24, torch.full((4,), share))


def test_a_prompt_of_one_token_drafts_from_zeros_and_masks_after_them(pair: Pair, monkeypatch: Patch) -> None:
    """In a refilled row, too; nothing of it stays."""
    watched = Watched(pair, {}, monkeypatch, prompts=[[5, 9, 1, 7, 2], [3], [3]], rows=1)
    assert [text for text, _ in watched.forwards if len(text) == 1] == [[3], [3]]
    check_logits(watched, pair.reference)
    assert watched.off < 1e-5
