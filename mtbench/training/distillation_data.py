"""A teacher's own answers as conversations to train a draft on: sequence-level distillation.

Kim and Rush, arXiv 1606.07947. The answers are decoded greedily by the reference method.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from mtbench import files
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS, plain_decoding
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.evaluation.suite import Messages
from mtbench.files import refuse_existing
from mtbench.models import chat_template
from mtbench.models.auto import fastest_for, parameters
from mtbench.models.chat_template import NO_OPTIONS, Options
from mtbench.models.families import existing
from mtbench.models.loading import DTYPES, Checkpoint, load
from mtbench.models.token_text import exact_text

ROWS = 64  # answers decoded together
CHUNK = 256  # answers decoded before they are kept


def write_answers(
    teacher: str,
    conversations: Iterable[Messages],
    out: Path,
    *,
    max_new_tokens: int,
    keep_cut: bool = False,
    options: Options = NO_OPTIONS,
    minutes: float | None = None,
    offline: bool = False,
) -> tuple[int, int]:
    """Write the conversations to `out`, a JSONL of `messages`, with the teacher's answer as the last turn.

    The turn has the answer's text with its special tokens, and the `token_ids` that the teacher emitted, which a
    training learns. `options`: variables of the chat template; each row names them. An answer that reached
    `max_new_tokens` is left out, because a draft would learn to stop there; or, with `keep_cut`, it is marked, and a
    training learns it without an end token. Answers are kept beside `out` until all are there, so the same call resumes
    after an interruption. A batch that would not end within `minutes` is not begun, but for the first one, and `out`
    has the answers that are there. The dtype is that of `mtbench run --dtype auto`. Returns how many conversations are
    written and how many of all reached the budget. Raises UserError if `out` exists, or if other answers were begun
    there.
    """
    refuse_existing(out)
    teacher = existing(teacher)
    ends_at = time.monotonic() + (float("inf") if minutes is None else 60 * minutes)
    partial, stream = out.with_name(out.name + ".partial"), iter(conversations)
    with files.write_errors(partial):
        request = {"teacher": teacher, "max_new_tokens": max_new_tokens, "chat_template_kwargs": dict(options)}
        _resume(partial, request, stream)
        if waiting := list(islice(stream, 1)):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = DTYPES[fastest_for(parameters(teacher, offline), device)]
            checkpoint = load(teacher, dtype=dtype, device=device, offline=offline)
            chat_template.refuse_unread(checkpoint.tokenizer, options)
            with partial.open("a", encoding="utf-8") as file:
                for answer in answered(checkpoint, chain(waiting, stream), max_new_tokens, ends_at, options):
                    _write_line(file, answer._asdict())
                    file.flush()
        answers = [Answered(**row) for row in _rows(partial)[1:]]
        kept = [answer for answer in answers if answer.finished or keep_cut]
    with files.atomic_write(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for answer in kept:
            row = {"messages": answer.messages, "chat_template_kwargs": dict(options)}
            _write_line(file, row | ({} if answer.finished else {"cut": True}))
    partial.unlink()
    return len(kept), sum(not answer.finished for answer in answers)


class Answered(NamedTuple):
    """A conversation with the teacher's answer, and whether the answer ended by itself."""

    messages: Messages
    finished: bool


def _resume(partial: Path, request: dict[str, Any], stream: Iterator[Messages]) -> None:
    """Take the conversations from the stream whose answers are kept. Raises UserError if those are of another call.

    A line that was being written when the process died is removed.
    """
    if not partial.exists():
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(request) + "\n", encoding="utf-8")
        return
    data = partial.read_bytes()
    if not data.endswith(b"\n"):
        partial.write_bytes(data[: data.rfind(b"\n") + 1])
    try:
        first, *lines = _rows(partial) or [None]
        pairs = zip(lines, stream, strict=False)
        same = first == request and all(line["messages"][:-1] == list(turns[:-1]) for line, turns in pairs)
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise UserError(f"{partial} holds answers to another request; repeat its command, or remove it to start again")


def _rows(partial: Path) -> list[Any]:
    with files.open_plain(partial) as file:
        return [json.loads(line) for line in files.read_lines(file)]


def _write_line(file: TextIO, entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def answered(
    checkpoint: Checkpoint, conversations: Iterable[Messages], max_new_tokens: int, ends_at: float, options: Options
) -> Iterator[Answered]:
    """Yield the conversations with the checkpoint's answers, at least one batch of them, up to a time.monotonic()."""
    engine = ENGINES["graph"]()
    runners = ModelRunners("teacher", {"teacher": engine.runner(checkpoint)})
    reference, tokenizer = METHODS[plain_decoding()[0]](), checkpoint.tokenizer
    stream, size = iter(conversations), min(ROWS, CHUNK)  # the first batch shows how long an answer takes
    while chunk := list(islice(stream, size)):
        began = time.monotonic()
        questions = [list(turns[:-1]) for turns in chunk]
        texts = [chat_template.render(tokenizer, turns, answer_follows=True, options=options) for turns in questions]
        prompts = chat_template.tokenise(tokenizer, texts, plain=False)
        requests = [Request(prompt_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        answers, _ = decode(reference, runners, requests, rows=ROWS, make=engine.batch)
        for turns, prompt, answer in zip(questions, prompts, answers, strict=True):
            ids, finished = answer.token_ids, answer.finish_reason == "end"
            text = exact_text(tokenizer, ids[:-1] if finished else ids, prompt)
            yield Answered([*turns, {"role": "assistant", "content": text, "token_ids": ids}], finished)
        now = time.monotonic()
        left = (ends_at - now) * len(chunk) / (now - began)  # answers until then
        size = CHUNK if left >= CHUNK else max(0, int(left / ROWS)) * ROWS
