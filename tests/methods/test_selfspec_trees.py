"""Self-speculation on a MARS checkpoint, by chains and trees, against plain Python that feeds one outcome's masks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import naive
import pytest
from decoding_cases import MANY, REFILLED, ar, check_step_never_waits, decode_prompts, naive_logits, on, run
from method_cases import graph
from small import END, MASK, small_checkpoint
from thinned import one_in
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models.runner import ModelRunner

Said = list[tuple[list[int], list[int] | None]]
BUDGETS = [14 + 2 * (i % 4) for i in range(len(MANY))]
runner = cache(lambda: ModelRunner(small_checkpoint()))


def selfspec(ahead: int, tree: str) -> Method:
    made: Method = METHODS["mars-selfspec"](ahead=ahead, tree=tree)
    return made


def says(ahead: int, tree: str, on: ModelRunner | None = None, **how: Any) -> Said:
    """Tokens and commits."""
    got = run(selfspec(ahead, tree), on or runner(), MANY, BUDGETS, **how)
    return [(g.token_ids, g.commits) for g in got]


def drafted(log_p: Tensor, tree: str) -> set[tuple[int, ...]]:
    """The tree's paths from the root, given the log-probabilities (K, V) that masks predict."""
    if nodes := tree.partition("best:")[2]:
        each = log_p.tolist()
        return set(naive.likeliest_prefixes(lambda path: each[len(path)], len(log_p), int(nodes)))
    branches = [*map(int, tree.split("x")), *[1] * len(log_p)]
    top = [place.topk(count).indices.tolist() for place, count in zip(log_p, branches, strict=False)]
    return {path for depth in range(len(top)) for path in product(*top[: depth + 1])}


def should_say(ahead: int, tree: str, end: int = END) -> Said:
    """Tokens and commits of each prompt: nothing is cached, and masks follow the text where it ended, no other."""
    logits = naive_logits(runner())

    def alone(prompt: list[int], budget: int) -> tuple[list[int], list[int]]:
        def guessed(text: list[int]) -> set[tuple[int, ...]]:
            """Masks stood at the place of the last token and behind it; the first step has none."""
            masked = text[:-1] + [MASK] * ahead
            return drafted(logits(masked)[-ahead:].log_softmax(1), tree) if len(text) > len(prompt) else set()

        return naive.tree_speculative(logits, guessed, prompt, budget, end)

    return [alone(prompt, budget) for prompt, budget in zip(MANY, BUDGETS, strict=True)]


@pytest.mark.parametrize(
    ("ahead", "tree"),
    one_in(3, [(3, "1"), (1, "1"), (4, "1"), (3, "2x2"), *product((1, 2, 3), ("best:1", "best:4", "best:16"))]),
)
def test_drafts_are_those_of_masks_after_the_accepted_text(ahead: int, tree: str) -> None:
    """Of ragged prompts, one of a single token, in rows that are refilled, too. Tokens are those of `ar`."""
    want = should_say(ahead, tree)
    assert [ids for ids, _ in want] == [g.token_ids for g in run(ar(), runner(), MANY, BUDGETS)]
    for how in REFILLED:
        assert says(ahead, tree, **how) == want


def test_an_answer_ends_inside_an_accepted_path() -> None:
    """At an end token that is neither a path's first nor its last, what follows it is cut."""
    how = 3, "best:16"
    answer, commits = max(should_say(*how), key=lambda said: max(said[1] or []))
    assert commits is not None
    assert max(commits) >= 3
    end = answer[sum(commits[: commits.index(max(commits))]) + 1]
    want = should_say(*how, end)
    assert answer[: answer.index(end) + 1] in [ids for ids, _ in want]
    assert says(*how, ModelRunner(replace(small_checkpoint(), end_ids=(end,))), rows=4) == want


def neighbours(offset: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Each row has the tree of another."""
    return offset.roll(1, 0), sees.roll(1, 0)


def another_group(offset: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """The masks of each group see what those of another should see. (Two masks each, after ROOT and four guesses.)"""
    wrong = sees.clone()
    wrong[:, 4:, :4] = sees[:, 4:, :4].roll(2, 1)
    return offset, wrong


@pytest.mark.parametrize("wrong", [neighbours, another_group])
def test_a_fault_planted_in_the_masks_is_found(
    wrong: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = trees.with_masks
    monkeypatch.setattr("mtbench.methods.mars_selfspec.with_masks", lambda *given: wrong(*right(*given)))
    assert says(2, "best:4") != should_say(2, "best:4")


def test_a_step_with_a_tree_never_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    runners, method = graph(on(runner())), selfspec(2, "best:4")
    decode_prompts(method, runners, MANY, 4)  # what is made once is made
    check_step_never_waits(runners, method, monkeypatch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": "best:8"}, "mars-selfspec: tree=best:8 needs a number as ahead"),
        ({"ahead": 3, "tree": "best:0"}, "mars-selfspec: tree='best:0' is not allowed"),
        ({"ahead": 1, "tree": "2x2"}, "of up to 1 depths"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        METHODS["mars-selfspec"](**options)
