"""The loop equals references that recompute everything, in float64; its counts are right for any acceptance."""

import itertools
from collections.abc import Callable
from itertools import product
from typing import Any

import naive
import pytest
import torch
from decoding_cases import (
    BUDGET,
    CONFIGS,
    MANY,
    PROMPTS,
    READ_LAG,
    ar,
    decode_prompts,
    mars,
    naive_logits,
    no_waiting,
    on,
    outcomes,
    requests_for,
    run,
)
from hypothesis import given, settings, strategies
from small import END, MASK, WORDS, scripted_lane
from thinned import one_in
from torch import Tensor

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import CHECKED, Batch, NoProgressError
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, TargetOutput
from mtbench.decoding.request import in_batch
from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.sampling import GREEDY, Sampling


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_equals_its_own_eager_attention(name: str, make_runner: Callable[..., ModelRunner]) -> None:
    """`ar` and `mars` on ragged rows emit what a recomputation through the model's own attention emits."""
    runner = make_runner(CONFIGS[name])
    logits = naive_logits(runner)
    plain = [naive.autoregressive(logits, p, BUDGET, END) for p in PROMPTS]
    masked = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=4, tau=0.3, metric="probability") for p in PROMPTS]
    assert [(g.token_ids, g.commits) for g in run(ar(), runner)] == plain
    assert [(g.token_ids, g.commits) for g in run(mars(tau=0.3), runner)] == masked


RULES = [
    ("probability", 0.15),
    ("probability", 0.4),
    ("entropy", 0.9),
    ("entropy", 1.0),
    ("entropy", 2.5),
    ("margin", 0.1),
    ("margin", 1),
]
CACHES = ("cursor", "none")


@pytest.mark.parametrize(  # each size with each rule; the caches alternate, so each cache has all sizes and rules
    ("cache", "size", "metric", "tau"),
    one_in(3, ((CACHES[(i + j) % 2], n, *rule) for i, n in enumerate([1, 2, 4, 7]) for j, rule in enumerate(RULES))),
)
def test_mars_equals_a_recomputation(runner: ModelRunner, cache: str, size: int, metric: str, tau: float) -> None:
    """Tokens, commits and forwards of `cursor` and `none` equal the naive ones for every metric, τ and B."""
    logits = naive_logits(runner)
    want = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=size, tau=tau, metric=metric) for p in PROMPTS]
    got = run(mars(tau=tau, block_size=size, confidence=metric, cache=cache), runner)
    assert [(g.token_ids, g.commits) for g in got] == want


def test_extra_also_accepts_the_prediction_of_the_last_mask(runner: ModelRunner) -> None:
    """`extra` equals the naive window with one more prediction."""
    logits = naive_logits(runner)
    want = [naive.mars(logits, p, BUDGET, END, mask=MASK, size=5, tau=0.2, metric="probability") for p in PROMPTS]
    assert [(g.token_ids, g.commits) for g in run(mars(tau=0.2, extra=True), runner)] == want


@pytest.mark.parametrize(("block", "tau"), one_in(2, product([1, 3, 8, 40], [0.1, 0.3, 1])))
def test_block_cache_equals_its_own_naive_reference(runner: ModelRunner, tau: float, block: int) -> None:
    """A window ends with its block, rows wait for the slowest, and each block has a fill forward."""
    answers, commits = naive.mars_block(naive_logits(runner), PROMPTS, BUDGET, END, mask=MASK, block=block, tau=tau)
    got = run(mars(tau=tau, cache="block", cache_block=block), runner)
    assert [g.token_ids for g in got] == answers
    for generation, naively in zip(got, commits, strict=True):
        assert generation.commits == naively


def test_at_tau_one_every_policy_is_autoregressive(runner: ModelRunner) -> None:
    """`mars:tau=1` emits the tokens of `ar`, one per forward, with every cache policy and window."""
    want = [g.token_ids for g in run(ar(), runner)]
    for options in ({}, {"cache": "none"}, {"block_size": 7}, {"extra": True}, {"cache": "block", "cache_block": 5}):
        got = run(mars(tau=1, **options), runner)
        assert [g.token_ids for g in got] == want
        if options.get("cache") != "block":
            assert all(g.commits == [1] * len(g.token_ids) for g in got)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"tau": 1},
    {"tau": 0.3},
    {"tau": 0.3, "cache": "none"},
    {"tau": 0.3, "cache": "block"},
    {"extra": True},
]


@pytest.mark.parametrize(
    ("options", "make", "rows"),
    one_in(5, product([o for o in OPTIONS if o.get("cache") != "block"], [None, READ_LAG], [1, 2, 4])),
)
def test_refilled_rows_emit_what_each_prompt_emits_alone(
    runner: ModelRunner, options: dict[str, Any], make: Any, rows: int
) -> None:
    """A row's previous request has no effect: tokens, commits and positions are those of each prompt alone."""
    method = mars(**options) if options else ar()
    alone = [run(method, runner, [p], 10 + i)[0] for i, p in enumerate(MANY)]
    budgets = [10 + i for i in range(len(MANY))]
    generations, timing = decode_prompts(method, on(runner), MANY, budgets, rows=rows, make=make)
    assert outcomes(generations) == outcomes(alone)
    assert (timing.rows, timing.items) == (rows, len(MANY))
    assert timing.row_forwards == sum(g.forwards or 0 for g in alone) <= rows * (timing.batch_forwards or 0)
    assert timing.miscounted == 0


def test_a_waiting_request_is_decoded_once_if_several_rows_finish_together(runner: ModelRunner) -> None:
    """Four rows finish in the same forward and one request waits: exactly one of the rows decodes it."""
    alone = [run(ar(), runner, [p], ignore_eos=True)[0] for p in MANY[:5]]
    for make in (None, READ_LAG):
        assert outcomes(run(ar(), runner, MANY[:5], rows=4, ignore_eos=True, make=make)) == outcomes(alone)


def test_refilled_rows_see_their_own_stop_strings(runner: ModelRunner) -> None:
    """A row that a stop string ended is refilled; the search then covers only the new request's text."""
    plain = run(ar(), runner, MANY)
    stop = [[g.text[2 + i % 3 : 4 + i % 3]] for i, g in enumerate(plain)]
    alone = [run(ar(), runner, [p], stop=[s])[0] for p, s in zip(MANY, stop, strict=True)]
    for make in (None, READ_LAG):
        assert run(ar(), runner, MANY, stop=stop, rows=2, make=make) == alone


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "graph") for name in CONFIGS if not name.startswith("gemma")),
        ("qwen2", "invariant"),
        ("mistral sliding", "invariant"),
    ],
)
def test_every_engine_emits_the_same(name: str, engine: str, make_runner: Callable[..., ModelRunner]) -> None:
    """Each engine computes the same logits for every architecture, with tight and with fixed shapes."""
    runner = make_runner(CONFIGS[name])
    chosen = ENGINES[engine]()
    fast = chosen.runner(runner.checkpoint)
    assert fast.decoder is not None
    for method in (ar(), mars(tau=0.3), mars(tau=0.3, cache="block")):
        want = run(method, runner)
        assert run(method, fast, make=chosen.batch) == want
        assert outcomes(run(method, fast, make=READ_LAG)) == outcomes(want)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_unsupported_layers_run_as_modules_of_transformers(name: str, make_runner: Callable[..., ModelRunner]) -> None:
    """`graph` runs without its decoder and says so. `invariant` needs its decoder and refuses."""
    runner = make_runner(CONFIGS[name])
    graph = ENGINES["graph"]()
    fast = graph.runner(runner.checkpoint)
    assert fast.decoder is None
    assert graph.layers(runner.checkpoint).startswith("transformers' modules (a layer has other parts: ")
    assert run(mars(tau=0.3), fast, make=graph.batch) == run(mars(tau=0.3), runner)
    with pytest.raises(UserError, match=r"needs layers of the Llama architecture.*other parts.*engine=eager"):
        ENGINES["invariant"]().runner(runner.checkpoint)


def test_the_decoder_shares_the_modules_weights(make_runner: Callable[..., ModelRunner]) -> None:
    """Building a decoder moves the weights, without a second copy; the modules still compute the same."""
    runner = make_runner()
    want = run(ar(), runner)
    decoder = ENGINES["graph"]().runner(runner.checkpoint).decoder
    again = ENGINES["invariant"]().runner(runner.checkpoint).decoder
    assert decoder is not None
    assert again is not None
    own = runner.model.model.layers[1].self_attn.k_proj.weight
    for held in (decoder, again):
        whole: Tensor = held.layers[1].get_parameter("qkv")
        assert whole.data_ptr() < own.data_ptr() < whole.data_ptr() + whole.nbytes
    assert run(ar(), runner) == want


def test_a_prefill_in_chunks_does_not_change_the_answers(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, longer than a prefill chunk, give the same answers as a prefill in one pass."""
    prompts = [[i % 30 for i in range(41)], [7], [(3 * i) % 30 for i in range(23)]]
    whole = run(mars(tau=0.3), runner, prompts)
    monkeypatch.setattr("mtbench.decoding.prefill.PREFILL_POSITIONS", 24)
    monkeypatch.setattr("mtbench.decoding.prefill.PREFILL_WIDTH", 8)
    assert run(mars(tau=0.3), runner, prompts) == whole


@pytest.mark.parametrize(
    "method",
    [
        ar(),
        mars(tau=0.3),
        mars(tau=0.3, block_size="auto"),
        mars(tau=0.3, cache="none"),
        mars(tau=0.3, cache="block"),
        mars(tau=0.3, confidence="margin"),
        mars(tau=0.3, confidence="entropy", extra=True),
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, 5, 0.9, 0.05)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_never_waits_for_the_host(
    runner: ModelRunner, method: Method, engine: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the choice of the shape to the cursors the host reads nothing and copies nothing."""
    with torch.inference_mode():
        chosen = ENGINES[engine]()
        runners = ModelRunners("any", {"any": chosen.runner(runner.checkpoint)})
        batch = Batch(method, runners, len(PROMPTS), 50, tight=False)
        run = batch.begin(in_batch(requests_for(PROMPTS, BUDGET), sampling=sampling, ignore_eos=False))
        for _ in range(CHECKED):
            run.count_step(0, 0)
        with no_waiting(monkeypatch):
            shape = batch.shape(run)
            batch.advance(run, shape)
            batch.advance(run, shape._replace(pending=max(2, shape.pending), view=shape.view - 16))


@pytest.mark.parametrize("method", [ar(), mars(tau=0.3), mars(tau=0.3, block_size="auto"), mars(cache="block")])
def test_where_budgets_end_answers_no_forward_is_surplus(runner: ModelRunner, method: Method) -> None:
    """The host reads late, but knows when all rows may have reached their budgets, and then waits for the latest."""
    for make in (None, READ_LAG):
        generations, timing = decode_prompts(method, on(runner), PROMPTS, BUDGET, ignore_eos=True, make=make)
        assert timing.batch_forwards == max(g.forwards or 0 for g in generations)


def test_an_end_token_is_seen_a_few_forwards_late(runner: ModelRunner) -> None:
    """Only launches in flight are surplus."""
    late = 2
    generations, timing = decode_prompts(ar(), on(runner), PROMPTS[1:2], 100, make=READ_LAG)
    assert [g.finish_reason for g in generations] == ["end"]
    assert 0 < (timing.batch_forwards or 0) - (generations[0].forwards or 0) <= late


def expected(script: list[int], sure: list[bool], at: int, budget: int, size: int) -> tuple[list[int], list[int]]:
    """Return the tokens and commits of a window of `size` from position `at`, one position at a time."""
    tokens: list[int] = []
    commits: list[int] = []
    while True:
        count = 0
        for column in range(size):
            place = at + len(tokens)
            if column and not sure[place]:
                break
            tokens.append(0 if script[place] == MASK else script[place])
            count += 1
            if tokens[-1] == END or len(tokens) == budget:
                commits.append(count)
                return tokens, commits
        commits.append(count)


@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_any_acceptance_pattern_is_accounted_for(data: strategies.DataObject) -> None:
    """For any predictions and confidences, tokens and commits are those of `expected`."""
    rows = data.draw(strategies.integers(1, 4))
    budget = data.draw(strategies.integers(1, 14))
    size = data.draw(strategies.integers(1, 5))
    cache = data.draw(strategies.sampled_from(["cursor", "none"]))
    lengths = [data.draw(strategies.integers(1, 6)) for _ in range(rows)]
    token = strategies.sampled_from([1, 2, 3, 4, END, MASK])
    script = [[data.draw(token) for _ in range(24)] for _ in range(rows)]
    sure = [[data.draw(strategies.booleans()) for _ in range(24)] for _ in range(rows)]
    runner = scripted_lane(torch.tensor(script), torch.tensor(sure))
    got = run(mars(tau=0.9, block_size=size, cache=cache), runner, [[5] * n for n in lengths], budget)
    for row, generation in enumerate(got):
        tokens, commits = expected(script[row], sure[row], lengths[row], budget, size)
        assert (generation.token_ids, generation.commits) == (tokens, commits)
        assert generation.finish_reason == ("end" if tokens[-1] == END else "length")
        assert generation.text == "".join(WORDS[t] for t in tokens if t != END)
        before = sum(commits[:-1])
        last = sure[row][lengths[row] + before + 1 :][: size - 1]  # also behind the budget, as papers count
        accepted = 1 + len(list(itertools.takewhile(bool, last)))  # by the last forward, for any finish reason
        assert generation.surplus == accepted - commits[-1]


@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_the_block_policy_accounts_for_waiting_and_filling(data: strategies.DataObject) -> None:
    """With `cache=block` counts add up, zeros included, and no token follows an end token."""
    rows, block = data.draw(strategies.integers(1, 4)), data.draw(strategies.integers(1, 6))
    budget = data.draw(strategies.integers(1, 14))
    token = strategies.sampled_from([1, 2, 3, END, MASK])
    script = torch.tensor([[data.draw(token) for _ in range(24)] for _ in range(rows)])
    sure = torch.tensor([[data.draw(strategies.booleans()) for _ in range(24)] for _ in range(rows)])
    method = mars(tau=0.9, cache="block", cache_block=block)
    for row, g in enumerate(run(method, scripted_lane(script, sure), [[5] * (row + 1) for row in range(rows)], budget)):
        plain, _ = expected(script[row].tolist(), sure[row].tolist(), row + 1, budget, 1)
        assert g.token_ids == plain
        assert g.commits is not None
        assert sum(g.commits) == len(g.token_ids)
        assert len(g.commits) == g.forwards
        assert g.commits[-1] > 0
        assert END not in g.token_ids[:-1]


@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_stop_strings_cut_text_tokens_and_counts(data: strategies.DataObject) -> None:
    """An answer ends with the token that completes a stop string; its text ends before the string."""
    script = [data.draw(strategies.sampled_from([0, 1, 2, 3])) for _ in range(40)]
    sure = [data.draw(strategies.booleans()) for _ in range(40)]
    stop = data.draw(strategies.lists(strategies.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3))
    budget, method = data.draw(strategies.integers(1, 30)), data.draw(strategies.sampled_from([ar(), mars(tau=0.9)]))
    runner = scripted_lane(torch.tensor([script]), torch.tensor([sure]))
    [g], timing = decode_prompts(method, on(runner), [[5]], budget, stop=[stop])
    text = "".join(WORDS[t] for t in script[1 : budget + 1])
    ends = [text.index(s) + len(s) for s in stop if s in text]
    if ends:
        assert g.finish_reason == "stop"
        assert len(g.token_ids) == min(ends)
        assert g.text == text[: min(text.index(s) for s in stop if s in text[: min(ends)])]
    else:
        assert (g.finish_reason, g.text) == ("length", text)
    assert sum(g.commits or []) == len(g.token_ids) == timing.tokens
    assert timing.row_forwards == g.forwards
    assert (g.forwards or 0) <= (timing.batch_forwards or 0)
    if method.name == "ar":
        assert g.forwards == len(g.token_ids)


def test_a_stop_string_found_late_does_not_change_the_answer() -> None:
    """Tokens after the stop string are cut before the end of the text is chosen."""
    script = torch.tensor([[0] + [0, 1, 2, 3] * 3])
    texts = set()
    for budget in range(2, 12):
        runner = scripted_lane(script, torch.ones_like(script, dtype=torch.bool))
        [g], _ = decode_prompts(ar(), on(runner), [[5]], budget, stop=[["abcd", "b"]])
        texts.add((g.text, tuple(g.token_ids)))
    assert texts == {("a", (0, 1))}


def test_fixed_length_ignores_end_tokens(runner: ModelRunner) -> None:
    """Every row emits exactly its budget, even with stop strings."""
    generations, _ = decode_prompts(mars(tau=0.3), on(runner), PROMPTS, BUDGET, stop=[["a"]] * 4, ignore_eos=True)
    assert [len(g.token_ids) for g in generations] == [BUDGET] * 4


def test_times_and_counts_of_a_batch_add_up(runner: ModelRunner) -> None:
    """Prefill and decode time add up to wall time; device time is within decode time; all forwards are counted."""
    _, timing = decode_prompts(mars(tau=0.3), on(runner), PROMPTS, BUDGET)
    assert timing.prefill_s and timing.decode_s and timing.device_s and timing.ttft_s  # noqa: PT018
    assert timing.prefill_s + timing.decode_s == pytest.approx(timing.wall_s)
    assert 0 < timing.device_s < timing.decode_s
    assert timing.prefill_s < timing.ttft_s <= timing.wall_s
    assert timing.step_s is not None
    assert len(timing.step_s) == timing.batch_forwards
    assert timing.miscounted == 0


def test_a_hidden_forward_is_counted(runner: ModelRunner) -> None:
    """If a method runs the model without its runner, a hook on the model counts the forward."""

    class Hidden(type(ar())):  # type: ignore[misc]
        def propose(self, state: Any, rows: Rows, runners: ModelRunners) -> Tensor:
            runners.target.model(torch.tensor([[1]]), use_cache=False, metadata=SEES_ITSELF)
            return torch.empty(len(PROMPTS), 0, dtype=torch.long)

    _, timing = decode_prompts(Hidden(), on(runner), PROMPTS, BUDGET)
    assert timing.miscounted == timing.batch_forwards


SEES_ITSELF = AttentionMetadata(
    torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), torch.ones(1), view=1
)


def test_a_method_that_never_commits_is_stopped(runner: ModelRunner) -> None:
    """It raises NoProgressError."""

    class Idle(type(ar())):  # type: ignore[misc]
        name = "idle"

        def accept(self, state: Any, rows: Rows, judged: TargetOutput) -> Commit:
            none = torch.zeros_like(rows.known)
            return Commit(judged.choice, count=none, kept=none)

    with pytest.raises(NoProgressError, match="idle made 57 forwards for 24 tokens"):
        run(Idle(), runner)


def test_a_prompt_that_does_not_fit_is_refused(runner: ModelRunner) -> None:
    """The error names the sizes and the option to lower."""
    with pytest.raises(
        UserError, match=r"250 tokens and 24 new ones, in rows of 274 positions, do not fit .*256.*--max-new-tokens"
    ):
        run(ar(), runner, [[1] * 250])


def test_the_memory_of_keys_and_values_is_that_of_all_rows_with_their_windows(runner: ModelRunner) -> None:
    """Each row has room for its prompt, its budget and the guesses of one forward."""
    prompts, budget = [[5, 6, 7], [8]], 4
    for method, guesses in ((ar(), 0), (mars(), mars().window().guesses)):
        _, timing = decode_prompts(method, on(runner), prompts, budget)
        slots = max(map(len, prompts)) + budget + guesses
        assert timing.kv_bytes == runner.cache.bytes_per_slot * len(prompts) * slots
