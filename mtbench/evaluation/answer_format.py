"""What an answer must be: JSON of a schema (JSON Schema), or text with calls of tools (OpenAI's API).

Answers and schemas are untrusted: a check takes at most CHECK_S, and nothing is fetched for a `$ref`.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from mtbench.errors import UserError, first_line
from mtbench.programs.deadline import OutOfTimeError, deadline
from mtbench.records import Record

CHECK_S = 2.0
MARKER, END, GAP = re.compile(r"<tool_call>|\[TOOL_CALLS\]"), "</tool_call>", " \t\r\n;,"
OBJECT = re.compile(r'\s*(\[\s*)?\{.*"name"\s*:', re.DOTALL)
PYTHON = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")


class AnswerFormat(Record):
    """What an answer must be. A serving engine gets the schema with the request; tools are in the prompt."""

    json_schema: dict[str, Any] | None = Field(None, description="JSON schema that the answer meets; null: none")
    tools: list[dict[str, Any]] = Field(
        default_factory=list, description="tools that the answer may call, as in OpenAI's API; empty: none"
    )

    def fault(self, text: str) -> str | None:
        """Return what is wrong with an answer; None: it is valid. With tools alone, a text without calls is."""
        try:
            with deadline(CHECK_S):
                if self.json_schema is not None:
                    return _mismatch(json.loads(text, parse_constant=int), self.json_schema)  # NaN raises ValueError
                tools = self._parameters()
                for name, arguments in calls(text) if tools else ():
                    if wrong := _mismatch(arguments, tools[name]) if name in tools else "no such tool":
                        return f"call of {name!r:.100}: {wrong}"
                return None
        except json.JSONDecodeError as error:
            return f"not JSON at character {error.pos + 1}{'' if self.json_schema is not None else ' of a call'}"
        except (Exception, OutOfTimeError) as error:  # too deep, too slow, or no call
            return f"not readable ({type(error).__name__})"

    def refuse_faulty(self, item: str) -> None:
        """Raise UserError for a schema or tools by which answers cannot be checked."""
        try:
            for schema in (self.json_schema or {}, *self._parameters().values()):
                validator = _validator(schema)
                with deadline(CHECK_S):
                    validator.check_schema(schema)
                    validator.is_valid({})  # a `$ref` that is nowhere, or never ends
        except (Exception, OutOfTimeError) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{item} has a schema or tools that cannot be used ({why}); correct them.") from None

    def _parameters(self) -> dict[str, Any]:
        functions = [tool.get("function", tool) for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}


def calls(text: str) -> list[tuple[str, Any]]:
    """Return name and arguments of the calls in an answer; []: it is text. Raises an error if a call does not parse.

    - Hermes, Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`. Mistral: `[TOOL_CALLS]` and a list of these.
    - Llama 3: such objects or a list alone, with `parameters`. So are others whose marker is a special token: a text
      has none. BFCL: `[f(a=1), g(b=[2])]`.
    """
    if PYTHON.match(text):
        with warnings.catch_warnings(action="ignore"):  # of odd Python
            nodes: Any = ast.parse(text.strip(), mode="eval").body
        if any(node.args for node in nodes.elts):
            raise ValueError("an argument has no name")
        named = [(of.func, {word.arg: ast.literal_eval(word.value) for word in of.keywords}) for of in nodes.elts]
        return [(ast.unparse(function), json.loads(json.dumps(arguments))) for function, arguments in named]
    parts = MARKER.split(text)[1:] or ([text] if OBJECT.match(text) else [])
    values = (value for part in parts for value in _values(part.partition(END)[0].lstrip(GAP)))
    objects = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [(one["name"], one.get("arguments", one.get("parameters", {}))) for one in objects]


def _values(text: str) -> Iterator[Any]:
    """Yield JSON values that follow each other, one at least. Raises ValueError for other text."""
    value, end = json.JSONDecoder(parse_constant=int).raw_decode(text)
    yield value
    if rest := text[end:].lstrip(GAP):
        yield from _values(rest)


def _mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return how a value does not meet a schema; None: it does."""
    error = next(_validator(schema).iter_errors(value), None)
    return error and f"{error.json_path}: {first_line(error)}"


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema import validators  # takes 0.1 s to import
    from referencing import Registry

    return validators.validator_for(schema, validators.Draft202012Validator)(schema, registry=Registry())
