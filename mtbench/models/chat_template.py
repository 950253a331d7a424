"""Render conversations by a checkpoint's chat template, an untrusted program in Jinja's sandbox; make tokens of texts.

The sandbox bounds what a template may touch, not how long it runs. Here it has a few seconds.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from mtbench.errors import UserError, first_line
from mtbench.programs.deadline import OutOfTimeError, deadline

LONGEST_S = 5.0
DATE = "MTBENCH_CHAT_TEMPLATE_DATE"  # environment variable: the date of plans in place of today, as a gate sets it
Options = Mapping[str, bool | int | float | str]
NO_OPTIONS: Options = MappingProxyType({})


@dataclass
class Clock:
    """A template's function `strftime_now`: the time by ISO 8601, None for now, and whether a template has read it."""

    time: str | None = None
    read: bool = False

    def __call__(self, format: str) -> str:
        self.read = True
        return (datetime.fromisoformat(self.time) if self.time else datetime.now()).strftime(format)


def render(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    answer_follows: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Options = NO_OPTIONS,
    clock: Clock | None = None,
) -> str:
    """Return the conversation as the tokenizer's template writes it, with the beginning of an answer if one follows.

    `tools`: as in OpenAI's API. `options`: variables that the template may read, such as Qwen3's `enable_thinking`.
    `clock`: None for the machine's. Raises jinja2.TemplateError if the template refuses the conversation, and UserError
    if there is none, or it fails or takes too long.
    """
    if not tokenizer.chat_template:  # an empty one would render nothing
        raise _failed(tokenizer, "is missing (plain text, as for /v1/completions, needs none)")
    # OpenAI's other name of a role: templates that do not know it write nothing
    messages = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in messages]
    offered = list(tools) or None
    functions: Any = {}
    try:
        template = tokenizer.get_chat_template(tools=offered)
        if "tool_calls" not in template:
            messages = [text_only(turn) for turn in messages]
        # The compiled template, which is cached, gets the clock: transformers makes plain data of all that it is passed
        functions = chat_template_utils._compile_jinja_template(template).globals
        functions["strftime_now"] = clock or Clock()
        with deadline(LONGEST_S):
            text = tokenizer.apply_chat_template(
                messages, tools=offered, tokenize=False, add_generation_prompt=answer_follows, **options
            )
    except (UserError, TemplateError):
        raise
    except OutOfTimeError:
        raise _failed(tokenizer, f"takes more than {LONGEST_S:g} s") from None
    except Exception as error:  # a template may raise any
        raise _failed(tokenizer, f"fails: {type(error).__name__}: {first_line(error)}") from None
    finally:
        functions.pop("strftime_now", None)  # transformers' own comes back
    return str(text)


def text_only(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn with its tool calls in its text, as Qwen's and Hermes' templates write them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    texts = [turn["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {**turn, "content": "\n".join(filter(None, texts))} if calls else turn


def tokenise(tokenizer: Any, texts: Sequence[str], *, plain: bool) -> list[list[int]]:
    """Return the token ids of texts. The tokenizer adds special tokens to plain ones; a chat template wrote its own.

    Raises UserError if the tokenizer fails.
    """
    try:
        return list(tokenizer(list(texts), add_special_tokens=plain, verbose=False)["input_ids"]) if texts else []
    except Exception as error:  # a tokenizer may raise any, and tokenizers raises plain ones
        raise UserError(
            f"the tokenizer of checkpoint {tokenizer.name_or_path!r} fails: {first_line(error)}; give another one with "
            "its own tokenizer."
        ) from None


def refuse_reserved(tokenizer: Any, names: Iterable[str], field: str) -> None:
    """Raise UserError for a name in `field` that is no variable of a template, but what we or a tokenizer pass."""
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "conversations"}
    for name in names:
        if name in reserved:
            raise UserError(
                f"{field} {name!r} is not allowed: it is no variable of a chat template. Give one that the template "
                "reads, such as enable_thinking."
            )


def refuse_unread(tokenizer: Any, names: Collection[str]) -> None:
    """Raise UserError for a name in --chat-template-kwargs that the tokenizer's template does not read."""
    refuse_reserved(tokenizer, names, "--chat-template-kwargs")
    for name in ignored(tokenizer, names) if tokenizer.chat_template and names else ():
        raise UserError(f"--chat-template-kwargs {name!r}: the chat template does not read it; give one that it reads.")


def ignored(tokenizer: Any, names: Collection[str]) -> list[str]:
    """Return the variables that do not occur in the tokenizer's template."""
    template = tokenizer.get_chat_template(tools=[] if "tools" in names else None)
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]


def _failed(tokenizer: Any, reason: str) -> UserError:
    return UserError(
        f"the chat template of checkpoint {tokenizer.name_or_path!r} {reason}; give another checkpoint or correct its "
        "template."
    )
