"""EAGLE against plain Python: drafts of every format, their trees, their cache, and each trap planted as a fault."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from decoding_cases import (
    BUDGET,
    PROMPTS,
    ar,
    decode_prompts,
)
from eagle_cases import FORMATS, Pair, eagle, make_pair
from thinned import one_in
from torch import Tensor

from mtbench.decoding import feature_drafting
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.errors import UserError
from mtbench.models.drafts import eagle_draft, loading
from mtbench.models.feature_draft import DraftRunner
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan

SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {  # options, and the choices at each depth
    "chain": ({}, [1, 1, 1, 1]),
    "tree": ({"ahead": 3, "tree": "3x3x2"}, [3, 3, 2]),
    "late tree": ({"ahead": 3, "tree": "1x2x2"}, [1, 2, 2]),
}
CHAIN, TREE = SHAPES["chain"][0], SHAPES["tree"][0]
OPTIONS = [{"ahead": 1}, {"ahead": 7}, {"ahead": "auto"}, *(options for options, _ in SHAPES.values())]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A target and a draft in a format."""
    return cache(lambda name: make_pair(tmp_path_factory.mktemp("pair"), FORMATS[name]))


@pytest.fixture(scope="module")
def pair(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("specforge")


def says(pair: Pair, options: dict[str, Any], **how: Any) -> list[tuple[list[int], Any]]:
    got, _ = decode_prompts(eagle(**options), pair.runners(), PROMPTS, BUDGET, **how)
    return [(g.token_ids, g.commits) for g in got]


def wants(pair: Pair, choices: list[int]) -> list[tuple[list[int], list[int]]]:
    return [pair.reference.decode(prompt, choices) for prompt in PROMPTS]


@pytest.mark.parametrize(("form", "shape"), one_in(2, product(FORMATS, SHAPES)))
def test_a_draft_says_what_plain_python_says(pairs: Callable[[str], Pair], form: str, shape: str) -> None:
    """Tokens and commits, from hidden states that transformers gives, everything recomputed for every token."""
    options, choices = SHAPES[shape]
    want = wants(pairs(form), choices)
    assert says(pairs(form), options) == want
    assert {1, 2, 3} <= {n for _, commits in want for n in commits}


@contextmanager
def forgetting() -> Iterator[None]:
    """Configurations read before and within are read again."""
    loading._draft_config.cache_clear()
    yield
    loading._draft_config.cache_clear()


Patch = pytest.MonkeyPatch


def shifted_ids(patch: Patch) -> None:
    """The other meaning of a layer's number."""
    right = eagle_draft._ids
    patch.setattr(eagle_draft, "_ids", lambda value, shift: right(value, 1 - shift)[: len(value)])


def shifted_defaults(patch: Patch) -> None:
    """Outputs of the default layers, not inputs."""
    right = DraftRunner.__init__

    def made(self: DraftRunner, *arguments: Any) -> None:
        right(self, *arguments)
        self.taps = tuple(tap + 1 for tap in self.taps)

    patch.setattr(DraftRunner, "__init__", made)


def other_order(patch: Patch) -> None:
    """Hidden states in the order of their layers, not in that of the configuration."""
    patch.setattr(
        DraftRunner, "read", lambda self, slots, rows=None: self.target.cache.features(sorted(self.taps), slots, rows)
    )


def flipped(name: str) -> Callable[[Patch], None]:
    """A flag of the configuration, the other way round."""

    def plant(patch: Patch) -> None:
        right = eagle_draft.EagleDraft.__init__

        def made(self: Any, config: Any, target: Any) -> None:
            right(self, replace(config, **{name: not getattr(config, name)}), target)

        patch.setattr(eagle_draft.EagleDraft, "__init__", made)

    return plant


def unnormed(patch: Patch) -> None:
    patch.setattr(eagle_draft.EagleDraft, "_normed", lambda self, features: features)


def own_token(patch: Patch) -> None:
    """The feature of a position with the token there, not the one after it."""
    patch.setattr(DraftRunner, "following", lambda self, tokens, slots: tokens.gather(1, slots))


def stale_cache(patch: Patch) -> None:
    """Entries from the draft's own features stay; only the last decided position is fed anew."""
    right = feature_drafting.new_entries

    def lazy(runner: Any, runners: Any, rows: Any, cached: Tensor) -> Any:
        torch.maximum(cached, rows.known - 2, out=cached)
        return right(runner, runners, rows, cached)

    patch.setattr(feature_drafting, "new_entries", lazy)


def no_prefill(patch: Patch) -> None:
    patch.setattr(DraftRunner, "feed", lambda *_: None)


def unmapped(patch: Patch) -> None:
    """Ids of the cut vocabulary taken for the target's."""
    right = eagle_draft.EagleDraft.logits

    def logits(self: Any, read: Tensor) -> Tensor:
        kept, self.d2t = self.d2t, None if self.d2t is None else torch.zeros_like(self.d2t)
        out = right(self, read)
        self.d2t = kept
        return out

    patch.setattr(eagle_draft.EagleDraft, "logits", logits)


def shifted_rotary(patch: Patch) -> None:
    """Own features at the position of the token, not at that of the feature."""
    right = eagle_draft.EagleDraft.forward

    def forward(self: Any, ids: Any, features: Any, metadata: Any, cache: Any, judged: int, own: bool) -> Any:
        rotary = self.rotary_emb.forward
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.rotary_emb, "forward", lambda x, positions: rotary(x, positions + own))
            return right(self, ids, features, metadata, cache, judged, own)

    patch.setattr(eagle_draft.EagleDraft, "forward", forward)


def other_parents(patch: Patch) -> None:
    """A guess of a tree reads the feature of another guess than its parent."""
    right = Tensor.repeat_interleave
    patch.setattr(Tensor, "repeat_interleave", lambda self, n, dim: right(self, n, dim).flip(dim))


def blind_tree(patch: Patch) -> None:
    """Guesses of a tree see all guesses before them."""
    right = feature_drafting.levels

    def blind(*how: Any) -> list[feature_drafting.Level]:
        levels = right(*how)
        return [level._replace(sees=None if level.sees is None else torch.ones_like(level.sees)) for level in levels]

    patch.setattr(feature_drafting, "levels", blind)


FAULTS: list[tuple[str, str, Callable[[Patch], None]]] = [  # format, shape, what is wrong
    ("specforge", "chain", shifted_defaults),
    ("specforge", "chain", other_order),
    ("specforge 3.1", "chain", shifted_ids),
    ("deepspec", "chain", shifted_ids),
    ("specforge", "chain", flipped("feedback_normed")),
    ("specforge 3.1", "chain", flipped("feedback_normed")),
    ("speculators", "chain", flipped("residual_normed")),
    ("specforge", "chain", flipped("residual_normed")),
    ("speculators", "chain", unnormed),
    ("specforge 3.1", "chain", unnormed),
    ("specforge", "chain", own_token),
    ("specforge", "chain", stale_cache),
    ("specforge", "tree", stale_cache),
    ("speculators", "chain", no_prefill),
    ("deepspec", "chain", no_prefill),
    ("specforge 3.1", "chain", no_prefill),
    ("speculators", "chain", unmapped),
    ("deepspec", "chain", shifted_rotary),
    ("deepspec", "tree", other_parents),
    ("deepspec", "tree", blind_tree),
]


@pytest.mark.parametrize(
    ("form", "shape", "plant"), [pytest.param(*fault, id=f"{i} {fault[0]}") for i, fault in enumerate(FAULTS)]
)
@pytest.mark.slow
def test_a_trap_is_noticed(
    pairs: Callable[[str], Pair], form: str, shape: str, plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """Every trap changes what is drafted, and nothing that is said."""
    options, choices = SHAPES[shape]
    want = wants(pairs(form), choices)
    with forgetting(), monkeypatch.context() as patch:
        plant(patch)
        got = says(pairs(form), options)
    assert got != want
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


def test_layers_of_speculators_are_those_whose_input_is_read(pairs: Callable[[str], Pair], monkeypatch: Patch) -> None:
    """Read as the other formats', its numbers would be beyond this target."""
    shifted_ids(monkeypatch)
    with forgetting(), pytest.raises(ValueError, match="reads the inputs of layers 1, 2, 3, and the target has 3"):
        pairs("speculators").runners()


def test_a_single_token_has_no_entry_yet(pair: Pair) -> None:
    """Its first drafts come from zeros, in a refilled row too, and leave no entry."""
    prompts = [[5, 9, 1, 7, 2], [3], [3]]
    got, _ = decode_prompts(eagle(), pair.runners(), prompts, BUDGET, rows=1)
    want = [pair.reference.decode(prompt, [1] * 4) for prompt in prompts]
    assert [(g.token_ids, g.commits) for g in got] == want


def test_in_a_step_of_any_width_no_entry_is_left_out(pair: Pair) -> None:
    """A narrow step after a wide one feeds all that the wide one committed, on a GPU too."""
    runners, seen = pair.runners(), []
    right = runners["eagle"].step  # type: ignore[attr-defined]

    def spy(ids: Tensor, features: Tensor, metadata: Any, judged: int, *, own: bool = False) -> Any:
        seen.append((own, ids.shape[1]))
        return right(ids, features, metadata, judged, own=own)

    runners["eagle"].step = spy  # type: ignore[attr-defined]
    with torch.inference_mode():
        decode_prompts(eagle(ahead="auto"), runners, PROMPTS, BUDGET, make=lambda *how: Batch(*how, tight=False))
    assert {width for own, width in seen[1:] if not own} == {8}


def test_forwards_and_memory_of_the_draft_are_counted(pair: Pair) -> None:
    """K forwards of the draft for each of the target; keys, values and features beside the target's cache."""
    got, timing = decode_prompts(eagle(ahead=3), pair.runners(), PROMPTS, BUDGET, ignore_eos=True)
    assert all(g.draft_forwards == 3 * (g.forwards or 0) for g in got)
    plain = decode_prompts(ar(), ModelRunners("any", {"any": pair.target}), PROMPTS, BUDGET, ignore_eos=True)[1]
    slots, rows = max(map(len, PROMPTS)) + BUDGET, len(PROMPTS)
    target_slot = (plain.kv_bytes or 0) // (rows * slots)
    # The draft's own keys and values (2 heads of 8), and three hidden states of width 32, in float64.
    assert timing.kv_bytes == (target_slot + 2 * 2 * 8 * 8 + 3 * 32 * 8) * rows * (slots + 3)
    window: Any = eagle(ahead=3).window()
    assert (window.drafts, window.guesses, window.commits) == (3, 3, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tree=2x2,verify=rejection", r"verify=rejection needs a chain, and tree=2x2 is none"),
        ("tree=2x2,ahead=auto", r"ahead=auto needs a chain, and tree=2x2 is none"),
        ("ahead=1,tree=2x2", r"up to 1 depths"),
        ("tree=0x2", r"tree='0x2' is not allowed"),
        ("tree=" + "9" * 5000, r"is not allowed; give the numbers of choices"),
        ("ahead=1000000000", r"feeds 1,000,000,000 guesses in a forward, and at most 2,048 are allowed"),
        ("draft=draft", r"in role 'draft' is a whole model \(qwen2\), and a draft that drafts token by token"),
        ("draft=nobody", r"has no checkpoint in the role 'nobody'"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(options: str, said: str) -> None:
    """At planning, before a model is loaded."""
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(method=[f"eagle:{options}"], limit=2, device="cpu"))


@pytest.mark.parametrize("method", ["speculative:draft=eagle", "hf-generate:draft=eagle", "speculative:draft=dflash"])
def test_a_draft_on_features_cannot_stand_for_a_whole_model(method: str) -> None:
    with pytest.raises(UserError, match="which reads the target's hidden states, and a whole model is needed"):
        make_plan(RunRequest(method=[method], limit=2, device="cpu"))
