"""`tree=best:N` of each method against plain Python: the likeliest prefixes by a heap, everything recomputed."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import naive
import pytest
import torch
from block_drafts import Reference
from decoding_cases import BUDGET, MANY, PROMPTS, READ_LAG, decode_prompts, naive_logits, on
from eagle_cases import FORMATS, make_pair
from method_cases import HEADS, block_drafted, graph, head_logits, headed
from mtp_checkpoints import save_headed
from parallel_eagle_cases import FORMATS as PARALLEL
from parallel_eagle_cases import make_pair as make_parallel
from safetensors.torch import load_file, save_file
from small import END
from thinned import one_in
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.plan.plan import RunRequest

DEPTH, NODES = 3, 6
NAMES = ["dflash z-lab", "dflash rnn", "medusa", "dflash dflash2", "mtp", "eagle in parallel", "eagle"]
SHARPER = 12  # fitted heads are nearly indifferent, and their likeliest prefixes are short
Drafts = Callable[[list[int], Sequence[int]], Tensor]  # a text and a path: the draft's logits after these, (V,)


class Drafting(NamedTuple):
    """A method, its models, and what they draft by plain Python."""

    name: str
    runners: ModelRunners
    after: Drafts

    def decodes(self, prompts: list[list[int]], nodes: int = NODES, depth: int = DEPTH) -> Any:
        """Tokens and commits, in ragged rows that are refilled, in a GPU's shapes."""
        width = {"heads": HEADS} if self.name == "medusa" else {"ahead": depth}
        method = METHODS[self.name](tree=f"best:{nodes}", **width)
        got, _ = decode_prompts(method, self.runners, prompts, BUDGET, rows=3, make=READ_LAG)
        return [(g.token_ids, g.commits) for g in got]

    def should(self, prompts: list[list[int]], nodes: int = NODES, depth: int = DEPTH) -> Any:
        def guessed(text: list[int]) -> set[tuple[int, ...]]:
            if self.name == "medusa" and len(text) == 1:
                return set()  # its heads have nothing to read
            log_p = lambda path: self.after(text, path).double().log_softmax(-1).tolist()  # noqa: E731
            return set(naive.likeliest_prefixes(log_p, depth, nodes))

        logits = naive_logits(self.runners.target)
        return [naive.tree_speculative(logits, guessed, prompt, BUDGET, END) for prompt in prompts]


def sharpen(model: Any, written_out: dict[str, Tensor]) -> None:
    """Make a draft's probabilities less even, and those of its reference."""
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    written_out["lm_head.weight"] = SHARPER * written_out["lm_head.weight"]


def drafting_of(name: str, folder: Path) -> Drafting:
    if name == "medusa":
        runner = headed(folder)
        heads = load_file(folder / "medusa.safetensors")
        heads |= {name: SHARPER * weight for name, weight in heads.items() if name.endswith(".head")}
        save_file(heads, folder / "medusa.safetensors")
        return Drafting(name, on(runner), lambda text, path: head_logits(runner, heads, text)[len(path)])
    if name == "mtp":
        checkpoint = save_headed(folder, "mimo", 1)
        never = checkpoint.target().suppressed
        forced: Drafts = lambda text, path: checkpoint.drafts(text, len(path) + 1, never, [*path, 0])[-1]  # noqa: E731
        return Drafting(name, checkpoint.runners(), forced)
    if name.startswith("dflash"):
        runners = block_drafted(folder, name.split()[1])
        block = Reference(folder / "draft", runners.target)
        sharpen(runners["dflash"].model, block.tensors)
        return Drafting("dflash", runners, lambda text, path: block.draft(text, len(path) + 1, [*path, 0])[1][-1])
    pair = make_pair(folder, FORMATS["specforge"]) if name == "eagle" else make_parallel(folder, PARALLEL["peagle"])
    runners, reference = pair.runners(), cast("Any", pair.reference)
    sharpen(runners["eagle"].model, reference.t)
    at_once: Drafts = lambda text, path: reference.drafted(text, DEPTH)[len(path)]  # noqa: E731
    return Drafting("eagle", runners, reference.after if name == "eagle" else at_once)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafting]:
    return cache(lambda name: drafting_of(name, tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_the_likeliest_prefixes_are_verified(made: Callable[[str], Drafting], name: str) -> None:
    """Tokens and commits of rows with different trees, one of a prompt of a single token."""
    drafting = made(name)
    prompts = [*(prompt for prompt in PROMPTS if len(prompt) > (name == "mtp")), *MANY[3:5]]
    want = drafting.should(prompts)
    assert drafting.decodes(prompts) == want
    assert len({n for _, commits in want for n in commits}) > 2


@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (2, 4), (40, 2)])
def test_few_guesses_or_many_for_the_depth(made: Callable[[str], Drafting], nodes: int, depth: int) -> None:
    """Fewer guesses than depths, or more than the draft has tokens: a sequential draft."""
    drafting = made("eagle")
    assert drafting.decodes(PROMPTS[:2], nodes, depth) == drafting.should(PROMPTS[:2], nodes, depth)


WRONG: dict[str, Callable[[trees.Guesses], trees.Guesses]] = {
    "a guess without its parent": lambda tree: tree._replace(sees=tree.sees & torch.eye(NODES, dtype=torch.bool)),
    "a row's tree used by its neighbour": lambda tree: tree._replace(sees=tree.sees.roll(1, 0)),
}


@pytest.mark.parametrize("wrong", [*WRONG, "probabilities of the wrong depth"])
def test_a_fault_planted_in_a_tree_is_found(
    made: Callable[[str], Drafting], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting, right, best = made("dflash z-lab"), trees.Likeliest.tree, trees.best
    want = drafting.should(PROMPTS[1:3])
    if wrong in WRONG:
        monkeypatch.setattr(trees.Likeliest, "tree", lambda self: WRONG[wrong](right(self)))
    else:
        monkeypatch.setattr(trees, "best", lambda ids, log_p, nodes: best(ids, log_p.roll(1, 1), nodes))
    assert drafting.decodes(PROMPTS[1:3]) != want


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("eagle:tree=best:0", r"eagle: tree='best:0' is not allowed; give .* such as 3x2, or best:N, .*mtbench ls"),
        ("dflash:tree=best:4,verify=block", r"verify=block needs a chain, and tree=best:4 is none"),
        ("mtp:ahead=auto,tree=best:4", r"ahead=auto needs a chain"),
        ("dflash:tree=best:2049", r"feeds 2,049 guesses in a forward, and at most 2,048"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_by_name(arm: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(RunRequest(method=[arm], limit=2, device="cpu"))


@pytest.mark.usefixtures("recorded")
def test_captured_prefills_suit_the_room_of_each_method(
    made: Callable[[str], Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of a sequential draft needs more slots than a chain, beside rows of the target that are equally long."""
    monkeypatch.setattr("mtbench.decoding.prefill.CAPTURED_WIDTHS", (4,))
    runners, prompts = graph(made("eagle").runners), 3 * PROMPTS[1:2]
    for tree in ("best:6", "1"):
        batch = Captured(METHODS["eagle"](ahead=3, tree=tree), runners, 3, 64)
        decode_prompts(batch.method, runners, prompts, 9, make=lambda *_: batch)  # noqa: B023
        keys = runners["eagle"].cache.view(0)[0][:, :, : len(prompts[0]) - 2]
        assert torch.allclose(keys, keys[:1])
        assert keys.any(-1).all()
