"""Medusa against plain Python: heads on recomputed hidden states, a chain or a tree, and who has no heads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from decoding_cases import BUDGET, BUDGETS, MANY, PROMPTS, REFILLED, ar, check_step_never_waits, decode_prompts, on, run
from safetensors.torch import load_file, save_file
from small import END, MASK, save_small
from torch import Tensor
from whole import plan_of

from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models.families import family
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.simulation import Scripted

HEADS = 3
RANDOM = {"method": ["medusa"], "suite": ["synthetic"], "simulate_acceptance": "0.8", "weights": "random:qwen2.5-0.5b"}
TREES = ["1", "3x2", "1x2x2"]
Read = Callable[[list[int]], tuple[Tensor, Tensor]]  # ids (L,) -> of the last: logits (V,), what the LM head read (C,)


def medusa(tree: str = "1", heads: int = HEADS) -> Method:
    method: Method = METHODS["medusa"](heads=heads, tree=tree)
    return method


def reading(runner: ModelRunner) -> Read:
    """The model's own eager attention over the whole sequence."""
    model = runner.model

    @torch.no_grad()
    def read(ids: list[int]) -> tuple[Tensor, Tensor]:
        model.set_attn_implementation("eager")
        out = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        model.set_attn_implementation("mtbench")
        return out.logits[0, -1].index_fill(-1, runner.checkpoint.suppressed, float("-inf")), out.hidden_states[-1][
            0, -1
        ]

    return read


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A random model, and heads that are often right: fitted by least squares to what it says itself."""
    folder = save_small(tmp_path_factory.mktemp("headed"))
    runner = ModelRunner(load(str(folder), dtype=torch.float64))
    read, says = reading(runner), run(ar(), runner, ignore_eos=True)
    texts = [p + g.token_ids for p, g in zip(PROMPTS, says, strict=True)]
    states = [(torch.stack([read(text[:n])[1] for n in range(1, len(text))]), text) for text in texts]
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for k in range(HEADS):
        weight, bias = 0.1 * torch.randn(32, 32).double(), 0.1 * torch.randn(32).double()
        known = torch.cat([hidden[: len(text) - k - 2] for hidden, text in states])
        target = torch.cat([torch.tensor(text[k + 2 :]) for _, text in states])
        x = known + torch.nn.functional.silu(known @ weight.T + bias)
        head = torch.linalg.lstsq(x, torch.eye(40).double()[target], driver="gelsd").solution.T
        head[MASK] = head.sum(0)  # an id no arm may say, which the heads like best
        tensors |= {f"{k}.hidden.weight": weight, f"{k}.hidden.bias": bias, f"{k}.head": head.contiguous()}
    save_file(tensors, folder / "medusa.safetensors")
    return runner


def naively(
    read: Read, heads: dict[str, Tensor], runner: ModelRunner, prompt: list[int], choices: Sequence[int]
) -> Any:
    """Every head guesses from the text but its last token; then greedy tokens while each is among those guesses."""
    answer: list[int] = []
    commits: list[int] = []
    ended = False
    while not ended:
        likely: list[list[int]] = []
        text = prompt + answer
        for k, many in enumerate(choices if len(text) > 1 else ()):
            hidden = read(text[:-1])[1]
            x = hidden + torch.nn.functional.silu(heads[f"{k}.hidden.weight"] @ hidden + heads[f"{k}.hidden.bias"])
            guessed = (heads[f"{k}.head"] @ x).index_fill(0, runner.checkpoint.suppressed, float("-inf"))
            likely.append(guessed.topk(many).indices.tolist())
        new: list[int] = []
        while len(new) <= len(likely) and (not new or new[-1] in likely[len(new) - 1]):
            new.append(int(read(text + new)[0].argmax()))
        ended = naive.finish(answer, commits, new, END, BUDGET)
    return answer, commits


@pytest.mark.parametrize(("tree", "choices"), [("1", [1, 1, 1]), ("3x2", [3, 2, 1]), ("1x1x4", [1, 1, 4])])
def test_heads_draft_what_plain_python_says(headed: ModelRunner, tree: str, choices: list[int]) -> None:
    """Tokens and commits, from hidden states that transformers gives, everything recomputed for every token."""
    heads, read = load_file(Path(headed.checkpoint.source) / "medusa.safetensors"), reading(headed)
    got = run(medusa(tree), headed)
    for prompt, generation in zip(PROMPTS, got, strict=True):
        want = naively(read, heads, headed, prompt, choices)
        assert (generation.token_ids, generation.commits) == want
    assert {1, 2, 4} <= {n for g in got for n in g.commits or []}


@pytest.mark.parametrize("tree", TREES)
def test_heads_change_nothing_but_the_pace(headed: ModelRunner, tree: str) -> None:
    """`ar`'s tokens and reasons, a row's own commits: in a batch whose rows are refilled, also fed as on a GPU."""
    want = run(ar(), headed, MANY[:5], BUDGETS)
    alone = [run(medusa(tree), headed, [p], [n])[0] for p, n in zip(MANY, BUDGETS, strict=False)]
    for how in REFILLED:
        got, timing = decode_prompts(medusa(tree), on(headed), MANY[:5], BUDGETS, **how)
        assert [(g.token_ids, g.finish_reason) for g in got] == [(g.token_ids, g.finish_reason) for g in want]
        assert [(g.commits, g.drafted) for g in got] == [(g.commits, g.drafted) for g in alone]
        assert timing.miscounted == 0
        for prompt, g in zip(MANY, got, strict=False):
            assert sum(g.commits or []) == len(g.token_ids)
            assert g.drafted == HEADS * ((g.forwards or 0) - (len(prompt) == 1))  # one token has no state before it


@pytest.mark.parametrize("tree", ["1", "3x2"])
def test_sampled_tokens_are_those_of_sampled_ar(headed: ModelRunner, tree: str) -> None:
    want = run(ar(), headed, MANY[:5], BUDGETS, temperature=1)
    got = run(medusa(tree), headed, MANY[:5], BUDGETS, temperature=1, **REFILLED[1])
    assert [(g.token_ids, g.finish_reason) for g in got] == [(g.token_ids, g.finish_reason) for g in want]


def test_on_trained_weights_a_tree_is_faster_than_a_chain_is_faster_than_nothing() -> None:
    """The embedded heads on questions they were trained for; what they cost is told."""
    runner = ModelRunner(load(family("tiny").checkpoint("medusa"), dtype=torch.float64))
    prompts = [item.prompt_ids for item in plan_of(2).suites[0].items]
    want, pace = run(ar(), runner, prompts, 64), [1.3]
    for tree in ("1", "3x2"):
        got, timing = decode_prompts(medusa(tree, heads=4), on(runner), prompts, 64)
        assert [g.token_ids for g in got] == [g.token_ids for g in want]
        pace.append(sum(len(g.token_ids) for g in got) / sum(g.forwards or 0 for g in got))
        assert 0 < (timing.head_s or 0) < (timing.device_s or 0)
    assert pace == sorted(pace)


@pytest.mark.parametrize("tree", ["1", "3x2"])
def test_a_captured_step_replayed_is_the_step(headed: ModelRunner, tree: str, recorded: list[str]) -> None:
    """Hidden states keep their place: recorded once, a step serves other rows, refills and later batches."""
    fast = on(ENGINES["graph"]().runner(headed.checkpoint))
    captured = Captured(medusa(tree), fast, 2, 64)
    for prompts in (PROMPTS[2:4], PROMPTS[1:]):
        got, _ = decode_prompts(medusa(tree), fast, prompts, BUDGET, rows=2, make=lambda *_: captured)
        want = run(medusa(tree), headed, prompts, rows=2)
        assert [(g.token_ids, g.commits) for g in got] == [(g.token_ids, g.commits) for g in want]
    assert len(recorded) == 2


@pytest.mark.parametrize("tree", TREES)
def test_a_step_never_waits_for_the_host(headed: ModelRunner, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_step_never_waits(on(ENGINES["graph"]().runner(headed.checkpoint)), medusa(tree), monkeypatch)


@pytest.mark.parametrize("tree", TREES)
def test_a_script_is_followed_whatever_the_heads_say(headed: ModelRunner, tree: str) -> None:
    """Simulated acceptance: commits are the script's, from the first forward on."""
    scripts, budgets = [[1, 3, 2, 4, 1, 1, 3], [4, 4, 1, 2]], [15, 11]
    method = Scripted(medusa(tree), scripts, torch.device("cpu"))
    got, _ = decode_prompts(method, on(headed), PROMPTS[:2], budgets, ignore_eos=True)
    assert [g.commits for g in got] == scripts


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"method": ["medusa:on=ar"]}, r"/ar' has no medusa.safetensors.*mtbench train medusa --base"),
        (RANDOM, r"'random:qwen2.5-0.5b' has no medusa.safetensors"),
        ({"method": ["medusa:heads=5"]}, r"heads=5.*has 4; use `heads=4`"),
        ({"method": ["medusa:tree=2x"]}, r"tree='2x' is not allowed"),
        ({"method": ["medusa:tree=0x2"]}, r"tree='0x2' is not allowed"),
        ({"method": ["medusa:heads=1,tree=2x2"]}, r"up to 1 depths"),
    ],
)
def test_what_has_no_heads_is_refused_by_name(how: dict[str, Any], said: str) -> None:
    """At planning, before a model is loaded, with what to do."""
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(limit=2, device="cpu", **how))


def test_the_heads_are_those_it_was_trained_with() -> None:
    plan = make_plan(RunRequest(method=["medusa"], limit=2, device="cpu"))
    assert next(cell for cell in plan.cells if cell.arm.startswith("medusa")).options == {"heads": 4, "tree": "1"}
