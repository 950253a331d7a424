"""transformers' own `generate` as an arm: the same tokens as `ar`, on the same weights, leaving our model as it was."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from chi_square import exact_law, filtered_law, fit, numbers
from decoding_cases import CONFIGS, decode_prompts, naive_logits, run, run_external
from small import END, VOCABULARY, WORDS, small_checkpoint, small_config
from thinned import one_in
from transformers import GenerationMixin

from mtbench.decoding.arms import baselines, engine_baselines, parse_arms
from mtbench.decoding.external import ExternalEngine, stock
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.errors import NotNumbersError, UserError
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling

PROMPTS = [[3], [5, 9, 1, 7, 2], list(range(20)), [30, 31]]
BUDGET = 24
FORMS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache": "static"},
    "draft": {"draft": "draft"},
    "lookup": {"prompt_lookup": 5},
}


@cache
def some_draft() -> Checkpoint:
    """A model that agrees now and then, whose head is padded further than the target's."""
    return small_checkpoint(small_config(vocab_size=48), seed=5)


def generate(runner: ModelRunner, form: str = "dynamic", budget: Any = BUDGET, **options: Any) -> list[Generation]:
    method: ExternalEngine = METHODS["hf-generate"](**FORMS[form])
    return run_external(method, {"ar": runner.checkpoint, "draft": some_draft()}, PROMPTS, budget, **options)[0]


def ours(runner: ModelRunner, budget: Any = BUDGET, **options: Any) -> list[Generation]:
    return decode_prompts(METHODS["ar"](), ModelRunners("ar", {"ar": runner}), PROMPTS, budget, **options)[0]


def answers(generations: list[Generation]) -> list[tuple[list[int], str, str]]:
    return [(g.token_ids, g.text, g.finish_reason) for g in generations]


ARCHITECTURES = {  # every architecture once; each other form where its caches and masks differ
    "dynamic": list(CONFIGS),
    "static": ["qwen2", "mistral sliding", "gemma3"],
    "lookup": ["qwen2", "llama"],
    "draft": ["qwen2", "gemma2"],
}


@pytest.mark.parametrize(("name", "form"), [(name, form) for form, names in ARCHITECTURES.items() for name in names])
def test_its_tokens_are_those_of_ar(name: str, form: str, make_runner: Callable[..., ModelRunner]) -> None:
    """In float64, ragged prompts, in one batch or one by one, on every architecture: tokens, texts, why they ended."""
    runner = make_runner(CONFIGS[name])
    if name == "gemma2" and form in ("dynamic", "static"):  # padding is NaN to its stock attention in float64
        with pytest.raises(NotImplementedError, match="float32"):
            generate(runner, form)
        runner.model.float()
    assert answers(generate(runner, form)) == answers(ours(runner))


@pytest.mark.parametrize("form", FORMS)
def test_the_model_of_the_other_arms_is_left_alone(form: str, make_runner: Callable[..., ModelRunner]) -> None:
    """Every weight is the one in use already; ours still runs our attention, counts its own forwards, says the same."""
    runner = make_runner()
    before = answers(ours(runner))
    seen = runner.checkpoint.calls.n
    generate(runner, form)
    assert runner.checkpoint.calls.n == seen
    twin = stock(runner.checkpoint)
    assert twin is stock(runner.checkpoint)
    pairs = zip(twin.parameters(), runner.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert (twin.config._attn_implementation, runner.model.config._attn_implementation) == ("sdpa", "mtbench")
    assert answers(ours(runner)) == before


def test_a_checkpoints_sampling_defaults_do_not_apply(make_runner: Callable[..., ModelRunner]) -> None:
    """A repetition penalty, a temperature or a shorter budget of the checkpoint's own changes nothing."""
    runner = make_runner(small_config(initializer_range=0.2), seed=3)
    want = answers(ours(runner))
    settings = runner.model.generation_config
    settings.repetition_penalty, settings.do_sample, settings.temperature, settings.max_length = 5.0, True, 9.0, 3
    assert answers(generate(runner)) == want


@pytest.mark.parametrize("form", one_in(2, FORMS))
def test_at_fixed_length_an_end_token_is_a_token(form: str, make_runner: Callable[..., ModelRunner]) -> None:
    """Every row spends its own budget, end tokens included, as with `ar`."""
    runner = make_runner(seed=1)
    want = answers(ours(runner, BUDGET, ignore_eos=True))
    assert any(END in ids[:-1] for ids, _, _ in want), "the model must say its end token for this to mean anything"
    assert answers(generate(runner, form, BUDGET, ignore_eos=True)) == want
    budgets = [3, BUDGET, 17, 1]
    got = generate(runner, form, budgets, ignore_eos=True)
    assert [g.token_ids for g in got] == [ids[:n] for (ids, _, _), n in zip(want, budgets, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_ends_with_its_own_stop_string(form: str, runner: ModelRunner) -> None:
    """Each row at its own string, cut at the same token and the same letter as in our loop; a row without goes on."""
    runner = ModelRunner(replace(runner.checkpoint, end_ids=()))
    plain = ours(runner)
    stop = [[], [plain[1].text[5:8]], [plain[2].text[-3:]], [WORDS[0] * 40]]
    got = generate(runner, form, stop=stop)
    assert answers(got) == answers(ours(runner, stop=stop))
    assert [g.finish_reason for g in got][1:3] == ["stop", "stop"]


@pytest.mark.parametrize("name", ["qwen2", "mistral sliding"])
def test_calls_of_one_shape_share_a_static_cache(
    name: str, make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded graph holds its address. Emptied between calls, it changes no answer; another shape has its own."""
    runner, seen = make_runner(CONFIGS[name]), []
    real = GenerationMixin.generate

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(options["past_key_values"])
        return real(self, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    method = METHODS["hf-generate"](cache="static")
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS, PROMPTS[:2]):
        got, timing = run_external(method, {"ar": runner.checkpoint}, prompts, BUDGET, room=50)
        assert answers(got) == answers(run(METHODS["ar"](), runner, prompts, BUDGET))
        assert timing.preparation_s == 0
    assert seen[0] is seen[1] is seen[2] is not seen[3]
    addresses = [layer.keys.data_ptr() for layer in seen[0].layers]
    run_external(method, {"ar": runner.checkpoint}, PROMPTS, BUDGET, room=50)
    assert [layer.keys.data_ptr() for layer in seen[0].layers] == addresses


def test_a_call_that_compiled_is_told_as_preparation(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a timed block would contain it, and our ratio over this engine would be too large."""
    counts = iter([3, 4, 4, 4])

    class Compiled(dict[str, int]):
        def __getitem__(self, _: str) -> int:
            return next(counts)

    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Compiled())
    for prepared in (True, False):
        method = METHODS["hf-generate"](cache="static")
        _, timing = run_external(method, {"ar": runner.checkpoint}, PROMPTS, BUDGET)
        assert timing.preparation_s == (timing.wall_s if prepared else 0)


def test_what_it_hides_is_none(runner: ModelRunner) -> None:
    """No forward, no part of its time is made up; what is known is counted."""
    generations, timing = run_external(METHODS["hf-generate"](), {"ar": runner.checkpoint}, PROMPTS, BUDGET)
    hidden = ("row_forwards", "batch_forwards", "prefill_s", "decode_s", "device_s", "ttft_s", "step_s", "kv_bytes")
    assert [getattr(timing, name) for name in hidden] == [None] * len(hidden)
    assert {(g.forwards, g.commits, g.positions_fed, g.draft_forwards) for g in generations} == {(None,) * 4}
    assert (timing.rows, timing.items, timing.prompt_tokens) == (4, 4, 28)
    assert timing.tokens == sum(len(g.token_ids) for g in generations)
    assert timing.wall_s > 0


def counted(
    method: ExternalEngine, checkpoints: dict[str, Checkpoint], prompt: list[int], budget: int, stop: str | None = None
) -> tuple[Generation, int]:
    """One answer, and how many forwards of the target it took."""
    seen: list[int] = []
    hook = stock(checkpoints["ar"]).register_forward_hook(lambda *_: seen.append(1))
    [generation] = run_external(method, checkpoints, [prompt], budget, stop=[[stop]] if stop else None)[0]
    hook.remove()
    return generation, len(seen)


@pytest.mark.parametrize(("agrees", "ahead"), one_in(4, product(("never", "sometimes", "always"), (1, 3, 7))))
def test_its_assisted_generation_is_our_speculative_decoding(agrees: str, ahead: int, runner: ModelRunner) -> None:
    """The tokens of `speculative` and of `ar`, and as many forwards of the target, whatever the draft is worth."""
    draft = {"never": small_checkpoint(seed=9), "sometimes": some_draft(), "always": small_checkpoint()}[agrees]
    if agrees == "never":
        draft.model.get_output_embeddings().weight.data[:] = 0  # id 0 all the way
    method, checkpoints = METHODS["hf-generate"](draft="draft", ahead=ahead), {"ar": runner.checkpoint, "draft": draft}
    runners = ModelRunners("ar", {"ar": runner, "draft": ModelRunner(draft)})
    want = decode_prompts(METHODS["speculative"](draft="draft", ahead=ahead), runners, PROMPTS, BUDGET)[0]
    for prompt, generation in zip(PROMPTS, want, strict=True):
        got, forwards = counted(method, checkpoints, prompt, BUDGET)
        assert (answers([got]), forwards) == (answers([generation]), generation.forwards)
    assert answers(want) == answers(ours(runner))


@pytest.mark.parametrize("ahead", [1, 5, 10])
def test_its_prompt_lookup_says_what_ours_says(ahead: int, runner: ModelRunner) -> None:
    """The tokens and forwards of `prompt-lookup` and the tokens of `ar`, for prompts that repeat themselves too."""
    prompts = [*PROMPTS, [4, 5, 6] * 4, [7] * 9]
    method, runners = METHODS["hf-generate"](prompt_lookup=ahead), ModelRunners("ar", {"ar": runner})
    ours = decode_prompts(METHODS["prompt-lookup"](ahead=ahead, ngram=2), runners, prompts, BUDGET)[0]
    got = []
    for prompt, generation in zip(prompts, ours, strict=True):
        answer, forwards = counted(method, {"ar": runner.checkpoint}, prompt, BUDGET)
        assert forwards == generation.forwards
        got.append(answer)
    assert answers(got) == answers(ours)
    assert answers(got) == answers(decode_prompts(METHODS["ar"](), runners, prompts, BUDGET)[0])


def test_a_stop_string_spares_it_the_rest(runner: ModelRunner) -> None:
    """However many tokens a forward adds, it looks in time."""
    endless = replace(runner.checkpoint, end_ids=())
    method, checkpoints = METHODS["hf-generate"](draft="draft", ahead=6), {"ar": endless, "draft": small_checkpoint()}
    plain, most = counted(method, checkpoints, PROMPTS[1], 100)
    stopped, few = counted(method, checkpoints, PROMPTS[1], 100, plain.text[5:8])
    assert (len(plain.token_ids), stopped.finish_reason) == (100, "stop")
    assert few <= 3 < most


def test_what_cannot_go_together_is_refused() -> None:
    """In one line that says what to leave out."""
    for options in ({"draft": "draft", "prompt_lookup": 3}, {"draft": "draft", "cache": "static"}):
        with pytest.raises(UserError, match=r"give one|leave out cache=static"):
            METHODS["hf-generate"](**options)


def test_only_its_plain_loop_is_a_baseline() -> None:
    """Assisted, it is compared with its own plain loop by the same cache, and nobody with it."""
    arms = parse_arms(["ar", "hf-generate", "hf-generate:cache=static", "hf-generate:draft=draft", "mars"])
    ar, plain, static, assisted, mars = arms
    assert baselines(assisted, arms) == [str(plain)]
    assert engine_baselines(assisted, arms) == [str(ar), str(static)]
    assert engine_baselines(mars, arms) == [str(plain), str(static)]
    assert assisted.roles == ("ar", "draft")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_named(
    make_runner: Callable[..., ModelRunner], form: str, value: float
) -> None:
    """At the item and the token, where one of its answer is chosen by them; a draft's own do not count."""
    runner, row = make_runner(), 1
    want = ours(runner)
    length = len(want[row].token_ids) - 2
    text = torch.tensor([*PROMPTS[row], *want[row].token_ids[:length]])

    def spoil(model: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The logits behind the first words of the row's answer, which are fed last."""
        if out.logits.shape[-1] == len(runner.checkpoint.model.get_output_embeddings().weight):
            ids = kwargs["input_ids"]
            place = (kwargs["position_ids"] == len(text) - 1) & (ids == text[-1])
            out.logits[place[:, -out.logits.shape[1] :]] = value

    hook = stock(runner.checkpoint).register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(NotNumbersError, match=f"at token {length + 1} of item 0 are not numbers"):
        generate(runner, form)
    hook.remove()
    assert answers(generate(runner, form)) == answers(want)


@pytest.mark.parametrize("count", [4000, pytest.param(24_000, marks=pytest.mark.slow)])
def test_sampled_texts_have_the_law_of_the_model(make_runner: Callable[..., ModelRunner], count: int) -> None:
    """By temperature and filters of the run, drawn by its own random numbers, which our own do not see."""
    runner, tokens, length = make_runner(small_config(initializer_range=0.2)), 8, 3
    runner.checkpoint = replace(runner.checkpoint, suppressed=torch.arange(tokens, VOCABULARY), end_ids=())
    settings, logits, before = (
        Sampling(0.8, top_k=6, top_p=0.95, min_p=0.02),
        naive_logits(runner),
        torch.get_rng_state(),
    )
    method: ExternalEngine = METHODS["hf-generate"]()
    texts: list[list[int]] = []
    for seed in range(0, count, 2000):
        seeds = range(seed, seed + 2000)
        how: dict[str, Any] = asdict(settings) | {"seeds": seeds}
        got, _ = run_external(method, {"ar": runner.checkpoint}, [[5, 9, 1]] * 2000, length, **how)
        texts += [g.token_ids for g in got]
    law = exact_law(
        lambda text: filtered_law(logits([5, 9, 1, *text])[-1:, :tokens].float(), settings)[0], tokens, length
    )
    counts = numbers(texts, tokens).bincount(minlength=len(law)).double()
    assert counts[law == 0].sum() == 0
    assert 0.1 < float((law > 0).double().mean()) < 0.9
    found = fit(counts, count * law)
    print(f"LAW {settings} hf-generate N={count} {found}")
    assert found.p > 1e-4
    assert torch.equal(torch.get_rng_state(), before)


def test_where_tokens_are_drawn_logits_that_are_not_numbers_are_named(runner: ModelRunner) -> None:
    """transformers cannot draw from them; the other rows go on."""
    method = METHODS["hf-generate"]()

    def spoil(model: Any, args: Any, out: Any) -> None:
        out.logits[1] = math.nan

    hook = stock(runner.checkpoint).register_forward_hook(spoil)
    with pytest.raises(NotNumbersError, match="at token 1 of item 0 are not numbers"):
        run_external(method, {"ar": runner.checkpoint}, PROMPTS, BUDGET, temperature=1.0, top_p=0.9)
    hook.remove()
