"""Conversations to train on: read from files, the hub or a suite, tokenised, and kept for the next time.

Only the last assistant turn is learned, with its end token and the newline behind it; earlier turns are prompt. Long
answers are cut on the right, conversations whose prompt leaves no room for an answer are dropped: all as the released
code of MARS does (arXiv 2604.07023). `datasets` is needed for the hub, pyarrow for Parquet, neither for JSONL.
"""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from jinja2 import TemplateError

from mtbench.errors import UserError, first_line
from mtbench.evaluation.lm_eval import go_offline
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite
from mtbench.training.token_cache import Counts, Examples, joined, lined_up, load, store, token_file

CHUNK = 1000  # conversations tokenised at once
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))  # question, answer
SCHEMAS = "messages; prompt and completion; question and answer; instruction and output (or instances), maybe input"
HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<config>[\w.-]+))?(:(?P<split>\w+))?")
TRAIN = re.compile(r"(?<![a-z])train")  # in the name of a file or of a folder it lies in

Row = tuple[str, Messages | None]  # where it stands, for people; its turns, None if one of them is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Tokenised conversations, and what the training record and people are told of them."""

    examples: Examples
    sources: tuple[int, ...]  # how many of them are of each source, in order
    description: Mapping[str, Any]
    sha256: str
    summary: str

    def split(self, held_out: int) -> tuple[Examples, Examples]:
        """Those to learn from, and `held_out` of them (at most a tenth) that are only evaluated on.

        Every source gives up its end, in proportion to its size, so that both are of one kind. By largest remainder:
        within one of the exact share, and with one source the end of the data.
        """
        total = len(self.examples)
        held_out = min(held_out, total // 10)
        shares = [held_out * size // total for size in self.sources]
        by_remainder = sorted(range(len(shares)), key=lambda n: -(held_out * self.sources[n] % total))
        for n in by_remainder[: held_out - sum(shares)]:
            shares[n] += 1
        learned, apart = [], []
        for source, share in zip(torch.arange(total).split(self.sources), shares, strict=True):
            learned.append(source[: len(source) - share])
            apart.append(source[len(source) - share :])
        return self.examples.take(torch.cat(learned)), self.examples.take(torch.cat(apart))


def prepare(
    data: str | Sequence[str],
    count: int | None,
    tokenizer: Any,
    *,
    max_length: int,
    seed: int,
    data_dir: Path | None = None,
    offline: bool = False,
) -> Data:
    """Read and tokenise, or take the tokens kept from the last time the same was asked.

    `count` is how many conversations to read of each of `data` (see `read`); None: all there are. Each of them is
    tokenised and kept on its own, so that another beside it costs nothing.

    Raises UserError if nothing is left to train on, and whatever `read` and `tokenise` raise.
    """
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template, so conversations cannot be written; choose another base")
    names = [data] if isinstance(data, str) else list(data)
    source = Source(data_dir=data_dir, offline=offline, seed=seed)
    sources = [_rereadable(name, count, source) for name in names]
    # All are read before the first is tokenised: a mistake in the last shows early.
    files = [token_file((turns for _, turns in rows()), tokenizer, max_length) for rows in sources]
    parts = []
    for rows, file in zip(sources, files, strict=True):
        kept = load(file)
        if kept is None:
            kept = tokenise(rows(), tokenizer, max_length)
            store(file, *kept)
        parts.append(kept)
    examples = joined([part for part, _ in parts])
    counts = Counts(*map(sum, zip(*(told for _, told in parts), strict=True)))
    summary = counts.summary(max_length)
    if not examples:
        raise UserError(
            f"{', '.join(names)} holds no conversation shorter than max_length {max_length} ({summary}); "
            + ("give a larger one with `--max-length N`" if counts.long else "give other conversations with `--data`")
        )
    description = {
        "data": names,
        "examples": len(examples),
        "seed": seed,
        "read": counts.read,
        "dropped": counts.dropped,
        "dropped_empty": counts.empty,
        "cut": counts.cut,
    }
    sizes = tuple(len(part) for part, _ in parts)
    return Data(examples=examples, sources=sizes, description=description, sha256=examples.sha256, summary=summary)


def _rereadable(name: str, count: int | None, source: Source) -> Callable[[], Iterable[Row]]:
    """Rows that can be gone through twice. Few are held; many, of files, are cheaper to read again than to hold."""
    if count is None:
        return lambda: read(name, None, source)
    rows = list(read(name, count, source))
    return lambda: rows


# --- Reading ------------------------------------------------------------------------------------------------------


def read_conversations(
    data: str, count: int | None, seed: int, *, data_dir: Path | None = None, offline: bool = False
) -> Iterator[Messages]:
    """The first `count` conversations (None: all), less those with an empty turn. `data` as in `read`."""
    source = Source(data_dir=data_dir, offline=offline, seed=seed)
    return (turns for _, turns in read(data, count, source) if turns is not None)


def read(data: str, count: int | None, source: Source) -> Iterator[Row]:
    """The first `count` rows (None: all) of `data`, as conversations.

    `data` is a suite (its training split), a file (.jsonl, .jsonl.gz, .parquet), a folder of such files, or a data set
    of the Hugging Face hub, OWNER/NAME[@CONFIG][:SPLIT]. Raises UserError if it is none of these or cannot be had, and,
    with row and reason, at the first row that is no conversation.
    """
    for where, row in islice(_rows(data, count, source), count):
        try:
            yield where, as_conversation(row)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def as_conversation(row: Any) -> Messages | None:
    """The turns of a row, the assistant's last; None if one has no content (a system turn may be empty).

    Rows are of the schemas in `SCHEMAS`; the last is that of Alpaca and of Self-Instruct (arXiv 2212.10560). What else
    is in them is left alone. Raises UserError with the reason.
    """
    if not isinstance(row, dict):
        raise UserError(f"a row must be an object, this is a {type(row).__name__}")
    turns = row["messages"] if "messages" in row else _two_turns(row)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and _is_turn(turn) for turn in turns):
        raise UserError("`messages` must be a list of objects with the texts `role` and `content`")
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise UserError("a conversation has at least two turns and ends with the assistant's")
    if any(turn["content"] is None or not (turn["content"].strip() or turn["role"] == "system") for turn in turns):
        return None
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _two_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "instruction" in row and "instances" in row:
        instances = row["instances"]
        if not (isinstance(instances, list) and len(instances) == 1 and isinstance(instances[0], dict)):
            raise UserError("`instances` must be a list of one object with `input` and `output`")
        row = {"instruction": row["instruction"], **instances[0]}
    for asks, answers in PAIRS:
        if asks in row and answers in row:
            question, extra = row[asks], row.get("input") if asks == "instruction" else None
            if isinstance(question, str) and extra:
                question = f"{question}\n\n{extra}"
            return [{"role": "user", "content": question}, {"role": "assistant", "content": row[answers]}]
    raise UserError(f"columns {sorted(row)}; known: {SCHEMAS}")


def _is_turn(turn: Mapping[str, Any]) -> bool:
    """A role and a text. Half a surrogate pair is no text: a tokenizer would not take it."""
    content = turn.get("content", 0)
    if not isinstance(turn.get("role"), str) or not isinstance(content, str | None):
        return False
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a turn holds half a character ({error.reason})") from None
    return True


def _refuse_without_training_split(name: str) -> None:
    trained_on = [other for other in SUITES if SUITES[other].examples is not Suite.examples]
    if name not in trained_on:
        raise UserError(f"suite {name!r} has no training split; known: {', '.join(trained_on)}")


def _rows(data: str, count: int | None, source: Source) -> Iterator[tuple[str, Any]]:
    """Every row as it stands, and where."""
    name, _, rest = data.partition(":")
    path = Path(data).expanduser()
    if name in SUITES:
        _refuse_without_training_split(name)
        suite = SUITES[name](rest, source)
        for number, turns in enumerate(suite.examples(count, source.seed), start=1):
            yield f"{data}, row {number:,}", {"messages": turns}
    elif path.exists():
        for file in _files(path) if path.is_dir() else [path]:
            yield from _reader(file)(file)
    elif not path.name.endswith(tuple(READERS)) and (hub := HUB.fullmatch(data)):
        yield from _hub_rows(data, hub, count, source.offline)
    else:
        raise UserError(
            f"no data {data!r}; known: a suite ({', '.join(SUITES)}), a file ({', '.join(READERS)}), a folder of them, "
            "or a data set of the hub (OWNER/NAME, OWNER/NAME@CONFIG:SPLIT)"
        )


def _files(folder: Path) -> list[Path]:
    """What can be read below a folder, in order. If some are called train, only they: others may be for testing."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name.endswith(tuple(READERS))]
    if not files:
        raise UserError(f"{folder} holds no file to train on; known: {', '.join(READERS)}")
    return [file for file in files if TRAIN.search(str(file.relative_to(folder)))] or files


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number:,}", json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number:,}: not JSON ({first_line(error)})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path} beyond line {number:,} ({first_line(error)})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(CHUNK):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number:,}", row
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {path} beyond row {number:,} ({first_line(error)})") from None


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _lines,
    ".jsonl.gz": _lines,
    ".parquet": _parquet_rows,
}


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[str, Any]]]:
    for suffix, reader in READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise UserError(f"cannot tell what {path} is; known: {', '.join(READERS)}")


def _hub_rows(data: str, hub: re.Match[str], count: int | None, offline: bool) -> Iterator[tuple[str, Any]]:
    """A data set of the hub; of one that is not wanted whole, no more is fetched than that."""
    import datasets

    if offline:
        go_offline()
    try:
        found = datasets.load_dataset(
            hub["id"], hub["config"], split=hub["split"] or "train", streaming=count is not None and not offline
        )
        for number, row in enumerate(found, start=1):
            yield f"{data}, row {number:,}", row
    except Exception as error:  # datasets, pyarrow and the hub's client each raise their own
        where = "in the cache" if offline else "on the Hugging Face hub"
        raise UserError(
            f"no usable data set {data!r} {where} ({type(error).__name__}: {first_line(error)}), and no such file or "
            "folder here; give a file with `--data FILE.jsonl`"
        ) from error


# --- Tokens -------------------------------------------------------------------------------------------------------


def tokenise(rows: Iterable[Row], tokenizer: Any, max_length: int) -> tuple[Examples, Counts]:
    """Conversations as at most `max_length` tokens each, and what became of them.

    Raises UserError if the chat template refuses a conversation or writes another prompt when an answer follows.
    """
    read = empty = long = cut = 0
    tokens, lengths, prompts = array("i"), array("q"), array("q")
    stream = iter(rows)
    while chunk := list(islice(stream, CHUNK)):
        written = [_write(where, turns, tokenizer) for where, turns in chunk if turns is not None]
        read += len(chunk)
        empty += len(chunk) - len(written)
        for prompt, answer in _encode(written, tokenizer) if written else ():
            if len(prompt) >= max_length:
                long += 1
                continue
            ids = prompt + answer
            cut += len(ids) > max_length
            tokens.extend(ids[:max_length])
            lengths.append(min(len(ids), max_length))
            prompts.append(len(prompt))
    columns = (torch.from_numpy(numpy.asarray(column)) for column in (tokens, lengths, prompts))
    return lined_up(*columns), Counts(read, empty, long, cut)


def _write(where: str, turns: Messages, tokenizer: Any) -> tuple[str, str]:
    """Prompt and whole conversation as the chat template writes them."""
    try:
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        prompt = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:  # Gemma's, for one, refuses a system turn
        raise UserError(f"{where}: the chat template refuses it ({first_line(error)})") from None
    if whole == prompt or not whole.startswith(prompt):
        raise UserError(
            f"{where}: this chat template changes a prompt when its answer follows; its labels cannot be told"
        )
    return prompt, whole


def _encode(written: Sequence[tuple[str, str]], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens of each prompt, and those of the whole behind them.

    Tokenizers cut a text at its special tokens first. So up to the last of a prompt's the tokens of prompt and whole
    are the same; what is left of the prompt is short, and mostly the same for all ("assistant").
    """

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded = tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded.input_ids
        return ids

    added = tokenizer.added_tokens_decoder.values()
    marks = [t.content for t in added if t.special and not (t.normalized or t.lstrip or t.single_word)]
    borders = [max([0, *(prompt.rfind(mark) for mark in marks)]) for prompt, _ in written]
    texts = [(prompt[:at], prompt[at:], whole[at:]) for (prompt, whole), at in zip(written, borders, strict=True)]
    openings = dict.fromkeys(opening for _, opening, _ in texts)
    opened = dict(zip(openings, encode(tuple(openings)), strict=True))
    heads, tails = encode([head for head, _, _ in texts]), encode([tail for _, _, tail in texts])
    for (_, opening, text), head, tail in zip(texts, heads, tails, strict=True):
        begun = opened[opening]
        if tail[: len(begun)] == begun:
            yield head + begun, tail[len(begun) :]
        else:
            # A token reaches over the border (an answer that begins with a newline). A model asked for an answer gets
            # the prompt's tokens as they are, so it learns to go on from them.
            yield head + begun, encode([text[len(opening) :]])[0]
