"""Answers in the result files of other tools: what was asked, what came back, and the score, as texts.

- lm-eval, `--log_samples`: samples_<task>_<date>.jsonl, a line for each item and filter; of several filters the first.
- vLLM, `vllm bench serve --save-detailed`: `generated_texts` in the order of the requests, without their prompts.
- guidellm: `requests.successful` of each benchmark, in their order, with the request if it is there.
- aiperf, `--export-level raw`: profile_export_raw.jsonl, a line for each request, with its responses, and its payload
  if it is there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtbench import files
from mtbench.errors import UserError, first_line, printable
from mtbench.results.imports.importer import LARGEST_FILE, has, shown, within

FORMATS = (
    "lm-eval's samples_*.jsonl, vLLM's `bench serve --save-detailed` JSON, guidellm's benchmarks.json, aiperf's "
    "profile_export_raw.jsonl"
)
Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation


@dataclass(frozen=True)
class TextAnswer:
    """One answer. None: the file does not have it."""

    item: str
    prompt: Prompt | None
    text: str
    score: float | None = None


@dataclass(frozen=True)
class TextAnswers:
    """The answers of a file. `suite`: the task; None: the file names none."""

    tool: str
    suite: str | None
    answers: list[TextAnswer]
    settings: Mapping[str, Any]


def read_answers(path: Path) -> TextAnswers:
    """Return the answers in a file. Raises UserError in one line for a file without any, or one that is cut off."""
    where, data = printable(str(path)), files.read_bytes(path, LARGEST_FILE)
    try:
        documents = [from_json(data)]
    except ValueError:
        documents = [_line(line, f"{where}, line {n}") for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not documents:
        raise UserError(f"{where} is empty; an audit reads {FORMATS}.")
    first = documents[0]
    if has(first, "doc_id", "resps", "arguments"):
        return _lm_eval(documents, path, where)
    if isinstance(within(first, "generated_texts"), list):
        return _vllm(first, where)
    if isinstance(within(first, "benchmarks"), list):
        return _guidellm(first, where)
    if has(first, "metadata", "responses"):
        return _aiperf(documents, where)
    raise UserError(f"{where} has no answers; an audit reads {FORMATS}.")


def _line(line: bytes, where: str) -> Any:
    try:
        return from_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({first_line(error)}): the file is cut off or no result file.") from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} is {shown(value)}; it must be a text.")
    return value


def _lm_eval(documents: Sequence[Any], path: Path, where: str) -> TextAnswers:
    task = path.stem.removeprefix("samples_").rpartition("_")[0] or path.stem
    answers: dict[str, TextAnswer] = {}
    rule = documents[0].get("filter")
    for number, sample in enumerate(documents, start=1):
        at = f"{where}, line {number}"
        if not has(sample, "doc_id", "resps", "arguments"):
            raise UserError(f"{at} is {shown(sample)}, and no sample of lm-eval.")
        if sample.get("filter") != rule:
            continue
        given = next(iter(sample["arguments"].values()), None) if isinstance(sample["arguments"], dict) else None
        resp = sample["resps"]
        while isinstance(resp, list) and resp:
            resp = resp[0]
        metric = next(iter(sample.get("metrics") or []), None)
        score = sample.get(metric) if isinstance(metric, str) else None
        item = f"{task}/{sample['doc_id']}/0"
        answers[item] = TextAnswer(
            item=item,
            prompt=_text(within(given, "arg_0"), f"{at}: arguments.gen_args_0.arg_0"),
            text=_text(resp, f"{at}: resps"),
            score=float(score) if isinstance(score, int | float) else None,
        )
    shots = _shots(path)
    settings = {"filter": rule} | ({} if shots is None else {"num_fewshot": shots})
    return TextAnswers("lm-eval", task, [*answers.values()], settings)


def _shots(path: Path) -> Any:
    """Return the number of examples that the results beside a file of samples name; None without them."""
    name = path.stem.removeprefix("samples_")
    task, _, date = name.rpartition("_")
    beside = path.parent / f"results_{date}.json"
    try:
        return within(json.loads(files.read_bytes(beside, LARGEST_FILE)), "n-shot", task)
    except (OSError, ValueError):
        return None


def _vllm(document: Mapping[str, Any], where: str) -> TextAnswers:
    texts = document["generated_texts"]
    answers = [TextAnswer(str(n), None, _text(text, f"{where}: generated_texts[{n}]")) for n, text in enumerate(texts)]
    return TextAnswers("vLLM", None, answers, {})


def _guidellm(document: Mapping[str, Any], where: str) -> TextAnswers:
    answers = []
    for number, benchmark in enumerate(document["benchmarks"]):
        for place, request in enumerate(within(benchmark, "requests", "successful") or []):
            text = _text(
                within(request, "output"), f"{where}: benchmarks[{number}].requests.successful[{place}].output"
            )
            answers.append(TextAnswer(f"{number}/{place}", _asked(request), text))
    if not answers:
        raise UserError(f"{where} has no answers: guidellm wrote it without requests; an audit reads {FORMATS}.")
    return TextAnswers("guidellm", None, answers, {})


def _asked(request: Any) -> Prompt | None:
    """Return the prompt that guidellm sent."""
    arguments = within(request, "request_args")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)
        except ValueError:
            return None
    return _prompt(within(arguments, "body"))


def _prompt(body: Any) -> Prompt | None:
    """Return what the body of a request to an OpenAI-compatible server asks: a completion, or a chat."""
    prompt, messages = within(body, "prompt"), within(body, "messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return messages
    return prompt if isinstance(prompt, str) else None


def _aiperf(documents: Sequence[Any], where: str) -> TextAnswers:
    answers = []
    for number, raw in enumerate(documents, start=1):
        if not has(raw, "metadata", "responses"):
            raise UserError(f"{where}, line {number} is {shown(raw)}, and no record of aiperf.")
        if raw.get("error"):
            continue  # a request without an answer
        item = within(raw, "metadata", "conversation_id")
        try:
            text = "".join(map(text_of, messages_of(raw["responses"])))
        except ValueError as error:
            raise UserError(f"{where}, line {number}: a response is not JSON ({first_line(error)}).") from None
        answers.append(TextAnswer(str(number - 1 if item is None else item), _prompt(raw.get("payload")), text))
    if not answers:
        raise UserError(f"{where} has no answers: every request of aiperf failed; an audit reads {FORMATS}.")
    return TextAnswers("aiperf", None, answers, {})


def messages_of(responses: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON messages in the responses of an aiperf record: events of a stream, or one document.

    Raises ValueError for one that is not JSON.
    """
    for response in responses if isinstance(responses, list) else ():
        packets = within(response, "packets")
        events = packets if isinstance(packets, list) else [{"name": "data", "value": within(response, "text")}]
        for value in (event.get("value") for event in events if has(event, "name") and event["name"] == "data"):
            if isinstance(value, str) and value.strip() != "[DONE]":
                message = from_json(value)
                if isinstance(message, dict):
                    yield message


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text in a message of a completion or a chat, streamed or whole."""
    places = (("text",), ("delta", "content"), ("message", "content"))
    said = [[within(choice, *place) for place in places] for choice in message.get("choices") or ()]
    return "".join(next((text for text in each if isinstance(text, str)), "") for each in said)
