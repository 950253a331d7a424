"""Block drafts against plain Python: what each format drafts after every text, what is committed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import naive
import pytest
import torch
from block_drafts import BLOCK, CONFIGS, Reference, fitted, random_tensors, save_draft
from decoding_cases import (
    BUDGET,
    BUDGETS,
    MANY,
    PROMPTS,
    READ_LAG,
    REFILLED,
    ar,
    decode_prompts,
    naive_logits,
    run,
)
from small import END, VOCABULARY, save_small
from thinned import one_in
from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.models.drafts.loading import load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

MOST = {
    "z-lab": BLOCK - 1,
    **dict.fromkeys(("dflash", "vanilla", "gated", "rnn", "domino", "gemma", "gemma values"), BLOCK),
}
MOST |= dict.fromkeys(("jetspec", "dflash2", "dflash2 flat"), BLOCK - 1)  # tokens of a block
Said = tuple[list[int], list[int]]  # tokens, commits
Drafted = list[tuple[list[int], list[int], int, Tensor]]  # text, drafts, how many are sure, the logits


class Case(NamedTuple):
    """A target, a draft that is often right, and what it should draft."""

    runners: ModelRunners
    reference: Reference
    most: int


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return ModelRunner(load(str(save_small(tmp_path_factory.mktemp("target"))), dtype=torch.float64))


@pytest.fixture(scope="module")
def case_of(target: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A format, its LM head fitted to what the target says."""
    says = run(ar(), target, ignore_eos=True)
    texts = [(p + g.token_ids, len(p)) for p, g in zip(PROMPTS, says, strict=True)]
    folder = tmp_path_factory.mktemp("drafts")

    @cache
    def make(kind: str) -> Case:
        draft = fitted(folder / kind, kind, target, texts)
        return Case(runners_of(target, draft), Reference(draft, target), MOST[kind])

    return make


def runners_of(target: ModelRunner, draft: Path) -> ModelRunners:
    runner = DraftRunner(load_draft(str(draft), target.checkpoint), target)
    return ModelRunners("ar", {"ar": target, "dflash": runner})


def dflash(ahead: int, **options: Any) -> Method:
    method: Method = METHODS["dflash"](ahead=ahead, **options)
    return method


@contextmanager
def listened(drafted: Drafted) -> Iterator[None]:
    """List what is drafted behind each text of a row that still decodes."""
    draft_block = METHODS["dflash"].draft_block

    def listening(method: Any, rows: Any, *args: Any) -> Any:
        block = draft_block(method, rows, *args)
        for row in range(len(rows.known)):
            if not rows.done[row]:
                text = rows.tokens[row, : rows.known[row]].tolist()
                drafted.append((text, block.tokens[row].tolist(), int(block.sure[row]), block.logits[row]))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS["dflash"], "draft_block", listening)
        yield


def wrong_drafts(case: Case, ahead: int, prompts: list[list[int]] = PROMPTS, **how: Any) -> int:
    """Blocks of drafts that differ from the reference's, or the logits that they were chosen from, of a decode."""
    drafted: Drafted = []
    with listened(drafted):
        decode_prompts(dflash(ahead), case.runners, prompts, BUDGET, ignore_eos=True, **how)
    assert len(drafted) >= 4 * len(prompts)
    wanted = [case.reference.greedy(tuple(text), ahead) for text, *_ in drafted]
    return sum(
        tokens != drafts or not torch.allclose(logits, scores, rtol=1e-5, atol=1e-5)  # float32: norms and angles
        for (_, drafts, _, logits), (tokens, scores) in zip(drafted, wanted, strict=True)
    )


@pytest.mark.parametrize("kind", one_in(4, CONFIGS, ("gemma",)))
def test_every_draft_is_what_plain_python_drafts(case_of: Callable[[str], Case], kind: str) -> None:
    """After every text, in ragged rows, refilled, with the whole block and a part of it, fed as on a GPU."""
    case = case_of(kind)
    assert wrong_drafts(case, 2) == 0
    assert wrong_drafts(case, case.most, MANY[:5], **REFILLED[1]) == 0


# Trees: behind each draft the best choices given that draft.

TREES = {
    "z-lab": [3, 2],
    "dflash": [1, 2, 2],
    "vanilla": [3, 3, 2],
    "gated": [2, 1, 2],
    "rnn": [3, 2, 2],
    "domino": [3, 2, 2],
    "dflash2": [3, 2],
}


def tree_of(kind: str) -> Method:
    return dflash(len(TREES[kind]), tree="x".join(map(str, TREES[kind])))


def tree_drafts(case: Case, text: list[int], branches: list[int]) -> list[list[list[int]]]:
    """The paths to the guesses of each depth: behind each path the draft's choices given that path."""
    levels: list[list[list[int]]] = [[[]]]
    for depth, choices in enumerate(branches):
        levels.append([])
        for path in levels[depth]:
            forced = [*path, *[0] * (len(branches) - depth)]  # the logits of a depth depend on the path before only
            judged = case.reference.draft(text, len(branches), forced)[1][depth]
            levels[-1] += [[*path, token] for token in judged.topk(choices).indices.tolist()]
    return levels[1:]


def tree_committed(case: Case, prompt: list[int], branches: list[int]) -> Said:
    """Tokens and commits: greedy tokens while each continues a path of the tree."""

    def guessed(text: list[int]) -> set[tuple[int, ...]]:
        return {tuple(path) for paths in tree_drafts(case, text, branches) for path in paths}

    return naive.tree_speculative(naive_logits(case.runners.target), guessed, prompt, BUDGET, END)


def tree_says(case: Case, kind: str, **how: Any) -> tuple[list[Said], int]:
    """Tokens and commits, and how many trees are not those of plain Python."""
    drafted: Drafted = []
    with listened(drafted):
        got, _ = decode_prompts(tree_of(kind), case.runners, PROMPTS, BUDGET, **how)
    levels = [(tree_drafts(case, text, TREES[kind]), guesses) for text, guesses, *_ in drafted]
    wrong = sum([path[-1] for paths in tree for path in paths] != guesses for tree, guesses in levels)
    return [(g.token_ids, g.commits or []) for g in got], wrong


@pytest.mark.parametrize("kind", one_in(3, TREES))
def test_a_tree_is_that_of_plain_python(case_of: Callable[[str], Case], kind: str) -> None:
    """Its guesses and what is committed, of one forward of the draft; in ragged rows, refilled, in a GPU's shapes."""
    case, window = case_of(kind), tree_of(kind).window()
    said, wrong = tree_says(case, kind, rows=3, make=READ_LAG)
    assert wrong == 0
    assert said == [tree_committed(case, prompt, TREES[kind]) for prompt in PROMPTS]
    assert len({n for _, commits in said for n in commits}) > 2
    assert (window.drafts, window.guesses) == (1, sum(math.prod(TREES[kind][: d + 1]) for d in range(len(TREES[kind]))))


def test_an_embedding_and_a_head_that_are_not_stored_are_the_targets(target: ModelRunner, tmp_path: Path) -> None:
    """And stored copies of the target's take no memory."""
    plain = save_draft(tmp_path / "plain", CONFIGS["z-lab"], random_tensors(CONFIGS["z-lab"]))
    case = Case(runners_of(target, plain), Reference(plain, target), BLOCK - 1)
    assert wrong_drafts(case, BLOCK - 1) == 0
    theirs = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    copied = save_draft(tmp_path / "copied", CONFIGS["z-lab"], random_tensors(CONFIGS["z-lab"]) | theirs)
    draft = runners_of(target, copied)["dflash"].model
    assert draft.get_input_embeddings() is target.model.get_input_embeddings()
    assert draft.get_output_embeddings() is target.model.get_output_embeddings()
    other = {"embed_tokens.weight": torch.randn(VOCABULARY, 32).double()}
    own = save_draft(tmp_path / "own", CONFIGS["z-lab"], random_tensors(CONFIGS["z-lab"]) | other)
    assert wrong_drafts(Case(runners_of(target, own), Reference(own, target), BLOCK - 1), BLOCK - 1) == 0


# Confidence: drafts that are not offered.


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_drafts_behind_the_first_unsure_one_are_missing(case_of: Callable[[str], Case], kind: str) -> None:
    """Offered are those before the first chance below the threshold; commits end there; tokens stay `ar`'s."""
    case, drafted = case_of(kind), Drafted()
    every = [c for text in MANY for c in case.reference.chances(text, case.reference.draft(text, BLOCK)[0])]
    threshold = sorted(every)[len(every) // 5]
    method = dflash(BLOCK, confidence=threshold)
    with listened(drafted):
        got, _ = decode_prompts(method, case.runners, MANY[:5], BUDGETS, **REFILLED[1])
    want = run(ar(), case.runners.target, MANY[:5], BUDGETS)
    assert [(g.token_ids, g.finish_reason) for g in got] == [(g.token_ids, g.finish_reason) for g in want]
    sures = {}
    for text, tokens, sure, _ in drafted:
        chances = case.reference.chances(text, tokens)
        sures[tuple(text)] = next((k for k, chance in enumerate(chances) if chance < threshold), BLOCK)
        assert sure == sures[tuple(text)]
    assert len(set(sures.values())) >= 4
    for prompt, g in zip(MANY, got, strict=False):
        text, offered = list(prompt), 0
        for count in g.commits or []:
            offered += sures[tuple(text)]
            assert count <= sures[tuple(text)] + 1
            text += g.token_ids[len(text) - len(prompt) :][:count]
        assert g.drafted == offered


# The loop's own demands.


def test_a_long_block_stays_in_its_row(target: ModelRunner, tmp_path: Path) -> None:
    """A block longer than the drafts that are fed: its last masks lie behind the slots of the target's rows."""
    config = {**CONFIGS["dflash"], "block_size": 40}
    draft = save_draft(tmp_path, config, random_tensors(config))
    case = Case(runners_of(target, draft), Reference(draft, target), 40)
    assert wrong_drafts(case, 1, MANY[:5], rows=3) == 0
    assert wrong_drafts(case, 1, MANY[:5], **REFILLED[1]) == 0
