"""Conversations to train on: read from files, the hub or a suite, and tokenised.

The labels are the last assistant turn with its end token and the newline after it; earlier turns are prompt. Long
answers are cut on the right; conversations whose prompt leaves no room for an answer are dropped. All of this is as in
the released code of MARS (arXiv 2604.07023). A row with `cut` has an answer that does not end: no end token is learned.
If the last turn has the `token_ids` that a teacher emitted, the labels are these and nothing else. A row whose answer
the chat template rewrites is dropped: a model would learn what nobody wrote.
`datasets` is needed for the hub, pyarrow for Parquet, neither for JSONL.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from jinja2 import TemplateError

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.evaluation.dataset_files import RowError, read_rows
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite
from mtbench.models import chat_template
from mtbench.models.chat_template import NO_OPTIONS, Options
from mtbench.models.token_text import exact_text
from mtbench.options.texts import joined, pairs
from mtbench.programs import network
from mtbench.training.packing import Examples, contiguous_examples

CHUNK = 1000  # conversations tokenised at once
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))  # columns: user, assistant
SCHEMAS = "messages; prompt and completion; question and answer; instruction and output, maybe input"
HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>\w+))?")
SUFFIXES = (".jsonl", ".parquet")
PROBE = "1827"  # an answer that no template rewrites


class Row(NamedTuple):
    """A row of the data."""

    location: str  # for messages
    turns: Messages | None  # None if one of them is empty
    cut: bool = False  # the answer was cut off, so nothing ends it
    options: Options | None = None  # variables of the chat template, if it names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Tokenised conversations, with their description for the training record and a summary for people."""

    examples: Examples
    sources: tuple[int, ...]  # number of examples of each source, in order
    description: Mapping[str, Any]
    summary: str

    def split(self, held_out: int) -> tuple[Examples, Examples]:
        """Return the training examples and the held-out ones: `held_out` of them, at most a tenth.

        Each source gives its last examples, in proportion to its size, so both parts have the same mix. With several
        sources the shares are rounded down. With one source, the held-out part is the end of the data.
        """
        total = len(self.examples)
        held_out = min(held_out, total // 10)
        training, evaluation = [], []
        for indices in torch.arange(total).split(self.sources):
            border = len(indices) - held_out * len(indices) // total
            training.append(indices[:border])
            evaluation.append(indices[border:])
        return self.examples.take(torch.cat(training)), self.examples.take(torch.cat(evaluation))


def prepare(
    data: str | Sequence[str],
    count: int | None,
    tokenizer: Any,
    *,
    max_length: int,
    seed: int,
    options: Options | None = NO_OPTIONS,
    data_dir: Path | None = None,
    offline: bool = False,
) -> Data:
    """Read and tokenise the data.

    `count` is how many conversations to read of each of `data` (see `read`); None: all. `options`: variables of the
    chat template; None: those of each row.

    Raises UserError if nothing is left to train on, and the errors of `read` and `tokenise`.
    """
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template, so conversations cannot be written; choose another base")
    chat_template.refuse_unread(tokenizer, options or ())
    names = [data] if isinstance(data, str) else list(data)
    source = Source(data_dir=data_dir, offline=offline, seed=seed)
    found = [tokenise(read(name, count, source), tokenizer, max_length, options) for name in names]
    parts = [examples for examples, _ in found]
    columns = zip(*((part.ids, part.lengths, part.prompts) for part in parts), strict=True)
    examples = contiguous_examples(*map(torch.cat, columns))
    counts = Counts(*map(sum, zip(*(counts for _, counts in found), strict=True)))
    if not examples:
        raise UserError(
            f"{', '.join(names)} holds no conversation to train on, at a max_length of {max_length} ({counts}); give a "
            "larger one with `--max-length N`, `--chat-template-kwargs` under which the template keeps answers as they "
            "are, or other conversations with `--data`"
        )
    description = {
        "data": names,
        "examples": len(examples),
        "seed": seed,
        "read": counts.read,
        "dropped": counts.dropped,
        "cut": counts.cut,
        **({"rewritten": counts.rewritten} if counts.rewritten else {}),
    }
    return Data(
        examples=examples,
        sources=tuple(len(part) for part in parts),
        description=description,
        summary=str(counts),
    )


class Counts(NamedTuple):
    """How many conversations were read, dropped and cut."""

    read: int
    dropped: int  # a turn has no content, the prompt alone reaches the maximum length, or the answer is rewritten
    cut: int  # kept, with the end of the answer cut off
    rewritten: int = 0  # dropped, because the chat template writes another answer

    def __str__(self) -> str:
        rewritten = f" ({self.rewritten:,}: the chat template rewrites their answers)" if self.rewritten else ""
        return f"{self.read:,} conversations: {self.dropped:,} dropped{rewritten}, {self.cut:,} cut"


# --- Reading ------------------------------------------------------------------------------------------------------


def read_conversations(
    data: str, count: int | None, seed: int, *, data_dir: Path | None = None, offline: bool = False
) -> Iterator[Messages]:
    """Return the first `count` conversations (None: all) without those that have an empty turn. `data` as in `read`."""
    source = Source(data_dir=data_dir, offline=offline, seed=seed)
    return (row.turns for row in read(data, count, source) if row.turns is not None)


def read(data: str, count: int | None, source: Source) -> Iterator[Row]:
    """Yield the first `count` rows (None: all) of `data`, as conversations.

    `data` is a suite (its training split), a file (.jsonl, .parquet), or a data set of the Hugging Face hub,
    OWNER/NAME[@CONFIG][:SPLIT]. Raises UserError if it is none of these or cannot be read,
    and, with row and reason, at the first row that is not a conversation.
    """
    for location, row in islice(_rows(data, count, source), count):
        try:
            turns, own = as_conversation(row), row.get("chat_template_kwargs")
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        options = {n: v for n, v in own.items() if v is not None} if isinstance(own, dict) else None  # as in a table
        yield Row(location, turns, row.get("cut") is True, options)


def as_conversation(row: Any) -> Messages | None:
    """Return the turns of a row, the assistant's last; None if one has no content (a system turn may be empty).

    The last one keeps its `token_ids`, those that its author emitted, with the end token unless it is cut. Rows follow
    one of `SCHEMAS`; the last is that of Alpaca. Other columns are ignored. Raises UserError with the reason.
    """
    if not isinstance(row, dict):
        raise UserError(f"a row must be an object, this is a {type(row).__name__}")
    turns = row["messages"] if row.get("messages") is not None else _two_turns(row)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and _is_turn(turn) for turn in turns):
        raise UserError("`messages` must be a list of objects with the texts `role` and `content`")
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise UserError("a conversation has at least two turns and ends with the assistant's")
    if any(turn["content"] is None or not (turn["content"].strip() or turn["role"] == "system") for turn in turns):
        return None
    found = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    ids = turns[-1].get("token_ids")
    if isinstance(ids, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        found[-1]["token_ids"] = ids
    return found


def _two_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    for user, assistant in sorted(PAIRS, key=lambda pair: row.get(pair[0]) is None):  # a table may have null columns
        if user in row and assistant in row:
            question = row[user]
            extra = row.get("input") if user == "instruction" else None
            if isinstance(question, str) and extra:
                question = f"{question}\n\n{extra}"
            return [{"role": "user", "content": question}, {"role": "assistant", "content": row[assistant]}]
    raise UserError(f"columns {sorted(row)}; known: {SCHEMAS}")


def _is_turn(turn: Mapping[str, Any]) -> bool:
    """Return whether the turn has a role and a text (or None) as content.

    Raises UserError for half a surrogate pair, which no tokenizer accepts.
    """
    role, content = turn.get("role"), turn.get("content", 0)
    if not isinstance(role, str) or not isinstance(content, str | None):
        return False
    try:
        f"{role}{content}".encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a turn holds half a character ({error.reason})") from None
    return True


def _rows(data: str, count: int | None, source: Source) -> Iterator[tuple[str, Any]]:
    name, _, rest = data.partition(":")
    path = Path(data).expanduser()
    if name in SUITES:
        with_training_split = [other for other in SUITES if SUITES[other].examples is not Suite.examples]
        if name not in with_training_split:
            raise UserError(f"suite {name!r} has no training split; known: {', '.join(with_training_split)}")
        suite = SUITES[name](rest, source)
        for number, turns in enumerate(suite.examples(count, source.seed), start=1):
            yield f"{data}, row {number:,}", {"messages": turns}
    elif path.exists():
        yield from _file_rows(path)
    elif HUB.fullmatch(data) and not data.endswith(SUFFIXES):
        yield from _hub_rows(data, count, source.offline)
    else:
        raise UserError(
            f"no data {data!r}; known: a suite ({', '.join(SUITES)}), a file ({', '.join(SUFFIXES)}), "
            "or a data set of the hub (OWNER/NAME, OWNER/NAME@CONFIG:SPLIT)"
        )


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} has an unknown file type; known: {', '.join(SUFFIXES)}")
    place = "its beginning"
    try:
        with files.open_plain(path) as file:
            for place, value in read_rows(file, path.suffix):
                yield f"{path}, {place}", value
    except RowError as error:
        raise UserError(f"{path}, {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path} beyond {place} ({first_line(error)})") from None


def _hub_rows(data: str, count: int | None, offline: bool) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a data set of the hub. With a `count` they are streamed, so no more is fetched than needed."""
    import datasets

    hub = HUB.fullmatch(data)
    assert hub is not None
    if offline:
        network.go_offline()
    refused = None if offline else network.hub_refusal()
    cached = offline or refused is not None
    try:
        rows = datasets.load_dataset(
            hub["id"], hub["config"], split=hub["split"] or "train", streaming=count is not None and not cached
        )
        for number, row in enumerate(rows, start=1):
            yield f"{data}, row {number:,}", row
    except Exception as error:  # datasets, pyarrow and the hub's client each raise errors of their own
        location = "in the cache" if offline else f"on the Hugging Face hub{f' ({refused})' if refused else ''}"
        raise UserError(
            f"no usable data set {data!r} {location} ({type(error).__name__}: {first_line(error)}), and no such file "
            "or folder exists; give a file with `--data FILE.jsonl`"
        ) from error


# --- Tokens -------------------------------------------------------------------------------------------------------


def tokenise(
    rows: Iterable[Row], tokenizer: Any, max_length: int, options: Options | None = NO_OPTIONS
) -> tuple[Examples, Counts]:
    """Tokenise conversations, each cut to `max_length` tokens. Return the examples and the counts.

    `options`: variables of the chat template; None: those of each row. Raises UserError if the template refuses a
    conversation, or for a row with other variables.
    """
    read = dropped = cut = rewritten = 0
    tokens, lengths, prompts = array("i"), array("q"), array("q")
    stream = iter(rows)
    while chunk := list(islice(stream, CHUNK)):
        whole = [_under(options, row) for row in chunk if row.turns is not None]
        read += len(chunk)
        dropped += len(chunk) - len(whole)
        for prompt, answer in _tokens(whole, tokenizer):
            rewritten += answer is None
            if answer is None or len(prompt) >= max_length:
                dropped += 1
                continue
            ids = prompt + answer
            cut += len(ids) > max_length
            tokens.extend(ids[:max_length])
            lengths.append(min(len(ids), max_length))
            prompts.append(len(prompt))
    columns = (torch.from_numpy(numpy.asarray(column)) for column in (tokens, lengths, prompts))
    return contiguous_examples(*columns), Counts(read, dropped, cut, rewritten)


def _tokens(rows: Sequence[Row], tokenizer: Any) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yield the tokens of each row's prompt, and those of its answer; None if the chat template rewrites it."""
    asked = [_render(row, (row.turns or ())[:-1], tokenizer, answer_follows=True) for row in rows]
    prompts = chat_template.tokenise(tokenizer, asked, plain=False)
    answers = [_answer(*one, tokenizer) for one in zip(rows, asked, prompts, strict=True)]
    texts = [text + answer if isinstance(answer, str) else "" for text, answer in zip(asked, answers, strict=True)]
    wholes = chat_template.tokenise(tokenizer, texts, plain=False)
    for prompt, answer, ids in zip(prompts, answers, wholes, strict=True):
        if isinstance(answer, str):
            # A token may span prompt and answer (an answer that begins with a newline). In decoding, the model gets the
            # prompt's tokens alone, so the answer is tokenised alone, too.
            alone = ids[: len(prompt)] != prompt
            answer = chat_template.tokenise(tokenizer, [answer], plain=False)[0] if alone else ids[len(prompt) :]
        yield prompt, answer


def _under(options: Options | None, row: Row) -> Row:
    """Return a row that is rendered with `options`, or None: its own. Raises UserError if it names others."""
    if options is not None and row.options not in (None, options):
        raise UserError(
            f"{row.location}: its answer was made with the template variables {joined(pairs(row.options)) or 'none'}, "
            f"not with {joined(pairs(options)) or 'none'}; give the same by `--chat-template-kwargs`"
        )
    return row._replace(options=row.options or options or NO_OPTIONS)


def _render(row: Row, turns: Messages, tokenizer: Any, answer_follows: bool = False) -> str:
    try:
        return chat_template.render(tokenizer, turns, answer_follows=answer_follows, options=row.options or NO_OPTIONS)
    except TemplateError as error:  # Gemma's, for example, refuses a system turn
        raise UserError(f"{row.location}: the chat template refuses it ({first_line(error)})") from None


def _answer(row: Row, asked: str, prompt: Sequence[int], tokenizer: Any) -> list[int] | str | None:
    """Return what is learned of a row: the emitted ids, else the text behind the prompt; None if it is rewritten."""
    # It is unless the template writes the answer as it is, then what ends every answer. The prompt may hold the
    # answer's beginning, such as <think>. A space before it is part of a word in the tokens of Mistral.
    assert row.turns is not None
    *turns, turn = row.turns
    content, ids = turn["content"], turn.get("token_ids")
    if ids and exact_text(tokenizer, ids if row.cut else ids[:-1], prompt) == content:
        return list(ids)  # ids of another vocabulary have another text
    whole, other = (_render(row, [*turns, {**turn, "content": text}], tokenizer) for text in (content, PROBE))
    ending = other.rpartition(PROBE)[2]
    before = whole.removesuffix(content + ending)
    begun = asked[len(before) :]  # of the answer
    fits = before in (asked, f"{asked} ") or (begun.strip() and len(begun) < len(content))
    if before == whole or not whole.startswith(asked) or not fits:
        return None
    return whole[len(asked) : len(whole) - len(ending) if row.cut else None]
