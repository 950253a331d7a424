"""Drafts without a draft model: they equal those of plain Python code, and they change speed but no tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import method_cases
import naive
import pytest
import torch
from decoding_cases import (
    BUDGET,
    PROMPTS,
    naive_logits,
    run,
)
from drafts_of import drafts_of
from hypothesis import given, settings, strategies
from small import END, VOCABULARY, scripted_lane

from mtbench import sampling
from mtbench.decoding.registry import METHODS
from mtbench.models.runner import ModelRunner

CASES = [case.method for case in method_cases.CASES if case.models == "plain"]


def copied(text: list[int], ahead: int, ngram: int, min_ngram: int, match: str) -> list[int]:
    """Return the tokens after an earlier occurrence of the longest suffix of `min_ngram` to `ngram` tokens, if any.

    After the earliest one, up to the end of the text; after the latest one, periodically.
    """
    for n in range(min(ngram, len(text) - 1), min_ngram - 1, -1):
        begins = [begin for begin in range(len(text) - n) if text[begin : begin + n] == text[-n:]]
        if begins and match == "earliest":
            return text[begins[0] + n :][:ahead]
        if begins:
            longer = text[:]
            for place in range(begins[-1] + n, begins[-1] + n + ahead):
                longer.append(longer[place])
            return longer[len(text) :]
    return []


def kept(drafts: Sequence[int], own: Sequence[int]) -> int:
    return next((i for i, draft in enumerate(drafts) if draft != own[i]), len(drafts))


@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_prompt_lookup_copies_what_a_plain_search_finds(data: strategies.DataObject) -> None:
    """For any text of few different tokens, tokens, commits and offers are those of a search in plain Python."""
    ngram, ahead = data.draw(strategies.integers(1, 4)), data.draw(strategies.integers(1, 6))
    least, match = data.draw(strategies.integers(1, ngram)), data.draw(strategies.sampled_from(["earliest", "latest"]))
    rows, budget = data.draw(strategies.integers(1, 3)), data.draw(strategies.integers(1, 14))
    token = strategies.sampled_from([0, 1, 2, 2, END])
    script = [[data.draw(token) for _ in range(30)] for _ in range(rows)]
    lengths = [data.draw(strategies.integers(1, 7)) for _ in range(rows)]
    runner = scripted_lane(torch.tensor(script), torch.ones(rows, 30, dtype=torch.bool))
    prompts = [words[:n] for words, n in zip(script, lengths, strict=True)]
    for words, prompt, got in zip(
        script,
        prompts,
        run(METHODS["prompt-lookup"](ngram=ngram, min_ngram=least, ahead=ahead, match=match), runner, prompts, budget),
        strict=True,
    ):
        answer: list[int] = []
        commits: list[int] = []
        offered, ended = 0, False
        while not ended:
            text = prompt + answer
            drafts = copied(text, ahead, ngram, least, match)
            offered += len(drafts)
            own = [*words, *[words[-1]] * 30][len(text) :]
            ended = naive.finish(answer, commits, own[: kept(drafts, own) + 1], END, budget)
        assert (got.token_ids, got.commits, got.drafted) == (answer, commits, offered)


@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_suffix_drafts_the_most_frequent_continuation(data: strategies.DataObject) -> None:
    """For any text of few different tokens, tokens, commits and offers are those of counting in plain Python."""
    depth, ahead = data.draw(strategies.integers(2, 12)), data.draw(strategies.integers(1, 6))
    factor, least = data.draw(strategies.sampled_from([0.5, 1.0, 2.0])), data.draw(strategies.sampled_from([0.0, 0.3]))
    rows, budget = data.draw(strategies.integers(1, 3)), data.draw(strategies.integers(1, 14))
    token = strategies.sampled_from([0, 1, 2, 2, END])
    script = [[data.draw(token) for _ in range(40)] for _ in range(rows)]
    lengths = [data.draw(strategies.integers(1, 20)) for _ in range(rows)]
    runner = scripted_lane(torch.tensor(script), torch.ones(rows, 40, dtype=torch.bool))
    prompts = [words[:n] for words, n in zip(script, lengths, strict=True)]
    method = METHODS["suffix"](depth=depth, ahead=ahead, factor=factor, least=least)
    for words, prompt, got in zip(script, prompts, run(method, runner, prompts, budget), strict=True):
        answer: list[int] = []
        commits: list[int] = []
        offered, ended = 0, False
        while not ended:
            text = prompt + answer
            drafts = naive.suffix_draft(text, depth, factor, least, ahead)
            offered += len(drafts)
            own = [*words, *[words[-1]] * 40][len(text) :]
            ended = naive.finish(answer, commits, own[: kept(drafts, own) + 1], END, budget)
        assert (got.token_ids, got.commits, got.drafted) == (answer, commits, offered)


@pytest.mark.parametrize(
    ("text", "options", "drafts"),
    [
        ([5, 1, 2, 5], {}, [1]),  # floor(1.0 · 1) draft
        ([5, 1, 2, 5], {"factor": 1.9}, [1]),  # floor(1.9 · 1), where the ceiling is 2
        ([5, 1, 5], {"factor": 3.0, "least": 0.5}, [1, 5]),  # of 2 places of 5 one has 1: the text's own end is a place
        ([5, 1, 5], {"factor": 3.0, "least": 0.51}, []),
        ([5, 1, 2, 5], {"factor": 9.0, "depth": 3}, [1, 2]),  # suffix and drafts have 3 tokens
        ([7, 8, 9, 1, 2, 3, 7, 8, 9], {}, [1, 2, 3]),  # a suffix of 3 tokens, no power of two
        ([5, 4, 5, 1, 5, 1, 5, 4, 5], {"depth": 2}, [4]),  # 4 and 1 followed 5 twice; 4 was first
        ([5, 4, 5, 1, 5, 1, 5], {}, [1, 5]),  # 1, 5 followed; its suffix 1, 5 has the larger score
        ([5, 1, 5, 1, 9, 5, 2, 9, 5], {"depth": 3}, [2]),  # 5 says 1 and 9, 5 says 2, both by a half: the longer one
        ([1, 2, 3], {}, []),
    ],
)
def test_suffix_follows_its_authors_rules(text: list[int], options: dict[str, Any], drafts: list[int]) -> None:
    [found] = drafts_of(METHODS["suffix"](**options), [text], VOCABULARY)
    assert found == drafts


def random_tokens(seed: int, count: int) -> list[int]:
    dice = sampling.uniform(torch.tensor(seed), torch.arange(count))
    return [int(VOCABULARY * float(number)) for number in dice]


@pytest.mark.parametrize("ahead", [1, 5, BUDGET])
def test_jacobi_is_a_fixed_point_iteration(runner: ModelRunner, ahead: int) -> None:
    """Each forward recomputes the text and all guesses; its prediction for a position is the next guess there."""
    logits = naive_logits(runner)
    got = run(METHODS["jacobi"](ahead=ahead), runner, seeds=[3, 1, 4, 1])
    for prompt, seed, generation in zip(PROMPTS, (3, 1, 4, 1), got, strict=True):
        iterate = random_tokens(seed, 2 * BUDGET + len(prompt) + 1)
        answer: list[int] = []
        commits: list[int] = []
        ended = False
        while not ended:
            known = len(prompt + answer)
            drafts = iterate[known : known + ahead]
            own = logits(prompt + answer + drafts)[-ahead - 1 :].argmax(1).tolist()
            iterate[known : known + ahead + 1] = own
            ended = naive.finish(answer, commits, own[: kept(drafts, own) + 1], END, BUDGET)
        assert (generation.token_ids, generation.commits) == (answer, commits)
    assert ahead == 1 or any(max(g.commits or []) > 1 for g in got)


Says = Callable[[list[int], list[int]], list[int]]  # text, guesses -> the next token after the text and each guess


def looked_ahead(
    says: Says, prompt: list[int], seed: int, width: int, ngram: int, candidates: int
) -> tuple[list[int], list[int]]:
    """Lookahead decoding with a separate text for each column and n-gram, and a list as pool."""
    random = random_tokens(seed, (ngram - 1) * width)
    levels = [random[i * width : (i + 1) * width] for i in range(ngram - 1)]
    pool: list[list[int]] = []
    answer: list[int] = []
    commits: list[int] = []
    ended = False
    while not ended:
        text = prompt + answer
        levels[0][0] = text[-1]
        columns = [[level[i] for level in levels] for i in range(width)]
        levels.append([says(text, (levels[0][: i + 1] + column[1:])[1:])[-1] for i, column in enumerate(columns)])
        new = says(text, [])
        for gram in [gram for gram in pool if gram[0] == text[-1]][:candidates]:
            own = says(text, gram[1:])
            new = max(new, own[: kept(gram[1:], own) + 1], key=len)
        for column, predicted in reversed([*zip(columns, levels[-1], strict=True)]):
            pool = [[*column, predicted], *(gram for gram in pool if gram != [*column, predicted])]
        del levels[0]
        ended = naive.finish(answer, commits, new, END, BUDGET)
    return answer, commits


SIZES = [{"width": 4, "ngram": 2, "candidates": 2}, {"width": 3, "ngram": 4, "candidates": 3}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lookahead_is_its_algorithm_column_by_column(runner: ModelRunner, sizes: dict[str, int]) -> None:
    """Tokens and commits equal those of a recomputation for every column and n-gram."""
    logits = naive_logits(runner)

    def says(text: list[int], more: list[int]) -> list[int]:
        said: list[int] = logits(text + more)[len(text) - 1 :].argmax(1).tolist()
        return said

    for seed, (prompt, got) in enumerate(zip(PROMPTS, run(METHODS["lookahead"](**sizes), runner), strict=True)):
        assert (got.token_ids, got.commits) == looked_ahead(says, prompt, seed, **sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lookahead_tries_the_latest_ngrams_that_differ(sizes: dict[str, int]) -> None:
    """The texts have three different tokens: many n-grams begin with the same token, and many occur again."""
    torch.manual_seed(0)
    script = torch.randint(0, 3, (20, 60))
    prompts = [row[:3].tolist() for row in script]
    got = run(METHODS["lookahead"](**sizes), scripted_lane(script, torch.ones_like(script, dtype=torch.bool)), prompts)
    for seed, (prompt, row, generation) in enumerate(zip(prompts, script.tolist(), got, strict=True)):

        def says(text: list[int], more: list[int], row: list[int] = row) -> list[int]:
            return row[len(text) : len(text) + len(more) + 1]

        assert (generation.token_ids, generation.commits) == looked_ahead(says, prompt, seed, **sizes)
