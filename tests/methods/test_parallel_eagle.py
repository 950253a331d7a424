"""P-EAGLE against plain Python: all drafts of one forward, in both layouts, and each trap planted as a fault."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from decoding_cases import BUDGET, BUDGETS, MANY, PROMPTS, READ_LAG, ar, decode_prompts, run
from eagle_cases import Pair, eagle
from parallel_eagle_cases import FORMATS, OTHER, ParallelReference, make_pair
from thinned import one_in
from torch import Tensor

from mtbench.decoding import feature_drafting
from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.method import ModelRunners, Rows
from mtbench.decoding.registry import METHODS
from mtbench.models.attention import AttentionMetadata
from mtbench.models.drafts import eagle_draft, loading
from mtbench.models.feature_draft import DraftRunner

SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {  # options, and the choices at each depth
    **{f"chain of {k}": ({"ahead": k}, [1] * k) for k in (1, 2, 4, 7)},
    "tree": ({"ahead": 3, "tree": "3x3x2"}, [3, 3, 2]),
}
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


@pytest.mark.parametrize(("form", "shape"), one_in(2, product(FORMATS, SHAPES)))
def test_a_draft_says_what_plain_python_says(pairs: Callable[[str], Pair], form: str, shape: str) -> None:
    """Tokens and commits, from hidden states that transformers gives, everything recomputed for every forward."""
    options, choices = SHAPES[shape]
    got, _ = decode_prompts(eagle(**options), pairs(form).runners(), PROMPTS, BUDGET)
    want = [pairs(form).reference.decode(prompt, choices) for prompt in PROMPTS]
    assert [(g.token_ids, g.commits) for g in got] == want
    assert {1, 2} <= {n for _, commits in want for n in commits}


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


@pytest.mark.parametrize(("ahead", "size"), one_in(3, product([1, 2, 4, 7], [1, 3, 5, 16])))
def test_tokens_are_those_of_plain_decoding_at_every_batch_size(pair: Pair, ahead: int, size: int) -> None:
    prompts = [[(7 * i + j) % 30 for j in range(1 + 5 * i % 11)] for i in range(size)]
    want = run(ar(), pair.target, prompts, 12)
    got, _ = decode_prompts(eagle(ahead=ahead), pair.runners(), prompts, 12)
    assert [g.token_ids for g in got] == [g.token_ids for g in want]


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


def resting_positions(patch: Patch) -> None:
    """All masks have the position of the first."""
    right = AttentionMetadata

    def resting(slots: Tensor, positions: Tensor, base: Tensor, *how: Any, **named: Any) -> Any:
        return right(slots, torch.minimum(positions, base.clamp(min=1)[:, None]), base, *how, **named)

    patch.setattr(feature_drafting, "AttentionMetadata", resting)


def earlier_positions(patch: Patch) -> None:
    """The first mask has the position of the last entry."""
    right = AttentionMetadata

    def earlier(slots: Tensor, positions: Tensor, base: Tensor, *how: Any, **named: Any) -> Any:
        return right(slots, positions - (positions >= base[:, None]).long(), base, *how, **named)

    patch.setattr(feature_drafting, "AttentionMetadata", earlier)


def kept_masks(patch: Patch) -> None:
    """Entries of masks count as final: tokens accepted in their places are not fed anew."""
    right = feature_drafting.new_entries

    def kept(runner: Any, runners: Any, rows: Rows, cached: Tensor) -> Any:
        torch.maximum(cached, rows.known - 2, out=cached)
        return right(runner, runners, rows, cached)

    patch.setattr(feature_drafting, "new_entries", kept)


def late_mask(patch: Patch) -> None:
    """`mask_hidden` takes the place of the projected feature, not of the hidden states (its first part is read)."""
    right = eagle_draft.EagleDraft.advance

    def advance(self: Any, ids: Tensor, features: Tensor, metadata: Any, cache: Any, judged: int, own: bool) -> Any:
        masked = (features == self.mask_hidden).all(-1, keepdim=True)
        feature = self.fc(self._normed(features))
        feature = torch.where(masked, self.mask_hidden[..., : feature.shape[2]], feature)
        return right(self, ids, feature, metadata, cache, judged, True)

    patch.setattr(eagle_draft.EagleDraft, "advance", advance)


def unnormed_mask(patch: Patch) -> None:
    """The norm before the projection leaves `mask_hidden` out."""
    right = eagle_draft.EagleDraft._normed

    def normed(self: Any, features: Tensor) -> Tensor:
        masked = (features == self.mask_hidden).all(-1, keepdim=True)
        return torch.where(masked, features, right(self, features))

    patch.setattr(eagle_draft.EagleDraft, "_normed", normed)


def other_token(patch: Patch) -> None:
    """The masks have another token than config.json names."""
    right = eagle_draft._mask_id
    patch.setattr(eagle_draft, "_mask_id", lambda *raw, needed: None if right(*raw, needed=needed) is None else OTHER)


def last_token(patch: Patch) -> None:
    """The masks have the last decided token."""
    right = DraftRunner.step

    def step(self: DraftRunner, ids: Tensor, features: Tensor, metadata: Any, judged: int, **how: Any) -> Any:
        shown = torch.where(ids.eq(self.draft.format.mask_id or 0), ids[:, -judged, None], ids) if judged else ids
        return right(self, shown, features, metadata, judged, **how)

    patch.setattr(DraftRunner, "step", step)


def short_layers(patch: Patch) -> None:
    """A later layer gets the last positions only, so that its cache lacks the others."""
    right = eagle_draft.EagleLayer.forward

    def forward(self: Any, embedding: Tensor, feature: Tensor, rotary: Any, metadata: Any, cache: Any, n: int) -> Any:
        if self.hidden_norm is None and 0 < n < feature.shape[1]:
            feature = torch.cat((torch.zeros_like(feature[:, :-n]), feature[:, -n:]), 1)
        return right(self, embedding, feature, rotary, metadata, cache, n)

    patch.setattr(eagle_draft.EagleLayer, "forward", forward)


def both_ways(patch: Patch) -> None:
    """Masks see each other both ways, as in DFlash."""
    right = AttentionMetadata

    def open_block(slots: Tensor, positions: Tensor, base: Tensor, view: int) -> Any:
        ahead = int((slots >= base.clamp(min=1)[:, None]).sum(1).max())
        return right(slots, positions, base, view, sees=torch.ones(ahead, ahead, dtype=torch.bool) if ahead else None)

    patch.setattr(feature_drafting, "AttentionMetadata", open_block)


FAULTS = [resting_positions, kept_masks, late_mask, other_token]
MORE = [earlier_positions, unnormed_mask, last_token, short_layers, both_ways]


@pytest.mark.parametrize(
    "plant",
    [*FAULTS, *(pytest.param(plant, marks=pytest.mark.slow) for plant in MORE)],
    ids=lambda plant: plant.__name__,
)
def test_a_trap_is_noticed(pair: Pair, plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Every trap changes the drafts of a later forward, or the cache, and nothing that is said."""
    prompts, reference = [PROMPTS[1], PROMPTS[3]], pair.reference
    assert isinstance(reference, ParallelReference)
    decoded = partial(Watched, pair, {}, monkeypatch, prompts=prompts, budget=10)
    right = decoded()
    check_logits(right, reference)
    loading._draft_config.cache_clear()  # configurations are read again
    with monkeypatch.context() as patch:
        plant(patch)
        wrong = decoded()
    loading._draft_config.cache_clear()
    with pytest.raises(AssertionError):
        check_logits(wrong, reference)
    assert [g.token_ids for g in wrong.generations] == [g.token_ids for g in right.generations]
