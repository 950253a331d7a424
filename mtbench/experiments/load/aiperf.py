"""aiperf 0.13.0 sends the requests (ai-dynamo/aiperf): its environment, command line and records of each request.

The environment is made once in the cache folder. The version is pinned, because exports and formulas change.
`profile_export.jsonl` has the times of a request by aiperf's formulas, `profile_export_raw.jsonl` every message of its
answer: the text, the tokens and what the server says about it. Both name the conversation and the turn.
A request is a `payload` of its mooncake_trace, sent as it is: of its formats only this one has delays, and turns
that are whole prompts. Its --request-rate spaces all turns; a schedule spaces the first ones, and later ones follow
answers. Its --concurrency counts conversations, and --num-conversations ends them whole.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files
from mtbench.clients.engine_server import forwards_of as of_reply
from mtbench.clients.openai_data import Event, Reply
from mtbench.clients.openai_wire import caching
from mtbench.errors import UserError
from mtbench.experiments.load.format import ClientFacts, LoadItem, LoadPlan, PointPlan, RequestLine
from mtbench.experiments.load.planning import sampling_fields, started_at
from mtbench.experiments.load.servers import Running
from mtbench.files import cache_home
from mtbench.programs import environments, processes
from mtbench.programs.environments import Note, Pip, installed

NAME, VERSION = "aiperf", "0.13.0"
LABEL = f"{NAME} {VERSION}"
PROMPTS, EXPORT = "prompts.jsonl", "export"
RECORDS, RAW = "profile_export.jsonl", "profile_export_raw.jsonl"
FORMULAS = {
    "ttft": "time from the request's start to its first message with text (time_to_first_token)",
    "tpot": "(time to the last message with text − time to the first one) / (output tokens − 1) "
    "(inter_token_latency). A first message with several tokens makes it a little too short",
    "e2e": "time from the request's start to its last message with text (request_latency)",
}
# aiperf treats any non-empty value of these variables as true, and offline it finds no tokenizer in a folder.
VARIABLES = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "TOKENIZERS_PARALLELISM": "false"}
FACTS = ClientFacts(name=NAME, version=VERSION, formulas=FORMULAS)
BEYOND_S = 300.0  # time that a client may take beyond the requests: to start, to end, to write
KEY = "<key>"  # stands for the server's key in a command
# The key is put in after the start: other users of the machine see the command line of a process.
WITH_KEY = f"""
import os, runpy, sys
variable, module, *arguments = sys.argv[1:]
sys.argv = [module, *(argument.replace({KEY!r}, os.environ[variable]) for argument in arguments)]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Sending(NamedTuple):
    """The requests that a client sends, and the server."""

    planned: LoadPlan
    point: PointPlan
    running: Running
    tokenizer: Path  # folder of the checkpoint's

    @property
    def items(self) -> list[LoadItem]:
        """The items, in the order in which their prompts are sent."""
        return [self.planned.items[place] for place in self.point.items]

    @property
    def duration_s(self) -> float:
        """The planned time of starting conversations; 0 with a concurrency."""
        request, level = self.planned.request, self.point.level
        return started_at(request, level) / level if request.request_rate else 0.0

    @property
    def body(self) -> dict[str, Any]:
        """The fields of every request."""
        stop = {"stop": list(self.planned.stop)} if self.planned.stop else {}
        fields = {"max_tokens": self.planned.max_new_tokens, **stop, **self.running.fields}
        return {"model": self.running.model, "stream": True, "stream_options": {"include_usage": True}, **fields}

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield lines of the client's input. A conversation has the name of its first request's position.

        With a prefix cache it finds no prompts but its own, and none of an earlier point.
        """
        first, draw, rate = 0, random.Random(self.point.seed).expovariate, self.point.level
        gaps_s = (draw(rate) if self.planned.request.poisson else 1 / rate for _ in self.items)  # for all arms alike
        starts_s = itertools.accumulate(gaps_s)
        for position, item in enumerate(self.items):
            when = {"delay": 1e3 * item.think_s}
            if item.turn == 1:
                first = position
                when = {"timestamp": 1e3 * next(starts_s)} if self.planned.request.request_rate else {}
            salt = f"{self.point.round}.{self.point.level:g}.{first}"  # vLLM takes 128 characters; a server has one arm
            cache = caching(salt, begins=item.turn == 1) if self.running.prefix_cache else {}
            drawn = sampling_fields(self.planned.request, self.point.seed + position)
            payload = {**self.body, **drawn, **cache, "prompt": item.prompt}
            yield {"session_id": f"{first:06}", **when, "payload": payload}


class Client:
    """The program that sends the requests."""

    def python(self, note: Note, *, offline: bool = False) -> Path:
        """Return a Python that has the client, which is installed if it is not there. Raises UserError if it cannot."""
        folder = cache_home() / "clients" / f"{NAME}-{VERSION}-{sys.implementation.cache_tag}"
        if (python := environments.python_of(folder)) is not None:
            return python
        if offline:
            raise UserError(
                f"{LABEL} is not installed in {folder} and --offline forbids to download it; run the command once "
                "without --offline."
            )
        return installed(folder, LABEL, "", _install, note)

    def command(self, python: Path, sending: Sending, folder: Path) -> list[str]:
        """Write the prompts and return the command line."""
        write_prompts(sending, folder)
        request, point, (server, model, *_) = sending.planned.request, sending.point, sending.running
        load = ["--concurrency", str(int(point.level)), "--num-conversations", str(started_at(request, point.level))]
        return [
            *(str(python), "-m", "aiperf", "profile"),
            *("--model", model, "--url", server.url, "--endpoint-type", "completions", "--streaming"),
            *("--input-file", PROMPTS, "--custom-dataset-type", "mooncake_trace"),
            *("--dataset-sampling-strategy", "sequential"),
            *(["--fixed-schedule"] if request.request_rate else load),
            *("--request-timeout-seconds", f"{request.request_timeout_s:g}"),
            *("--tokenizer", str(sending.tokenizer.resolve()), "--use-server-token-count"),
            *(("--api-key", KEY) if server.key_env else ()),
            *("--export-level", "raw", "--artifact-dir", EXPORT, "--ui-type", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics"),
        ]

    def send(self, python: Path, sending: Sending, folder: Path) -> list[RequestLine]:
        """Run the client to its end in a folder of its own; return its requests in the order of the prompts.

        Raises UserError if it fails, or takes much longer than the requests may.
        """
        with files.write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        log = folder / "client.log"
        command = self.command(python, sending, folder)
        if (key_env := sending.running.server.key_env) is not None:
            command = with_key(command, key_env)
        variables = environments.variables(python) | VARIABLES
        timeout_s = sending.planned.request.request_timeout_s
        waits_s = sending.duration_s + sum(item.think_s for item in sending.items)
        limit_s = waits_s + timeout_s * (1 + len(sending.items) / 8) + BEYOND_S
        with processes.started(command, variables, log, folder, grace_s=5.0) as process:
            over = not processes.has_ended(process, limit_s)
        output = processes.last_line(log)
        if over:
            raise UserError(f"{LABEL} did not end within {limit_s:,.0f} s: {output}. See {log}.")
        try:
            return read(sending, folder)
        except UserError as error:
            code = process.returncode
            reason = f"ended with exit code {code}: {output}" if code else f"{error}".rstrip(".")
            raise UserError(f"{LABEL} {reason}. See {log}.") from None


def read(sending: Sending, folder: Path) -> list[RequestLine]:
    """Return the requests of an export, in the order of the prompts. Raises UserError if one is missing."""
    records = {_request(line): line for line in _lines(folder / EXPORT / RECORDS)}
    found: dict[int, dict[str, Any]] = {}
    for raw in _lines(folder / EXPORT / RAW):
        metadata = raw["metadata"]
        if metadata.get("benchmark_phase") == "profiling":
            position = int(metadata["conversation_id"]) + metadata["turn_index"]
            found[position] = _line(raw, records.get(_request(raw), {}))
    items = sending.items
    missing = [position for position in range(len(items)) if position not in found]
    if missing:
        raise UserError(f"wrote {len(found)} of {len(items)} requests; the first missing one is {missing[0]}")
    first_ns = min(line["start_ns"] for line in found.values())
    return [
        RequestLine(
            position=position,
            item=item.item,
            turn=item.turn,
            prompt_tokens=item.prompt_tokens,
            start_s=(found[position].pop("start_ns") - first_ns) / 1e9,
            **found[position],
        )
        for position, item in enumerate(items)
    ]


def _install(pip: Pip) -> None:
    pip("install", f"{NAME}=={VERSION}")


def write_prompts(sending: Sending, folder: Path) -> None:
    """Write the requests into a folder."""
    files.write_text(folder / PROMPTS, "".join(json.dumps(line) + "\n" for line in sending.requests()))


def with_key(command: Sequence[str], variable: str) -> list[str]:
    """Return a command `python -m MODULE …` in which the process itself puts a variable's value in place of KEY."""
    python, _, module, *arguments = command
    return [python, "-c", WITH_KEY, variable, module, *arguments]


def outcome_of(code: Any, message: str | None) -> str:
    """Return `rejected` for an error of a full server, else `failed`."""
    full = code in (429, 503) or (code is None and any(word in (message or "") for word in ("'503 ", "'429 ")))
    return "rejected" if full else "failed"


def forwards_of(metrics: Any, tokens: int | None) -> int | None:
    """Return the forward passes of a request by its server: mtbench's, or vLLM's by its accepted drafts; else None."""
    try:
        forwards = metrics["mtbench"]["forwards"]
    except (LookupError, TypeError):
        return of_reply(Reply(counted=tokens, speculation=Event(metrics=metrics).speculation))
    return forwards if type(forwards) is int and forwards >= 0 else None


def _line(raw: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    error, messages = raw.get("error"), list(messages_of(raw.get("responses")))
    metrics = record.get("metrics") or {}
    answered = not error and "request_latency" in metrics
    reason = None
    if error:
        reason = f"{error.get('type')}: {error.get('message')}"[:200]
    elif not answered:
        reason = "no text in the answer"
    usage: dict[str, Any] = next((m["usage"] for m in reversed(messages) if m.get("usage")), {})
    tokens = usage.get("completion_tokens")
    measured = next((m["metrics"] for m in reversed(messages) if m.get("metrics")), None)
    return {
        "start_ns": raw["metadata"]["request_start_ns"],
        "outcome": "ok" if answered else outcome_of((error or {}).get("code"), reason),
        "error": reason,
        "e2e_s": _seconds(metrics, "request_latency"),
        "ttft_s": _seconds(metrics, "time_to_first_token"),
        "tpot_s": _seconds(metrics, "inter_token_latency"),
        "tokens": tokens,
        "text": "".join(map(text_of, messages)) if answered else None,
        "forwards": forwards_of(measured, tokens),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }


def messages_of(responses: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON messages in the responses of a record: the events of streams."""
    for event in (event for response in responses or () for event in response.get("packets") or ()):
        if event["name"] == "data" and event["value"].strip() != "[DONE]":
            yield json.loads(event["value"])


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text in a message of a streamed completion."""
    return "".join(choice.get("text") or "" for choice in message.get("choices") or ())


def _request(line: Mapping[str, Any]) -> Any:
    return line["metadata"]["x_request_id"]


def _seconds(metrics: Mapping[str, Any], name: str) -> float | None:
    metric = metrics.get(name)
    return None if metric is None else float(metric["value"]) / 1e3


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of aiperf. Raises UserError if it is missing or is not such a file."""
    try:
        with files.open_plain(path) as file:
            for line in files.read_lines(file):
                yield json.loads(line)
    except FileNotFoundError:
        raise UserError(f"wrote no {path.name}") from None
    except ValueError as error:
        raise UserError(f"wrote {path.name}, which cannot be read: {error}") from None
