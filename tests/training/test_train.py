"""Training end to end: the checkpoints that come out, and the models that can be trained."""

import json
import math
import shutil
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from decoding_cases import PROMPTS, ar, decode_prompts
from safetensors.torch import load_file
from trainings import COUNT, HELD_OUT, SHAPE, USUAL, Watch, conversation, losses_of, plan, record, requested, run, saved
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, MistralConfig

from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models.drafts.loading import load_draft
from mtbench.models.families import family
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner
from mtbench.training.conversations import prepare
from mtbench.training.draft_objectives import Eagle, Mtp
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Mars, Medusa, Objective
from mtbench.training.self_distillation import SelfDistill
from mtbench.training.train import check

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


@pytest.mark.parametrize(
    "objective",
    [
        Ar(),
        Mars(block_size=4),
        Mars(block_size=3, layout="anchored", ar_weight=0.0, timestep_weight=True),
        SelfDistill(block_size=3),
        BlockDiffusion(block_size=4),
        Draft(),
        Medusa(heads=2),
    ],
    ids=["ar", "mars", "anchored", "self-distill", "block-diffusion", "draft", "medusa"],
)
def test_every_objective_makes_a_complete_checkpoint(
    base: str, rows: str, tmp_path: Path, objective: Objective
) -> None:
    """It loads in bfloat16, with tokenizer and record; the loss falls; no other file is left."""
    settings = replace(USUAL, epochs=6, batch_size=8, dtype="bfloat16")
    watch = Watch()
    out = run(objective, base, rows, settings, tmp_path / "out", progress=watch)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template(conversation(3), return_tensors="pt", return_dict=False)
    assert model(ids).logits.isfinite().all()
    assert model.dtype == torch.bfloat16
    assert tokenizer.mask_token == "<|mask|>"
    assert list(tmp_path.iterdir()) == [out]

    entries = record(out)
    assert (entries["objective"], entries["options"]) == (objective.name, asdict(objective))
    assert entries["settings"] == asdict(settings)
    assert entries["steps"] == 12
    taught = isinstance(objective, SelfDistill)
    assert entries["teacher"] == (base if taught else None)
    assert entries["forwards"] == {"student": 12 * 3, "teacher": 12 * 3 * taught}  # 8 conversations, 3 rows a forward
    assert (entries["flops"] is None) == isinstance(objective, Medusa)
    for point in entries["curve"]:
        assert math.isclose(sum(point[name] for name in objective.parts), point["loss"], abs_tol=1e-5)
    curve = losses_of(out)
    assert sum(curve[-3:]) < sum(curve[:3])
    assert entries["evaluation"]["conversations"] == HELD_OUT
    assert (watch.started_at, watch.steps, watch.ended) == ((12, 0), list(range(1, 13)), True)


def test_medusa_does_not_change_its_target(base: str, rows: str, tmp_path: Path) -> None:
    """The weights are equal to the bit; the trained heads are in a file beside them."""
    out = run(Medusa(heads=2), base, rows, USUAL, tmp_path / "out")
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    heads = load_file(out / "medusa.safetensors")
    assert {name.partition(".")[0] for name in heads} == {"0", "1"}
    assert all(heads[f"{k}.hidden.weight"].any() for k in range(2))


def test_a_multi_token_prediction_layer_is_added_to_a_copy_of_its_target(base: str, rows: str, tmp_path: Path) -> None:
    """Whether the target's weights are in one file or several, in whatever dtype: they are equal to the bit."""
    sharded = tmp_path / "sharded"
    shutil.copytree(base, sharded)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(sharded, max_shard_size="8KB")
    (sharded / "model.safetensors").unlink()
    for source in (base, str(sharded)):
        out = run(Mtp(), source, rows, USUAL, tmp_path / "out")
        stored = [
            {k: v for f in sorted(Path(x).glob("*.safetensors")) for k, v in load_file(f).items()}
            for x in (source, out)
        ]
        for name, tensor in stored[0].items():
            assert torch.equal(tensor, stored[1][name])
            assert tensor.dtype == stored[1][name].dtype
        added = stored[1].keys() - stored[0].keys()
        assert {name.split(".")[1] for name in added} == {"mtp_layers"}
        target = load(str(out))
        assert load_draft(f"{out}#mtp", target).model.block.mlp.up_proj.weight.any()
        with pytest.raises(UserError, match="has a layer for multi-token prediction already"):
            check(requested(Mtp(), str(out), rows, USUAL, tmp_path / "again"))
        shutil.rmtree(out)


def test_a_trimmed_draft_drafts_the_frequent_tokens_by_the_targets_rows(rows: str, tmp_path: Path) -> None:
    """Config, d2t and t2d are those that vLLM and SGLang read; logits are the target's rows; answers are `ar`'s."""
    target, watch = load(family("tiny").checkpoint("ar")), Watch()
    out = run(Eagle(steps=1, draft_vocabulary=20), target.source, rows, USUAL, tmp_path / "out", progress=watch)
    learned, _ = prepare(rows, None, target.tokenizer, max_length=USUAL.max_length, seed=0).split(HELD_OUT)
    counts = Counter(token for ids, prompt in learned for token in ids[prompt:].tolist())
    kept = sorted(sorted(range(target.vocabulary), key=lambda token: (-counts[token], token))[:20])
    stored = load_file(out / "model.safetensors")
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    assert (stored["d2t"] + torch.arange(20)).tolist() == stored["t2d"].nonzero().flatten().tolist() == kept
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 20
    share = sum(counts[token] for token in kept) / counts.total()
    assert f"the draft has 20 tokens: {share:.1%} and" in watch.notes[-1]

    draft, head = load_draft(str(out), target), target.model.get_output_embeddings().weight.bfloat16().float()
    read = torch.randn(1, 1, head.shape[1])
    logits = draft.model.logits(read)[0, 0]
    assert torch.allclose(logits[kept], head[kept] @ read[0, 0], atol=1e-4)
    assert logits.isfinite().nonzero().flatten().tolist() == kept

    says, _ = decode_prompts(ar(), ModelRunners("any", {"any": ModelRunner(target)}), PROMPTS, 12)
    for options in ({"ahead": 3}, {"ahead": 2, "tree": "3x2"}):
        runner = ModelRunner(target)
        runners = ModelRunners("any", {"any": runner, "eagle": DraftRunner(draft, runner)})
        drafted, _ = decode_prompts(METHODS["eagle"](**options), runners, PROMPTS, 12, rows=2)
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in says]


def test_a_model_whose_logits_are_not_one_product_is_refused(base: str, rows: str, tmp_path: Path) -> None:
    """The loss of training would be wrong for it. The error is one line, and nothing is written."""
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=1.0, initializer_range=0.5)
    gemma = saved(tmp_path / "gemma", base, config)
    with pytest.raises(UserError, match=r"computes its logits by more than one matrix product \(gemma2\)") as error:
        run(Ar(), gemma, rows, USUAL, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["gemma"]


def test_a_sliding_window_is_used_in_training(base: str, rows: str, tmp_path: Path) -> None:
    """The loss before the first step is that of transformers' own attention on each conversation alone."""
    config = MistralConfig(**SHAPE, sliding_window=5, initializer_range=0.5, eos_token_id=None, bos_token_id=None)
    mistral = saved(tmp_path / "mistral", base, config)
    settings = replace(USUAL, batch_size=COUNT - HELD_OUT, epochs=1, pack=96)
    out = run(Ar(), mistral, rows, settings, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(mistral, attn_implementation="eager")
    schedule = plan(mistral, rows, Ar(), settings)
    surprises = []
    with torch.no_grad():
        for example in schedule.examples:
            log_p = model(example.ids[None]).logits[0].log_softmax(1)
            surprises += [-log_p[t - 1, example.ids[t]] for t in range(example.prompt, len(example.ids))]
    assert losses_of(out) == pytest.approx([torch.stack(surprises).mean().item()], abs=1e-5)
    assert max(len(example.ids) for example in schedule.examples) > 10


def test_a_teacher_may_have_more_rows_of_padding(base: str, rows: str, tmp_path: Path) -> None:
    """As Qwen2.5 from 7B on: rows without a token are ignored."""
    teacher = AutoModelForCausalLM.from_pretrained(base)
    rows_of_base = teacher.get_input_embeddings().weight.shape[0]
    teacher.resize_token_embeddings(rows_of_base + 16, mean_resizing=False)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "teacher")
    out = run(Draft(distil="logits"), base, rows, USUAL, tmp_path / "out", teacher=str(tmp_path / "teacher"))
    assert losses_of(out)[0] == pytest.approx(0, abs=1e-5)
    with pytest.raises(UserError, match=f"has {rows_of_base} ids, fewer than the {rows_of_base + 16} of the base"):
        run(Draft(distil="logits"), str(tmp_path / "teacher"), rows, USUAL, tmp_path / "no", teacher=base)
