"""An answer is checked against a schema or tools; the check of any text and any schema ends, and fetches nothing."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from mtbench.errors import UserError
from mtbench.evaluation import answer_format
from mtbench.evaluation.answer_format import AnswerFormat, calls

PROMPTS = [json.loads(line) for line in Path(__file__).with_name("schema_prompts.jsonl").read_text().splitlines()]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = AnswerFormat(tools=[{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}])
BACKTRACKS = {"type": "string", "pattern": "^(a+)+$"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the network is used"))
    monkeypatch.setattr(answer_format, "CHECK_S", 0.2)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["id"])
def test_the_made_prompts_take_good_answers_only(prompt: dict[str, Any]) -> None:
    schema = prompt.get("response_format", {}).get("json_schema", {}).get("schema")
    wanted = AnswerFormat(json_schema=schema, tools=prompt.get("tools", []))
    wanted.refuse_faulty(prompt["id"])
    assert wanted.fault(prompt["good"]) is None
    assert wanted.fault(prompt["bad"])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        'I look it up.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}',
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}',
        '[weather(city="Rome")]',
    ],
)
def test_a_call_is_found_in_every_format(text: str) -> None:
    """Also as bare JSON, which is left where a marker is a special token."""
    assert calls(text) == [("weather", {"city": "Rome"})]
    assert TOOLS.fault(text) is None
    assert TOOLS.fault(text.replace("weather", "news")) == "call of 'news': no such tool"
    assert "'city' is a required property" in (TOOLS.fault(text.replace("city", "town")) or "")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "weather", "arg',
        "<tool_call>weather</tool_call>",
        '{"name": "weather", "parameters": {"city": "Rome"}',
        '{"name": "weather", "parameters": {"city": "Rome"}} is it',
        '{"name": "weather", "parameters": {"city": "Rome", "days": NaN}}',
        '[weather("Rome")]',
        '[weather(city="Rome").get()]',
        "[weather(city=" + "-" * 100_000 + "1)]",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_an_opened_call_that_does_not_parse_is_invalid(text: str) -> None:
    assert TOOLS.fault(text)


@pytest.mark.parametrize("text", ["", "It is sunny.", "[1] says so", '{"sunny": true}', "[see](https://rome.it)", "{"])
def test_a_text_without_calls_is_valid(text: str) -> None:
    assert calls(text) == []
    assert TOOLS.fault(text) is None


def test_several_calls_are_all_checked() -> None:
    good, bad = '{"name": "weather", "parameters": {"city": "Rome"}}', '{"name": "weather", "parameters": {}}'
    assert len(calls(f"{good}; {good}")) == len(calls(f"<tool_call>{good}</tool_call>\n<tool_call>{good}")) == 2
    assert TOOLS.fault(f"{good}\n{good}") is None
    assert TOOLS.fault(f"{good}; {bad}")
    assert calls("[f(a=(1, [2])), g.h(b=-1.5)]") == [("f", {"a": [1, [2]]}), ("g.h", {"b": -1.5})]


def test_what_is_wrong_is_said() -> None:
    wanted = AnswerFormat(json_schema=WEATHER)
    assert wanted.fault('{"city": "Rome}') == "not JSON at character 10"
    assert wanted.fault('{"city": 5}') == "$.city: 5 is not of type 'string'"
    assert wanted.fault('{"city": "Rome", "days": NaN}') == "not readable (ValueError)"
    assert wanted.fault("[" * 100_000) == "not readable (RecursionError)"
    assert wanted.fault("1" * 5000) == "not readable (ValueError)"
    assert AnswerFormat(json_schema={"$ref": "http://example.org/schema.json"}).fault("1"), "nothing is fetched"


def test_a_pattern_that_backtracks_ends() -> None:
    wanted, began = AnswerFormat(json_schema=BACKTRACKS), time.monotonic()
    assert wanted.fault('"aaaa"') is None
    assert wanted.fault(json.dumps("a" * 60 + "!")) == "not readable (OutOfTimeError)"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "http://example.org/schema.json"}, "Unresolvable"),
        ({"$ref": "#"}, "RecursionError"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"type": "number or so"}, "SchemaError"),
        ({"$defs": {"0": {}} | {str(n): {"allOf": [{"$ref": f"#/$defs/{n - 1}"}] * 2} for n in range(1, 40)},
          "$ref": "#/$defs/39"}, "OutOfTimeError"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused(schema: dict[str, Any], why: str) -> None:
    for wanted in (
        AnswerFormat(json_schema=schema),
        AnswerFormat(tools=[{"function": {"name": "f", "parameters": schema}}]),
    ):
        with pytest.raises(UserError, match=why):
            wanted.refuse_faulty("made/1/0")


def test_broken_tools_are_refused() -> None:
    for wanted in (AnswerFormat(tools=[{}]), AnswerFormat(tools=[{"function": 5}])):
        with pytest.raises(UserError, match="made/1/0 has a schema or tools that cannot be used"):
            wanted.refuse_faulty("made/1/0")
