"""EAGLE against plain Python: drafts of every format, their trees, their cache."""

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
from torch import Tensor

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.plan.plan import RunRequest

SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {  # options, and the choices at each depth
    "chain": ({}, [1, 1, 1, 1]),
    "tree": ({"ahead": 3, "tree": "3x3x2"}, [3, 3, 2]),
    "late tree": ({"ahead": 3, "tree": "1x2x2"}, [1, 2, 2]),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), FORMATS["specforge"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_says_what_plain_python_says(pair: Pair, shape: str) -> None:
    """Tokens and commits, everything recomputed for every token. Formats: tests/models/drafts/test_eagle_draft.py."""
    options, choices = SHAPES[shape]
    want = [pair.reference.decode(prompt, choices) for prompt in PROMPTS]
    got, _ = decode_prompts(eagle(**options), pair.runners(), PROMPTS, BUDGET)
    assert [(g.token_ids, g.commits) for g in got] == want
    assert {1, 2, 3} <= {n for _, commits in want for n in commits}


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

    def spy(ids: Tensor, features: Tensor, metadata: Any, judged: int, *, depth: int = 0) -> Any:
        seen.append((depth > 0, ids.shape[1]))
        return right(ids, features, metadata, judged, depth=depth)

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
        ("tree=2x2,ahead=auto", r"ahead=auto needs a chain, and tree=2x2 is none"),
        ("ahead=1,tree=2x2", r"up to 1 depths"),
        ("tree=" + "9" * 5000, r"is not allowed; give the numbers of choices"),
        ("draft=draft", r"in role 'draft' is a whole model \(qwen2\), and a draft that drafts token by token"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(options: str, said: str) -> None:
    """At planning, before a model is loaded."""
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(method=[f"eagle:{options}"], limit=2, device="cpu"))
