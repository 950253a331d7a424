"""What an answer must be: JSON of a schema (JSON Schema), or text with calls of tools (OpenAI's API)."""

from typing import Any

from pydantic import Field

from mtbench.records import Record


class AnswerFormat(Record):
    """What an answer must be. A serving engine gets the schema with the request; tools are in the prompt."""

    json_schema: dict[str, Any] | None = Field(None, description="JSON schema that the answer meets; null: none")
    tools: list[dict[str, Any]] = Field(
        default_factory=list, description="tools that the answer may call, as in OpenAI's API; empty: none"
    )
