"""Suites of questions with turns and a category, for speed and agreement only: mtbench does not judge the answers.

The data file has one JSON line for each question, the format of MT-Bench (FastChat) and of later benchmarks for
speculative decoding:

    {"question_id": 81, "category": "writing", "turns": ["Compose a travel blog post.", "Start every sentence with A."]}

The file lies below `--data-dir`, or is downloaded once, verified by its hash, and cached. A category, or a group of
categories, is a subtask: it has its own limit, batches and results. A later turn is a prompt of its own, which follows
the arm's own answer to the turn before.
"""

import hashlib
import http.client
import io
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from jinja2 import TemplateError

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.evaluation.dataset_files import RowError, read_rows
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite, Template
from mtbench.files import cache_home
from mtbench.programs import network

TIMEOUT_S = 60
ANSWER = "<<answer-placeholder>>"  # stands for the answer when a template renders the turn after it
T = TypeVar("T")


class Question(NamedTuple):
    subtask: str
    category: str  # as in the file
    id: str
    turns: tuple[str, ...]


class QuestionSuite(Suite):
    """A suite of questions. A suite file sets the attributes below."""

    metric = None
    title: ClassVar[str]  # the benchmark's own name
    files: tuple[str, ...]  # possible paths below --data-dir, JSONL or Parquet; a download is cached as the first
    origin: str  # where a user gets the file
    url: ClassVar[str | None] = None  # where mtbench downloads the file; None: never
    sha256: ClassVar[str | None] = None  # of the file at `url`
    git_blob: ClassVar[str | None] = None  # git's own id of the file at `url`, in place of `sha256`
    subtask_of: ClassVar[Mapping[str, str]] = {}  # category in the file -> subtask, where the names differ
    max_turns: ClassVar[int | None] = None  # use only the first turns of a question; None: all

    def __init__(self, variant: str, source: Source) -> None:
        if variant:
            raise UserError(f"suite {self.name!r} has no variants, so {variant!r} is not allowed behind the colon")
        self._load(source)

    def _load(self, source: Source) -> None:
        """Read the file and set `task`. Raise UserError if the file is missing or not valid."""
        self._data = self._find_data(source)
        self._questions = self._read_questions(source.subtasks)
        most_turns = max(len(question.turns) for question in self._questions)
        self.task = {
            "name": self.name,
            "num_fewshot": 0,
            "chat_template": True,
            "turns": "first" if most_turns == 1 else "all",
            "sha256": hashlib.sha256(self._data).hexdigest(),
        }

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Interleave the subtasks, and the categories in a subtask; the turns of a conversation stay together."""
        chosen = (questions[:limit] for questions in self._questions_by_subtask())
        return [prompt for question in interleave(chosen) for prompt in self._conversation(question, template)]

    # --- Turns ----------------------------------------------------------------------------------------------------

    def _conversation(self, question: Question, template: Template) -> Iterator[Prompt]:
        messages: Messages = []
        previous = None
        for turn, text in enumerate(question.turns):
            item = self._item(question, turn)
            messages = [*messages, {"role": "user", "content": text}]
            yield Prompt(item=item, text=render_turn(item, messages, template, self.name), follows=previous)
            previous = item
            messages = [*messages, {"role": "assistant", "content": ANSWER}]

    def _item(self, question: Question, turn: int) -> str:
        return f"{question.subtask}/{question.id}/{turn}"

    # --- Questions ------------------------------------------------------------------------------------------------

    def _read_questions(self, subtasks: tuple[str, ...]) -> list[Question]:
        """Return the questions of these subtasks (none given: all) in file order. Raise UserError for a wrong row."""
        questions: dict[tuple[str, str], Question] = {}
        for place, row in self._rows():
            try:
                question = self._parse_question(row)
                if (question.subtask, question.id) in questions:
                    raise ValueError(f"question_id {question.id!r} occurs twice")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"not a question of {self.title} ({type(error).__name__}: {first_line(error)})"
                raise UserError(f"suite {self.name!r}: {self.files[0]}, {place}: {reason}") from None
            questions[question.subtask, question.id] = question
        chosen = [question for question in questions.values() if not subtasks or question.subtask in subtasks]
        if not chosen:
            which = f" of {', '.join(subtasks)}" if subtasks else ""
            raise UserError(f"suite {self.name!r}: {self.files[0]} has no questions{which}")
        return chosen

    def _rows(self) -> Iterator[tuple[str, Any]]:
        """Yield the place of each row, for error messages, and the row. Raise UserError if one cannot be read."""
        try:
            yield from read_rows(io.BytesIO(self._data), Path(self.files[0]).suffix)
        except RowError as error:
            raise UserError(f"suite {self.name!r}: {self.files[0]}, {error}") from None

    def _parse_question(self, row: Any) -> Question:
        """Return the question in a row of the file. Raise ValueError, KeyError or TypeError if there is none."""
        category, name, turns = row["category"], str(row["question_id"]), self._checked_turns(row["turns"])
        if "/" in name or not name.strip():
            raise ValueError(f"'question_id' {name!r} must not be empty or contain '/'")
        subtask = self.subtask_of.get(category, category)
        if subtask not in self.subtasks:
            known = ", ".join([*self.subtask_of, *self.subtasks])
            raise ValueError(f"category {category!r} is not one of {known}")
        return Question(subtask, category, name, turns)

    def _checked_turns(self, turns: Any) -> tuple[str, ...]:
        """Return the turns to use. Raise ValueError if they are not texts."""
        if not isinstance(turns, list) or not turns:
            raise ValueError("'turns' must be a list of texts that is not empty")
        used = tuple(turns[: self.max_turns])
        if not all(isinstance(turn, str) and turn.strip() for turn in used):
            raise ValueError("each of 'turns' must be a text that is not empty")
        for turn in used:
            turn.encode()  # half a surrogate pair raises a ValueError here; a tokenizer would crash
        return used

    def _questions_by_subtask(self) -> list[list[Question]]:
        by_category: dict[str, dict[str, list[Question]]] = {}
        for question in self._questions:
            by_category.setdefault(question.subtask, {}).setdefault(question.category, []).append(question)
        return [interleave(by_category[name].values()) for name in self.subtasks if name in by_category]

    # --- The file -------------------------------------------------------------------------------------------------

    def _find_data(self, source: Source) -> bytes:
        """Return the file's content: from the data folder, the cache or `url`. Raise UserError if there is none."""
        if source.data_dir is not None:
            paths = [source.data_dir / file for file in self.files]
            path = next((path for path in paths if path.is_file()), paths[0])
            try:
                return files.read_bytes(path)
            except FileNotFoundError:
                raise UserError(
                    f"suite {self.name!r}: no file {path}; --data-dir DIR must hold {self.files[0]} ({self.origin})"
                ) from None
        remedy = f"pass --data-dir DIR with {self.files[0]} in it ({self.origin})"
        if self.url is None:
            raise UserError(f"suite {self.name!r} cannot be downloaded: {remedy}")
        cached = cache_home() / "data" / self.files[0]
        with suppress(OSError, UserError):  # not downloaded yet
            if self._is_published(data := files.read_bytes(cached)):
                return data
        if source.offline:
            raise UserError(
                f"suite {self.name!r}: no usable data in the cache; {remedy}, or run once without --offline"
            )
        return self._download(self.url, cached, remedy)

    def _is_published(self, data: bytes) -> bool:
        if self.git_blob is not None:
            blob = b"blob %d\0%b" % (len(data), data)
            return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == self.git_blob
        return hashlib.sha256(data).hexdigest() == self.sha256

    def _download(self, url: str, cached: Path, remedy: str) -> bytes:
        """Return the file at `url` after checking its hash, and try to cache it. Raise UserError if it differs."""
        try:
            if reason := network.refusal(url):
                raise OSError(reason)
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                data: bytes = response.read(files.LARGEST_FILE)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"suite {self.name!r}: cannot download {url} ({first_line(error)}); {remedy}") from None
        if not self._is_published(data):
            raise UserError(f"suite {self.name!r}: the file at {url} has changed (its hash differs); {remedy}")
        with suppress(UserError):  # without a cache the next run downloads the file again
            files.write_bytes(cached, data)
        return data


def render_turn(place: str, messages: Messages, template: Template, suite: str) -> str:
    """Return the text of a conversation behind its last ANSWER, or all of it if there is none.

    Raise UserError if the template rejects it, or cannot continue a conversation.
    """
    answer = max((n for n, message in enumerate(messages) if message["content"] == ANSWER), default=None)
    try:
        whole = template(messages)
        if answer is None:
            return whole
        previous_prompt = template(messages[:answer])
    except TemplateError as error:
        raise UserError(f"{place}: the checkpoint's chat template rejects it ({first_line(error)})") from None
    before_answer, found, text = whole.rpartition(ANSWER)
    # A template may write blanks before an answer (without a template: a blank line); the model may omit them.
    added = before_answer.removeprefix(previous_prompt)
    if not found or not before_answer.startswith(previous_prompt) or added.strip():
        raise UserError(
            f"{place}: the checkpoint's chat template rewrites an earlier turn when a later one follows, so the "
            f"model would have read other tokens; use a checkpoint with another template, or leave out "
            f"`--suite {suite}`."
        )
    return text


def interleave(lists: Iterable[Iterable[T]]) -> list[T]:
    """Return the first element of each list, then the second of each, and so on until all are empty.

    >>> interleave(["ad", "b", "cef"])
    ['a', 'b', 'c', 'd', 'e', 'f']
    """
    return [element for element in chain.from_iterable(zip_longest(*lists)) if element is not None]
