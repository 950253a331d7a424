"""Prompts have the tokens that transformers makes; variables of the chat template (`--chat-template-kwargs`)."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from small import BEGIN, PAD, TEMPLATES, beginning_tokenizer, save_beginning
from transformers import AutoTokenizer
from typer.testing import CliRunner

from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt
from mtbench.lineup.planner import make_plan
from mtbench.models import chat_template
from mtbench.models.families import TINY
from mtbench.models.loading import inspect
from mtbench.options.texts import template_variables
from mtbench.plan.plan import Plan, RunRequest

TEMPLATE = (  # as Qwen3's: without the variable it thinks
    "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %} 0{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint whose template knows `enable_thinking`."""
    folder = tmp_path_factory.mktemp("model") / "ar"
    shutil.copytree(TINY / "ar", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def planned(model: Path, tmp_path: Path, suite: str | None = None, **options: Any) -> Plan:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1 + 1"}\n')
    request = RunRequest(
        suite=(suite or f"prompts:{tmp_path}/mine.jsonl",),
        model=str(model),
        method=("ar",),
        limit=1,
        max_new_tokens=4,
        chat_template_kwargs=options,
    )
    return make_plan(request)


def text(plan: Plan, model: Path) -> str:
    decoded: str = inspect(str(model), offline=True, needs_mask=False).tokenizer.decode(
        plan.suites[0].items[0].prompt_ids
    )
    return decoded


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_the_tokens_that_transformers_makes(name: str, ends: bool, tmp_path: Path) -> None:
    """Of a chat those of `apply_chat_template`, of plain text the tokenizer's: one BOS, and none in the middle."""
    folder = save_beginning(tmp_path / "model", TEMPLATES[name], ends=ends)
    (tmp_path / "mt_bench").mkdir()
    asked = {"question_id": 1, "category": "writing", "turns": ["d e", "f g"]}
    (tmp_path / "mt_bench" / "question.jsonl").write_text(json.dumps(asked))
    request = RunRequest(suite=("mt-bench", "synthetic:2x1"), model=str(folder), method=("ar",), data_dir=str(tmp_path))
    chat, plain = make_plan(request.changed(max_new_tokens=4, limit=1)).suites

    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, later = (item.prompt_ids for item in chat.items)
    assert plain.items[0].prompt_ids[:1] == [PAD]
    assert later.count(PAD) == 0
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": "d e"}]
        assert first == tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
        assert (chat.flags, chat.task["chat_template"]) == ([], True)
    else:
        assert first == tokenizer("d e")["input_ids"]
        assert later == tokenizer("f g", add_special_tokens=False)["input_ids"]
        ended = ["1 of 2 prompts end with an end token"] if ends else []
        assert chat.flags == ["raw prompts: the checkpoint has no chat template", *ended]
        assert chat.task["chat_template"] is False
    assert "no chat template" not in "".join(plain.flags)


NO_ROW = {"vocab_size": PAD, "eos_token_id": 1, "pad_token_id": None}  # PAD and the ids behind it have no row


@pytest.mark.parametrize(
    ("template", "prompt", "config", "says"),
    [
        (
            None,
            "a b",
            NO_ROW,
            rf"prompts/1/0 has the token id {PAD}, '<\|endoftext\|>' of the tokenizer: the tokenizer has",
        ),
        (
            TEMPLATES["writes BOS"],
            "a b",
            NO_ROW,
            "of the chat template: the tokenizer has ids up to 38, the embedding 37 rows; resize that of",
        ),
        ("{{ messages[0].content }}", f"a {BEGIN}", NO_ROW, "of the prompt: the tokenizer has .* 37 rows; resize that"),
        ({"rag": "x", "tool_use": "y"}, "a b", {}, "fails: ValueError: This model has multiple chat templates"),
        (
            "{{ raise_exception('only users') }}",
            "a b",
            {},
            "line 1: the checkpoint's chat template rejects it .only users",
        ),
        ("{% if %}", "a b", {}, "the checkpoint's chat template rejects it"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_models_are_loaded(
    template: Any, prompt: str, config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """In one line and in two seconds: ids that no row of the embedding has, and templates that render nothing."""
    folder = save_beginning(tmp_path / "model", template, **config)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": prompt}))
    words = ["run", "--suite", f"prompts:{tmp_path}/p.jsonl", "--model", str(folder), "--method", "ar", "-o"]
    begun = time.process_time()
    done = CliRunner().invoke(main.app, [*words, str(tmp_path / "out"), "--max-new-tokens", "4"])
    assert time.process_time() - begun < 2
    assert isinstance(done.exception, UserError)
    assert re.search(says, str(done.exception))
    assert "\n" not in str(done.exception)
    assert "loading the models" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_variable_reaches_the_prompt_and_is_recorded(model: Path, tmp_path: Path) -> None:
    """Only where it is given; in the plan's request and in the task that the results repeat."""
    thinking = planned(model, tmp_path)
    plain = planned(model, tmp_path, enable_thinking=False)

    assert (text(thinking, model), text(plain, model)) == ("1 + 1", "1 + 1 0")
    assert plain.request.chat_template_kwargs == {"enable_thinking": False}
    assert plain.suites[0].task["template_options"] == {"enable_thinking": False}
    assert "template_options" not in thinking.suites[0].task
    assert thinking.suites[0].flags == plain.suites[0].flags == []
    assert planned(model, tmp_path, enable_thinking=True).suites[0].items == thinking.suites[0].items


def test_a_variable_that_changes_nothing_is_flagged(model: Path, tmp_path: Path) -> None:
    """A misspelled one, and any for a suite that uses no chat template."""
    misspelled = planned(model, tmp_path, enable_thinkin=False).suites[0]
    unused = planned(model, tmp_path, suite="synthetic:8x4", enable_thinking=False).suites[0]

    assert misspelled.flags == ["the chat template does not read enable_thinkin"]
    assert unused.flags == ["the chat template does not read enable_thinking"]
    assert "template_options" not in unused.task


@pytest.mark.parametrize(
    ("trained", "run", "words"),
    [
        ({}, {"enable_thinking": False}, ("none", "enable_thinking=false")),
        ({"enable_thinking": False}, {}, ("enable_thinking=false", "none")),
        ({"enable_thinking": True}, {"enable_thinking": False}, ("enable_thinking=true", "enable_thinking=false")),
        ({}, {}, None),
        ({"enable_thinking": False}, {"enable_thinking": False}, None),
        (None, {"enable_thinking": False}, None),
    ],
)
def test_a_checkpoint_that_was_trained_under_other_variables_is_flagged(
    model: Path, tmp_path: Path, trained: Any, run: dict[str, bool], words: tuple[str, str] | None
) -> None:
    """A draft and a target, each by name; a training record of an older version says nothing of them."""
    record = {"objective": "draft", "options": {}}
    for name in ("target", "small"):
        shutil.copytree(model, tmp_path / name)
        given = {} if trained is None else {"chat_template_kwargs": trained}
        (tmp_path / name / "mtbench_training.json").write_text(json.dumps(record | given))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1 + 1"}\n')
    request = RunRequest(
        suite=(f"prompts:{tmp_path}/mine.jsonl", "synthetic:8x4"),
        model=str(tmp_path / "target"),
        checkpoint={"draft": str(tmp_path / "small")},
        method=("ar", "speculative"),
        max_new_tokens=4,
        chat_template_kwargs=run,
    )
    chat, plain = make_plan(request).suites
    expected = [
        f"{name} was trained with the template variables {words[0]}, and runs with {words[1]}"
        for name in ("target", "small")
        if words
    ]
    assert [flag for flag in chat.flags if "trained" in flag] == expected
    assert not [flag for flag in plain.flags if "trained" in flag]  # it has no chat template


@pytest.mark.parametrize("role", ["system", "developer"])
def test_openais_developer_is_the_system(role: str) -> None:
    """Templates of open models know the one name only, and leave out the turn of another."""
    tokenizer = beginning_tokenizer("{% for turn in messages %}{{ turn.role }}: {{ turn.content }}. {% endfor %}")
    turns = [{"role": role, "content": "Brief"}, {"role": "user", "content": "Why?"}]
    assert chat_template.render(tokenizer, turns) == "system: Brief. user: Why?. "
    assert turns[0]["role"] == role


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "add_generation_prompt"])
def test_what_is_no_variable_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    """It would replace the template or what comes back."""
    with pytest.raises(UserError, match=rf"^--chat-template-kwargs '{name}' is not allowed: [^\n]*$"):
        planned(model, tmp_path, **{name: "x"})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("option=false", False),
        ("option=False", False),
        ("option=3", 3),
        ("option=0.5", 0.5),
        ("option=low", "low"),
        ("option=nan", "nan"),
        ('{"option": false, "budget": 512}', False),
    ],
)
def test_values_are_read_as_json_reads_them(given: str, value: object) -> None:
    """Text that is neither a truth value nor a number stays text. A later value replaces an earlier one."""
    found = template_variables(["option=old", given])["option"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "give a JSON object of texts, numbers and truth values"),
        ('{"tools": []}', "give a JSON object of texts"),
        ('{"a": null}', "give a JSON object of texts"),
        ("enable_thinking", "give NAME=VALUE, such as `--chat-template-kwargs enable_thinking=false`$"),
        ("=false", "give NAME=VALUE"),
        ("a b=1", "give NAME=VALUE"),
    ],
)
def test_other_text_is_refused(given: str, says: str) -> None:
    """In one line with an example."""
    with pytest.raises(ValueError, match=says):
        template_variables([given])


def test_a_stop_string_that_no_arm_may_emit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that has no row in the embedding, or the mask; others may come."""

    def stopping(suite: Any, template: Any, limit: int | None) -> list[Prompt]:
        return [Prompt(item="prompts/1/0", text="1 + 1", stop=("<|far|>", "<|im_end|>", "Question:"))]

    folder = Path(shutil.copytree(TINY / "ar", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<|{n}|>" for n in range(rows - len(tokenizer))] + ["<|far|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(SUITES["prompts"], "prompts", stopping)
    flags = planned(folder, tmp_path).suites[0].flags
    assert [flag for flag in flags if "stop string" in flag] == [
        "the stop string '<|far|>' is a token that no arm may emit"
    ]
