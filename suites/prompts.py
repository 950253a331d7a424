"""Your own prompts: `prompts:FILE.jsonl`. How fast, and do the methods agree; nothing is scored.

Each line of FILE is one prompt, sent through the checkpoint's chat template. `id` is optional (else the line number);
other keys are left alone, so the questions of another benchmark can be used as they are.

    {"prompt": "Why is the sky blue?"}
    {"id": "sky-2", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}

    mtbench run --suite prompts:mine.jsonl
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, Template

KEPT = "prompts"  # below --data-dir, where a bundle carries files to
ROLES = ("system", "user", "assistant")


@SUITES.register("prompts")
class Prompts(Suite):
    metric = None

    def __init__(self, rest: str, source: Source) -> None:
        self.file, self._data = _read(rest)
        sha256 = _digest(self._data)
        self.task = {"name": "prompts", "chat_template": True, "file": self.file.name, "sha256": sha256}
        self._conversations: dict[str, tuple[int, Messages]] = {}  # id -> line number, conversation
        for number, line in enumerate(self._data.split(b"\n"), start=1):
            if line.strip():
                self._add(number, line)
        if not self._conversations:
            raise UserError(f"suite 'prompts': {self.file} has no prompts")

    @classmethod
    def stem(cls, rest: str) -> str:
        """The file's stem and a hash of what is in it: an edited file is another benchmark."""
        file, data = _read(rest)
        return f"prompts-{file.stem}-{_digest(data)[:8]}"

    def keep(self, folder: Path) -> None:
        kept = folder / KEPT / self.file.name
        if kept.exists() and kept.read_bytes() != self._data:
            raise UserError(f"suite 'prompts': two files are called {self.file.name}; rename one to carry both")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(self._data)

    @classmethod
    def found(cls, rest: str, data_dir: Path) -> str:
        """The file carried there, if there is none where `rest` says."""
        kept = data_dir / KEPT / Path(rest).name
        return str(kept) if rest and kept.is_file() and not Path(rest).expanduser().is_file() else rest

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [
            Prompt(item=f"prompts/{name}/0", text=self._apply(template, number, messages))
            for name, (number, messages) in list(self._conversations.items())[:limit]
        ]

    def _add(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise self._wrong(number, f"not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise self._wrong(number, 'not an object like {"prompt": "…"}')
        name = entry.get("id", number)
        if type(name) not in (str, int) or not str(name).strip() or "/" in str(name):
            raise self._wrong(number, f"id {name!r} is not a number or a text without '/'")
        if (taken := self._conversations.get(str(name))) is not None:
            raise self._wrong(number, f"id {name!r} is that of line {taken[0]}")
        try:
            self._conversations[str(name)] = number, conversation(entry)
        except ValueError as error:
            raise self._wrong(number, str(error)) from error

    def _apply(self, template: Template, number: int, messages: Messages) -> str:
        try:
            return template(messages)
        except TemplateError as error:  # Gemma's, for one, refuses a system turn
            raise self._wrong(number, f"the checkpoint's chat template refuses it ({error})") from error

    def _wrong(self, number: int, reason: str) -> UserError:
        return UserError(f"suite 'prompts': {self.file}, line {number}: {reason}")


def _read(rest: str) -> tuple[Path, bytes]:
    if not rest:
        raise UserError('suite \'prompts\' needs a file: `--suite prompts:FILE.jsonl`, lines like {"prompt": "…"}')
    file = Path(rest).expanduser()
    try:
        return file, file.read_bytes()
    except OSError as error:
        raise UserError(f"suite 'prompts': cannot read {file}: {error.strerror}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def conversation(entry: Mapping[str, Any]) -> Messages:
    """The turns that one line asks for. Raises ValueError with the reason."""
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("needs either 'prompt' or 'messages'")
    messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is not a list of turns")
    for turn in messages:
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            raise ValueError(f"a turn's 'role' is not one of {', '.join(ROLES)}")
        if not isinstance(turn.get("content"), str) or not turn["content"].strip():
            raise ValueError("'prompt' or a turn's 'content' is empty or not a text")
        turn["content"].encode()  # half a surrogate pair is a ValueError here, and a crash in a tokenizer
    if messages[-1]["role"] != "user":
        raise ValueError("the last turn is not the user's")
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]
