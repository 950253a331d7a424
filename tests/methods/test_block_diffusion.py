"""Block diffusion against a reference that recomputes everything, in float64; and what it refuses."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from decoding_cases import decode_prompts, no_waiting, requests_for
from small import END, MASK, save_small
from thinned import one_in
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.arms import parse_arms
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.lineup.simulation import Scripted
from mtbench.models.runner import ModelRunner
from mtbench.options.classes import build
from mtbench.plan.plan import RunRequest

SIZES = [2, 3, 4]
BUDGET = 14
LATE = partial(Batch, tight=False)  # the fixed shapes and late looks of a GPU's host
RULES: list[dict[str, Any]] = [
    {"per_forward": 1},
    {"per_forward": 2},
    {"tau": 0.3},
    {"tau": 0.9},
    {"per_forward": 2, "tau": 0.3},
]


def method(**options: Any) -> Method:
    made: Method = METHODS["block-diffusion"](**options)
    return made


def prompts(size: int) -> list[list[int]]:
    """Of every length from one block to three."""
    return [[(11 * n + 7 * i + i * i) % 34 for i in range(n)] for n in range(size, 3 * size + 1)]


def run(
    method: Method, runner: ModelRunner, prompts: Sequence[Sequence[int]], budget: int | list[int] = BUDGET, **how: Any
) -> list[Generation]:
    generations, timing = decode_prompts(method, ModelRunners("any", {"any": runner}), prompts, budget, **how)
    assert timing.miscounted == 0
    return generations


def tokens_and_commits(generations: Sequence[Generation]) -> list[tuple[list[int], list[int] | None]]:
    return [(g.token_ids, g.commits) for g in generations]


@cache
def naive_logits(runner: ModelRunner, size: int) -> naive.Logits:
    """The model's own eager attention over the whole sequence, block-causal by a mask."""
    model = runner.model

    @cache
    @torch.no_grad()
    def logits(ids: tuple[int, ...]) -> Tensor:
        block = torch.arange(len(ids)) // size
        hidden = block[None, :] > block[:, None]
        bias = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, float("-inf"))
        model.set_attn_implementation("eager")
        out: Tensor = model(torch.tensor([ids]), attention_mask=bias[None, None], use_cache=False).logits[0]
        model.set_attn_implementation("mtbench")
        return out.index_fill(-1, runner.checkpoint.suppressed, float("-inf"))

    return lambda ids: logits(tuple(ids))


def recomputed(
    runner: ModelRunner, prompts: list[list[int]], size: int, options: dict[str, Any], budget: int = BUDGET
) -> list[tuple[list[int], list[int]]]:
    least, tau = options.get("per_forward", 1), options.get("tau", 1)
    logits = naive_logits(runner, size)
    return [naive.block_diffusion(logits, p, budget, END, mask=MASK, block=size, least=least, tau=tau) for p in prompts]


@pytest.fixture(scope="module")
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    """A random model that is sure now and then, and that ends some answers."""
    runner = make_runner(seed=3)
    runner.model.lm_head.weight.data.mul_(2)
    return runner


@pytest.mark.parametrize(("size", "options"), one_in(3, product(SIZES, RULES)))
def test_it_equals_a_recomputation(runner: ModelRunner, size: int, options: dict[str, Any]) -> None:
    """Tokens and commits, alone and batched, by each engine, tight and with fixed shapes, static and refilled."""
    asked = prompts(size)
    want = recomputed(runner, asked, size, options)
    chosen = method(block_size=size, **options)
    for engine in ("eager", "graph"):
        fast = ENGINES[engine]().runner(runner.checkpoint)
        for make in (None, LATE):
            assert tokens_and_commits(run(chosen, fast, asked, make=make)) == want
            if (engine == "eager") == (make is LATE):
                assert tokens_and_commits(run(chosen, fast, asked, make=make, rows=2)) == want
            else:
                assert [tokens_and_commits(run(chosen, fast, [p], make=make))[0] for p in asked] == want


def test_a_long_prompt_is_cached_by_whole_blocks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the prefill end where a block ends, in rows of any length."""
    monkeypatch.setattr("mtbench.decoding.prefill.PREFILL_POSITIONS", 24)
    monkeypatch.setattr("mtbench.decoding.prefill.PREFILL_WIDTH", 8)
    asked = [[i % 30 for i in range(41)], [7, 3, 8], [(3 * i) % 30 for i in range(23)], [9] * 30]
    for size in (3, 5):
        usable = [p for p in asked if len(p) >= size]
        assert tokens_and_commits(run(method(block_size=size), runner, usable)) == recomputed(runner, usable, size, {})


def test_the_finished_block_is_fed_once_more_and_no_more(runner: ModelRunner) -> None:
    """A block's first forward feeds the block before it too, every other one only that block's last token."""
    for make, others in ((None, 1), (LATE, 4)):  # a graph's forwards are of one width
        [g] = run(method(block_size=4), runner, [[5, 9, 1, 7]], 12, make=make, ignore_eos=True)
        assert g.forwards is not None
        assert g.forwards <= 12
        first = 3  # blocks
        assert g.positions_fed == first * (4 + 4) + (g.forwards - first) * (others + 4)


def test_a_captured_step_replayed_is_the_step(runner: ModelRunner, recorded: list[str]) -> None:
    """Recorded once and replayed for other rows and refills, a step keeps its state in place."""
    chosen, asked = method(block_size=3, tau=0.3), prompts(3)
    captured = Captured(chosen, ModelRunners("any", {"any": ENGINES["graph"]().runner(runner.checkpoint)}), 2, 64)
    for some in (asked[:2], asked[2:4], asked):
        got, timing = decode_prompts(chosen, captured.runners, some, BUDGET, rows=2, make=lambda *_: captured)
        assert tokens_and_commits(got) == recomputed(runner, some, 3, {"tau": 0.3})
    assert timing.preparation_s == 0
    assert recorded


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_never_waits_for_the_host(runner: ModelRunner, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess, forward, accept and commit read nothing back."""
    chosen, asked = ENGINES[engine](), prompts(4)
    with torch.inference_mode():
        runners = ModelRunners("any", {"any": chosen.runner(runner.checkpoint)})
        batch = Batch(method(tau=0.9), runners, len(asked), 50, tight=False)
        run = batch.begin(requests_for(asked, BUDGET))
        with no_waiting(monkeypatch):
            batch.advance(run, batch.shape(run))
            batch.advance(run, batch.shape(run))


def test_a_large_block_and_a_small_budget_are_no_stall(runner: ModelRunner) -> None:
    """All of a block may have to be decided before its first token is output; the progress guard knows."""
    for size, budget in ((32, 1), (32, 3), (24, 2)):
        asked = [[(5 * i + n) % 30 for i in range(size + n)] for n in range(8)]
        got = run(method(block_size=size), runner, asked, budget, ignore_eos=True)
        assert all(len(g.token_ids) == budget for g in got)
        assert max(g.forwards or 0 for g in got) > 2 * budget + 8


def test_a_mask_id_in_the_prompt_is_a_token_of_the_prompt(runner: ModelRunner) -> None:
    """It is fed as it stands and is never decided anew."""
    asked = [[5, MASK, 1, MASK, 7, MASK], [MASK, 2, MASK, 3], [1, 2, 4, 6, MASK, MASK]]
    assert tokens_and_commits(run(method(), runner, asked)) == recomputed(runner, asked, 4, {})


def test_a_script_says_what_is_output_of_a_block(runner: ModelRunner) -> None:
    """Under `--simulate-acceptance` the block is the cap: as many as a script says come out, cut at the block's end."""
    scripted = Scripted(method(tau=0.9), [[3, 2, 9, 9]], torch.device("cpu"))
    [g] = run(scripted, runner, [[5, 9, 1, 7, 2]], 12, ignore_eos=True)  # three places of the first block are open
    assert g.commits == [3, 2, 2, 4, 1]
    whole = Scripted(method(tau=0.9), [[4] * 9] * len(prompts(4)), torch.device("cpu"))
    certain = run(method(tau=0), runner, prompts(4))
    assert tokens_and_commits(run(whole, runner, prompts(4))) == tokens_and_commits(certain)


def test_a_prompt_shorter_than_a_block_is_refused(runner: ModelRunner, tmp_path: Path) -> None:
    """By name, where a library decodes and where a run is planned."""
    with pytest.raises(UserError, match=r"block-diffusion needs prompts of at least one block, here 4 tokens.*has 3"):
        run(method(), runner, [[1] * 5, [1] * 3])
    asked = tmp_path / "mine.jsonl"
    asked.write_text("".join(json.dumps({"prompt": "a " * n}) + "\n" for n in (6, 3)))
    request = RunRequest(
        suite=[f"prompts:{asked}"],
        checkpoint={"block_diffusion": str(save_small(tmp_path / "small"))},
        method=["block-diffusion"],
        batch_size=(1,),
        device="cpu",
    )
    with pytest.raises(UserError, match=r"'block-diffusion@block_diffusion/graph' needs .* 4 tokens, and .* has 3;"):
        make_plan(request)
    [cell] = make_plan(request.changed(method=["block-diffusion:block_size=3"])).cells
    assert cell.options == {"block_size": 3, "per_forward": 1, "tau": 1.0}


def test_the_block_is_the_checkpoints_unless_said() -> None:
    """`block_size` comes from the training record; another value is flagged; tokens are not promised."""
    [arm] = parse_arms(["block-diffusion:tau=0.9,per_forward=2"])
    assert str(arm) == "block-diffusion:per_forward=2,tau=0.9@block_diffusion/graph"
    made, flags = build(METHODS["block-diffusion"], arm.options, {"block_size": 8})
    assert (made.block, flags, made.claims) == (8, [], "lossy")
    assert build(METHODS["block-diffusion"], {"block_size": 4}, {"block_size": 8})[1] == [
        "block_size=4, trained with 8"
    ]


def test_the_surest_come_first() -> None:
    """Of those asked about only; all of them where there are fewer; the first of equals."""
    confidence = torch.tensor([[0.2, 0.9, 0.5, 0.5], [0.0, 0.1, 0.3, 0.9], [0.5, 0.5, 0.5, 0.5]])
    among = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert sampling.top_confidence(confidence, among, 1).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert sampling.top_confidence(confidence, among, 2).tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]]
    assert sampling.top_confidence(confidence, ~among, 4).tolist() == (~among).tolist()


def test_scripted_acceptance_is_refused() -> None:
    """Leading runs say nothing of a block that is decided in any order; a replay would overstate its speed."""
    request = RunRequest(
        suite=["synthetic:16x8"],
        weights="random:qwen2.5-0.5b",
        simulate_acceptance="0.8,0.5",
        method=["block-diffusion:tau=0.9"],
        batch_size=(1,),
        device="cpu",
        limit=2,
    )
    with pytest.raises(UserError, match="decides tokens out of order"):
        make_plan(request)
