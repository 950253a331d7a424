"""Speculation against plain decoding: a draft on another lane, masks behind every outcome, a model drafting itself."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import naive
import pytest
import torch
from decoding_cases import ar, decode_prompts, naive_logits, outcomes, requests_for
from hypothesis import given, settings, strategies
from method_cases import AGREES, drafted
from small import END, MASK, VOCABULARY, save_small, small_checkpoint, small_config
from thinned import one_in

from mtbench import sampling
from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.method import Method, ModelRunners, Window
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.runner import ModelRunner
from mtbench.plan.plan import RunRequest

PROMPTS = [[3], [5, 9, 1, 7, 2], list(range(20)), [30, 31], [4, 4, 4]]
BUDGET = 16
runners = cache(drafted)


def method(name: str, **options: Any) -> Method:
    made: Method = METHODS[name](**options)
    return made


def run(
    method: Method, on: ModelRunners, prompts: Sequence[Sequence[int]] = PROMPTS, budget: int = BUDGET, **how: Any
) -> list[Generation]:
    return decode_prompts(method, on, prompts, budget, **how)[0]


WAYS: list[Any] = [{}, {"rows": 2, "make": partial(Batch, tight=False)}]


def test_a_draft_that_always_agrees_is_always_kept() -> None:
    """K + 1 tokens per forward of the target for K forwards of the draft, and the last draft never fed."""
    on = runners("always")
    got = run(method("speculative", ahead=3), on, [[3, 8]], budget=12, ignore_eos=True)[0]
    assert got.commits == [4, 4, 4]
    assert got.draft_forwards == 9
    assert got.drafted == 9


def test_several_drafts_per_forward_cost_fewer_forwards() -> None:
    """The draft's forwards are those that K tokens, M at a time, take."""
    for per_forward, forwards in ((1, 5), (2, 3), (5, 1), (8, 1)):
        got = run(method("speculative", ahead=5, per_forward=per_forward), runners("never"), [[3, 8]], ignore_eos=True)
        assert got[0].draft_forwards == forwards * (got[0].forwards or 0)


@pytest.mark.parametrize(("tau", "agrees"), one_in(2, product([0.3, 1], AGREES)))
def test_mars_speculative_equals_a_recomputation(agrees: str, tau: float) -> None:
    """Drafts verified one by one, then the masks behind what was kept: every forward recomputes the whole text.

    For prompts of every length from one block to two, together; the first and the last alone, too.
    """
    ahead, size, budget = 3, 4, 12
    on, prompts = runners(agrees), [[(7 * i + n) % 30 for i in range(n)] for n in range(size, 2 * size + 1)]
    draft, target = naive_logits(on["draft"]), naive_logits(on.target)
    want = []
    for prompt in prompts:
        answer: list[int] = []
        commits: list[int] = []
        while True:
            text = prompt + answer
            drafts: list[int] = []
            for _ in range(ahead):
                drafts.append(int(draft(text + drafts)[-1].argmax()))
            own = target(text + drafts)[-ahead - 1 :].argmax(1).tolist()
            kept = next((i for i, (a, b) in enumerate(zip(drafts, own, strict=False)) if a != b), ahead)
            masks = target(text + drafts[:kept] + [MASK] * (size - 1))[1 - size :]
            new = own[: kept + 1]
            for column in masks:
                if tau == 1 or not naive.sure(column, "probability", tau):
                    break
                new.append(int(column.argmax()))
            if naive.finish(answer, commits, new, END, budget):
                break
        want.append((answer, commits))
    made = method("mars-speculative", ahead=ahead, block_size=size, tau=tau)
    together, alone = run(made, on, prompts, budget), [run(made, on, [p], budget)[0] for p in (prompts[0], prompts[-1])]
    assert [(g.token_ids, g.commits) for g in together] == want
    assert [(g.token_ids, g.commits) for g in alone] == [want[0], want[-1]]
    if agrees != "never" or tau < 1:
        assert max(max(commits) for _, commits in want) > 1


def test_rows_of_mars_speculative_may_have_thresholds_of_their_own() -> None:
    """In one batch each request has the tokens, commits and offers of a run at its own τ; 1 is autoregressive."""
    on, taus = runners("sometimes"), [1.0, 0.3, 0.0, 0.6, 1.0]
    made = method("mars-speculative", ahead=2, block_size=4, tau=0.5)
    prompts = [[(7 * i + n) % 30 for i in range(4 + n)] for n in range(5)]
    asked = [replace(r, options={"tau": tau}) for r, tau in zip(requests_for(prompts, BUDGET), taus, strict=True)]
    for how in WAYS:
        together = decode(made, on, asked, **how)[0]
        for number, tau in enumerate(taus):
            alone = run(method("mars-speculative", ahead=2, block_size=4, tau=tau), on, [prompts[number]], **how)[0]
            assert outcomes([together[number]]) == outcomes([alone])
            assert together[number].drafted == alone.drafted
    plain = run(ar(), on, prompts)
    assert [together[i].token_ids for i in (0, 4)] == [plain[i].token_ids for i in (0, 4)]


def test_a_seed_is_the_requests_own() -> None:
    """The same prompt twice says two things, and each of them again whatever its row and neighbours."""
    on = runners("always")
    first = run(ar(), on, [[3, 8]] * 6, temperature=1.0, seeds=[7, 7, 8, 9, 10, 11])
    assert first[0].token_ids == first[1].token_ids
    assert len({tuple(g.token_ids) for g in first}) == 5
    assert run(ar(), on, [[3, 8]], temperature=1.0, seeds=[9])[0].token_ids == first[3].token_ids


def test_a_distribution_sums_to_one_in_half_precision_too() -> None:
    """Rejection compares probabilities, which bfloat16 would round by a third of a percent."""
    rows = Batch(ar(), runners("always"), 1, 8).rows
    logits = torch.randn(1, 3, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for temperature in (0.0, 0.7):
        chances = dataclasses.replace(rows, temperature=torch.tensor([temperature])).distribution(logits)
        assert chances.sum(2).sub(1).abs().max() < 1e-12


def test_a_draft_never_says_an_id_that_the_target_lacks() -> None:
    """Of a draft with more rows in its vocabulary only the target's are looked at."""
    on = runners("never")
    wide = small_checkpoint(small_config(vocab_size=VOCABULARY + 24), seed=3)
    on["draft"] = ModelRunner(dataclasses.replace(wide, suppressed=wide.suppressed[:0]))
    for verify in ("match", "rejection", "block"):
        got = run(method("speculative", verify=verify), on)
        assert [g.token_ids for g in got] == [g.token_ids for g in run(ar(), on)]


def test_no_number_of_the_dice_is_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest and largest hash either; for its noise would be infinite, and any token win."""
    for bits in (0, -1):
        monkeypatch.setattr(sampling, "_shifted", lambda _, by, bits=bits: torch.tensor((bits % (1 << 64)) >> by))
        number = sampling.uniform(torch.tensor(1))
        assert number.dtype == torch.double
        assert 0 < float(number) < 1


def test_an_id_that_no_arm_may_emit_is_never_sampled() -> None:
    """Over a real vocabulary and some places, with one likely token and all others forbidden."""
    logits = torch.full((1, 16, 151_936), float("-inf"))
    logits[..., 5] = 200
    places = torch.arange(175, 191)[None]
    assert sampling.choose(sampling.sampled(logits, 1.0, torch.tensor([7]), places)).eq(5).all()


@given(strategies.integers(0, 2**62), strategies.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_dice_fall_evenly(seed: int, place: int) -> None:
    """A thousand tokens' numbers at one place fill ten bins (chi-square, 9 degrees, p = 1e-6)."""
    numbers = sampling.uniform(torch.tensor(seed), torch.tensor(place), torch.arange(1000))
    counts = torch.histc(numbers, 10, 0, 1)
    assert float(((counts - 100) ** 2 / 100).sum()) < 45


def test_sampling_follows_the_distribution() -> None:
    """Noise on the logits draws from softmax(logits / T)."""
    logits, rows = torch.tensor([2.0, 1.0, 0.0, float("-inf")]), 50_000
    tokens = sampling.choose(
        sampling.sampled(logits.expand(rows, 1, 4), 0.7, torch.arange(rows), torch.full((rows, 1), 11))
    )
    assert tokens.flatten().bincount(minlength=4) / rows == pytest.approx((logits / 0.7).softmax(0), abs=0.01)


@pytest.mark.parametrize(
    ("acceptance", "cost", "width"),
    [
        (0.1, [1.0, 1.0, 1.0], 2),  # what is free is taken
        (0.1, [1.0, 1.1, 1.5], 0),
        (0.8, [1.0, 1.1, 1.5], 2),
        (0.8, [1.0, 2.0, 9.0], 0),
    ],
)
def test_the_width_that_promises_most_for_its_cost(acceptance: float, cost: list[float], width: int) -> None:
    chosen = sampling.best_width(torch.tensor([acceptance]), torch.tensor([2.0, 3.0, 5.0]), torch.tensor(cost))
    assert chosen.tolist() == [width]


@pytest.mark.parametrize(("accepted", "width"), [(0, 0), (8, 2)])
def test_a_width_follows_what_was_accepted(accepted: int, width: int) -> None:
    """Narrow where nothing was, wide where all was, within a few forwards; what was not offered says nothing."""
    widths = Widths([Window(1, n, n + 1) for n in (1, 4, 8)], None, 1, torch.device("cpu"))
    widths.begin(torch.tensor([0]))
    widths.cost.copy_(torch.tensor([1.0, 1.2, 1.5]))
    for _ in range(6):
        widths.update(torch.tensor([accepted + 1]), torch.tensor([8]))
        widths.update(torch.tensor([1]), torch.tensor([0]))
    assert widths.best().tolist() == [width]


@pytest.mark.parametrize("tight", [True, False])
def test_an_adaptive_mars_emits_the_same_in_refilled_rows(runner: ModelRunner, tight: bool) -> None:
    """Reads that the refill of another row brings forward change no row's widths."""
    adaptive, on = method("mars", tau=0.15, block_size="auto"), ModelRunners("any", {"any": runner})
    make, prompts = partial(Batch, tight=tight), [[(7 * i + j) % 30 for j in range(1 + 5 * i % 11)] for i in range(9)]
    alone = [outcomes(run(adaptive, on, [p] * 2, make=make))[0] for p in prompts]
    assert outcomes(run(adaptive, on, prompts, rows=2, make=make)) == alone


def test_a_width_costs_what_it_feeds_and_what_its_drafts_cost(runner: ModelRunner) -> None:
    """On a GPU wide is chosen as long as it is free; a draft as large as the target costs its forwards."""
    on, cuda = runners("always"), SimpleNamespace(device=torch.device("cuda"), model=runner.model)
    for rows, drafts, width in ((1, 0, 2), (24, 0, 1), (64, 0, 0), (1, 1, 0)):
        windows = [Window(1, n, n + 1, drafts=n * drafts) for n in (1, 4, 8)]
        widths = Widths(windows, None, rows, torch.device("cpu"))
        widths.begin(torch.arange(rows))
        widths.set_costs(cast("ModelRunner", cuda), on)
        assert widths.best().unique().tolist() == [width]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("speculative:draft=ar", "cannot draft for itself"),
        ("speculative:draft=nobody", "no checkpoint in the role 'nobody'"),
        ("mars:block_size=auto,cache=block", "needs cache=cursor or none"),
        ("speculative:per_forward=2", "trained by 'draft', which feeds no mask tokens"),
        ("medusa:tree=9x9x9x9", "feeds 7,380 guesses in a forward, and at most 2,048"),
    ],
)
def test_what_cannot_draft_or_would_mislead_is_refused(spec: str, said: str) -> None:
    """At planning, before a model is loaded."""
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(method=[spec], limit=2, device="cpu"))


def test_masks_on_a_checkpoint_that_never_saw_any_are_flagged() -> None:
    cells = make_plan(RunRequest(method=["mars:on=ar,tau=0.9", "mars:tau=0.9"], limit=2, device="cpu")).cells
    assert [any("feeds masks" in flag for flag in c.flags) for c in cells] == [True, False] * 2


def test_a_checkpoint_with_other_ids_for_the_same_words_is_refused(tmp_path: Path) -> None:
    """Whether or not the first prompt has any of these words."""
    save_small(tmp_path / "one")
    save_small(tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    stored = json.loads(file.read_text())
    words = stored["model"]["vocab"]
    words["y"], words["z"] = words["z"], words["y"]
    file.write_text(json.dumps(stored))
    roles = {"ar": str(tmp_path / "one"), "draft": str(tmp_path / "other")}
    with pytest.raises(UserError, match=r"other token ids than .*'[yz]'"):
        make_plan(RunRequest(checkpoint=roles, method=["speculative"], limit=1, max_new_tokens=4, device="cpu"))
