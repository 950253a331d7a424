"""Block drafts against plain Python: what each format drafts after every text, what is committed."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
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
from mtbench.decoding.verification import TreeMethod
from mtbench.models.drafts.dflash import BlockDraft, BlockLayer, MarkovHead
from mtbench.models.drafts.loading import load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

MOST = {"z-lab": BLOCK - 1, **dict.fromkeys(("dflash", "vanilla", "gated", "rnn", "domino"), BLOCK)}
MOST["jetspec"] = BLOCK - 1  # tokens of a block
SEEN = "vanilla"  # of the formats, the one for tests that need only one
Said = tuple[list[int], list[int]]  # tokens, commits
Drafted = list[tuple[list[int], list[int], int]]  # text, drafts, how many are sure


class Case(NamedTuple):
    """A target, a draft that is often right, and what it should draft."""

    runners: ModelRunners
    reference: Reference
    most: int


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return ModelRunner(load(str(save_small(tmp_path_factory.mktemp("target"))), dtype=torch.float64))


@pytest.fixture(scope="module")
def cases(target: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every format, its LM head fitted to what the target says."""
    says = run(ar(), target, ignore_eos=True)
    texts = [(p + g.token_ids, len(p)) for p, g in zip(PROMPTS, says, strict=True)]
    folder, made = tmp_path_factory.mktemp("drafts"), {}
    for kind, most in MOST.items():
        draft = fitted(folder / kind, kind, target, texts)
        made[kind] = Case(runners_of(target, draft), Reference(draft, target), most)
    return made


def runners_of(target: ModelRunner, draft: Path) -> ModelRunners:
    runner = DraftRunner(load_draft(str(draft), target.checkpoint), target)
    return ModelRunners("ar", {"ar": target, "dflash": runner})


def module() -> Any:
    """The method's file."""
    return sys.modules[METHODS["dflash"].__module__]


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
                drafted.append((text, block.tokens[row].tolist(), int(block.sure[row])))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS["dflash"], "draft_block", listening)
        yield


def wrong_drafts(case: Case, ahead: int, prompts: list[list[int]] = PROMPTS, **how: Any) -> int:
    """Drafts that differ from the reference's, of a decode."""
    drafted: Drafted = []
    with listened(drafted):
        decode_prompts(dflash(ahead), case.runners, prompts, BUDGET, ignore_eos=True, **how)
    assert len(drafted) >= 4 * len(prompts)
    return sum(case.reference.greedy(tuple(text), ahead) != tokens for text, tokens, _ in drafted)


@pytest.mark.parametrize("kind", one_in(4, CONFIGS))
def test_every_draft_is_what_plain_python_drafts(cases: dict[str, Case], kind: str) -> None:
    """After every text, in ragged rows, refilled, with the whole block and a part of it, fed as on a GPU."""
    case = cases[kind]
    assert wrong_drafts(case, 2) == 0
    for how in REFILLED:
        assert wrong_drafts(case, case.most, MANY, **how) == 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_committed_is_what_plain_python_commits(cases: dict[str, Case], kind: str) -> None:
    """Tokens and commits of the whole decode."""
    case = cases[kind]
    logits, commits_seen = naive_logits(case.runners.target), set()
    for ahead in (2, case.most):
        got, _ = decode_prompts(dflash(ahead), case.runners, PROMPTS, BUDGET)
        for prompt, generation in zip(PROMPTS, got, strict=True):
            answer: list[int] = []
            commits: list[int] = []
            ended = False
            while not ended:
                drafts = case.reference.greedy(tuple(prompt + answer), ahead)
                own = logits(prompt + answer + drafts)[-ahead - 1 :].argmax(1).tolist()
                kept = next((i for i, (a, b) in enumerate(zip(drafts, own, strict=False)) if a != b), ahead)
                ended = naive.finish(answer, commits, own[: kept + 1], END, BUDGET)
            assert (generation.token_ids, generation.commits) == (answer, commits)
            commits_seen |= set(commits)
    assert len(commits_seen) >= 4


# Trees: behind each draft the best choices given that draft.

TREES = {
    "z-lab": [3, 2],
    "dflash": [1, 2, 2],
    "vanilla": [3, 3, 2],
    "gated": [2, 1, 2],
    "rnn": [3, 2, 2],
    "domino": [3, 2, 2],
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
    logits, answer, commits, ended = naive_logits(case.runners.target), list[int](), list[int](), False
    while not ended:
        text, new = prompt + answer, list[int]()
        for paths in [*tree_drafts(case, text, branches), []]:
            new.append(int(logits(text + new)[-1].argmax()))
            if new not in paths:
                break
        ended = naive.finish(answer, commits, new, END, BUDGET)
    return answer, commits


def tree_says(case: Case, kind: str, **how: Any) -> tuple[list[Said], int]:
    """Tokens and commits, and how many trees are not those of plain Python."""
    drafted: Drafted = []
    with listened(drafted):
        got, _ = decode_prompts(tree_of(kind), case.runners, PROMPTS, BUDGET, **how)
    levels = [(tree_drafts(case, text, TREES[kind]), guesses) for text, guesses, _ in drafted]
    wrong = sum([path[-1] for paths in tree for path in paths] != guesses for tree, guesses in levels)
    return [(g.token_ids, g.commits or []) for g in got], wrong


@pytest.mark.parametrize("kind", one_in(3, TREES))
def test_a_tree_is_that_of_plain_python(cases: dict[str, Case], kind: str) -> None:
    """Its guesses and what is committed, of one forward of the draft; in ragged rows, refilled, in a GPU's shapes."""
    case, window = cases[kind], tree_of(kind).window()
    said, wrong = tree_says(case, kind, rows=3, make=READ_LAG)
    assert wrong == 0
    assert said == [tree_committed(case, prompt, TREES[kind]) for prompt in PROMPTS]
    assert len({n for _, commits in said for n in commits}) > 2
    assert (window.drafts, window.guesses) == (1, sum(math.prod(TREES[kind][: d + 1]) for d in range(len(TREES[kind]))))


def other_parent(real: Any) -> Any:
    """A child takes the Markov term of another parent."""

    def forward(self: MarkovHead, before: Tensor, hidden: Tensor, state: Tensor) -> Any:
        return real(self, before.flip(1), hidden, state)

    return forward


def other_state(real: Any) -> Any:
    """A child continues the recurrent state of another parent."""
    return lambda self, before, hidden, state: real(self, before, hidden, state.flip(1))


OTHERS = [("vanilla", other_parent), ("domino", other_parent), ("rnn", other_state)]


@pytest.mark.parametrize(("kind", "plant"), one_in(3, OTHERS))
def test_a_child_of_another_parent_is_seen(cases: dict[str, Case], kind: str, plant: Any, monkeypatch: Any) -> None:
    """Tokens of `ar` it still has; the trees are others."""
    head = type(cases[kind].runners["dflash"].model.markov_head)
    monkeypatch.setattr(head, "forward", plant(head.forward))
    said, wrong = tree_says(cases[kind], kind)
    assert wrong > 0
    assert [tokens for tokens, _ in said] == [g.token_ids for g in run(ar(), cases[kind].runners.target)]


def test_a_path_that_is_not_moved_in_the_cache_is_seen(cases: dict[str, Case], monkeypatch: Any) -> None:
    """Keys and values of the accepted drafts would be those of the tree's first guesses."""
    accept = TreeMethod.accept
    monkeypatch.setattr(TreeMethod, "accept", lambda self, *on: replace(accept(self, *on), path=None))
    said, _ = tree_says(cases[SEEN], SEEN)
    assert [tokens for tokens, _ in said] != [g.token_ids for g in run(ar(), cases[SEEN].runners.target)]


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


# Planted faults. Each is a change of the smallest unit; the comparison with plain Python must see it.


def of_format(**changes: Any) -> Callable[[pytest.MonkeyPatch, DraftRunner], None]:
    return lambda patch, runner: patch.setattr(runner.draft, "format", replace(runner.draft.format, **changes))


def replaced(holder: type, name: str, make: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch, DraftRunner], None]:
    return lambda patch, _: patch.setattr(holder, name, make(getattr(holder, name)))


def keep_block_keys(patch: pytest.MonkeyPatch, _: DraftRunner) -> None:
    """Accepted tokens keep the keys they had as masks: only the newest entry is made of features."""
    real: Any = vars(module())["new_entries"]
    newest = SimpleNamespace(tight=False, commits=1)
    patch.setattr(module(), "new_entries", lambda runner, _, *rest: real(runner, newest, *rest))


def shift_block(real: Any) -> Any:
    def forward(self: BlockDraft, ids: Tensor, features: Tensor, metadata: Any, *args: Any) -> Any:
        ahead = torch.arange(metadata.slots.shape[1]) >= features.shape[1]
        return real(self, ids, features, replace(metadata, positions=metadata.positions + ahead), *args)

    return forward


def lag(real: Any) -> Any:
    """The token before the one before."""
    seen: list[Tensor] = []

    def forward(self: MarkovHead, before: Tensor, hidden: Tensor, state: Tensor) -> Any:
        seen.append(before)
        return real(self, seen[-2] if len(seen) > 1 and len(seen[-2]) == len(before) else before, hidden, state)

    return forward


def shift_taps(patch: pytest.MonkeyPatch, runner: DraftRunner) -> None:
    patch.setattr(runner, "taps", tuple(tap - 1 if tap else 1 for tap in runner.taps))


def before_their_norm(patch: pytest.MonkeyPatch, runner: DraftRunner) -> None:
    patch.setattr(runner.draft.hidden_norm, "forward", lambda context: context)


def forget(patch: pytest.MonkeyPatch, runner: DraftRunner) -> None:
    """A recurrent state starts anew at every token."""
    real: Any = runner.draft.markov_head.forward  # type: ignore[union-attr]
    patch.setattr(
        runner.draft.markov_head, "forward", lambda before, hidden, state: real(before, hidden, torch.zeros_like(state))
    )


def causal(patch: pytest.MonkeyPatch, _: DraftRunner) -> None:
    patch.setattr(module(), "seen", lambda size, device, causal: torch.ones(size, size).tril().bool())


def normed(real: Any) -> Any:
    return lambda self, context, *args: real(self, self.input_layernorm(context), *args)


def updated(real: Any) -> Any:
    return lambda self, context, *args: real(self, context + self.mlp(context), *args)


BOTH = {"z-lab", "vanilla"}
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, DraftRunner], None], set[str]]] = {
    "block keys stay": (keep_block_keys, BOTH),
    "a causal block": (causal, BOTH),
    "features one position ahead": (
        replaced(DraftRunner, "read", lambda real: lambda self, slots, rows=None: real(self, slots + 1, rows)),
        BOTH,
    ),
    "a context that layers norm": (replaced(BlockLayer, "forward", normed), BOTH),
    "a context that layers update": (replaced(BlockLayer, "forward", updated), BOTH),
    "shifted taps": (shift_taps, BOTH),
    "a context without its norm": (before_their_norm, BOTH),
    "the block's positions shifted": (replaced(BlockDraft, "forward", shift_block), BOTH),
    "another mask": (of_format(mask_id=1), BOTH),
    "the first position predicts": (of_format(from_anchor=True), {"z-lab"}),
    "the first position does not predict": (of_format(from_anchor=False), {"dflash", "rnn"}),
    "no Markov term": (of_format(markov=None), {"vanilla", "gated", "rnn", "domino"}),
    "the term of the token before last": (replaced(MarkovHead, "forward", lag), {"vanilla"}),
    "a state forgotten": (forget, {"rnn", "domino"}),
    "a term of the first prediction": (of_format(uncorrected=0), {"domino"}),
    "a block that is not causal": (of_format(causal=False), {"jetspec"}),
}


@pytest.mark.parametrize(
    ("fault", "kind"), [case for fault in FAULTS for case in one_in(9, product([fault], sorted(FAULTS[fault][1])))]
)
def test_a_planted_fault_is_seen(
    cases: dict[str, Case], fault: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of `ar` it still has; the drafts are others."""
    case = cases[kind]
    runner = case.runners["dflash"]
    assert isinstance(runner, DraftRunner)
    FAULTS[fault][0](monkeypatch, runner)
    assert wrong_drafts(case, BLOCK - 1) > 0


# Confidence: drafts that are not offered.


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_drafts_behind_the_first_unsure_one_are_missing(cases: dict[str, Case], kind: str) -> None:
    """Offered are those before the first chance below the threshold; commits end there; tokens stay `ar`'s."""
    case, drafted = cases[kind], Drafted()
    every = [c for text in MANY for c in case.reference.chances(text, case.reference.draft(text, BLOCK)[0])]
    threshold = sorted(every)[len(every) // 5]
    method = dflash(BLOCK, confidence=threshold)
    with listened(drafted):
        got, _ = decode_prompts(method, case.runners, MANY[:5], BUDGETS, **REFILLED[1])
    want = run(ar(), case.runners.target, MANY[:5], BUDGETS)
    assert [(g.token_ids, g.finish_reason) for g in got] == [(g.token_ids, g.finish_reason) for g in want]
    sures = {}
    for text, tokens, sure in drafted:
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


@pytest.mark.parametrize("shortened", [False, True])
def test_rejection_sampling_has_the_distribution_of_the_target(cases: dict[str, Case], shortened: bool) -> None:
    """The second token, over many seeds; also where the second draft may be missing."""
    case, count, prompt = cases[SEEN], 1000, [5, 9]
    confidence = shortened * (case.reference.chances(prompt, [0])[0] - 0.01)
    method = dflash(2, verify="rejection", confidence=confidence)
    got, _ = decode_prompts(method, case.runners, [prompt] * count, 2, seeds=range(count), temperature=1.0)
    logits = naive_logits(case.runners.target)
    first = logits(prompt)[-1].softmax(0)
    pairs = torch.stack([first[a] * logits([*prompt, a])[-1].softmax(0) for a in range(VOCABULARY) if first[a] > 0])
    seen = torch.zeros(VOCABULARY).double()
    for g in got:
        if len(g.token_ids) == 2:
            seen[g.token_ids[1]] += 1 / count
    expected = pairs[[i for i, a in enumerate(a for a in range(VOCABULARY) if first[a] > 0) if a != END]].sum(0)
    assert float((seen - expected).abs().sum()) < 0.2
    assert any(n == 2 for g in got for n in g.commits or [])


# The loop's own demands.


def test_a_long_block_stays_in_its_row(target: ModelRunner, tmp_path: Path) -> None:
    """A block longer than the drafts that are fed: its last masks lie behind the slots of the target's rows."""
    config = {**CONFIGS["dflash"], "block_size": 40}
    draft = save_draft(tmp_path, config, random_tensors(config))
    case = Case(runners_of(target, draft), Reference(draft, target), 40)
    assert wrong_drafts(case, 1, MANY, rows=3) == 0
    assert wrong_drafts(case, 1, MANY, **REFILLED[1]) == 0
