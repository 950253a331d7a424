"""Answers in the result files of other tools: prompt, answer and score, as texts.

- lm-eval, `--log_samples`: samples_<task>_<date>.jsonl, a line for each item and filter; of several filters the first.
- vLLM, `vllm bench serve --save-detailed`: `generated_texts` in the order of the requests, without prompts; SGLang too.
- guidellm: `requests` of each benchmark, in the order of the queue, with the prompt if it is there.
- aiperf, `--export-level raw`: profile_export_raw.jsonl, a line for each request, with its responses, and its payload
  if it is there; without those of the warm-up.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeGuard

from pydantic_core import from_json

from mtbench import files
from mtbench.errors import UserError, first_line, printable

FORMATS = (
    "lm-eval's samples_*.jsonl, vLLM's `bench serve --save-detailed` JSON, guidellm's benchmarks.json, aiperf's "
    "profile_export_raw.jsonl"
)
LARGEST_FILE = 1 << 27  # bytes: a report with every request of a long benchmark
Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation
REASONING = ("reasoning_content", "reasoning", "reasoning_output", "thinking")  # a server may send a text by two names
TEXT = ("text", "delta", "message", "content", "output")
NO_TEXT = ("tool_calls", "function_call", "refusal", "audio", "image_url")  # what a model emits in place of text
CUT = ("content_filter", "error", "abort")  # values of finish_reason


@dataclass(frozen=True)
class TextAnswer:
    """One request and its answer. None: the file does not have it."""

    item: str
    prompt: Prompt | None
    text: str
    score: float | None = None
    parts: Sequence[str] = ()  # of a text with reasoning: the texts between which a server takes tokens out
    lacks: str | None = None  # why its text is not, or not all, there


@dataclass(frozen=True)
class TextAnswers:
    """The answers of a file. `suite`: the task; None: the file names none."""

    tool: str
    suite: str | None
    answers: list[TextAnswer]
    settings: Mapping[str, Any]


def read_answers(path: Path) -> TextAnswers:
    """Return the answers in a file. Raises UserError in one line for a file without any, or one that is cut off."""
    where, data = printable(str(path)), files.read_bytes(path, LARGEST_FILE).removeprefix(codecs.BOM_UTF8)
    try:
        documents = [from_json(data)]
    except ValueError:
        documents = [_line(line, f"{where}, line {n}") for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not documents:
        raise UserError(f"{where} is empty; an audit reads {FORMATS}.")
    first = documents[0]
    if has(first, "doc_id", "resps", "arguments"):
        return _lm_eval(documents, path, where)
    if has(first, "metadata", "responses"):
        return TextAnswers("aiperf", None, list(_aiperf(documents, where)), {})
    server = "SGLang" if str(within(first, "backend")).startswith("sglang") else "vLLM"  # of their benchmarks, alike
    for name, tool, answers in (("generated_texts", server, _vllm), ("benchmarks", "guidellm", _guidellm)):
        if isinstance(within(first, name), list):
            if len(documents) > 1:
                raise UserError(f"{where} holds {len(documents)} results of {tool}; give a file with one.")
            return TextAnswers(tool, None, list(answers(first, where)), {})
    raise UserError(f"{where} has no answers; an audit reads {FORMATS}.")


def has(value: Any, *names: str) -> TypeGuard[dict[str, Any]]:
    """Return whether a JSON value is an object with these keys."""
    return isinstance(value, dict) and all(name in value for name in names)


def within(value: Any, *path: str) -> Any:
    """Return a value in nested objects; None if one of them is missing or no object."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _line(line: bytes, where: str) -> Any:
    try:
        return from_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({first_line(error)}): the file is cut off or no result file.") from None


def _answer(where: str, item: str, prompt: Prompt | None, content: Any, failed: Any = False) -> TextAnswer:
    """Return an answer. `content`: what `pieces` reads; nothing: the request has failed."""
    if not isinstance(content, str | list | dict | None):
        raise UserError(f"{where} is {content!r:.60}; it must be a text.")
    found = list(pieces(content))
    lost = next((f"got {kind} in place of text" for kind, _ in found if kind not in ("text", "reasoning")), None)
    texts = [piece for piece in found if piece[1]]
    parts = ["".join(text for _, text in group) for _, group in groupby(texts, itemgetter(0))]
    lacks = "failed" if failed or not found else lost
    return TextAnswer(item, prompt, "".join(parts), parts=parts if "reasoning" in dict(texts) else (), lacks=lacks)


def _lm_eval(documents: Sequence[Any], path: Path, where: str) -> TextAnswers:
    task = path.stem.removeprefix("samples_").rpartition("_")[0] or path.stem
    answers: list[TextAnswer] = []
    rule = documents[0].get("filter")
    for number, sample in enumerate(documents, start=1):
        at = f"{where}, line {number}"
        if not has(sample, "doc_id", "resps", "arguments"):
            raise UserError(f"{at} is {sample!r:.60}, and no sample of lm-eval.")
        if sample.get("filter") != rule:
            continue
        given = next(iter(sample["arguments"].values()), None) if isinstance(sample["arguments"], dict) else None
        written, response = within(given, "arg_0"), sample["resps"]
        while isinstance(response, list) and len(response) == 1:
            response = response[0]
        if (prompt := _prompt({"messages": _parsed(written), "prompt": written})) is None:
            raise UserError(f"{at}: arguments.gen_args_0.arg_0 is {written!r:.60}; it must be a text.")
        if (response and isinstance(response, list)) or not isinstance(within(given, "arg_1"), dict):
            raise UserError(f"{at}: resps is {response!r:.60}; it must be one text, without repeats or likelihoods.")
        metric = next(iter(sample.get("metrics") or []), None)
        score = sample.get(metric) if isinstance(metric, str) else None
        answer = _answer(f"{at}: resps", f"{task}/{sample['doc_id']}/0", prompt, response)
        answers.append(replace(answer, score=float(score) if isinstance(score, int | float) else None))
    shots = _shots(path)
    settings = {"filter": rule} | ({} if shots is None else {"num_fewshot": shots})
    return TextAnswers("lm-eval", task, answers, settings)


def _shots(path: Path) -> Any:
    """Return the number of examples that the results beside a file of samples name; None without them."""
    name = path.stem.removeprefix("samples_")
    task, _, date = name.rpartition("_")
    beside = path.parent / f"results_{date}.json"
    try:
        return within(json.loads(files.read_bytes(beside, LARGEST_FILE)), "n-shot", task)
    except (OSError, ValueError):
        return None


def _vllm(document: Mapping[str, Any], where: str) -> Iterator[TextAnswer]:
    """Yield the answers. `errors` says why a request failed; some failed ones have no tokens, and no reason."""
    columns = [value if isinstance(value := document.get(name), list) else [] for name in ("errors", "output_lens")]
    for n, (text, error, tokens) in enumerate(zip_longest(document["generated_texts"], *columns)):
        yield _answer(f"{where}: generated_texts[{n}]", str(n), None, text, error or tokens == 0)


def _guidellm(document: Mapping[str, Any], where: str) -> Iterator[TextAnswer]:
    for number, benchmark in enumerate(document["benchmarks"]):
        groups = [(name, within(benchmark, "requests", name)) for name in ("successful", "errored", "incomplete")]
        stored = [(request, name != "successful") for name, group in groups for request in group or ()]
        stored.sort(key=lambda e: t if isinstance(t := within(e[0], "info", "timings", "queued"), int | float) else 0)
        for place, (request, failed) in enumerate(stored):
            body, text = within(_parsed(within(request, "request_args")), "body"), within(request, "prompt")
            if body is None and text and within(request, "request_type") != "text_completions":
                body = {"messages": [{"role": "user", "content": text}]}  # an older report
            yield _answer(f"{where}: a request", f"{number}/{place}", _prompt(body or request), request, failed)


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, which may be alone in a list; any other value as it is."""
    [text] = value if isinstance(value, list) and len(value) == 1 else [value]
    with suppress(ValueError):
        return from_json(text) if isinstance(text, str) else value
    return value


def _prompt(body: Any) -> Prompt | None:
    """Return the prompt in the body of a request to an OpenAI-compatible server: a completion, or a chat."""
    prompt, messages = within(body, "prompt"), within(body, "messages")
    if messages and isinstance(messages, list) and all(has(message, "role") for message in messages):
        parts = [m.get("content") for m in messages]
        texts = [{"content": "".join(text for _, text in pieces(of))} if isinstance(of, list) else {} for of in parts]
        return [message | text for message, text in zip(messages, texts, strict=True)]
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    return prompt if isinstance(prompt, str) else None


def _aiperf(documents: Sequence[Any], where: str) -> Iterator[TextAnswer]:
    def order(line: tuple[int, Any]) -> list[int]:
        numbers = (within(line[1], "metadata", name) for name in ("session_num", "turn_index"))
        return [number if isinstance(number, int) else 0 for number in numbers]

    found = []
    for number, raw in sorted(enumerate(documents, start=1), key=order):
        if not has(raw, "metadata", "responses"):
            raise UserError(f"{where}, line {number} is {raw!r:.60}, and no record of aiperf.")
        if within(raw, "metadata", "benchmark_phase") == "warmup":
            continue
        item, at = within(raw, "metadata", "conversation_id"), f"{where}, line {number}: a response"
        try:
            messages = list(messages_of(raw["responses"]))
        except ValueError as error:
            raise UserError(f"{at} is not JSON ({first_line(error)}).") from None
        failed = raw.get("error") or within(raw, "metadata", "was_cancelled") or any(m.get("error") for m in messages)
        choices_of = [message.get("choices") for message in messages]
        choices = [choice for of in choices_of if isinstance(of, list) for choice in of]
        answer = _answer(at, str(number - 1 if item is None else item), _prompt(raw.get("payload")), choices_of, failed)
        if any(within(choice, "index") for choice in choices):
            answer = replace(answer, lacks=answer.lacks or "got several choices")
        reason = any(within(choice, "finish_reason") for choice in choices)
        found.append((answer, reason, any(message.get("done") for message in messages)))
    reasons = any(reason for _, reason, _ in found)
    for answer, reason, done in found:  # a stream without an end was cut off, if this server says why one ends
        yield replace(answer, lacks=answer.lacks or "failed") if reasons and not (reason or done) else answer


def messages_of(responses: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON messages in the responses of an aiperf record: events of a stream, or one document.

    `done` marks the end of a stream, `error` a packet of that name. Raises ValueError for one that is not JSON.
    """
    for response in responses if isinstance(responses, list) else ():
        packets = within(response, "packets")
        events = packets if isinstance(packets, list) else [{"name": "data", "value": within(response, "text")}]
        for name, value in ((within(event, "name"), within(event, "value")) for event in events):
            if name == "error" or (name == "event" and value == "error"):
                yield {"error": value or name}
            elif name == "data" and isinstance(value, str):
                message = {"done": True} if value.strip() == "[DONE]" else from_json(value)
                if isinstance(message, dict):
                    yield message


def pieces(content: Any, kind: str = "text") -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each piece of an answer, in the order of the model.

    `content`: a text; an object with texts, such as a message or a choice; a list of these. The kinds are
    `text`, `reasoning`, and the names of other content or of a cut.
    """
    if isinstance(content, str):
        yield kind, content
    elif isinstance(content, list):
        for part in content:
            yield from pieces(part, kind)
    elif isinstance(content, dict):
        for names, of in ((REASONING, "reasoning"), (TEXT, kind)):
            yield from pieces(max((content.get(name) for name in names), key=lambda v: (bool(v), v is not None)), of)
        yield from ((name, "") for name in NO_TEXT if content.get(name))
        yield from ((cut, "") for cut in CUT if content.get("finish_reason") == cut)
