"""Suites of questions with turns and a category. Speed and agreement only: answers are judged by nobody.

One JSON line each, as MT-Bench (FastChat) began and speculative decoding's benchmarks went on:

    {"question_id": 81, "category": "writing", "turns": ["Compose a travel blog post.", "Start every sentence with A."]}

The file lies below `--data-dir`, or is fetched once from its authors, by content, and kept. A category, or a group of
them, is a subtask, so that it is batched, limited and told apart. A later turn is a prompt of its own that follows
whatever the arm at hand answered to the one before.
"""

import hashlib
import http.client
import json
import os
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from jinja2 import TemplateError

from mtbench.cache import cache_home
from mtbench.errors import UserError, first_line
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, Template

PATIENCE_S = 60
ANSWER = "<<what-was-answered>>"  # stands for it while a template writes what comes behind
T = TypeVar("T")


class Question(NamedTuple):
    subtask: str
    category: str  # as the file has it
    id: str
    turns: tuple[str, ...]


class QuestionSuite(Suite):
    """A suite file gives the values below, and `_rows` if its file is not one of JSON lines."""

    metric = None
    title: ClassVar[str]  # what the benchmark calls itself
    files: tuple[str, ...]  # where it may lie below --data-dir; kept as the first
    origin: str  # where a person gets it
    url: ClassVar[str | None] = None  # where we do; None: never
    sha256: ClassVar[str | None] = None  # of what is there
    kinds: ClassVar[Mapping[str, str]] = {}  # the file's category -> its subtask, where they differ
    turns: ClassVar[int | None] = None  # of a question's, how many are asked; None: all

    def __init__(self, rest: str, source: Source) -> None:
        if rest:
            raise UserError(f"suite {self.name!r} takes nothing behind a colon, not {rest!r}")
        self._read(source)

    def _read(self, source: Source) -> None:
        self._data = self._find(source)
        self._questions = self._load(source.subtasks)
        longest = max(len(q.turns) for q in self._questions)
        self.task = {
            "name": self.name,
            "num_fewshot": 0,
            "chat_template": True,
            "turns": "first" if longest == 1 else "all",
            "sha256": hashlib.sha256(self._data).hexdigest(),
        }

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """The first `limit` conversations of each subtask, turn by turn; subtasks take turns, and so do categories."""
        chosen = (questions[:limit] for questions in self._questions_by_subtask())
        return [prompt for question in deal(chosen) for prompt in self._conversation(question, template)]

    def keep(self, folder: Path) -> None:
        kept = folder / self.files[0]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(self._data)

    # --- Turns ----------------------------------------------------------------------------------------------------

    def _conversation(self, question: Question, template: Template) -> Iterator[Prompt]:
        messages: Messages = []
        before = None
        for number, text in enumerate(question.turns):
            item = f"{question.subtask}/{question.id}/{number}"
            messages = [*messages, {"role": "user", "content": text}]
            yield Prompt(item=item, text=self._written(item, messages, template), follows=before)
            before = item
            messages = [*messages, {"role": "assistant", "content": ANSWER}]

    def _written(self, item: str, messages: Messages, template: Template) -> str:
        """The first turn whole; of a later one what comes behind the answer to the turn before."""
        try:
            whole = template(messages)
            if len(messages) == 1:
                return whole
            before = template(messages[:-2])
        except TemplateError as error:
            raise UserError(f"{item}: the checkpoint's chat template refuses it ({first_line(error)})") from None
        prompt, found, text = whole.rpartition(ANSWER)
        # Blanks before an answer (a blank line where there is no template at all) are the model's to write or not.
        if not found or prompt[: len(before)] != before or prompt[len(before) :].strip():
            raise UserError(
                f"{item}: the checkpoint's chat template writes an earlier turn otherwise once a later one follows, so "
                f"what was read could not be gone on with; give a checkpoint with another template, or leave "
                f"`--suite {self.name}` out."
            )
        return text

    # --- Questions ------------------------------------------------------------------------------------------------

    def _load(self, chosen: tuple[str, ...]) -> list[Question]:
        """The questions of the subtasks asked for, as the file has them. Raises UserError for what is none."""
        questions: dict[tuple[str, str], Question] = {}
        for where, entry in self._rows():
            question = self._question(where, entry)
            if (question.subtask, question.id) in questions:
                raise self._wrong(where, f"question {question.id} is there twice")
            questions[question.subtask, question.id] = question
        found = [q for q in questions.values() if not chosen or q.subtask in chosen]
        if not found:
            which = f" of {', '.join(chosen)}" if chosen else ""
            raise UserError(f"suite {self.name!r}: {self.files[0]} has no questions{which}")
        return found

    def _rows(self) -> Iterator[tuple[str, Any]]:
        """What the file has, and where."""
        for number, line in enumerate(self._data.split(b"\n"), start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    raise self._wrong(f"line {number}", f"not JSON: {first_line(error)}") from None

    def _question(self, where: str, entry: Any) -> Question:
        try:
            category, name, turns = entry["category"], str(entry["question_id"]), entry["turns"]
            if not isinstance(turns, list) or not turns:
                raise ValueError("'turns' is no list of texts, or empty")
            turns = tuple(turns[: self.turns])
            if not all(isinstance(turn, str) and turn.strip() for turn in turns):
                raise ValueError("one of 'turns' is no text, or empty")
            if "/" in name or not name.strip():
                raise ValueError(f"'question_id' {name!r} is empty or has a '/'")
            subtask = self.kinds.get(category, category)
            if subtask not in self.subtasks:
                raise ValueError(f"category {category!r} is none of {', '.join([*self.kinds, *self.subtasks])}")
            for turn in turns:
                turn.encode()  # half a surrogate pair is a ValueError here, and a crash in a tokenizer
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(where, f"{type(error).__name__}: {first_line(error)}") from None
        return Question(subtask, category, name, turns)

    def _wrong(self, where: str, reason: str) -> UserError:
        return UserError(f"suite {self.name!r}: {self.files[0]}, {where} is no question of {self.title} ({reason})")

    def _questions_by_subtask(self) -> list[list[Question]]:
        """In the suite's order; within a subtask the file's categories take turns."""
        piles: dict[str, dict[str, list[Question]]] = {}
        for question in self._questions:
            piles.setdefault(question.subtask, {}).setdefault(question.category, []).append(question)
        return [deal(piles[subtask].values()) for subtask in self.subtasks if subtask in piles]

    # --- The file -------------------------------------------------------------------------------------------------

    def _find(self, source: Source) -> bytes:
        """What is in the file, fetched if need be. Raises UserError if it cannot be had."""
        if source.data_dir is not None:
            return self._stored(source.data_dir)
        wayout = f"pass --data-dir DIR with {self.files[0]} in it ({self.origin})"
        if self.url is None:
            raise UserError(f"suite {self.name!r} is not fetched: {wayout}")
        kept = cache_home() / "data" / self.files[0]
        try:
            data = kept.read_bytes()
            if hashlib.sha256(data).hexdigest() == self.sha256:
                return data
        except OSError:
            pass  # it was not fetched before
        if source.offline:
            raise UserError(
                f"suite {self.name!r}: no usable data in the cache; {wayout}, or run once without --offline"
            )
        return self._fetched(self.url, kept, wayout)

    def _stored(self, data_dir: Path) -> bytes:
        paths = [data_dir / file for file in self.files]
        path = next((path for path in paths if path.is_file()), paths[0])
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(
                f"suite {self.name!r}: cannot read {path}: {error.strerror}; --data-dir DIR holds {self.files[0]} "
                f"({self.origin})"
            ) from None

    def _fetched(self, url: str, kept: Path, wayout: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                data: bytes = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"suite {self.name!r}: cannot fetch {url} ({first_line(error)}); {wayout}") from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise UserError(f"suite {self.name!r}: {url} is not the file it was; {wayout}")
        partial = kept.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(kept)
        except OSError:  # it is fetched again the next time
            partial.unlink(missing_ok=True)
        return data


def deal(piles: Iterable[Iterable[T]]) -> list[T]:
    """One of each pile, then the next of each, until all are empty.

    >>> deal(["ad", "b", "cef"])
    ['a', 'b', 'c', 'd', 'e', 'f']
    """
    return [one for one in chain.from_iterable(zip_longest(*piles)) if one is not None]
