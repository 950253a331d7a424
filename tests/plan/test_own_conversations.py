"""Conversations of the user's own: what each turn's prompt holds, and which turns a plan leaves out."""

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_up import chat, write_lines
from stored import stored_lines
from whole import finish, start

from mtbench.errors import UserError
from mtbench.evaluation.answer_format import AnswerFormat
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source
from mtbench.lineup.planner import make_plan
from mtbench.models import chat_template
from mtbench.models.families import TINY
from mtbench.models.loading import inspect
from mtbench.plan.plan import Plan, RunRequest

READ = {"type": "function", "function": {"name": "read", "arguments": {"file": "a.py"}}}
CALL = {"id": "1", **READ, "function": {"name": "read", "arguments": '{"file": "a.py"}'}}
SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Brief."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Is a.py right?", "think_s": 9},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "x = 1", "think_s": 0.5},
    {"role": "tool", "tool_call_id": "2", "content": "", "delay": 250},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Thanks."},
]
SHAREGPT = [
    {"from": "human", "value": "Is a.py right?"},
    {"from": "function_call", "value": '{"name": "read", "arguments": {"file": "a.py"}}'},
    {"from": "observation", "value": "x = 1"},
    {"from": "gpt", "value": "Yes."},
]
TOOL = {"type": "function", "function": {"name": "read"}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
KNOWS = "{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls }}\n{% endfor %}{{ tools }} "
REWRITES = "{{ messages | length }} turns\n" + CHATML
FORGETS = "{{ messages[-1].content }}"


def prompts(path: Path, name: str = "conversations", limit: int | None = None, template: Any = chat) -> list[Any]:
    return [*SUITES[name](str(path), Source()).prompts(template, limit)]


def keep(messages: Messages, /, **given: Any) -> Any:
    """Return what a template is given, in place of a text."""
    return [*messages], given


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return copies of an embedded checkpoint, by template."""
    found = {}
    for name, text in {"chatml": CHATML, "rewrites": REWRITES, "knows": KNOWS, "forgets": FORGETS, "none": ""}.items():
        found[name] = tmp_path_factory.mktemp("models") / name
        shutil.copytree(TINY / "ar", found[name])
        (found[name] / "chat_template.jinja").write_text(text)
    return found


def planned(model: Path, path: Path, name: str = "conversations", **options: Any) -> Plan:
    asked: dict[str, Any] = {"method": ("ar",), "max_new_tokens": 4, "batch_size": (1,)} | options
    return make_plan(RunRequest(suite=(f"{name}:{path}",), model=str(model), **asked))


def random_talk(chance: random.Random, turns: int) -> list[dict[str, str]]:
    roles = ("user", "assistant") * turns
    return [{"role": role, "content": "".join(chance.choices("ab 12\n", k=chance.randrange(1, 9)))} for role in roles]


def test_each_answer_is_a_turn_behind_all_that_was_said(tmp_path: Path) -> None:
    """A greeting is none, a null content stays, arguments are objects, times add up, and formats are kept."""
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    entry = {"id": "a", "messages": SAID, "tools": [TOOL], "response_format": wanted}
    found = prompts(write_lines(tmp_path / "a.jsonl", [entry]), template=keep)
    names = [f"conversations/a/{n}" for n in range(3)]

    assert [(p.item, p.follows, p.think_s) for p in found] == [*zip(names, [None, *names], [0, 0.75, 0], strict=False)]
    assert all(p.recorded and p.answer_format == AnswerFormat(json_schema=schema, tools=[TOOL]) for p in found)
    read = [{name: value for name, value in turn.items() if name not in ("think_s", "delay")} for turn in SAID]
    read[3]["tool_calls"] = [{**READ, "id": "1"}]
    assert [p.text for p in found] == [(read[:cut], {"tools": [TOOL]}) for cut in (3, 6, 8)]


def test_sharegpt_has_calls_and_their_results(tmp_path: Path) -> None:
    """As LLaMA-Factory writes them, with the tools as a text."""
    line = {"conversations": SHAREGPT, "tools": json.dumps([TOOL["function"]])}
    first, second = prompts(write_lines(tmp_path / "a.jsonl", [line]), template=keep)

    assert first.text == ([{"role": "user", "content": "Is a.py right?"}], {"tools": [TOOL]})
    call, result = second.text[0][1:]
    assert call["tool_calls"] == [READ]
    assert result == {"role": "tool", "content": "x = 1"}


def test_a_file_an_array_cases_and_a_folder_are_read(tmp_path: Path) -> None:
    """A limit counts conversations, and metadata of the recorded cases need no remark."""
    write_lines(tmp_path / "b.jsonl", [{"messages": SAID}, {"prompt": "Why?"}])
    case = {"id": "x", "messages": SAID[2:4], "source": "s", "reference_response": "r", "context_chars": 3, "top_k": 1}
    (tmp_path / "a.json").write_text(json.dumps({"cases": [case]}))
    (tmp_path / "notes.txt").write_text("Why?")

    assert [p.item[14:] for p in prompts(tmp_path, limit=2)] == ["x/0", "b-1/0", "b-1/1", "b-1/2"]
    assert prompts(tmp_path / "b.jsonl")[-1].item == "conversations/2/0"
    assert SUITES["conversations"](str(tmp_path), Source()).flags == [f"not read in {tmp_path.name}: top_k"]
    before = SUITES["conversations-own"].cell_prefix(str(tmp_path))
    (tmp_path / "a.json").write_text("[]")
    assert before.startswith("conversations-own-")
    assert SUITES["conversations-own"].cell_prefix(str(tmp_path)) != before


def test_an_arms_own_answer_takes_the_place_of_a_recorded_one(tmp_path: Path) -> None:
    """The text behind it is what the template writes there: here a tool's results, with a call it did not make."""
    found = prompts(write_lines(tmp_path / "a.jsonl", [{"messages": SAID}]), "conversations-own")

    assert [(p.text, p.recorded) for p in found] == [
        ("<system>Brief.</><assistant>Hello.</><user>Is a.py right?</><assistant>", False),
        ("</><tool>x = 1</><tool></><assistant>", False),
        ("</><user>Thanks.</><assistant>", False),
    ]


@pytest.mark.parametrize("template", ["chatml", "rewrites", "forgets"])
def test_a_recorded_prompt_is_made_again_exactly(template: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    """Whatever of it the turn before has, also where a template rewrites the turns before."""
    chance = random.Random(5)
    talks = [{"messages": random_talk(chance, chance.randrange(1, 6))} for _ in range(12)]
    path = write_lines(tmp_path / "a.jsonl", talks)
    tokenizer = inspect(str(models[template]), offline=True, needs_mask=False).tokenizer
    suite = planned(models[template], path, limit=None).suites[0]
    texts = prompts(path, template=lambda turns: chat_template.render(tokenizer, turns, answer_follows=True))

    assert [suite.prompt(n) for n in range(len(suite.items))] == chat_template.tokenise(
        tokenizer, [prompt.text for prompt in texts], plain=False
    )
    assert all(map(suite.is_fixed, range(len(suite.items))))


def test_tools_and_their_calls_reach_every_template(models: Mapping[str, Path], tmp_path: Path) -> None:
    """One that knows neither gets the call as a text, as do paragraphs without a template; a flag names the tools."""
    path = write_lines(tmp_path / "a.jsonl", [{"messages": SAID[2:], "tools": [TOOL]}])
    texts = {}
    for name in ("knows", "chatml", "none"):
        tokenizer = inspect(str(models[name]), offline=True, needs_mask=False).tokenizer
        plan = planned(models[name], path)
        texts[name] = tokenizer.decode(plan.suites[0].prompt(1))
        assert ("the chat template does not read tools" in plan.suites[0].flags) == (name != "knows")

    call = '<tool_call>\n{"name": "read", "arguments": {"file": "a.py"}}\n</tool_call>'
    assert call in texts["chatml"]
    assert f"right?\n\n{call}\n\nx = 1" in texts["none"]
    assert "'arguments': {'file': 'a.py'}" in texts["knows"]
    assert f"{[TOOL]} " in texts["knows"]


@pytest.mark.whole
@pytest.mark.parametrize("name", ["conversations", "conversations-own"])
def test_all_arms_get_the_same_tokens_in_every_recorded_turn(name: str, tmp_path: Path) -> None:
    """Whatever they answered; in own conversations a turn has the arm's answers."""
    path = write_lines(tmp_path / "a.jsonl", [{"messages": random_talk(random.Random(n), 3)} for n in range(4)])
    asked: Mapping[str, Any] = {"method": ("ar", "mars"), "rounds": 1, "max_new_tokens": 6, "batch_size": (1, 2)}
    request = RunRequest(suite=(f"{name}:{path}",), family="tiny", **asked)
    plan, run = make_plan(request), start(tmp_path / "run", request)
    assert len(finish(run)["cells"]) == 4
    suite, all_items = plan.suites[0], range(12)
    alone = {suite.items[n].item: suite.prompt(n) for n in all_items}
    for cell in plan.cells:
        lines = {line["item"]: line for line in stored_lines(run, f"generations/{cell.cell}.jsonl")}
        said = {item: line["token_ids"] for item, line in lines.items()}
        sent = [request.prompt_ids for request in plan.requests(suite, all_items, said)]
        assert (sent == [*alone.values()]) == (name == "conversations")
        read = {item: line["prompt_tokens"] == len(alone[item]) for item, line in lines.items()}
        assert (list(read.values()) == [True] * 12) == (name == "conversations")


LONG = [{"role": "user", "content": "1 " * 40}]


def test_turns_that_do_not_fit_are_left_out(
    models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one on, with its answer; their texts are not even tokenised. One flag counts them."""
    talks = [{"messages": random_talk(random.Random(1), 3)}, {"messages": LONG}]
    talks.append({"messages": [*random_talk(random.Random(2), 1), *LONG, *random_talk(random.Random(3), 2)[1:]]})
    path = write_lines(tmp_path / "a.jsonl", talks)
    whole = planned(models["chatml"], path).suites[0]
    tokenise, seen = chat_template.tokenise, list[int]()

    def counted(tokenizer: Any, texts: list[str], *, plain: bool) -> list[list[int]]:
        seen.append(len(texts))
        return tokenise(tokenizer, texts, plain=plain)

    monkeypatch.setattr(chat_template, "tokenise", counted)
    room = max(whole.positions[:3])
    cut = planned(models["chatml"], path, max_context=room).suites[0]

    assert [i.item for i in cut.items] == [f"conversations/{i}" for i in ("1/0", "1/1", "1/2", "3/0")]
    assert [cut.prompt(n) for n in range(3)] == [whole.prompt(n) for n in range(3)]
    assert f"3 turns of 2 conversations are left out: over {room} tokens" in cut.flags
    assert seen == [3, 2, 1]
    assert len(planned(models["chatml"], path, max_context=room - 1).suites[0].items) == 3
    room = planned(models["chatml"], path, "conversations-own").suites[0].positions[1]
    own = planned(models["chatml"], path, "conversations-own", max_context=room).suites[0]
    assert [i.item for i in own.items] == [f"conversations/{i}" for i in ("1/0", "1/1", "3/0")]
    with pytest.raises(UserError, match="has no items of at most 9 tokens"):
        planned(models["chatml"], path, max_context=9)
    with pytest.raises(UserError, match="--max-context: arithmetic has no conversations to shorten; leave it out"):
        make_plan(RunRequest(max_context=9, limit=1))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "Hi."}]}, "no turn is the user's or the result of a tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and other parts ('image_url')"),
        ({"messages": [{"role": "tool", "content": {"a": 1}}]}, "a turn's 'content' is not a text"),
        ({"messages": [{"role": "user", "content": "a", "think_s": -1}]}, "the time before a turn is -1 s"),
        ({"messages": [*LONG, {"role": "assistant", "tool_calls": [{}]}]}, "not a conversation (KeyError: 'name')"),
        ({"messages": LONG, "json_schema": 5}, "'json_schema' is not an object"),
        (
            {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant") * 1001]},
            "1,001 answers",
        ),
        ({"messages": LONG, "id": "a\nb"}, "is not a number or 1 to 200 printed characters without '/'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
        ({"messages": LONG, "id": 1}, "id 1 is already that of "),
        (b'{"prompt": "caf\xe9"}', "not JSON ("),
    ],
)
def test_an_invalid_conversation_is_named(line: Any, reason: str, tmp_path: Path) -> None:
    """In one line with the suite, the file and the line."""
    lines = [json.dumps({"messages": LONG}).encode(), line if isinstance(line, bytes) else json.dumps(line).encode()]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError) as caught:
        prompts(tmp_path / "a.jsonl")

    assert str(caught.value).startswith(f"suite 'conversations': {tmp_path}/a.jsonl, line 2: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
