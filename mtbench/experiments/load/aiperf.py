"""aiperf 0.13.0 as a client (ai-dynamo/aiperf): its command line, and its records of each request.

`profile_export.jsonl` has the times of a request by aiperf's formulas, `profile_export_raw.jsonl` every message of its
answer: the text, the tokens and what the server says about it. Both name the position of the prompt (`session_id`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.load.clients import KEY, Client, Sending, forwards_of, outcome_of, write_lines
from mtbench.experiments.load.format import RequestLine
from mtbench.results.answers import messages_of, text_of

VERSION = "0.13.0"
PROMPTS, EXPORT = "prompts.jsonl", "export"
RECORDS, RAW = "profile_export.jsonl", "profile_export_raw.jsonl"
FORMULAS = {
    "ttft": "time from the request's start to its first message with text (time_to_first_token)",
    "itl": "(time to the last message with text − time to the first one) / (output tokens − 1) "
    "(inter_token_latency). A first message with several tokens makes it a little too short",
    "e2e": "time from the request's start to its last message with text (request_latency)",
}
# aiperf takes any value of these variables for yes, and offline it finds no tokenizer in a folder.
VARIABLES = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "TOKENIZERS_PARALLELISM": "false"}


def command(python: Path, sending: Sending, folder: Path) -> list[str]:
    """Write the prompts and return the command line."""
    write_lines(
        folder / PROMPTS,
        [{"text": text, "session_id": f"{position:06}"} for position, text in enumerate(sending.prompts)],
    )
    load = ["--concurrency", str(sending.concurrency)]
    if sending.rate is not None:
        pattern = "poisson" if sending.poisson else "constant"
        load = ["--request-rate", f"{sending.rate:g}", "--arrival-pattern", pattern]
    return [
        *(str(python), "-m", "aiperf", "profile"),
        *("--model", sending.model, "--url", sending.url, "--endpoint-type", "completions", "--streaming"),
        *("--input-file", PROMPTS, "--custom-dataset-type", "single_turn", "--dataset-sampling-strategy", "sequential"),
        *("--request-count", str(len(sending.prompts)), *load, "--random-seed", str(sending.seed)),
        *("--extra-inputs", json.dumps(sending.body), "--request-timeout-seconds", f"{sending.timeout_s:g}"),
        *("--tokenizer", str(sending.tokenizer.resolve()), "--use-server-token-count"),
        *(("--api-key", KEY) if sending.key_env else ()),
        *("--export-level", "raw", "--artifact-dir", EXPORT, "--ui-type", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]


def read(sending: Sending, folder: Path) -> list[RequestLine]:
    """Return the requests of an export, in the order of the prompts. Raises UserError if one is missing."""
    records = {_request(line): line for line in _lines(folder / EXPORT / RECORDS)}
    found: dict[int, dict[str, Any]] = {}
    for raw in _lines(folder / EXPORT / RAW):
        metadata = raw["metadata"]
        if metadata.get("benchmark_phase") == "profiling":
            found[int(metadata["conversation_id"])] = _line(raw, records.get(_request(raw), {}))
    missing = [position for position in range(len(sending.prompts)) if position not in found]
    if missing:
        raise UserError(f"wrote {len(found)} of {len(sending.prompts)} requests; the first missing one is {missing[0]}")
    first_ns = min(line["start_ns"] for line in found.values())
    return [
        RequestLine(
            position=position,
            item=item,
            start_s=(found[position].pop("start_ns") - first_ns) / 1e9,
            **found[position],
        )
        for position, item in enumerate(sending.items)
    ]


def _line(raw: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request's line."""
    error, messages = raw.get("error"), list(messages_of(raw.get("responses")))
    metrics = record.get("metrics") or {}
    answered = not error and "request_latency" in metrics
    reason = None
    if error:
        reason = f"{error.get('type')}: {error.get('message')}"[:200]
    elif not answered:
        reason = "no text in the answer"
    usage: dict[str, Any] = next((m["usage"] for m in reversed(messages) if m.get("usage")), {})
    told = next((m["metrics"] for m in reversed(messages) if m.get("metrics")), None)
    return {
        "start_ns": raw["metadata"]["request_start_ns"],
        "outcome": "ok" if answered else outcome_of((error or {}).get("code"), reason),
        "error": reason,
        "e2e_s": _seconds(metrics, "request_latency"),
        "ttft_s": _seconds(metrics, "time_to_first_token"),
        "itl_s": _seconds(metrics, "inter_token_latency"),
        "tokens": usage.get("completion_tokens"),
        "text": "".join(map(text_of, messages)) if answered else None,
        "forwards": forwards_of(told),
    }


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


CLIENT = Client("aiperf", VERSION, FORMULAS, command, read, VARIABLES)
