"""A draft of a token map: it computes the logits of the map's ids alone, and drafts no others."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from chi_square import excess_at
from decoding_cases import MANY, PROMPTS, decode_prompts, naive_logits
from eagle_cases import FORMATS, make_pair
from method_cases import MAP, drafted
from method_cases import models as models_of
from small import END, MASK, VOCABULARY, small_checkpoint
from torch import Tensor
from typer.testing import CliRunner
from whole import finish, start

from mtbench.cli.train import app
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.method_checks import fault
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.models import token_map
from mtbench.models.drafts.loading import inspect_draft
from mtbench.models.families import TINY
from mtbench.models.fused_decoder import build
from mtbench.models.loading import inspect
from mtbench.models.runner import ModelRunner
from mtbench.plan.checks import read_plan
from mtbench.plan.plan import RunRequest
from mtbench.training.draft_vocabulary import write_token_map

BUDGET, AHEAD = 12, 4
TEXTS = [*PROMPTS, *MANY[:2]]


@pytest.fixture(scope="module")
def whole() -> ModelRunners:
    return drafted("sometimes")


@pytest.fixture(scope="module")
def pair(whole: ModelRunners) -> ModelRunners:
    return ModelRunners("any", {"any": whole.target, "draft": whole["draft"].trimmed(MAP)})


def restricted(whole: ModelRunners, text: list[int], masks: int = 0) -> Tensor:
    """Return the whole draft's logits (masks + 1, V), −∞ for ids that are not in the map; everything computed anew."""
    logits = naive_logits(whole["draft"])(text + [MASK] * masks)[-masks - 1 :]
    outside = [token for token in range(VOCABULARY) if token not in MAP]
    return logits.index_fill(1, torch.tensor(outside), float("-inf"))


def recomputed(whole: ModelRunners, prompt: list[int], each: int) -> tuple[list[int], list[int]]:
    """Return tokens and commits of drafts that are made `each` a forward."""
    target, draft = naive_logits(whole.target), partial(restricted, whole)
    return naive.speculative(target, draft, prompt, ahead=AHEAD, each=each, budget=BUDGET, end=END)


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_it_drafts_as_the_whole_draft_whose_other_logits_are_left_out(
    whole: ModelRunners, pair: ModelRunners, each: int
) -> None:
    """Alone, in refilled rows of different lengths, in 16 rows, in the shapes of a GPU: the same tokens and commits."""
    method = METHODS["speculative"](ahead=AHEAD, per_forward=each)
    want = [recomputed(whole, prompt, each) for prompt in TEXTS]
    assert len({n for _, commits in want for n in commits}) > 2
    assert any(token not in MAP for tokens, _ in want for token in tokens)
    for rows, tight in ((1, True), (3, False), (16, False)):
        got, timing = decode_prompts(method, pair, TEXTS, BUDGET, rows=rows, make=partial(Batch, tight=tight))
        assert [(g.token_ids, g.commits) for g in got] == want
        assert timing.miscounted == 0


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_verification_sees_the_drafts_distribution_over_the_map(
    whole: ModelRunners, pair: ModelRunners, verify: str
) -> None:
    """Normalised over the map at the temperature, zero elsewhere; in float64 against everything computed anew."""
    method = METHODS["speculative"](ahead=1, verify=verify)
    batch: list[Batch] = []

    def make(*arguments: Any) -> Batch:
        batch.append(Batch(*arguments))
        return batch[0]

    decode_prompts(method, pair, TEXTS, 1, temperature=0.7, make=make)
    for offered, prompt in zip(batch[0].state["offered"][:, 0], TEXTS, strict=True):
        torch.testing.assert_close(offered, (restricted(whole, prompt)[0] / 0.7).softmax(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("draws", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_targets_distribution(pair: ModelRunners, verify: str, draws: int) -> None:
    """The first three tokens of many answers, by chi-square; ids outside the map among them."""
    method, prompt = METHODS["speculative"](ahead=2, verify=verify), [26, 3, 27]
    got, _ = decode_prompts(method, pair, [prompt] * draws, 3, rows=250, temperature=1.0, ignore_eos=True)
    assert {token in MAP for g in got for token in g.token_ids} == {True, False}
    logits = naive_logits(pair.target)
    for place in range(3):
        assert excess_at([g.token_ids for g in got], lambda text: logits([*prompt, *text])[-1], place) < 4


def test_the_head_that_runs_has_the_rows_of_the_map_alone(tmp_path: Path) -> None:
    """In transformers' modules, in the decoder and in drafts with the target's head; the whole model keeps its own."""
    checkpoint = small_checkpoint()
    for runner in (ModelRunner(checkpoint), ModelRunner(checkpoint, build(checkpoint.model))):
        trimmed = runner.trimmed(MAP)
        assert trimmed.model.get_output_embeddings().weight.shape == (len(MAP), 32)
        if runner.decoder is not None and trimmed.decoder is not None:
            assert len(trimmed.decoder.lm_head) == len(MAP)
            assert len(runner.decoder.lm_head) == VOCABULARY
        assert len(runner.model.get_output_embeddings().weight) == VOCABULARY
    draft = models_of("trimmed mimo", tmp_path)["#mtp"]
    assert len(draft.model.get_output_embeddings().weight) == len(MAP)
    assert draft.model.num_parameters() < draft.checkpoint.model.num_parameters()


def save(file: Path, value: Any) -> str:
    """Write a token map, with torch if the name says so."""
    if file.suffix == ".pt":
        torch.save(value, file)
    else:
        file.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(file)


def test_a_map_is_read_as_json_or_as_sglang_reads_it(tmp_path: Path) -> None:
    """Ids in any order; what code could hide in is not executed; a file is written as it is read."""
    for number, value in enumerate(([5, 3, 9], torch.tensor([9, 5, 3]), torch.tensor([3, 5, 9], dtype=torch.int32))):
        file = Path(save(tmp_path / f"{number}.pt", value))
        assert token_map.read(str(file)) == ([3, 5, 9], hashlib.sha256(file.read_bytes()).hexdigest())
    for name in ("out.json", "out.pt"):
        token_map.write(tmp_path / name, [3, 5, 9])
        assert token_map.read(str(tmp_path / name)).ids == [3, 5, 9]
    assert json.loads((tmp_path / "out.json").read_text()) == [3, 5, 9]
    assert torch.load(tmp_path / "out.pt", weights_only=True) == [3, 5, 9]
    wrong: list[Any] = ["", "[1, 2", "{}", "[]", "[1, 2.5]", "[true]", "[-1]", "[[1]]"]
    huge = torch.zeros(1, dtype=torch.long).expand(1 << 40)
    for number, value in enumerate((*wrong, torch.ones(2), torch.zeros(1, 2).long(), huge, {"a": 1}, Path("x"))):
        file = tmp_path / f"wrong{number}{'.json' if isinstance(value, str) else '.pt'}"
        with pytest.raises(UserError, match=r"it is no list of token ids.* make one with"):
            token_map.read(save(file, value))
    with pytest.raises(UserError, match="there is no such file"):
        token_map.read(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="is there twice"):
        token_map.read(save(tmp_path / "twice.json", [4, 7, 4]))


def test_what_no_draft_can_draft_by_is_refused(tmp_path: Path) -> None:
    """A map of other ids, and a draft with a vocabulary of its own: trained so, or of another tokenizer."""
    ar, file = inspect(str(TINY / "ar")), tmp_path / "map.json"
    own = make_pair(tmp_path / "own", FORMATS["specforge"])
    target = inspect(own.target.checkpoint.source)
    eagle = inspect_draft(str(own.folder), target)
    assert eagle is not None
    for ids, method, checkpoints, said in (
        ([3, ar.largest_id + 1], "speculative", [ar, inspect(str(TINY / "draft"))], f"ids up to {ar.largest_id}"),
        (MAP[:-1], "eagle", [target, eagle], "has a vocabulary of its own"),
    ):
        made = METHODS[method](token_map=save(file, ids), draft="drafts")
        with pytest.raises(UserError, match=said):
            fault(made, dict(zip(("any", "drafts"), checkpoints, strict=True)))
    other = METHODS["speculative"](token_map=str(file), vocabulary="intersection")
    with pytest.raises(UserError, match=r"vocabulary of its own.*leave `token_map` out"):
        token_map.refuse(other, {"ar": target, "draft": target})


@pytest.mark.filterwarnings("ignore:arithmetic at batch size")
def test_a_run_by_a_map_made_of_answers(tmp_path: Path) -> None:
    """Made by the command, planned with its hash and share, decoded, exact; a changed map is refused."""
    answers, file = tmp_path / "answers.jsonl", tmp_path / "map.json"
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4 and 4 and four"}]
    answers.write_text(json.dumps({"messages": turns}))
    with pytest.raises(UserError, match="gsm8k is a suite"):
        write_token_map(str(TINY / "ar"), ["gsm8k"], file, size=200)
    words = ["token-map", "--base", TINY / "ar", "--data", answers, "--size", 200, "-o", file]
    made = CliRunner().invoke(app, [str(word) for word in words])
    assert made.exit_code == 0, made.exception
    assert "200 tokens: 100.0% of the answers' tokens" in made.stderr
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    spec = f"speculative:token_map={file}"
    request = RunRequest(method=["ar", spec], limit=2, batch_size=[2], rounds=1, max_new_tokens=12, device="cpu")
    begun = start(tmp_path / "run", request)
    plan = read_plan(begun)
    rows = inspect(str(TINY / "ar")).vocabulary
    share = f"draft drafts 200 of {rows} tokens ({200 / rows:.0%}), of the map map.json, SHA-256 {sha256[:12]}…"
    assert share in plan.cells[1].flags
    assert plan.token_maps == {str(file): sha256}
    assert finish(begun)["cells"][1]["lossless"]["grade"] == "exact"
    file.write_text("[3, 4, 5]")
    with pytest.raises(UserError, match="changed since the plan was made"):
        finish(begun)


def test_sglang_takes_a_map_where_its_drafts_have_the_targets_head() -> None:
    """And no other engine does. SGLang's EAGLE-3 ignores it, and its draft model would draft wrong ids."""
    sglang, drafts = SERVING_ENGINES["sglang"](), {"draft": "d", "eagle": "e", "#mtp": "t#mtp"}
    words = sglang.setting(METHODS["mtp"](token_map="hot.pt"), drafts).words
    assert words[words.index("--speculative-token-map") + 1] == "hot.pt"
    assert "--speculative-token-map" not in sglang.setting(METHODS["mtp"](), drafts).words
    assert "FILE.pt" in sglang.setting(METHODS["mtp"](token_map="hot.json"), drafts)
    assert "verify=match" in sglang.setting(METHODS["mtp"](token_map="hot.pt", verify="rejection"), drafts)
    for name in ("speculative", "eagle"):
        method = METHODS[name](token_map="hot.pt")
        for engine in ("sglang", "vllm", "llamacpp"):
            assert "leave token_map out" in SERVING_ENGINES[engine]().setting(method, drafts)
