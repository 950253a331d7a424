"""What holds for every lossless method of our loop, with whatever models it drafts: it changes the speed, no tokens."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from decoding_cases import (
    BUDGETS,
    MANY,
    PROMPTS,
    REFILLED,
    ar,
    check_step_never_waits,
    decode_prompts,
    requests_for,
    run,
)
from method_cases import CASES, HEADS, Case, graph, models
from thinned import one_in
from torch import Tensor

from mtbench import kernels, sampling
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners, Rows
from mtbench.decoding.output import Generation
from mtbench.lineup.simulation import Scripted

Made = Callable[[str], ModelRunners]
EACH = [*{case.name: case for case in CASES}.values()]  # one of each method
LOSSLESS = [case for case in CASES if case.method.claims == "lossless"]
STILL = [case for case in CASES if case.models not in ("glm", "deepseek")]  # a mixture of experts reads its routes
DRAFTS = [  # as many as a script may say, in every step
    case
    for case in LOSSLESS
    if len(case.method.variants) == 1 and case.method.window().commits >= 4 and not case.name.startswith("mars")
]
CHAINS = [  # one of each method; a tree needs the scores of several children
    Case("plain", "ar", {}),
    Case("plain", "mars", {"tau": 0.3}),
    Case("headed", "medusa", {"heads": HEADS}),
    *{case.name: case for case in CASES if not {"tree", "verify"} & set(case.options)}.values(),
]
LOSSY = [
    Case("plain", "mars", {"tau": 0.3}),
    Case("plain", "mars", {"tau": 0.3, "cache": "block", "confidence": "margin"}),
    Case("plain", "block-diffusion", {"tau": 0.3}),
    Case("plain", "fast-dllm-v2", {"tau": 0.3, "block_size": 8, "sub_block": 4}),
]
ONE_TOKEN = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]
BLOCKS = [case for case in CASES if case.options.get("verify") == "block"]
WIDTHS = (4, 8, 16)  # of captured prefills. The last token is not fed, so the prompts are below, at and above each
AROUND = [[(7 * i + j) % 30 for j in range(length)] for i, length in enumerate((5, 17, 4, 6, 9, 1, 10, 18))]
SCRIPTS, SCRIPTED_BUDGETS = [[1, 3, 2, 4, 1, 1, 3], [4, 4, 1, 2]], [15, 11]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The models of a case, made once."""
    known: dict[str, ModelRunners] = {}

    def make(name: str) -> ModelRunners:
        if name not in known:
            known[name] = models(name, tmp_path_factory.mktemp("models"))
        return known[name]

    return make


def ends(generations: list[Generation]) -> list[tuple[list[int], str]]:
    return [(g.token_ids, g.finish_reason) for g in generations]


@pytest.mark.parametrize("case", one_in(6, CASES, EACH), ids=str)
def test_a_method_changes_the_speed_but_no_tokens(made: Made, case: Case) -> None:
    """Tokens and finish reasons are those of `ar`, in rows that are refilled, also in the shapes of a GPU.

    At a fixed width commits and offers are those of each prompt alone.
    """
    method, runners = case.method, made(case.models)
    want = run(ar(), runners.target, MANY[:5], BUDGETS)
    alone = [
        decode_prompts(method, runners, [p], [n], seeds=[i])[0][0]
        for i, (p, n) in enumerate(zip(MANY, BUDGETS, strict=False))
    ]
    for how in REFILLED:
        got, timing = decode_prompts(method, runners, MANY[:5], BUDGETS, **how)
        assert ends(got) == ends(want)
        assert timing.miscounted == 0
        for g, by_itself in zip(got, alone, strict=True):
            assert sum(g.commits or []) == len(g.token_ids)
            assert sum(n - 1 for n in g.commits or []) <= (g.drafted or 0)
            if len(method.variants) == 1:
                assert (g.commits, g.drafted) == (by_itself.commits, by_itself.drafted)


@pytest.mark.parametrize("case", one_in(6, LOSSLESS, EACH), ids=str)
def test_sampled_tokens_are_those_of_sampled_ar(made: Made, case: Case) -> None:
    """Of every other case those that filters keep."""
    runners, sampled = made(case.models), dict[str, Any](temperature=1.0)
    settings = sampled | {"top_k": 20, "top_p": 0.6, "min_p": 0.1} if CASES.index(case) % 2 else sampled
    want = run(ar(), runners.target, MANY[:5], BUDGETS, **settings)
    assert ends(want) != ends(run(ar(), runners.target, MANY[:5], BUDGETS, **({} if settings == sampled else sampled)))
    got, _ = decode_prompts(case.method, runners, MANY[:5], BUDGETS, **settings, **REFILLED[1])
    assert ends(got) == ends(want)


@pytest.mark.parametrize(("case", "only"), list(zip([*LOSSY, *EACH], cycle(ONE_TOKEN), strict=False)), ids=str)
def test_where_filters_keep_one_token_it_is_the_greedy_one(made: Made, case: Case, only: dict[str, Any]) -> None:
    """In the same forwards, if no draft is drawn: a confidence is that before the filters."""
    runners, prompts = made(case.models), [[*range(1, 9), *prompt] for prompt in MANY[:4]]
    want, _ = decode_prompts(case.method, runners, prompts, 12, **REFILLED[0])
    got, _ = decode_prompts(case.method, runners, prompts, 12, temperature=1.7, **only, **REFILLED[1])
    assert ends(got) == ends(want)
    if case in LOSSY:
        assert [g.commits for g in got] == [g.commits for g in want]


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_drafts_for_block_verification_are_drawn_by_numbers_of_the_step(
    made: Made, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts of later positions say how many are accepted, the next step must draw by other numbers."""
    drawn, choose, runners = list[tuple[int, int]](), Rows.choose, made(case.models)

    def noted(rows: Rows, logits: Tensor, position: Tensor) -> Tensor:
        drawn.extend(zip(rows.seed.tolist(), rows.known.tolist(), strict=True))
        return choose(rows, logits, position)

    monkeypatch.setattr(Rows, "choose", noted)
    decode_prompts(case.method, runners, PROMPTS[:2], 6, temperature=1, seeds=[5, 6])
    assert len({known for _, known in drawn}) > 2
    assert {seed for seed, _ in drawn}.isdisjoint({5, 6})
    assert len({seed for seed, _ in drawn}) == len(set(drawn))


@pytest.mark.parametrize(("case", "filters"), list(zip(CHAINS, cycle([False, True]), strict=False)), ids=str)
def test_on_a_gpu_each_choice_is_one_pass_over_the_logits(
    made: Made, case: Case, filters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows have settings of their own, some greedy: of the target and of drafts, with the same tokens.

    In float64 a sample would take 25 kernels over the vocabulary. The definition of the pass stands for its kernel.
    """
    runners, choose, sampled, inside = made(case.models), kernels.choose_logsumexp, sampling.sampled, [0, 0]
    asked = [
        replace(request, temperature=temperature, top_k=3 if filters else 0)
        for request, temperature in zip(requests_for(MANY[:4], 6), (0.0, 1.3, None, 0.5), strict=True)
    ]
    want, _ = decode(case.method, runners, asked, rows=2)

    def in_one_pass(logits: Tensor, temperature: Tensor | None, *keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside[0] += 1
        result = choose(logits, temperature, *keys)
        inside[0] -= 1
        inside[1] += temperature is not None
        return result

    def only_there(*arguments: Any) -> Tensor:
        assert inside[0], "sampled outside the pass"
        return sampled(*arguments)

    monkeypatch.setattr(kernels, "_off", ["this is a CPU"])
    monkeypatch.setattr(kernels, "choose_logsumexp", in_one_pass)
    monkeypatch.setattr(sampling, "sampled", only_there)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    got, _ = decode(case.method, runners, asked, rows=2)
    assert ends(got) == ends(want)
    assert inside[1] > 0


@pytest.mark.parametrize("case", one_in(6, STILL, EACH), ids=str)
def test_a_replayed_step_equals_a_plain_step(
    made: Made, case: Case, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step or a prefill reads keeps its address: recorded once, it serves other rows, refills, later batches."""
    monkeypatch.setattr("mtbench.decoding.prefill.CAPTURED_WIDTHS", WIDTHS)
    method, plain, fast = case.method, made(case.models), graph(made(case.models))
    plainly = ModelRunners("any", {"any": fast.target})  # its graphs of prefills are those of the method, but for taps
    decode_prompts(ar(), plainly, PROMPTS[:1], 2, make=lambda *_: Captured(ar(), plainly, 3, 64))
    captured = Captured(method, fast, 3, 64)
    for prompts, budgets in ((PROMPTS[2:], 9), (AROUND, [3 + 2 * (i % 3) for i in range(len(AROUND))])):
        got, timing = decode_prompts(method, fast, prompts, budgets, rows=3, make=lambda *_: captured)
        want, _ = decode_prompts(method, plain, prompts, budgets, rows=3)
        assert timing.miscounted == 0
        assert ends(got) == ends(want)
        if len(method.variants) == 1:
            assert [g.commits for g in got] == [g.commits for g in want]
    assert len(captured._graphs) == len(method.variants)
    assert timing.preparation_s == 0 or len(method.variants) > 1


@pytest.mark.parametrize("case", one_in(4, STILL, EACH), ids=str)
def test_a_step_never_waits_for_the_host(made: Made, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting included: nothing is read back, at every width."""
    runners = graph(made(case.models))
    decode_prompts(case.method, runners, PROMPTS, 4)  # what is made once is made
    check_step_never_waits(runners, case.method, monkeypatch)


@pytest.mark.parametrize("case", one_in(2, DRAFTS), ids=str)
def test_a_script_is_followed_whatever_the_draft_says(made: Made, case: Case) -> None:
    """Simulated acceptance: commits are the script's, from the first forward on."""
    method = Scripted(case.method, SCRIPTS, torch.device("cpu"))
    got, timing = decode_prompts(method, made(case.models), PROMPTS[:2], SCRIPTED_BUDGETS, ignore_eos=True)
    assert [g.commits for g in got] == SCRIPTS
    assert timing.miscounted == 0
