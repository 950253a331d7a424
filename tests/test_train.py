"""Training: from data to labels, one step on a model made on the spot, the record beside it; and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from mtbench.cli_train import app
from mtbench.errors import UserError
from mtbench.families import RECORD
from mtbench.objectives import IGNORE
from mtbench.train import Settings, as_conversation, initialise, read_conversations, tokenise, train

SHAPE = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
CHAT = [
    {"role": "user", "content": "She has 12."},
    {"role": "assistant", "content": "Okay."},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "The answer is 15."},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint."""
    return initialise("arithmetic", 200, Settings(seed=1), tmp_path_factory.mktemp("base") / "init", **SHAPE)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base)


def test_the_tokenizer_has_single_digits_and_its_special_tokens(tokenizer: Any) -> None:
    """A number is a token per digit; the end of a turn ends generation; the mask is one token."""
    assert tokenizer.tokenize("147 shells")[:3] == ["1", "4", "7"]
    assert not any(len(token) > 1 and any(map(str.isdigit, token)) for token in tokenizer.get_vocab())
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (
        "<|im_end|>",
        "<|endoftext|>",
        "<|mask|>",
    )
    assert len(tokenizer("<|mask|><|im_end|>").input_ids) == 2


@pytest.mark.parametrize("text", ["Größe 3½ ≤ 4", "日本語", "\n\n  x\t", "naïve 🙂"])
def test_the_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    """Byte-level: nothing is unknown."""
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_labels_lie_on_the_last_assistant_turn_with_its_end_and_newline(tokenizer: Any) -> None:
    """Earlier turns, the assistant's too, are prompt."""
    examples, dropped, cut = tokenise([CHAT], tokenizer, max_length=512)
    (ids, labels), learned = examples[0], [label for label in examples[0].labels if label != IGNORE]
    assert tokenizer.decode(learned) == "The answer is 15.<|im_end|>\n"
    assert labels[-len(learned) :] == ids[-len(learned) :] == learned
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert (dropped, cut) == (0, 0)


def test_long_answers_are_cut_and_long_prompts_dropped(tokenizer: Any) -> None:
    """What fits is kept from the left; a prompt that leaves no room for an answer is counted, not trained."""
    (whole,), _, _ = tokenise([CHAT], tokenizer, max_length=512)
    prompt = whole.labels.count(IGNORE)
    (short,), dropped, cut = tokenise([CHAT], tokenizer, max_length=prompt + 3)
    assert short.input_ids == whole.input_ids[: prompt + 3]
    assert (dropped, cut) == (0, 1)
    assert tokenise([CHAT], tokenizer, max_length=prompt) == ([], 1, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"prompt": "Q", "completion": "A"},
        {"question": "Q", "answer": "A", "id": 7},
    ],
)
def test_three_schemas_are_read(tmp_path: Path, row: dict[str, Any]) -> None:
    """Messages, prompt and completion, question and answer give the same conversation."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    expected = [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]]
    assert list(read_conversations(str(file), None, seed=0)) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "a row must be an object, this is a list"),
        ({"text": "Q"}, r"columns \['text'\]; known: messages"),
        ({"messages": [{"role": "user", "content": "Q"}]}, "at least two turns"),
        ({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "A"}]}, "the texts"),
        ({"question": "Q", "answer": 3}, "the texts"),
    ],
)
def test_a_row_of_no_schema_is_refused_with_the_reason(row: Any, reason: str) -> None:
    """One line: what is wrong, what is known."""
    with pytest.raises(UserError, match=reason):
        as_conversation(row)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """The error says which line of which file."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Q", "completion": "A"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2"):
        list(read_conversations(str(file), None, seed=0))


@pytest.mark.parametrize(
    ("objective", "block_size", "parts"),
    [("ar", 1, {"loss", "loss_ar"}), ("mars", 4, {"loss", "loss_ar", "loss_mask"})],
)
def test_training_changes_the_weights_and_tells_how(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, block_size: int, parts: set[str]
) -> None:
    """A complete Hugging Face checkpoint in bf16, with a record of objective, data, base, versions and tokens."""
    settings = Settings(learning_rate=1e-2, epochs=1, batch_size=4)
    monkeypatch.chdir(tmp_path)
    out = train(objective, str(base), "arithmetic", 16, settings, tmp_path / "out", block_size=block_size)
    assert list(tmp_path.iterdir()) == [out]
    before = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    after = AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().weight
    assert after.dtype == torch.bfloat16
    assert not torch.equal(before.bfloat16(), after)
    assert AutoTokenizer.from_pretrained(out).mask_token == "<|mask|>"
    record = json.loads((out / RECORD).read_text())
    assert record["objective"] == objective
    assert record["options"] == ({} if objective == "ar" else {"block_size": block_size})
    assert record["settings"]["learning_rate"] == 1e-2
    assert (record["data"]["examples"], record["steps"]) == (16, 4)
    assert len(record["base_sha256"]) == len(record["data"]["sha256"]) == 64
    assert record["labelled_tokens_seen"] > 16 * 30
    assert set(record["final"]) == parts


def test_the_same_command_makes_the_same_weights(base: Path, tmp_path: Path) -> None:
    """Training is a function of its settings."""
    settings = Settings(learning_rate=1e-2, epochs=1, batch_size=4)
    weights = [
        (train("ar", str(base), "arithmetic", 8, settings, tmp_path / name) / "model.safetensors").read_bytes()
        for name in ("a", "b")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--data", "nothing"], "no data 'nothing'; known: a suite"),
        (["--data", "arithmetic"], "--examples N"),
        (["--data", "arithmetic", "--examples", "8", "--max-length", "3"], "no conversation shorter than"),
        (["--data", "arithmetic", "--examples", "8", "--dtype", "int8"], "'int8'; known: bfloat16, float32"),
        (["--data", "arithmetic", "--examples", "8", "--base", "/nowhere"], "'/nowhere'"),
    ],
)
def test_a_mistake_is_one_error_and_writes_nothing(
    base: Path, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    """The command raises a UserError that names the value; no folder is left behind."""
    result = CliRunner().invoke(app, ["ar", "--base", str(base), "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(result.exception, UserError)
    assert reason in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_never_overwritten(base: Path) -> None:
    """`--out` must be new."""
    with pytest.raises(UserError, match="exists already"):
        initialise("arithmetic", 10, Settings(), base, **SHAPE)
