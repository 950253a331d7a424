"""The user's own conversations: `conversations:FILE`, and `conversations-own:FILE` with each arm's own answers.

A line of FILE is a conversation, OpenAI's `messages` (and `tools`) or ShareGPT's `conversations`. FILE may be a JSON
array of these, an object with such a list in `cases`, or a folder of .json and .jsonl files.

    {"messages": [{"role": "user", "content": "Is a.py right?"}, {"role": "assistant", "tool_calls": [{"function":
     {"name": "read", "arguments": "{\\"file\\": \\"a.py\\"}"}}]}, {"role": "tool", "content": "x = 1"}], "tools": […]}

Each answer of the assistant is a turn, and its prompt is all that stands before it. What follows the last answer is a
turn, too; an answer before the first question is none. `conversations:FILE` keeps the recorded answers, so that all
arms get the same tokens. Nothing is scored.

Also read: `id` (default: the line number), `response_format` of OpenAI or `json_schema` (what each answer must be), and
in a message `think_s`, the seconds before it is sent, or `delay`, in milliseconds. Of a conversation that does not fit
the context, or `--max-context`, the later turns are left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from mtbench.errors import first_line
from mtbench.evaluation.answer_format import AnswerFormat
from mtbench.evaluation.multi_turn import ANSWER, render_turn
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Template

from .prompts import Prompts, given_turns, text_turn, without_nulls

RESULT = ("tool", "function", "observation")  # roles of a tool's result: OpenAI's, its former one, and ShareGPT's
KEPT = ("tool_call_id", "name", "reasoning_content")  # fields of a turn that templates read
Turn = tuple[list[dict[str, Any]], float, dict[str, Any]]  # new messages, seconds before them, recorded answer


@SUITES.register("conversations")
class Conversations(Prompts):
    metrics = ()
    shortens = True
    recorded: ClassVar[bool] = True

    def __init__(self, variant: str, source: Source) -> None:
        super().__init__(variant, source)
        begun = {json.dumps([turns[0][0], turns[0][2]]) for _, (turns, _) in self._conversations.values()}
        if again := len(self._conversations) - len(begun):
            self.flags = [*self.flags, f"{again} conversations begin as another one, so they are not independent"]

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        chosen = list(self._conversations.items())[:limit]
        return [prompt for name, (place, found) in chosen for prompt in self._turns(name, place, template, *found)]

    def _turns(
        self, name: str, place: str, template: Template, turns: Sequence[Turn], answer_format: AnswerFormat | None
    ) -> Iterator[Prompt]:
        """Yield the prompt of each turn."""
        if answer_format is not None and answer_format.tools:
            template = partial(template, tools=answer_format.tools)
        past: list[Mapping[str, Any]] = []
        for number, (said, think_s, answer) in enumerate(turns):
            past += said
            yield Prompt(
                item=f"conversations/{name}/{number}",
                text=render_turn(f"suite {self.name!r}: {place}, turn {number}", past, template, self.name),
                follows=f"conversations/{name}/{number - 1}" if number else None,
                recorded=self.recorded,
                answer_format=answer_format,
                think_s=think_s if number else 0.0,
            )
            past.append(answer if self.recorded else {"role": "assistant", "content": ANSWER})

    def _conversation(self, entry: dict[str, Any]) -> tuple[list[Turn], AnswerFormat | None]:
        turns: list[Turn] = []
        said: list[dict[str, Any]] = []
        think_s, asked = 0.0, False
        try:
            for given in given_turns(entry):
                said.append(message := _message(given))
                think_s += float(given.get("think_s") or (given.get("delay") or 0) / 1000)
                if not 0 <= think_s <= 1e9:
                    raise ValueError(f"the time before a turn is {think_s:g} s")
                asked = asked or message["role"] in ("user", "tool")
                if asked and message["role"] == "assistant":
                    turns.append((said[:-1], think_s, message))
                    said, think_s = [], 0.0
            wanted = _answer_format(entry)
        except (TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a conversation ({type(error).__name__}: {first_line(error)})") from None
        if not asked:
            raise ValueError("no turn is the user's or the result of a tool, so there is nothing to answer")
        if len(turns) > 1000:  # the texts of all prompts take memory by the square of it
            raise ValueError(f"{len(turns):,} answers, and at most 1,000 are read; cut the conversation")
        json.dumps([turns, said, wanted and wanted.model_dump()], ensure_ascii=False).encode()  # as in Prompts
        return [*turns, *([(said, think_s, {})] if said else [])], wanted


@SUITES.register("conversations-own")
class OwnConversations(Conversations):
    recorded = False


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it. Raise ValueError, or another error, if it is not valid."""
    fields = without_nulls(given)
    kept = {name: fields.pop(name) for name in KEPT if name in fields}
    calls = fields.pop("tool_calls", fields.pop("function_call", []))
    if fields.get("from") == "function_call":  # ShareGPT's, as LLaMA-Factory has it
        calls, fields = _json(fields["value"]), {"role": "assistant"}
    result = fields.get("role", fields.get("from")) in RESULT
    turn = text_turn(fields | ({"role": "user"} if result else {})) | kept | ({"role": "tool"} if result else {})
    if calls:
        turn["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    elif not isinstance(turn["content"], str):
        raise ValueError("a turn's 'content' is not a text")
    return turn


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect it (vLLM does the same)."""
    function = given.get("function", given)
    called = {"name": function["name"], "arguments": _json(function.get("arguments", {}))}
    return {"type": "function", "function": called} | ({"id": given["id"]} if "id" in given else {})


def _json(value: Any) -> Any:
    """Return what a text says in JSON, or the value itself: a recorded call may be broken."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(value)
    return value


def _answer_format(entry: dict[str, Any]) -> AnswerFormat | None:
    """Take what each answer must be from one line of the file."""
    schema, wanted = entry.pop("json_schema", None), entry.pop("response_format", {})
    tools = [t if t.get("function") else {"type": "function", "function": t} for t in _json(entry.pop("tools", []))]
    if (kind := wanted.get("type", "text")) != "text":
        schema = {"type": "object"} if kind == "json_object" else wanted[kind]["schema"]
    if not isinstance(schema, dict | None):
        raise ValueError("'json_schema' is not an object")
    return AnswerFormat(json_schema=schema, tools=tools) if tools or schema is not None else None
