"""The mask token of a base that has none: a reserved token, or a new row of the embedding."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import COUNT, MARS, SHAPE, USUAL, conversation, requested
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.models.loading import MASK, inspect, load
from mtbench.training.block_objectives import BlockDraft
from mtbench.training.init_model import initialise
from mtbench.training.mask_token import ROWS, grow_embedding, reserved_tokens
from mtbench.training.objectives import Ar, Objective
from mtbench.training.self_distillation import SelfDistill
from mtbench.training.train import check, train

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base whose embedding has a row for each token of its tokenizer, and whose `<filename>` is reserved."""
    out = tmp_path_factory.mktemp("base") / "init"
    folder = initialise(map(conversation, range(COUNT)), out, seed=1, data={}, **SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace(MASK, "<filename>")
        settings = json.loads(text)
        settings.pop("mask_token", None)
        (folder / name).write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    assert inspect(str(folder)).mask_id is None
    return str(folder)


@pytest.mark.whole
def test_a_reserved_token_becomes_the_mask_token_of_the_checkpoint(full: str, rows: str, tmp_path: Path) -> None:
    """Its id and its row stay; decoding finds it, and never emits it."""
    before = AutoTokenizer.from_pretrained(full).get_vocab()["<filename>"]
    trained = load(str(train(requested(MARS, full, rows, USUAL, tmp_path / "out", mask_token="<filename>"))))
    assert trained.mask_id == before
    assert trained.mask_id in trained.suppressed
    assert trained.vocabulary == inspect(full).vocabulary
    assert json.loads((tmp_path / "out" / RECORD).read_text())["mask_token"] == "<filename>"


@pytest.mark.whole
@pytest.mark.parametrize("objective", [MARS, SelfDistill(block_size=3, target="soft")], ids=lambda each: each.name)
def test_a_grown_vocabulary_has_a_row_for_the_mask_token(
    full: str, rows: str, tmp_path: Path, objective: Objective
) -> None:
    """Rows behind it are suppressed, too, and the text of the others is read as before. A teacher has as many."""
    tokens = inspect(full).vocabulary
    trained = load(str(train(requested(objective, full, rows, USUAL, tmp_path / "out", grow_vocabulary=True))))
    assert trained.mask_id == tokens
    assert trained.vocabulary % ROWS == 0
    assert trained.suppressed.tolist() == list(range(tokens, trained.vocabulary))
    assert trained.tokenizer("1 2")["input_ids"] == AutoTokenizer.from_pretrained(full)("1 2")["input_ids"]


def test_new_rows_are_the_mean_and_the_others_stay(full: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(full, dtype=torch.float64)
    before = model.get_input_embeddings().weight.detach().clone()
    grow_embedding(model, len(before))
    after = model.get_input_embeddings().weight
    assert torch.equal(after[: len(before)], before)
    assert torch.allclose(after[len(before) :], before.mean(0), rtol=1e-12)
    assert model.get_output_embeddings().weight is after  # still tied
    assert model.config.vocab_size == len(after)


def test_reserved_tokens_stand_for_nothing_else(full: str) -> None:
    assert reserved_tokens(AutoTokenizer.from_pretrained(full)) == ["<filename>"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, r"has no mask token .*--mask-token TOKEN.*--grow-vocabulary"),
        ({"mask_token": "<filenam>"}, r"unknown reserved token '<filenam>' \(did you mean '<filename>'\?\)"),
        ({"mask_token": "<|im_end|>"}, "unknown reserved token"),
        ({"mask_token": "<filename>", "grow_vocabulary": True}, "exclude each other"),
        ({"objective": Ar(), "grow_vocabulary": True}, "ar feeds no mask token; leave out"),
        ({"objective": BlockDraft(), "grow_vocabulary": True}, "dflash leaves the model as it is, and --grow-voc"),
        ({"mask_token": "<filename>", "data": "<filename>"}, "the data hold '<filename>', which is the mask token"),
    ],
)
def test_mistakes_are_refused_before_weights_are_loaded(
    full: str, rows: str, tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    if said := more.get("data"):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"prompt": "1?", "completion": said}) + "\n")
        more = more | {"data": (str(file),)}
    with pytest.raises(UserError, match=reason):
        check(replace(requested(MARS, full, rows, USUAL, tmp_path / "out"), **more))


def test_a_base_with_a_mask_token_needs_none(rows: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a mask token or a free row for one already; leave out --grow-vocabulary"):
        check(requested(MARS, "embedded:tiny/ar", rows, USUAL, tmp_path / "out", grow_vocabulary=True))
