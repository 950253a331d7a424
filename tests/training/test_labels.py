"""Labels are what an author emitted: a chat template adds nothing to them, takes nothing away and moves nothing."""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtbench.errors import UserError
from mtbench.evaluation.suite import Messages, Source
from mtbench.training.conversations import Counts, Row, prepare, read, tokenise
from mtbench.training.init_model import learn_tokenizer
from mtbench.training.objectives import Special
from mtbench.training.packing import Examples
from mtbench.training.registry import OBJECTIVES

ANSWER = "<|im_start|>assistant\n"
ASKS = "{% if add_generation_prompt %}"
OTHERS = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}"


def chat(answer: str, begin: str) -> str:
    """A template in ChatML: how it writes an answer, and what follows the header of the next one."""
    turns = f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}{OTHERS}{{% endif %}}"
    return f"{turns}{{% endfor %}}{ASKS}{{{{ '{ANSWER}' }}}}{begin}{{% endif %}}".replace("\n", "\\n")


SPLIT = (  # as Qwen3's: the last answer gets a block of reasoning, an empty one if it has none
    "{% set parts = m.content.split('</think>') %}{% set text = parts[-1].lstrip('\\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\\n' + ('<think>\\n' + thought + '\\n</think>\\n\\n' if loop.last else '') "
    "+ text + '<|im_end|>\\n' }}"
)
PLAIN = "{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}"
TEMPLATES = {
    "chatml": chat(PLAIN, ""),
    "qwen3": chat(SPLIT, NO_THINKING + "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"),
    "qwen35": chat(SPLIT, NO_THINKING + "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}"),
    "opens": chat(PLAIN, "{{ '<think>\\n' }}"),  # and the template writes an answer as it is
    "r1": chat("{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}", ""),
    "llama3": chat("{{ '<|im_start|>assistant\\n' + m.content | trim + '<|im_end|>\\n' }}", ""),
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}",
    "system": "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}" + chat(PLAIN, ""),
    "channels": chat("{{ '<|im_start|>assistant\\n<|final|>' + m.content + '<|im_end|>\\n' }}", ""),
    "closes": chat(
        "{{ '<|im_start|>assistant\\n' + m.content + ('</think>' if '<think>' in m.content and '</think>' not in "
        "m.content else '') + '<|im_end|>\\n' }}",
        "",
    ),
}


def turns(question: str, answer: str, **more: Any) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


@pytest.fixture(scope="module")
def learned() -> Any:
    """Byte-level BPE with marks of thinking: two are special tokens, two are not."""
    words = turns("Why is she there?\n\n    for", "Okay, she thinks that the answer is here.\n\n    for the rest")
    tokenizer = learn_tokenizer([words] * 50, vocab_size=330)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[/THINK]", "<|final|>"]}, False)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.fixture
def tokenizer(learned: Any) -> Any:
    """A copy of the tokenizer that a test may change."""
    return copy.deepcopy(learned)


def only(row: Row, tokenizer: Any, options: Mapping[str, Any] | None = None) -> tuple[list[int], list[int]] | Counts:
    """Prompt and labels of a row; if it is dropped, the counts."""
    examples, counts = tokenise([row], tokenizer, 4096, options or {})
    if not examples:
        return counts
    prompt, labels = examples[0].ids.tensor_split([examples[0].prompt])
    return prompt.tolist(), labels.tolist()


def asked(tokenizer: Any, conversation: Messages, **options: Any) -> list[int]:
    """The prompt as a run feeds it."""
    text = tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True, **options)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


# --- Emitted ids ----------------------------------------------------------------------------------------------------


def emissions(tokenizer: Any, count: int, seed: int) -> Iterator[tuple[list[int], bool]]:
    """Random ids, special ones too, whose text has other tokens, and whether the answer is cut; the end comes last."""
    rng, vocabulary = random.Random(seed), len(tokenizer)
    spelled = tokenizer("Okay, she thinks that the answer is here.", add_special_tokens=False).input_ids
    for number in range(count):
        drawn = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 24))]
        letters = [
            token
            for word in rng.sample(spelled, 4)
            for token in tokenizer.convert_tokens_to_ids(list(tokenizer.convert_ids_to_tokens(word)))
        ]
        ids = [token for token in [*drawn, *letters] if token not in (tokenizer.eos_token_id, tokenizer.mask_token_id)]
        rng.shuffle(ids)
        yield (ids, True) if number % 3 == 0 else ([*ids, tokenizer.eos_token_id], False)


def is_part(labels: Sequence[int], emitted: Sequence[int]) -> bool:
    """Whether labels are a sub-sequence of what was emitted."""
    rest = iter(emitted)
    return all(label in rest for label in labels)


def written(path: Path, tokenizer: Any, seed: int) -> list[list[int]]:
    """Write 500 rows as `mtbench train answers` does; return what was emitted in each."""
    emitted = []
    with path.open("w", encoding="utf-8") as file:
        for ids, cut in emissions(tokenizer, 500, seed):
            text = tokenizer.decode(ids if cut else ids[:-1], clean_up_tokenization_spaces=False)
            if text.strip():
                row = {"messages": turns("Why?", text, token_ids=ids)} | ({"cut": True} if cut else {})
                file.write(json.dumps(row) + "\n")
                emitted.append(ids)
    return emitted


@pytest.mark.parametrize("name", list(TEMPLATES)[:8])
def test_labels_of_every_objective_are_a_part_of_the_emitted_ids(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """Ids that a training tokenises anew are found here: 500 rows under each template, with special tokens, with words
    that are spelled otherwise than the tokenizer does, with characters that end in the middle.
    """
    tokenizer.chat_template = TEMPLATES[name]
    emitted = written(tmp_path / "answers.jsonl", tokenizer, seed=len(name))
    examples, counts = tokenise(read(str(tmp_path / "answers.jsonl"), None, Source()), tokenizer, 4096)
    assert counts == Counts(read=len(emitted), dropped=0, cut=0)
    retokenised = 0
    for example, ids in zip(examples, emitted, strict=True):
        assert example.ids[: example.prompt].tolist() == asked(tokenizer, turns("Why?", ""))
        assert example.ids[example.prompt :].tolist() == ids
        retokenised += tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids != ids
    assert retokenised > 400
    refuse_other_labels(examples, emitted, tokenizer, places=range(0, len(emitted), 8))


def refuse_other_labels(examples: Examples, emitted: Sequence[list[int]], tokenizer: Any, places: range) -> None:
    """Assert of each objective that what it learns at a distance is a part of what was emitted.

    Distance 0 is what fills the last block behind the text: end tokens.
    """
    special = Special(tokenizer.mask_token_id, tokenizer.eos_token_id)
    for kind in OBJECTIVES.values():
        for place in places:
            made = kind().build(examples[place], special, torch.Generator().manual_seed(place))
            for ahead in made.ahead.unique().tolist():
                labels = made.target[made.ahead == ahead].tolist()
                allowed = emitted[place] if ahead else [tokenizer.eos_token_id] * len(labels)
                assert is_part(labels, allowed), (kind.name, ahead)


@pytest.mark.parametrize(
    ("content", "ids"),
    [("Okay. And more", None), ("Okay.", [5, 6, 7]), ("Okay.", []), ("Okay.", [-1]), ("Okay.", ["5"])],
    ids=["edited", "of another vocabulary", "none", "negative", "texts"],
)
def test_ids_that_are_not_the_answers_text_are_left_alone(
    tokenizer: Any, tmp_path: Path, content: str, ids: Any
) -> None:
    """The text is learned: the answer was corrected, or its author has another vocabulary."""
    if ids is None:
        ids = [*tokenizer("Okay.", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns("Why?", content, token_ids=ids)}))
    data = prepare(str(tmp_path / "a.jsonl"), None, tokenizer, max_length=64, seed=0)
    assert tokenizer.decode(data.examples[0].ids[data.examples[0].prompt :]) == f"{content}<|im_end|>\n"


# --- Texts ----------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nA lake in the Alps.\n</think>\n\nThe Walensee."
LATER = "A sea near Italy.\n</think>\n\nThe Adriatic."  # the prompt has opened the block


@pytest.mark.parametrize(
    ("name", "content", "cut", "labels"),
    [
        ("qwen35", "The Danube.", False, None),  # the template writes an empty block
        ("qwen35", THOUGHT, False, THOUGHT.removeprefix("<think>\n")),
        ("qwen35", "< and </think>", False, None),  # moved into a block
        ("qwen3", THOUGHT, False, THOUGHT),
        ("qwen3", LATER, False, None),
        ("opens", "Okay, a town, maybe by the", True, None),  # without the block that the prompt opens
        ("opens", "<think>\nOkay, a town, maybe by the", True, "Okay, a town, maybe by the"),
        ("opens", "<think>\n", True, None),  # nothing of it is behind the prompt
        ("r1", THOUGHT, False, None),
        ("r1", "<think>\nOkay, a hill, maybe in", True, "<think>\nOkay, a hill, maybe in"),
        ("llama3", "The Danube.", False, "The Danube."),
        ("llama3", "   return x", False, None),
        ("chatml", "   return x\n", False, "   return x\n"),
        ("mistral", "The Danube.", False, " The Danube."),  # the space is a part of the first token
        ("system", "The Danube.", False, "The Danube."),
        ("channels", "The Danube.", False, None),
        ("closes", THOUGHT, False, THOUGHT),
        ("closes", "<think>\nOkay, a hill, maybe in", False, None),
    ],
)
def test_an_answer_that_the_template_rewrites_is_not_learned(
    tokenizer: Any, name: str, content: str, cut: bool, labels: str | None
) -> None:
    """The answer as it is, behind what the prompt has of it, then its end unless it is cut; else it is counted."""
    tokenizer.chat_template = TEMPLATES[name]
    found = only(Row("here", turns("Why?", content), cut), tokenizer)
    if labels is None:
        assert found == Counts(read=1, dropped=1, cut=0, rewritten=1)
    else:
        assert isinstance(found, tuple)
        assert found[0] == asked(tokenizer, turns("Why?", content))
        end = "" if cut else "<|im_end|>" + "\n" * (name != "mistral")
        assert tokenizer.decode(found[1]) == labels + end


def test_earlier_turns_may_be_rewritten(tokenizer: Any) -> None:
    """They are prompt, and a run writes them so, too."""
    tokenizer.chat_template = TEMPLATES["qwen35"]
    talk = [*turns("Name a wood.", "<think>\nOne.\n</think>\n\nThe Bienwald."), *turns("Another?", LATER)]
    found = only(Row("here", talk), tokenizer)
    assert isinstance(found, tuple)
    assert "One." not in tokenizer.decode(found[0])
    assert tokenizer.decode(found[1]) == f"{LATER}<|im_end|>\n"


def test_rewritten_answers_are_counted_and_named(tokenizer: Any, tmp_path: Path) -> None:
    """In the summary and the record; if none is left, with what to do, which works."""
    tokenizer.chat_template = TEMPLATES["qwen35"]
    file, rows = tmp_path / "rows.jsonl", [turns("Why?", text) for text in ("The Danube.", "Okay.", LATER)]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = prepare(str(file), None, tokenizer, max_length=128, seed=0)
    assert data.summary == "3 conversations: 2 dropped (2: the chat template rewrites their answers), 0 cut"
    assert (len(data.examples), data.description["dropped"], data.description["rewritten"]) == (1, 2, 2)
    with pytest.raises(UserError, match=r"2 dropped \(2: .*`--chat-template-kwargs` under which the template"):
        prepare(str(file), 2, tokenizer, max_length=128, seed=0)
    plain = prepare(str(file), 2, tokenizer, max_length=128, seed=0, options={"enable_thinking": False})
    assert plain.summary == "2 conversations: 0 dropped, 0 cut"
    assert "rewritten" not in plain.description


# --- Variables of the chat template ---------------------------------------------------------------------------------


def test_an_answer_is_learned_behind_the_prompt_that_its_author_read(tokenizer: Any, tmp_path: Path) -> None:
    """Under the variables of the row, else the training is refused with both settings."""
    tokenizer.chat_template = TEMPLATES["qwen35"]
    off = {"enable_thinking": False}
    row = {"messages": turns("Why?", "Okay."), "chat_template_kwargs": off}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"line 1: .* variables enable_thinking=false, not with none; give the same"):
        prepare(str(tmp_path / "a.jsonl"), None, tokenizer, max_length=128, seed=0)
    data = prepare(str(tmp_path / "a.jsonl"), None, tokenizer, max_length=128, seed=0, options=off)
    example = data.examples[0]
    assert example.ids[: example.prompt].tolist() == asked(tokenizer, turns("Why?", ""), **off)
    assert len(prepare(str(tmp_path / "a.jsonl"), None, tokenizer, max_length=128, seed=0, options=None).examples) == 1


@pytest.mark.parametrize("name", ["enable_thinkin", "add_generation_prompt"])
def test_a_variable_that_the_template_does_not_read_is_refused(tokenizer: Any, name: str) -> None:
    """Before anything is read: a misspelled one, or one that is not the user's."""
    tokenizer.chat_template = TEMPLATES["qwen35"]
    with pytest.raises(UserError, match=f"--chat-template-kwargs '{name}'"):
        prepare("nothing", None, tokenizer, max_length=128, seed=0, options={name: False})


@pytest.mark.parametrize(("own", "options"), [({"a": 1, "b": None}, {"a": 1}), ({}, {}), (None, None), ("a=1", None)])
def test_a_row_names_its_variables(tmp_path: Path, own: Any, options: Any) -> None:
    """A table has a column for the variables of all its rows, empty where a row has none."""
    row = {"messages": turns("Why?", "Okay."), "chat_template_kwargs": own}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert [found.options for found in read(str(tmp_path / "a.jsonl"), None, Source())] == [options]
