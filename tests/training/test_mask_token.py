"""The mask token of a base that has none: a reserved token, or a new row of the embedding."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.models.loading import MASK, inspect, load
from mtbench.training.init_model import initialise
from mtbench.training.mask_token import ROWS, grow_embedding, reserved_tokens
from mtbench.training.objectives import Ar, Mars
from mtbench.training.train import TrainingRequest, check, train
from mtbench.training.trainer import Settings

SETTINGS = Settings(learning_rate=1e-2, epochs=1, batch_size=8, max_length=48, dtype="float32")
SHAPE = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def talk(n: int, said: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{said} {n + 1} {n + 2}"}]


def rows(folder: Path, said: str = "") -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": talk(n, said)}) + "\n" for n in range(16)))
    return str(file)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base whose embedding has a row for each token of its tokenizer, and whose `<filename>` is reserved."""
    folder = initialise(map(talk, range(16)), tmp_path_factory.mktemp("base") / "init", seed=1, data={}, **SHAPE)
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


def asked(full: str, folder: Path, said: str = "", **more: object) -> TrainingRequest:
    values: dict[str, object] = {"objective": Mars(block_size=4), "base": full, "data": (rows(folder, said),)}
    return TrainingRequest(**{**values, "settings": SETTINGS, "out": folder / "out", **more})  # type: ignore[arg-type]


@pytest.mark.whole
def test_a_reserved_token_becomes_the_mask_token_of_the_checkpoint(full: str, tmp_path: Path) -> None:
    """Its id and its row stay; decoding finds it, and never emits it."""
    before = AutoTokenizer.from_pretrained(full).get_vocab()["<filename>"]
    trained = load(str(train(asked(full, tmp_path, mask_token="<filename>"))))
    assert trained.mask_id == before
    assert trained.mask_id in trained.suppressed
    assert trained.vocabulary == inspect(full).vocabulary
    assert json.loads((tmp_path / "out" / RECORD).read_text())["mask_token"] == "<filename>"


@pytest.mark.whole
def test_a_grown_vocabulary_has_a_row_for_the_mask_token(full: str, tmp_path: Path) -> None:
    """Rows behind it are suppressed, too, and the text of the others is read as before."""
    tokens = inspect(full).vocabulary
    trained = load(str(train(asked(full, tmp_path, grow_vocabulary=True))))
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
        ({"mask_token": "1"}, "unknown reserved token"),
        ({"mask_token": "<filename>", "grow_vocabulary": True}, "exclude each other"),
        ({"objective": Ar(), "grow_vocabulary": True}, "ar feeds no mask token; leave out"),
        ({"mask_token": "<filename>", "said": "<filename>"}, "the data hold '<filename>', which is the mask token"),
    ],
)
def test_mistakes_are_refused_before_weights_are_loaded(
    full: str, tmp_path: Path, more: dict[str, object], reason: str
) -> None:
    said = str(more.pop("said", ""))
    with pytest.raises(UserError, match=reason):
        check(asked(full, tmp_path, said, **more))


def test_a_base_with_a_mask_token_needs_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a mask token or a free row for one already; leave out --grow-vocabulary"):
        check(asked("embedded:tiny/ar", tmp_path, grow_vocabulary=True))
