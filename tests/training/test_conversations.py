"""Conversations to train on: what is read and refused, and which tokens are labels."""

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mtbench.errors import UserError
from mtbench.evaluation.suite import Messages, Source
from mtbench.programs import network
from mtbench.training.conversations import (
    Data,
    Row,
    as_conversation,
    prepare,
    read,
    read_conversations,
    tokenise,
)
from mtbench.training.init_model import learn_tokenizer
from mtbench.training.packing import contiguous_examples
from mtbench.training.recipes import Stage
from mtbench.training.trainer import Settings

CHAT = [
    {"role": "user", "content": "She has 12."},
    {"role": "assistant", "content": "Okay."},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "The answer is 15."},
]
ROWS = [{"prompt": f"Why {n}?", "completion": f"Because {n}."} for n in range(8)]


def turns(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of eight conversations."""
    return write_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def unconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` offline, with a cache of its own; the settings are restored at the end."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, True)
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def learned() -> Any:
    """Byte-level BPE with single digits and ChatML; one of its tokens is an empty line."""
    return learn_tokenizer([turns("Why is she there?\n\n", "The answer is here.\n\n"), CHAT] * 50, vocab_size=320)


@pytest.fixture
def tokenizer(learned: Any) -> Any:
    """A copy of the tokenizer that a test may change."""
    return copy.deepcopy(learned)


def tokens_of(tokenizer: Any, conversation: Messages, **settings: Any) -> list[int]:
    """The conversation as the tokenizer itself writes it."""
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **settings)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


# --- Rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("Q\n\nI", "A"), "id": 7},
        {"prompt": "Q\n\nI", "completion": "A"},
        {"question": "Q\n\nI", "answer": "A", "input": "left alone"},
        {"instruction": "Q", "input": "I", "output": "A"},
        {"messages": None, "question": "Q\n\nI", "answer": "A"},
        {"prompt": None, "completion": None, "instruction": "Q", "input": "I", "output": "A"},
    ],
)
def test_every_schema_gives_the_same_conversation(row: dict[str, Any]) -> None:
    """Messages, prompt and completion, question and answer, Alpaca's; other columns are ignored."""
    assert as_conversation(row) == turns("Q\n\nI", "A")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "a row must be an object, this is a list"),
        ({"text": "Q"}, r"columns \['text'\]; known: messages"),
        ({"messages": turns("Q", "A")[::-1]}, "ends with the assistant's"),
        ({"messages": "Q"}, "a list of objects"),
        ({"messages": [{"role": "user", "content": ["Q"]}, {"role": "assistant", "content": "A"}]}, "the texts"),
        ({"instruction": ["Q"], "input": "I", "output": "A"}, "the texts"),
        ({"prompt": "Q", "completion": "\ud800"}, "half a character"),
    ],
)
def test_a_row_of_no_schema_is_refused_with_its_number_and_the_reason(tmp_path: Path, row: Any, reason: str) -> None:
    """One line with file, row, reason and known schemas."""
    data = write_lines(tmp_path / "mine.jsonl", [*ROWS, row])
    with pytest.raises(UserError, match=rf"^[^\n]*mine\.jsonl, line 9: [^\n]*{reason}[^\n]*$"):
        list(read(data, None, Source()))


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_rows_with_an_empty_turn_are_dropped_and_counted(tmp_path: Path, tokenizer: Any, content: str | None) -> None:
    """A question or an answer without content; a system turn may be empty."""
    system = {"role": "system", "content": ""}
    empty = [{"question": content, "answer": "A"}, {"prompt": "Q", "completion": content}]
    data = write_lines(tmp_path / "mine.jsonl", [*empty, {"messages": [system, *turns("Q", "A")]}])
    prepared = prepare(data, None, tokenizer, max_length=64, seed=0)
    assert len(prepared.examples) == 1
    assert prepared.description["dropped"] == 2
    assert prepared.summary == "3 conversations: 2 dropped, 0 cut"


# --- Sources -----------------------------------------------------------------------------------------


def test_files_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL and Parquet give their rows in order; blank lines do not count."""
    import pyarrow
    import pyarrow.parquet

    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    lines.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    expected = [turns(row["prompt"], row["completion"]) for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.table({"messages": expected}), table)
    for file in (lines, table):
        assert list(read_conversations(str(file), None, seed=0)) == expected
        assert list(read_conversations(str(file), 5, seed=0)) == expected[:5]
    for module in ("datasets", "pyarrow"):  # both are optional
        monkeypatch.setitem(sys.modules, module, None)
    assert list(read_conversations(str(lines), None, seed=0)) == expected


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("torn.jsonl", b'{"prompt": "Q", "completion": "A"}\n{"prompt": \n', "torn.jsonl, line 2: not JSON"),
        ("not.parquet", b"plain", r"not\.parquet, row 1: not readable as Parquet"),
        ("mine.csv", b"plain", r"mine\.csv has an unknown file type; known: \.jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    """One line with the file, and the number of the line or row."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*$"):
        list(read(str(tmp_path / name), None, Source()))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("nothing", r"no data 'nothing'; known: a suite \(aime25, "),
        ("arithmetic", "give their number with `--examples N`"),
        ("synthetic", "'synthetic' has no training split; known: arithmetic, gsm8k"),
    ],
)
def test_data_that_is_not_there_is_named_with_the_choices(data: str, reason: str) -> None:
    """An unknown name, a missing file, an endless suite, a suite without examples."""
    with pytest.raises(UserError, match=reason):
        list(read(data, None, Source()))


@pytest.mark.parametrize(
    ("data", "count", "arguments"),
    [
        ("allenai/Dolci-Instruct-SFT", None, ("allenai/Dolci-Instruct-SFT", None, "train", False)),
        ("openai/gsm8k@socratic:test", 2, ("openai/gsm8k", "socratic", "test", True)),
    ],
)
def test_a_data_set_of_the_hub_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, data: str, count: int | None, arguments: tuple[Any, ...]
) -> None:
    """OWNER/NAME, @CONFIG, :SPLIT; with a count its rows are streamed."""
    import datasets

    def load(path: str, name: str | None, *, split: str, streaming: bool) -> Iterator[Any]:
        assert (path, name, split, streaming) == arguments
        yield from ROWS[:3]
        yield {"text": "Q"}

    monkeypatch.setattr(network, "hub_refusal", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    if count is None:
        with pytest.raises(UserError, match=rf"^{data}, row 4: columns \['text'\]"):
            list(read(data, count, Source()))
    else:
        assert len(list(read(data, count, Source()))) == count


@pytest.mark.usefixtures("unconnected")
def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    """It has the data set, the cause, and an alternative that needs no network."""
    with pytest.raises(UserError) as caught:
        list(read("no-one/nothing", None, Source(offline=True)))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'no-one/nothing' in the cache (", "no such file or folder", "--data FILE.jsonl"):
        assert part in message


@pytest.mark.usefixtures("unconnected")
def test_a_suites_training_split_has_the_format_of_its_prompts(tmp_path: Path) -> None:
    """gsm8k writes question and answer as in its prompts; without a training file there is an error."""
    gsm8k = [{"question": f"Has {n}?", "answer": f"{n}.\n#### {n}"} for n in range(6)]
    write_lines(tmp_path / "gsm8k" / "train.jsonl", gsm8k)
    write_lines(tmp_path / "gsm8k" / "test.jsonl", gsm8k[:1])
    found = list(read_conversations("gsm8k", None, seed=0, data_dir=tmp_path, offline=True))
    assert found == [turns(f"Question: Has {n}?\nAnswer:", f"{n}.\n#### {n}") for n in range(6)]
    assert list(read_conversations("gsm8k", 2, seed=1, data_dir=tmp_path, offline=True)) == found[:2]
    with pytest.raises(UserError, match="'gsm8k-paper' has no training split in its data"):
        list(read_conversations("gsm8k-paper", None, seed=0, data_dir=tmp_path, offline=True))


def of_sizes(sizes: Sequence[int]) -> Data:
    """Conversations of one token each, 0, 1, 2, …, from sources of these sizes."""
    total = sum(sizes)
    ones = torch.ones(total, dtype=torch.long)
    examples = contiguous_examples(torch.arange(total, dtype=torch.int32), ones, ones * 0)
    return Data(examples=examples, sources=tuple(sizes), description={}, summary="")


def numbers(examples: Sequence[Any]) -> list[int]:
    return [int(example.ids) for example in examples]


@given(some.lists(some.integers(0, 60), min_size=1, max_size=5).filter(any), some.integers(0, 40))
def test_every_source_is_evaluated_on_in_proportion(sizes: list[int], held_out: int) -> None:
    """Both parts together have all examples, in order; each source gives its end, its share rounded down."""
    total = sum(sizes)
    trained, evaluated = map(numbers, of_sizes(sizes).split(held_out))
    assert sorted([*trained, *evaluated]) == list(range(total))
    assert (trained, evaluated) == (sorted(trained), sorted(evaluated))
    end = 0
    for size in sizes:
        end += size
        share = min(held_out, total // 10) * size // total
        assert [n for n in evaluated if end - size <= n < end] == list(range(end - share, end))


@given(some.integers(1, 200), some.integers(1, 4), some.integers(0, 60))
def test_of_each_source_the_requested_number_is_trained_on(examples: int, kinds: int, held_out: int) -> None:
    """`--examples N` of several sources: N of each, or one more."""
    settings = Settings(held_out=held_out)
    read = Stage(name="x", objective=None, data=("x",) * kinds, examples=examples, settings=settings).to_read()
    assert read is not None
    trained, _ = of_sizes([read] * kinds).split(held_out)
    sources_trained = [number // read for number in numbers(trained)]
    assert {sources_trained.count(kind) for kind in range(kinds)} <= {examples, examples + 1}


# --- Tokens -------------------------------------------------------------------------------------------------------


def test_long_answers_are_cut_and_long_prompts_dropped(rows: str, tokenizer: Any) -> None:
    """Answers are cut on the right; a prompt that leaves no room for an answer is dropped and counted."""
    whole, _ = tokenise([Row("here", CHAT)], tokenizer, max_length=512)
    prompt = whole[0].prompt
    short, counts = tokenise([Row("here", CHAT)] * 2, tokenizer, max_length=prompt + 3)
    assert short[1].ids.tolist() == whole[0].ids[: prompt + 3].tolist()
    assert (counts.dropped, counts.cut) == (0, 2)
    none, counts = tokenise([Row("here", CHAT)], tokenizer, max_length=prompt)
    assert (len(none), counts.dropped, counts.cut) == (0, 1, 0)
    reason = r"no conversation to train on, at a max_length of 3 \(8 conv.*: 8 dropped.*; give .* `--max-length N`"
    with pytest.raises(UserError, match=reason):
        prepare(rows, None, tokenizer, max_length=3, seed=0)


@pytest.mark.parametrize("question", ["Why?", "<|im_start|>assistant\n<|im_start|>", "<|mask|> \n\n <|endoftext|>  "])
@pytest.mark.parametrize("answer", ["Because 12.", " <|im_end|>\n<|im_start|>x", "  \t½  🙂\n\n"])
def test_tokens_are_those_of_the_text_as_a_whole(tokenizer: Any, question: str, answer: str) -> None:
    """Also if the texts contain special tokens."""
    chat = turns(question, answer)
    ((ids, prompt),), _ = tokenise([Row("here", chat)], tokenizer, max_length=512)
    assert ids[:prompt].tolist() == tokens_of(tokenizer, chat[:1], add_generation_prompt=True)
    assert ids.tolist() == tokens_of(tokenizer, chat)


def test_an_answer_that_would_merge_with_the_prompts_last_token_is_tokenised_alone(tokenizer: Any) -> None:
    """An answer that begins with a newline follows the prompt's own tokens, as in decoding."""
    chat = turns("Why?", "\nBecause.")
    prompt = tokens_of(tokenizer, chat[:1], add_generation_prompt=True)
    assert tokens_of(tokenizer, chat)[: len(prompt)] != prompt
    examples, _ = tokenise([Row("here", chat)], tokenizer, max_length=512)
    assert examples[0].ids[: examples[0].prompt].tolist() == prompt
    assert tokenizer.decode(examples[0].ids) == tokenizer.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ messages | length }}{{ messages[-1].content }}",
            r"holds no conversation to train on, .*8 dropped \(8: the",
        ),
        ("{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('No') }}{% endif %}", r"it \(No\)"),
        ("{{ raise_exception('No users') }}", r"line 1: the chat template refuses it \(No users\)"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_changes_the_prompt_is_refused(
    rows: str, tokenizer: Any, template: str | None, reason: str
) -> None:
    """A prompt that changes with the answer, an answer that is left out, a template error; with the row."""
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=reason):
        prepare(rows, None, tokenizer, max_length=64, seed=0)
