"""The user's own prompts: `prompts:FILE.jsonl`. Speed, agreement, and accuracy where the file has answers.

Each line of FILE is one prompt, rendered by the checkpoint's chat template. FILE may be a JSON array of these or of
texts, or a folder of .json and .jsonl files. In `FILE.txt` a line is the prompt itself.

    {"prompt": "Why is the sky blue?"}
    {"id": "sky-2", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}
    {"prompt": "What is the capital of France? Answer with its name only.", "answer": "Paris"}
    {"prompt": "How many continents are there?", "reference": [7, "seven"]}

Fields that are read, the first one that a line has: `messages`, `conversations` (ShareGPT's), `prompt`, `question`,
`problem`, `instruction`, `text` for the prompt (a line with two of the first three is refused); `answer`, `reference`,
`target` for the answer; `id` (default: the line number). `input` is added to an `instruction`. A flag names the others;
null is no field. A conversation is read up to the user's last turn; one of ShareGPT without any is left out.

A line with an answer is scored: a text, a number, or a list of which one must match. In an answer that ends with
`#### 72`, as in GSM8K, the number behind `####` counts. Values of `--metric`: `exact`, `contains`, `number`, or `none`
for no scores. The default is `number` for a file whose answers all end so, and else `exact`.

- `exact`: the text is the reference, whatever the case, the white space and the punctuation around it. This is
  `exact_match` of lm-evaluation-harness with `ignore_case`. Its `ignore_punctuation` is not used: 3.5 would be 35.
- `contains`: the text has the reference in it as whole words, compared in the same way.
- `number`: the last number of the text, before a further question, equals that of the reference. Numbers are compared
  by value, so 1,000 and 1000.0 are equal.

    mtbench run --suite prompts:mine.jsonl --metric contains
"""

import codecs
import hashlib
import io
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError, first_line, printable
from mtbench.evaluation.by_value import NUMBER, first, last_number
from mtbench.evaluation.dataset_files import RowError, read_json_lines
from mtbench.evaluation.multi_turn import render_turn
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Reading, Source, Suite, Template

AROUND = string.whitespace + string.punctuation.replace("-", "").replace("+", "")  # a sign belongs to its number
TEXT_KEYS = ("prompt", "question", "problem", "instruction", "text")  # the first one that a line has
ANSWER_KEYS = ("answer", "reference", "target")  # the first one that a line has
MARKED = re.compile(rf"####\s*\$?({NUMBER})\s*\.?\s*$")  # the result of an answer that has its reasoning
NONE = "none"  # of `--metric`: nothing is scored
LINE = '{"prompt": "…"} or {"messages": […]}'
ROLES = ("system", "developer", "user", "assistant")
SHAREGPT = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}  # its names of roles
TOOLS = ("tool_calls", "function_call", "tool_call_id")
TOOL_CALL = "a turn has a tool call or its result; `--suite conversations:FILE` reads those of OpenAI and ShareGPT"
SUFFIXES = (".json", ".jsonl")  # of a folder's files
NAMED = 6  # of the fields that are not read
METADATA = re.compile(  # fields that no prompt needs
    r"(.*_)?id|.*Id|category|subject|subset|dataset|task|source|difficulty|level|topic|type|language|split|model|stream"
    r"|context_(chars|tokens_approx)|initial_state|kind|n_messages|reference_(response|trace)|.*_path|target_.*_tokens|verifier"
)
# Fields that a server would honour, or that belong to a prompt: they are named first.
FIRST = re.compile("stop|temperature|top_|seed|tool|token|penalty|format|schema|system|context|history|answer")


def normalised(text: str) -> str:
    """Return the text in lower case, with single spaces, without white space and punctuation around it.

    >>> normalised(' "The  Answer" is\\n-4.5.')
    'the answer" is -4.5'
    """
    return " ".join(text.casefold().split()).strip(AROUND)


def exact(text: str, reference: str) -> bool:
    """Return whether the text is the reference.

    >>> exact("Paris.", "paris"), exact("3.5", "35")
    (True, False)
    """
    return normalised(text) == normalised(reference)


def contains(text: str, reference: str) -> bool:
    """Return whether the reference is in the text as whole words.

    >>> contains("It is Paris, of course.", "paris"), contains("Parisian", "Paris")
    (True, False)
    """
    return re.search(rf"(?<!\w){re.escape(normalised(reference))}(?!\w)", normalised(text)) is not None


def number(text: str, reference: str) -> bool:
    """Return whether the last numbers of both texts are equal; without a number in one of them they are not.

    >>> number("18 + 24 = 1,042.0 dollars", "#### 1042"), number("none", "3")
    (True, False)
    """
    value = first(text, last_number)
    return value is not None and value == last_number(reference)


METRICS: Mapping[str, Callable[[str, str], bool]] = {"exact": exact, "contains": contains, "number": number}


@SUITES.register("prompts")
class Prompts(Suite):
    metrics = (*METRICS, NONE)

    def __init__(self, variant: str, source: Source) -> None:
        self.path, files_read = self._read_files(variant)
        self.task = {"name": self.name, "chat_template": True, "file": self.path.name, "sha256": _digest(files_read)}
        self._chosen = source.metric if self.metrics else NONE  # set to a default when the answers are known
        self._references: dict[str, list[str]] = {}  # item -> answers of which one must match
        self._marked = 0  # items whose answers are all MARKED
        self._conversations: dict[str, tuple[str, Any]] = {}  # id -> file and line, conversation
        ignored: dict[str, Any] = {}
        left_out = 0
        for file, data in files_read.items():
            try:
                for number, entry in _entries(file, data):
                    if isinstance(entry, dict) and not _is_asked(entry.get("conversations")):
                        left_out += 1
                        continue
                    default = number if file == self.path else f"{file.stem}-{number}"
                    ignored |= self._add(f"{file}, line {number}", default, entry)
            except RowError as error:
                hint = f"a {file.suffix} file is not read: give JSONL, a JSON array, or .txt with a prompt a line"
                if file.suffix.lower() in ("", ".ndjson", ".txt", *SUFFIXES):
                    hint = f"a line is like {LINE}"
                raise self._line_error(f"{file}, line {error.number}", f"{error.reason}; {hint}") from None
        if not self._conversations:
            raise UserError(f"suite {self.name!r}: {self.path} has no {self.name.partition('-')[0]}")
        named = sorted((n[:40] for n in ignored if not METADATA.fullmatch(n)), key=lambda n: not FIRST.search(n))
        named[NAMED:] = [f"{len(named) - NAMED:,} more"] if len(named) > NAMED else []
        self.flags = [f"not read in {self.path.name}: {printable(', '.join(named))}"] if named else []
        self.flags += [f"left out of {self.path.name}: {left_out:,} without a question"] if left_out else []
        if self._references:
            self._chosen = self._chosen or ("number" if self._marked == len(self._references) else "exact")
            self.metric = "exact_match" if self._chosen == "exact" else self._chosen
        elif source.metric not in (None, NONE):
            raise UserError(
                f"suite 'prompts': {self.path} has no answers, so `--metric {source.metric}` has nothing to compare "
                'with; leave it out, or add "answer" to its lines'
            )

    @classmethod
    def cell_prefix(cls, variant: str) -> str:
        """Return the file's stem and a hash of its content: an edited file is another benchmark."""
        path, files_read = cls._read_files(variant)
        return f"{cls.name}-{path.stem}-{_digest(files_read)[:8]}"

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [
            Prompt(
                item=_item(name),
                text=render_turn(f"suite {self.name!r}: {place}", messages, template, self.name),
                scored=not self._references or _item(name) in self._references,
            )
            for name, (place, messages) in list(self._conversations.items())[:limit]
        ]

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        assert self._chosen is not None
        matches, readings = METRICS[self._chosen], {}
        for item, text in answers.items():
            right = any(matches(text, reference) for reference in self._references[item])
            numberless = self._chosen == "number" and first(text, last_number) is None
            readings[item] = Reading(float(right), "no number" if numberless else None if text.strip() else "no text")
        return readings

    def _add(self, place: str, default: str | int, entry: Any) -> dict[str, Any]:
        """Add the conversation in a line of a file; return the other fields. Raise UserError if there is none."""
        if not isinstance(entry, dict):
            raise self._line_error(place, f"not an object like {LINE}")
        entry = without_nulls(entry)
        name = entry.pop("id", default)
        text = str(name)  # no half of a surrogate pair, which no file holds, and no control
        if type(name) not in (str, int) or printable(text) != text or "/" in text or not 0 < len(text.strip()) <= 200:
            raise self._line_error(place, f"id {name!r:.60} is not a number or 1 to 200 printed characters without '/'")
        if text in self._conversations:
            raise self._line_error(place, f"id {name!r} is already that of {self._conversations[text][0]}")
        try:
            self._conversations[text] = place, self._conversation(entry)
            if self._chosen != NONE and (found := references(entry)):
                marked = [MARKED.search(answer) for answer in found]
                self._marked += all(marked)
                self._references[_item(text)] = [m[1] if m else a for m, a in zip(marked, found, strict=True)]
        except ValueError as error:
            raise self._line_error(place, first_line(error)) from error
        return {name: value for name, value in entry.items() if value not in ("", [], {})}

    def _conversation(self, entry: dict[str, Any]) -> Any:
        """Take the turns from one line of a file, up to the user's last one. Raise ValueError if they are not valid."""
        turns = [text_turn(turn) for turn in given_turns(entry)]
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns or turns[-1]["role"] != "user":
            raise ValueError("the last turn is not the user's")
        for turn in turns:
            if not isinstance(turn["content"], str) or not (turn["content"].strip() or turn is not turns[-1]):
                raise ValueError("the prompt or a turn's 'content' is not a text, or the last one is empty")
            turn["content"].encode()  # half a surrogate pair raises a ValueError here; a tokenizer would crash
        return turns

    def _line_error(self, place: str, reason: str) -> UserError:
        return UserError(f"suite {self.name!r}: {place}: {reason}")

    @classmethod
    def _read_files(cls, variant: str) -> tuple[Path, dict[Path, bytes]]:
        """Return the path, and the content of the file or of a folder's. Raise UserError if it cannot be read."""
        if not variant:
            raise UserError(f"suite {cls.name!r} needs a file: `--suite {cls.name}:FILE.jsonl`, lines like {LINE}")
        path = Path(variant).expanduser()
        try:
            paths = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES) if path.is_dir() else [path]
            if not paths:
                raise UserError(f"the folder {path} has no .json or .jsonl file")
            return path, {file: files.read_bytes(file) for file in paths}
        except OSError as error:
            raise UserError(f"suite {cls.name!r}: cannot read {path}: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"suite {cls.name!r}: {error}") from None


def _entries(file: Path, data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of each line that is not blank; of a text file it is a prompt."""
    if file.suffix.lower() != ".txt":
        data = data.removeprefix(codecs.BOM_UTF8)
        values: Any = None
        with suppress(ValueError, RecursionError):
            values = json.loads(data)  # one value: an array, or an object on several lines
        if not isinstance(values, list | dict):
            yield from read_json_lines(io.BytesIO(data))
            return
        if isinstance(values, dict):
            values = values["cases"] if isinstance(values.get("cases"), list) else [values]
        yield from enumerate(({"prompt": entry} if isinstance(entry, str) else entry for entry in values), 1)
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig").strip()
        except ValueError as error:
            raise RowError("line", number, f"not UTF-8 ({error})") from None
        if text:
            yield number, {"prompt": text}


def _item(name: str) -> str:
    return f"prompts/{name}/0"


def _digest(files: Mapping[Path, bytes]) -> str:
    return hashlib.sha256(b"".join(files.values())).hexdigest()


def references(entry: dict[str, Any]) -> list[str]:
    """Take the answers from one line of the file, of which one must match; [] if it has none.

    Raise ValueError if they are not valid.
    """
    key = next((key for key in ANSWER_KEYS if entry.get(key) not in (None, "")), "")  # "": null in CSV
    value = entry.pop(key, None)
    given = [one for one in (value if isinstance(value, list) else [value]) if one is not None and str(one).strip()]
    for answer in given:
        if type(answer) not in (str, int, float):
            raise ValueError(f"{key!r} is not a text, a number or a list of them; `--metric none` ignores it")
    return [str(answer) for answer in given]


def given_turns(entry: dict[str, Any]) -> list[Any]:
    """Take the turns from one line of the file as they are. Raise ValueError if they are no list."""
    keys = [key for key in ("prompt", "messages", "conversations") if key in entry]
    if len(keys) > 1:
        raise ValueError(f"has both {keys[0]!r} and {keys[1]!r}; leave one out")
    given = entry.pop(keys[0]) if keys else _text(entry)
    if keys in ([], ["prompt"]) and not isinstance(given, list):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{', '.join(keys) or 'the prompt'} is not a list of turns")
    if not all(isinstance(turn, dict) for turn in given):
        what = {int: "token ids", str: "texts"}.get(type(given[0]), "other values than turns")
        raise ValueError(f"a list of {what} is not read; give one text a line")
    return given


def _is_asked(turns: Any) -> bool:
    """Return whether a conversation of ShareGPT ends with a question. Its files have some without."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return True  # it is none, or a fault
    texts = [str(t.get("value", t.get("content"))) for t in turns if t.get("from", t.get("role")) in ("human", "user")]
    return bool(texts and texts[-1].strip())


def text_turn(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return role and content of a turn, as OpenAI's API or ShareGPT has it. Raise ValueError for another one."""
    turn = without_nulls(given)
    role = turn.get("role", SHAREGPT.get(str(turn.get("from")), turn.get("from")))
    if role in ("tool", "function", "function_call", "observation") or any(turn.get(name) for name in TOOLS):
        raise ValueError(TOOL_CALL)
    if role not in ROLES:
        raise ValueError(f"a turn's 'role' is not one of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # of parts
        for kind in (part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content):
            if kind in ("tool_use", "tool_result"):
                raise ValueError(TOOL_CALL)
            if kind != "text":
                raise ValueError(f"images and other parts ({kind!r:.40}) are not supported; leave the line out")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return {"role": role, "content": content}


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _text(entry: dict[str, Any]) -> Any:
    """Take the prompt from one line of the file. Raise ValueError if it has no field for it."""
    key = next((key for key in TEXT_KEYS if key in entry), None)
    if key is None:
        raise ValueError(f"has none of the fields 'messages', {', '.join(map(repr, TEXT_KEYS))}")
    text, added = entry.pop(key), entry.pop("input", None) if key == "instruction" else None
    return f"{text}\n\n{added}" if added and isinstance(text, str) else text
