"""Medusa against plain Python: heads on recomputed hidden states, a chain or a tree, and who has no heads."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import method_cases
import naive
import pytest
from decoding_cases import BUDGET, PROMPTS, naive_logits, run
from method_cases import HEADS, head_logits
from safetensors.torch import load_file
from small import END
from torch import Tensor

from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.runner import ModelRunner
from mtbench.plan.plan import RunRequest

RANDOM = {"method": ["medusa"], "suite": ["synthetic"], "simulate_acceptance": "0.8", "weights": "random:qwen2.5-0.5b"}


def medusa(tree: str = "1", heads: int = HEADS) -> Method:
    method: Method = METHODS["medusa"](heads=heads, tree=tree)
    return method


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return method_cases.headed(tmp_path_factory.mktemp("headed"))


def naively(runner: ModelRunner, heads: dict[str, Tensor], prompt: list[int], choices: Sequence[int]) -> Any:
    """Every head guesses from the text but its last token; then greedy tokens while each is among those guesses."""

    def guessed(text: list[int]) -> set[tuple[int, ...]]:
        if len(text) == 1:
            return set()
        likely = [
            guess.topk(n).indices.tolist() for guess, n in zip(head_logits(runner, heads, text), choices, strict=True)
        ]
        return {path for depth in range(len(likely)) for path in product(*likely[: depth + 1])}

    return naive.tree_speculative(naive_logits(runner), guessed, prompt, BUDGET, END)


@pytest.mark.parametrize(("tree", "choices"), [("1", [1, 1, 1]), ("3x2", [3, 2, 1]), ("1x1x4", [1, 1, 4])])
def test_heads_draft_what_plain_python_says(headed: ModelRunner, tree: str, choices: list[int]) -> None:
    """Tokens and commits, from hidden states that transformers gives, everything recomputed for every token."""
    heads = load_file(Path(headed.checkpoint.source) / "medusa.safetensors")
    got = run(medusa(tree), headed)
    for prompt, generation in zip(PROMPTS, got, strict=True):
        want = naively(headed, heads, prompt, choices)
        assert (generation.token_ids, generation.commits) == want
    assert {1, 2, 4} <= {n for g in got for n in g.commits or []}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"method": ["medusa:on=ar"]}, r"/ar' has no medusa.safetensors.*mtbench train medusa --base"),
        (RANDOM, r"'random:qwen2.5-0.5b' has no medusa.safetensors"),
        ({"method": ["medusa:heads=5"]}, r"heads=5.*has 4; use `heads=4`"),
        ({"method": ["medusa:tree=0x2"]}, r"tree='0x2' is not allowed"),
        ({"method": ["medusa:heads=1,tree=2x2"]}, r"up to 1 depths"),
    ],
)
def test_what_has_no_heads_is_refused_by_name(how: dict[str, Any], said: str) -> None:
    """At planning, before a model is loaded, with what to do."""
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(limit=2, device="cpu", **how))
