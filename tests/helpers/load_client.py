"""A client for tests that starts in milliseconds: it sends the prompts for real and writes what aiperf 0.13.0 writes.

load_client.py PROMPTS EXPORT URL
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any


def ask(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the record and of the raw line of one request."""
    message = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(message) as answer:
            said = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return {}, {"responses": [], "error": {"code": error.code, "type": error.reason, "message": "no"}}
    tokens = said["usage"]["completion_tokens"]
    times = {"request_latency": 10.0 + tokens, "time_to_first_token": 10.0, "inter_token_latency": 1.0}
    packet = {"packets": [{"name": "data", "value": json.dumps(said)}]}
    return {name: {"value": value, "unit": "ms"} for name, value in times.items()}, {
        "responses": [packet],
        "error": None,
    }


def main(prompts: str, export: str, url: str) -> None:
    Path(export).mkdir()
    records, raws = [], []
    turns = Counter[str]()
    for number, line in enumerate(Path(prompts).read_text().splitlines()):
        sent = json.loads(line)
        start_ns = time.time_ns()
        metrics, raw = ask(url, sent["payload"] | {"stream": False})
        metadata = {"x_request_id": str(number), "conversation_id": sent["session_id"]}
        metadata |= {"turn_index": turns[sent["session_id"]]}
        turns[sent["session_id"]] += 1
        metadata |= {"benchmark_phase": "profiling", "request_start_ns": start_ns}
        records.append({"metadata": metadata, "metrics": metrics})
        raws.append({"metadata": metadata, **raw})
    for name, lines in (("profile_export.jsonl", records), ("profile_export_raw.jsonl", raws)):
        Path(export, name).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
