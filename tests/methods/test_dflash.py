"""Block drafts against plain Python: what each format drafts after every text, what is committed."""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

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
from small import END, MASK, VOCABULARY, save_small
from thinned import one_in
from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.models.attention import AttentionMetadata
from mtbench.models.drafts.block_heads import CandidateSelector
from mtbench.models.drafts.dflash import BlockConvolution, BlockDraft
from mtbench.models.drafts.loading import load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

MOST = {
    "z-lab": BLOCK - 1,
    **dict.fromkeys(("dflash", "vanilla", "gated", "rnn", "domino", "gemma", "gemma values"), BLOCK),
}
MOST |= dict.fromkeys(("jetspec", "sliding", "dflash2", "dflash2 flat"), BLOCK - 1)  # tokens of a block
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
def test_every_draft_is_what_plain_python_drafts(cases: dict[str, Case], kind: str) -> None:
    """After every text, in ragged rows, refilled, with the whole block and a part of it, fed as on a GPU."""
    case = cases[kind]
    assert wrong_drafts(case, 2) == 0
    for how in REFILLED:
        assert wrong_drafts(case, case.most, MANY, **how) == 0


# Faults of DFlash 2: each changes drafts or scores.

convolution, select, forward = BlockConvolution._convolved, CandidateSelector.forward, BlockDraft.forward
of_block = AttentionMetadata.of_block


def reordered(self: Any, logits: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    scores, state = select(self, logits, *given)
    candidates = logits.topk(self.candidates, -1).indices
    return scores.scatter(-1, candidates, scores.gather(-1, candidates.flip(-1))), state


def of_place_before(self: Any, *given: Any) -> tuple[Tensor, Tensor]:
    logits, hidden = forward(self, *given)
    return logits, hidden.roll(1, 1)


CONVOLUTION, SELECTOR = (BlockConvolution, "_convolved"), (CandidateSelector, "forward")
FAULTS: dict[str, tuple[type, str, Any]] = {
    "later positions": (*CONVOLUTION, lambda self, x, weights: convolution(self, x.flip(1), weights.flip(1)).flip(1)),
    "no zeros before the block": (
        *CONVOLUTION,
        lambda self, x, weights: sum(x.roll(i, 1) * weights[:, :, i] for i in range(weights.shape[2])),
    ),
    "taps reversed": (*CONVOLUTION, lambda self, x, weights: convolution(self, x, weights.flip(2))),
    "weights of another position": (*CONVOLUTION, lambda self, x, weights: convolution(self, x, weights.roll(1, 1))),
    "candidates in another order": (*SELECTOR, reordered),
    "others than candidates": (
        *SELECTOR,
        lambda self, logits, *given: (select(self, logits, *given)[0].logaddexp(logits - 9), given[-1]),
    ),
    "hidden state of the place before": (BlockDraft, "forward", of_place_before),
    "sliding layers not causal": (
        AttentionMetadata,
        "of_block",
        lambda self, count, causal, window: of_block(self, count, False, window),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(cases: dict[str, Case], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert wrong_drafts(cases["dflash2"], BLOCK - 1, PROMPTS[1:2]) > 0


# DFlash 2 and DFlash as their owners compute them.


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The owners' model.py."""
    folder = tmp_path_factory.mktemp("owners")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "dflash==0.1.0"]
    subprocess.run(command, check=True, timeout=300)
    (folder / "owners_of_dflash.py").write_bytes(ZipFile(next(folder.glob("*.whl"))).read("dflash/model.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module: Any = import_module("owners_of_dflash")
    module._sample_probs = lambda probabilities: probabilities.argmax(-1)  # their q along the greedy path
    return module


THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding and full": ("dflash2", {}),
    "flat, not causal": ("dflash2 flat", {}),
    "flat, causal": ("dflash2 flat", {"is_causal": True}),
    "full, causal": ("dflash2", {"is_causal": True, "layer_types": None, "use_sliding_window": False}),
    "full, not causal": ("dflash2", {"layer_types": None, "use_sliding_window": False}),
    "DFlash, sliding and full": ("sliding", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", THEIRS)
def test_drafts_are_those_of_the_owners_classes(owners: Any, target: ModelRunner, tmp_path: Path, case: str) -> None:
    """In 1,000 contexts at every K: the tokens, and the distribution that a sampled draft is drawn from."""
    kind, changes = THEIRS[case]
    config = {**CONFIGS[kind], **changes}
    tensors = random_tensors(config)
    checkpoint = replace(target.checkpoint, suppressed=target.checkpoint.suppressed[:0])  # the owners know none
    runners = runners_of(ModelRunner(checkpoint), save_draft(tmp_path, config, tensors))
    made_of = owners.DFlash2DraftModel if "2" in kind else owners.DFlashDraftModel
    theirs = made_of(owners.Qwen3Config(**config)).double().eval()
    theirs.rotary_emb.inv_freq = runners["dflash"].model.rotary_emb.inv_freq
    theirs.load_state_dict({f"{n}.weight" if n.endswith("_codebook") else n: x for n, x in tensors.items()})
    reference = Reference(tmp_path, runners.target)
    head = target.model.get_output_embeddings()

    @cache
    @torch.no_grad()
    def wanted(text: tuple[int, ...]) -> tuple[list[int], Tensor]:
        """Drafts and q (K, V) after a text, of the whole text at once."""
        block = torch.tensor([[text[-1], *[MASK] * (BLOCK - 1)]])
        scale = owners._draft_value(theirs.config, "input_embedding_scale", 1.0)
        hidden = theirs(
            position_ids=torch.arange(len(text) - 1 + BLOCK)[None],
            noise_embedding=owners._raw_input_embeddings(target.model, block, scale),
            target_hidden=reference.features(text)[None, :-1],
        )[:, 1:]
        if "2" not in kind:
            logits = theirs.compute_logits(hidden, head)[0]
            return logits.argmax(-1).tolist(), logits.float().softmax(-1)
        drafts, candidates, q = theirs.propose(hidden, block[:, 0], head, 1.0)
        return drafts[0].tolist(), torch.zeros(BLOCK - 1, VOCABULARY).scatter(1, candidates[0], q[0])

    for ahead in range(1, BLOCK):
        drafted: Drafted = []
        generator = torch.Generator().manual_seed(ahead)
        prompts = torch.randint(0, 36, (70, 6), generator=generator).tolist()
        with listened(drafted):
            decode_prompts(dflash(ahead), runners, prompts, 20, rows=32, ignore_eos=True)
        texts = {tuple(text) for text, *_ in drafted}
        wrong = sum(drafts != wanted(tuple(text))[0][:ahead] for text, drafts, *_ in drafted)
        apart = [logits.softmax(-1) - wanted(tuple(text))[1][:ahead] for text, _, _, logits in drafted]
        worst = float(torch.stack(apart).abs().max())
        print(f"{case}, K={ahead}: {len(texts)} contexts, {wrong} differ; largest difference of q {worst:.1e}")
        assert len(texts) >= 1000
        assert wrong == 0
        assert worst < 1e-5  # norms and angles are of float32


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
    levels = [(tree_drafts(case, text, TREES[kind]), guesses) for text, guesses, *_ in drafted]
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
    assert wrong_drafts(case, 1, MANY, rows=3) == 0
    assert wrong_drafts(case, 1, MANY, **REFILLED[1]) == 0
