"""Logits that are NaN or +∞ end their row by name, in every method and engine; −∞ is legal; other rows go on."""

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import BUDGET, MANY, PROMPTS, READ_LAG, ar, decode_prompts, mars, on, requests_for, run, sampled
from decoding_live import generation_of, live
from method_cases import CASES, Case, models
from small import small_checkpoint
from torch import Tensor

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.live import Ended, Ticket
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import NotNumbersError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.plan.request import RunRequest

ROW, AT = 1, 5  # the row that goes wrong, and the index of its token
FAULTS = {"NaN": math.nan, "+inf": math.inf}
LOSSY = [
    mars(tau=0.3),
    mars(tau=0.3, cache="block", cache_block=5),
    METHODS["mars-selfspec"](ahead=2),
    METHODS["block-diffusion"](block_size=1, tau=0.3),
]


def spoil(runner: ModelRunner, value: float, row: int = ROW, position: int = len(PROMPTS[ROW]) + AT) -> None:
    """Give a logit this value wherever the runner predicts a position of a row, for a guess of it, too."""
    forward = runner.forward

    def spoilt(ids: Tensor, metadata: AttentionMetadata, judged: int) -> Forwarded:
        out = forward(ids, metadata, judged)
        if metadata.rows is None:
            logits, there = out.logits, metadata.positions[:, -judged:] + 1 == position
            there &= torch.arange(len(there), device=there.device)[:, None] == row
            logits.masked_fill_(there[..., None] & (torch.arange(logits.shape[2], device=there.device) == 7), value)
        return out

    runner.forward = spoilt  # type: ignore[method-assign]


def asked(prompts: Any = PROMPTS, budget: int = BUDGET, **how: Any) -> list[Any]:
    return [replace(r, item=100 + n, **how) for n, r in enumerate(requests_for(prompts, budget))]


def error_of(method: Method, runners: ModelRunners, **how: Any) -> str:
    with pytest.raises(NotNumbersError) as raised:
        decode(method, runners, asked(), ignore_eos=True, **sampled(how))
    return str(raised.value)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return small_checkpoint()


# A case of each method, rule of verification and shape of the drafts.
KINDS = {(c.name, c.options.get("verify"), "tree" in c.options, "ahead" in c.options): c for c in CASES}


@pytest.mark.parametrize(("case", "fault"), list(zip(KINDS.values(), itertools.cycle(FAULTS), strict=False)), ids=str)
def test_every_lossless_method_fails_at_the_token_of_plain_decoding(case: Case, fault: str, tmp_path: Path) -> None:
    """+∞ and NaN are refused where the token is chosen: not at a guess of its position that is not accepted."""
    runners = models(case.models, tmp_path)
    spoil(runners.target, FAULTS[fault])
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9}]
    for make, settings in zip((None, READ_LAG, READ_LAG), ways, strict=True):
        said = error_of(case.method, runners, make=make, **settings)
        assert said.startswith(f"the target's logits at token {AT + 1} of item {100 + ROW} are not numbers (NaN or ")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", LOSSY, ids=str)
def test_methods_that_accept_by_confidence_fail_too(checkpoint: Checkpoint, method: Method, fault: str) -> None:
    runner = ModelRunner(checkpoint)
    spoil(runner, FAULTS[fault])
    for make in (None, READ_LAG):
        assert f"token {AT + 1} of item {100 + ROW} " in error_of(method, on(runner), make=make)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{"tau": 0.3}, {"per_forward": 2}], ids=str)
def test_in_a_block_every_position_counts(checkpoint: Checkpoint, options: dict[str, Any], fault: str) -> None:
    """A later position of the block may be decided first, by which time no token is committed."""
    runner, method = ModelRunner(checkpoint), METHODS["block-diffusion"](block_size=4, **options)
    prompts = [[*range(8)], [*range(9)]]
    spoil(runner, FAULTS[fault], position=11)
    with pytest.raises(NotNumbersError, match="of item 101 "):
        decode(method, on(runner), asked(prompts), ignore_eos=True)


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_without_numbers_is_not_accepted(verify: str, fault: str) -> None:
    """Greedy or filtered, its distribution filtered or not: only the target's own logits end an answer."""
    runners = models("sometimes", Path())
    forward = runners["draft"].forward

    def spoilt(*given: Any, **more: Any) -> Forwarded:
        out = forward(*given, **more)
        out.logits.fill_(FAULTS[fault])
        return out

    runners["draft"].forward = spoilt  # type: ignore[method-assign]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9}]
    for settings in ways:
        want = run(ar(), runners.target, **settings)
        for own in (False, True):
            method = METHODS["speculative"](ahead=2, verify=verify, filter_draft=own)
            got, _ = decode_prompts(method, runners, PROMPTS, BUDGET, **settings)
            if verify == "match" or not settings:
                assert [g.token_ids for g in got] == [g.token_ids for g in want]
            assert verify == "match" or {n for g in got for n in g.commits or []} == {1}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_names_the_row(checkpoint: Checkpoint, engine: str) -> None:
    """The prompt has a word whose embedding is NaN: the first token cannot be chosen."""
    chosen = ENGINES[engine]()
    runner = chosen.runner(with_nan(checkpoint))
    place, cause = "token 1 of item 102", "is the checkpoint damaged?"
    said = f"the target's logits at {place} are not numbers (NaN or +inf) in float64: {cause}"
    assert error_of(ar(), on(runner), make=chosen.batch) == said


def with_nan(checkpoint: Checkpoint, word: int = 19) -> Checkpoint:
    """Return another model whose embedding of a word is NaN."""
    spoilt = small_checkpoint()
    with torch.no_grad():
        spoilt.model.get_input_embeddings().weight[word] = math.nan
    return spoilt


@pytest.mark.parametrize("method", [ar(), mars(tau=0.3), METHODS["jacobi"](ahead=3)], ids=str)
def test_minus_infinity_is_a_suppressed_id(checkpoint: Checkpoint, method: Method) -> None:
    """A token that is not chosen may have −∞; nothing changes."""
    want, _ = decode_prompts(method, on(ModelRunner(checkpoint)), PROMPTS, BUDGET)
    runner = ModelRunner(checkpoint)
    at = len(PROMPTS[ROW]) + next(n for n, token in enumerate(want[ROW].token_ids) if token != 7 and n > 2)
    spoil(runner, -math.inf, position=at)
    got, _ = decode_prompts(method, on(runner), PROMPTS, BUDGET)
    assert [g.token_ids for g in got] == [g.token_ids for g in want]


def test_what_comes_behind_the_answers_end_does_not_count(checkpoint: Checkpoint) -> None:
    """Neither behind the budget nor behind an end token, also in a forward that accepts more."""
    for method in (ar(), mars(tau=0.0, block_size=8), METHODS["prompt-lookup"]()):
        plain = run(method, ModelRunner(checkpoint))
        for row, (prompt, answer) in enumerate(zip(PROMPTS, plain, strict=True)):
            runner = ModelRunner(checkpoint)
            spoil(runner, math.nan, row, len(prompt) + len(answer.token_ids))
            assert run(method, runner)[row].token_ids == answer.token_ids


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", [ar(), mars(tau=0.3), METHODS["lookahead"]()], ids=str)
def test_in_a_live_batch_one_request_fails_and_the_others_keep_their_tokens(
    checkpoint: Checkpoint, method: Method, fault: str, tight: bool
) -> None:
    """The failed one had its tokens up to the fault; the rows serve later requests."""
    want = [g.token_ids for g in run(method, ModelRunner(checkpoint), MANY[:5], ignore_eos=True)]
    runner, row = ModelRunner(checkpoint), 2
    spoil(runner, FAULTS[fault], row, len(MANY[row]) + AT)
    tickets = [Ticket(request) for request in asked(MANY[:5], ignore_eos=True)]
    with live(partial(Batch, method, on(runner), 5, 60, tight=tight)) as (queue, watcher):
        for ticket in tickets:
            queue.put(ticket)
        watcher.wait(5)
    failed = [ticket for ticket in tickets if not isinstance(ticket.outcome, Ended)]
    assert len(failed) == 1
    assert isinstance(failed[0].outcome, NotNumbersError)
    assert str(failed[0].outcome).startswith("the target's logits at token ")
    assert "item" not in str(failed[0].outcome)
    for ticket, ids in zip(tickets, want, strict=True):
        if ticket not in failed:
            assert generation_of(ticket).token_ids == ids
        else:
            assert ticket.token_ids == ids[: len(ticket.token_ids)]


@pytest.mark.parametrize("method", [ar(), METHODS["prompt-lookup"]()], ids=str)
def test_a_row_is_clean_for_the_request_behind_a_failed_one(checkpoint: Checkpoint, method: Method) -> None:
    """Keys and values that are NaN do not stay in the cache, where a mask would not hide them."""
    runner, long = ModelRunner(with_nan(checkpoint)), [19] * 20
    prompts = [long, [3], [5, 9, 1]]
    tickets = [Ticket(request) for request in asked(prompts, ignore_eos=True)]
    with live(partial(Batch, method, on(runner), 1, 60)) as (queue, watcher):
        for ticket in tickets:
            queue.put(ticket)
        watcher.wait(3)
    assert isinstance(tickets[0].outcome, NotNumbersError)
    clean = ModelRunner(with_nan(checkpoint))
    for ticket, prompt in zip(tickets[1:], prompts[1:], strict=True):
        assert generation_of(ticket).token_ids == run(method, clean, [prompt], ignore_eos=True)[0].token_ids


def test_a_batch_is_clean_behind_one_that_failed(checkpoint: Checkpoint) -> None:
    """The cell after the failed one, on the same runner, with rows of another size."""
    runner = ModelRunner(with_nan(checkpoint))
    want = [g.token_ids for g in run(ar(), runner, [[3], [5, 9, 1]])]
    with pytest.raises(NotNumbersError):
        run(ar(), runner, [[19] * 20, [19] * 3])
    assert [g.token_ids for g in run(ar(), runner, [[3], [5, 9, 1]])] == want


COLD = [5e-324, 1e-309, 1e-308, 1e-307, 1e-271, 1e-269, 1e-45, 1e-6]
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("jacobi", {}),
    ("speculative", {"verify": "match"}),
    ("speculative", {"verify": "rejection"}),
    ("speculative", {"verify": "block"}),
]


@pytest.mark.parametrize(("name", "options"), SAMPLED, ids=str)
def test_near_a_temperature_of_zero_the_tokens_are_the_greedy_ones(name: str, options: dict[str, Any]) -> None:
    """Also where the temperature is a denormal number and a logit divided by it exceeds every float."""
    runners = models("sometimes", Path())
    method = METHODS[name](**options)
    want = [g.token_ids for g in decode_prompts(method, runners, PROMPTS[:2], 8)[0]]
    for temperature in COLD:
        got, _ = decode_prompts(method, runners, PROMPTS[:2], 8, temperature=temperature)
        assert [g.token_ids for g in got] == want, temperature


def test_a_plan_at_a_temperature_near_zero_is_greedy() -> None:
    """So its arms claim, and are held to, what those of a greedy plan do."""
    assert [RunRequest(temperature=t).temperature for t in (5e-324, 1e-200, 1e-6, 0.99e-4)] == [0.0] * 4
    assert [RunRequest(temperature=t).temperature for t in (1e-4, 0.7)] == [1e-4, 0.7]
