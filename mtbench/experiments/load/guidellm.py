"""guidellm 0.8.1 as a client (vllm-project/guidellm): its command line, and the requests in its benchmarks.json.

A request has the text, the times by guidellm's formulas, and the server's metrics. guidellm keeps the order of the
prompts in its queue, but not their position: an answered request is found by its prompt, a refused one by its place in
the queue.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.experiments.load.clients import KEY, Client, Sending, forwards_of, outcome_of, write_lines
from mtbench.experiments.load.format import RequestLine

VERSION = "0.8.1"
PROMPTS, EXPORT = "prompts.jsonl", "benchmarks.json"
FORMULAS = {
    "ttft": "time from the request's start to its first message with text (time_to_first_token_ms)",
    "itl": "time from the first to the last message with text / (output tokens − 1) (inter_token_latency_ms). A first "
    "message with several tokens makes it a little too short",
    "e2e": "time from the request's start to its end, the message with usage included (request_latency)",
}


def command(python: Path, sending: Sending, folder: Path) -> list[str]:
    """Write the prompts and return the command line."""
    write_lines(folder / PROMPTS, [{"prompt": text} for text in sending.prompts])
    body = dict(sending.body)
    backend = {
        "kind": "openai_http",
        "target": sending.url.removesuffix("/v1"),
        "model": sending.model,
        "request_format": "/v1/completions",
        "max_tokens": body.pop("max_tokens"),
        "extras": {"body": body},
        "timeout": sending.timeout_s,
        "validate_backend": False,
    }
    if sending.key_env:
        backend["api_key"] = KEY
    profile: dict[str, Any] = {"kind": "concurrent", "streams": [sending.concurrency]}
    if sending.rate is not None:
        profile = {"kind": "poisson" if sending.poisson else "constant", "rate": [sending.rate]}
    return [
        *(str(python), "-m", "guidellm", "run"),
        *("--backend", json.dumps(backend), "--profile", json.dumps(profile)),
        *("--constraint", f"kind=max_requests,count={len(sending.prompts)}"),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(sending.tokenizer.resolve())})),
        *("--data", json.dumps({"kind": "json_file", "path": PROMPTS})),
        *("--seed", json.dumps({"kind": "static", "value": sending.seed})),
        *("--output", json.dumps({"kind": "json", "path": EXPORT}), "--disable-console"),
    ]


def read(sending: Sending, folder: Path) -> list[RequestLine]:
    """Return the requests of an export, in the order of the prompts. Raises UserError if one is missing."""
    try:
        report = json.loads(files.read_bytes(folder / EXPORT))
        groups = report["benchmarks"][0]["requests"]
        stored = [(entry, name) for name in ("successful", "errored", "incomplete") for entry in groups[name]]
    except FileNotFoundError:
        raise UserError(f"wrote no {EXPORT}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"wrote {EXPORT}, which cannot be read: {first_line(error)}") from None
    stored.sort(key=lambda entry: entry[0]["info"]["timings"]["queued"])
    if len(stored) < len(sending.prompts):
        raise UserError(f"wrote {len(stored)} of {len(sending.prompts)} requests")
    starts = [_start(entry) for entry, _ in stored]
    return [
        RequestLine(
            position=position,
            item=sending.items[position],
            start_s=max(0.0, _start(stored[place][0]) - min(starts)),
            **_line(*stored[place]),
        )
        for position, place in enumerate(_places([_prompt(entry) for entry, _ in stored], sending.prompts))
    ]


def _places(sent: Sequence[str | None], prompts: Sequence[str]) -> list[int]:
    """Return for each prompt the place of its request in the queue. `sent`: prompts of the requests, None if unknown.

    >>> _places(["b", None, "a"], ["a", "x", "b"])
    [2, 1, 0]
    """
    by_prompt: dict[str | None, list[int]] = {}
    for place, prompt in enumerate(sent):
        by_prompt.setdefault(prompt, []).append(place)
    unknown = by_prompt.pop(None, [])
    places = [by_prompt[prompt].pop(0) if by_prompt.get(prompt) else -1 for prompt in prompts]
    rest = sorted([*unknown, *(place for left in by_prompt.values() for place in left)])
    return [rest.pop(0) if place < 0 else place for place in places]


def _line(entry: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the fields of a request's line."""
    answered = group == "successful"
    error = None if answered else (entry["info"].get("error") or "it did not end")[:200]
    output = entry.get("output_metrics") or {}
    return {
        "outcome": "ok" if answered else outcome_of(None, error),
        "error": error,
        "e2e_s": entry.get("request_latency") if answered else None,
        "ttft_s": _seconds(entry.get("time_to_first_token_ms")) if answered else None,
        "itl_s": _seconds(entry.get("inter_token_latency_ms")) if answered else None,
        "tokens": output.get("text_tokens") if answered else None,
        "text": (entry.get("output") or "") if answered else None,
        "forwards": forwards_of(entry.get("response_metrics")),
    }


def _prompt(entry: Mapping[str, Any]) -> str | None:
    """Return the prompt of a request; None if guidellm did not keep it."""
    arguments = entry.get("request_args")
    if not isinstance(arguments, str):
        return None
    prompt = (json.loads(arguments).get("body") or {}).get("prompt")
    return prompt if isinstance(prompt, str) else None


def _start(entry: Mapping[str, Any]) -> float:
    timings = entry["info"]["timings"]
    return float(timings.get("request_start") or timings.get("resolve_start") or timings["queued"])


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


CLIENT = Client("guidellm", VERSION, True, FORMULAS, command, read, {"TOKENIZERS_PARALLELISM": "false"})
