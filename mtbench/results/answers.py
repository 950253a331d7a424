"""Answers in a file: JSONL, a line for each request. docs/audit.md makes it of the result files of other tools."""

import codecs
import io
from pathlib import Path
from typing import Any

from pydantic import Field

from mtbench import files
from mtbench.decoding.output import FinishReason
from mtbench.errors import UserError, printable
from mtbench.records import Record, TokenId, parse

LARGEST_FILE = 1 << 27  # bytes: every request of a long benchmark
FORM = "a line has `prompt` or `prompt_ids`, `output` or `token_ids`, and `finish_reason` if it is known."
Prompt = str | list[dict[str, Any]]  # a text, or the messages of a chat


class FileAnswer(Record):
    """One request and its answer."""

    prompt: Prompt | None = Field(None, description="text, or messages of a chat; null: not known, or prompt_ids")
    prompt_ids: list[TokenId] | None = Field(None, description="token ids of the prompt; null: not known")
    output: str | None = Field(None, description="text of the answer; null: the request failed, or token_ids")
    token_ids: list[TokenId] | None = Field(None, description="token ids of the answer; null: not known")
    finish_reason: FinishReason | None = Field(None, description="why the answer ended; null: not known")

    @property
    def failed(self) -> bool:
        """Whether the request has no answer."""
        return self.output is None and self.token_ids is None


def read_answers(path: Path) -> list[FileAnswer]:
    """Return the answers in a file. Raises UserError in one line for a file without any, or one that is cut off."""
    where, data = printable(str(path)), files.read_bytes(path, LARGEST_FILE).removeprefix(codecs.BOM_UTF8)
    lines = enumerate(files.read_lines(io.BytesIO(data), LARGEST_FILE), 1)
    answers = [parse(text, FileAnswer, f"{where}, line {n}", FORM) for n, line in lines if (text := line.strip())]
    if not answers:
        raise UserError(f"{where} is empty; {FORM}")
    if len({answer.token_ids is None for answer in answers if not answer.failed}) > 1:
        raise UserError(f"{where}: some answers have token_ids and others have only a text; give all of them one form.")
    return answers
