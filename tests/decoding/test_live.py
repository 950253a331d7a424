"""A live batch decodes what a workload would; requests join, leave and fail one by one; nothing spins or grows."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from decoding_cases import MANY, PROMPTS, READ_LAG, ar, decode_prompts, mars, on, requests_for, run
from decoding_live import Watcher, generation_of, live, live_answers, live_generations
from small import PAD, WORDS, scripted_lane, small_checkpoint

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.host_sync import Shape
from mtbench.decoding.live import GivenUpError, Queue, Ticket, serve
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.method import Method
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.decoding.run_state import RunState
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling

TAUS = [1.0, 0.3, 0.05, 0.6, 1.0, 0.15, 0.3, 0.9, 0.0]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ENGINES["graph"]().runner(small_checkpoint())


def batch(method: Method, runner: ModelRunner, *, rows: int = 3, tight: bool | None = None) -> Callable[[], Batch]:
    return partial(Batch, method, on(runner), rows, 60, tight=tight)


def outcome(generation: Generation) -> tuple[list[int], list[int] | None, str]:
    return generation.token_ids, generation.commits, generation.text


@pytest.mark.parametrize(
    ("method", "tight"),
    [
        *((mars(tau=0.3, block_size="auto"), tight) for tight in (True, False)),
        (ar(), False),
        (mars(tau=0.3, cache="none"), True),
        (METHODS["suffix"](ahead=2), True),
    ],
    ids=str,
)
def test_a_live_batch_answers_as_a_workload(runner: ModelRunner, method: Method, tight: bool) -> None:
    """Tokens, commits and text, with fewer rows than requests, by a host that reads at once or late."""
    asked = requests_for(MANY, [8 + 3 * i for i in range(len(MANY))], stop=[(WORDS[5],)] * 4 + [()] * 5)
    want, _ = decode(method, on(runner), asked, rows=3, make=None if tight else READ_LAG)
    got = live_generations(batch(method, runner, tight=tight), asked)
    assert [outcome(g) for g in got] == [outcome(g) for g in want]


@pytest.mark.parametrize("method", [ar(), mars(tau=0.9, block_size=8)], ids=str)
@pytest.mark.parametrize("stop", ["<|endoftext|>", "c<|endoftext|>", "<|endoftext|>d"])
def test_a_stop_string_with_a_special_token_ends_an_answer(method: Method, stop: str) -> None:
    """Also inside of accepted drafts, in a workload and in a server; the text has no special tokens."""
    script = torch.tensor([[0, 1, PAD, 2, PAD, 3] + [1, 2, 3] * 12])
    runner = scripted_lane(script, torch.ones_like(script, dtype=torch.bool))
    asked = requests_for([[5]], [30], stop=[(stop,)])
    ends = {"<|endoftext|>": (2, "b"), "c<|endoftext|>": (4, "b"), "<|endoftext|>d": (5, "bc")}[stop]
    [closed], _ = decode(method, on(runner), asked)
    [live] = live_generations(batch(method, runner, rows=1), asked)
    for g in (closed, live):
        assert (len(g.token_ids), g.text, g.finish_reason) == (*ends, "stop")
        assert g.special == ([(1, "<|endoftext|>")] if len(g.token_ids) > 2 else None)


@pytest.mark.parametrize("options", [{"cache": "block"}, {"confidence": "entropy"}], ids=str)
def test_rows_with_a_threshold_of_their_own_answer_as_alone(runner: ModelRunner, options: dict[str, Any]) -> None:
    """In one batch, closed or live, every request has the tokens of a run at its own τ."""
    method = mars(tau=0.5, **options)
    asked = [replace(r, options={"tau": tau}) for r, tau in zip(requests_for(MANY[:5], 16), TAUS[:5], strict=True)]
    alone = [run(replace(method, tau=tau), runner, [p], 16)[0] for p, tau in zip(MANY[:5], TAUS[:5], strict=True)]  # type: ignore[type-var]
    for make in (None, READ_LAG):
        together, _ = decode(method, on(runner), asked, rows=3, make=make)
        assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert live_answers(batch(method, runner), asked) == [g.token_ids for g in alone]


@pytest.mark.parametrize("method", [ar(), mars(tau=0.3)], ids=str)
def test_greedy_and_sampled_requests_share_a_batch(runner: ModelRunner, method: Method) -> None:
    """Each has the tokens that it has alone by its own settings; the batch's hold for what it does not set."""
    batch = Sampling(0.8, top_p=0.7)
    own: list[dict[str, Any]] = [{"temperature": 0.0, "top_k": 1}, {"temperature": 1.3, "top_p": 1.0}, {}]
    own += [{"temperature": 1.3, "top_k": 3}, {"min_p": 0.2, "top_p": 1.0}]
    seeded = requests_for(MANY[:5], 10, seeds=range(100, 105))
    asked = [replace(request, **settings) for request, settings in zip(seeded, own, strict=True)]
    for make in (None, READ_LAG):
        got, _ = decode(method, on(runner), asked, rows=3, sampling=batch, make=make)
        for request, settings, generation in zip(seeded, own, got, strict=True):
            [alone], _ = decode(method, on(runner), [request], sampling=replace(batch, **settings))
            assert generation.token_ids == alone.token_ids


def test_a_request_may_ignore_end_tokens(runner: ModelRunner) -> None:
    """It takes its whole budget beside others that end."""
    plain = run(ar(), runner, MANY, 40)
    assert any(g.finish_reason == "end" for g in plain)
    asked = [replace(r, ignore_eos=i % 2 == 0) for i, r in enumerate(requests_for(MANY, 40))]
    want, _ = decode_prompts(ar(), on(runner), MANY, 40, ignore_eos=True)
    got, _ = decode(ar(), on(runner), asked, rows=3)
    assert [g.token_ids for g in got[::2]] == [g.token_ids for g in want[::2]]
    assert [g.token_ids for g in got[1::2]] == [g.token_ids for g in plain[1::2]]


@pytest.mark.parametrize("tight", [True, False])
def test_a_request_given_up_leaves_its_row_within_three_steps(runner: ModelRunner, tight: bool) -> None:
    """The next one has the row; nobody else's tokens change."""
    first, second, other = (
        Ticket(Request(prompt_ids=p, max_new_tokens=45, ignore_eos=True)) for p in ([3], [7, 2], [9])
    )
    at = {"given up": 0, "freed": 0}
    with live(batch(ar(), runner, rows=2, tight=tight)) as (queue, watcher):

        def on_step() -> None:
            if not at["given up"] and len(first.token_ids) >= 5:
                first.give_up()
                at["given up"] = watcher.forwards
            if at["given up"] and not at["freed"] and first.outcome is not None:
                at["freed"] = watcher.forwards

        watcher.on_step = on_step
        for ticket in (first, other, second):
            queue.put(ticket)
        watcher.wait(3)
    assert isinstance(first.outcome, GivenUpError)
    assert at["freed"] - at["given up"] <= 3
    want, _ = decode_prompts(ar(), on(runner), [[7, 2], [9]], 45, ignore_eos=True)
    assert [generation_of(second).token_ids, generation_of(other).token_ids] == [g.token_ids for g in want]


def test_a_thread_without_requests_sleeps(runner: ModelRunner) -> None:
    """It makes no forward before the first request, nor after the last one."""
    with live(batch(ar(), runner)) as (queue, watcher):
        time.sleep(0.02)
        assert watcher.forwards == 0
        queue.put(Ticket(requests_for(PROMPTS, 5)[0]))
        watcher.wait(1)
        made = watcher.forwards
        started = time.thread_time()
        time.sleep(0.02)
        assert watcher.forwards == made
        assert time.thread_time() - started < 0.02


def test_an_error_costs_the_requests_in_rows_and_no_others(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, error = ar(), torch.OutOfMemoryError("no memory left")
    kind, accept = type(method), type(method).accept
    broken = [False]

    def failing(*arguments: Any) -> Any:
        if broken[0]:
            broken[0] = False
            raise error
        return accept(*arguments)

    monkeypatch.setattr(kind, "accept", failing)
    tickets = [Ticket(request) for request in requests_for(MANY[:6], 20)]
    with live(batch(method, runner, rows=2)) as (queue, watcher):
        watcher.on_step = lambda: broken.__setitem__(0, watcher.forwards == 3)
        for ticket in tickets:
            queue.put(ticket)
        watcher.wait(len(tickets))
    failed = [ticket for ticket in tickets if ticket.outcome is error]
    assert 1 <= len(failed) <= 2
    monkeypatch.undo()
    want = run(method, runner, MANY[:6], 20)
    for ticket, generation in zip(tickets, want, strict=True):
        assert ticket in failed or outcome(generation_of(ticket)) == outcome(generation)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "device-side assert"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), "unspecified launch failure"),
    ],
    ids=["by its error", "by the next call"],
)
def test_an_error_that_loses_the_gpu_ends_the_thread(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """Errors of libraries do not name CUDA's. The queue is not empty, and no further request is tried."""
    first, second = (Ticket(request) for request in requests_for(MANY[:2], 20))
    queue = Queue()
    for ticket in (first, second):
        queue.put(ticket)
    queue.close()

    def raising(error: Exception) -> Callable[..., Any]:
        def failing(*_: Any) -> Any:
            raise error

        return failing

    monkeypatch.setattr(type(ar()), "accept", raising(error))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raising(RuntimeError("CUDA error: unspecified launch failure")))
    with pytest.raises(RuntimeError, match=said):
        serve(batch(ar(), runner, rows=1), queue, Watcher())
    assert first.outcome is error
    assert second.outcome is None


def test_an_error_without_requests_ends_the_thread(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come back for ever."""
    monkeypatch.setattr(Batch, "open", lambda *_: pytest.fail("cannot start"))
    with pytest.raises(pytest.fail.Exception, match="cannot start"):
        serve(partial(Batch, ar(), on(runner), 2, 60), Queue(), Watcher())


def test_nothing_grows_with_the_life_of_a_batch(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that rests for longer than its log is long does no harm, and what the host keeps has one size."""
    tickets = [Ticket(Request(prompt_ids=[3 + i % 5], max_new_tokens=45, ignore_eos=True)) for i in range(8)]
    sizes, runs, open_run = [], [], Batch.open

    def opened(batch: Batch, run: RunState) -> None:
        runs.append(run)
        open_run(batch, run)

    monkeypatch.setattr(Batch, "open", opened)
    with live(batch(ar(), runner, rows=2)) as (queue, watcher):
        for ticket in tickets:  # one at a time: the other row rests
            queue.put(ticket)
            watcher.wait(1)
            sizes.append([len(value) for value in vars(runs[0]).values() if hasattr(value, "__len__")])
    assert watcher.forwards > 2 * (2 * 64 + 8 + 2)  # more than a log has
    assert all(size == sizes[0] for size in sizes[1:])
    assert len({tuple(generation_of(ticket).token_ids) for ticket in tickets}) <= 5


def test_a_row_that_has_finished_does_not_lengthen_the_next_steps(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long request in another row, a short one is decoded with as few slots in view as alone."""
    views, shape = [], Batch.shape

    def noted(batch: Batch, run: RunState) -> Shape:
        views.append(shape(batch, run))
        return views[-1]

    monkeypatch.setattr(Batch, "shape", noted)
    long, short = (Ticket(Request(prompt_ids=[3], max_new_tokens=n, ignore_eos=True)) for n in (50, 5))
    first = Ticket(Request(prompt_ids=[4], max_new_tokens=1, ignore_eos=True))
    with live(batch(ar(), runner, rows=2)) as (queue, watcher):
        for ticket in (first, long):
            queue.put(ticket)
        watcher.wait(2)
        views.clear()
        queue.put(short)
        watcher.wait(1)
    assert max(view.view for view in views) <= 8
