"""Files of a run as JSON, so that a test can look at them, or spoil them, without the records that read them."""

import json
from typing import Any

from mtbench.plan.directory import RunDirectory


def stored_json(run: RunDirectory, name: str) -> Any:
    """Return the value of a JSON file."""
    return json.loads((run.path / name).read_text())


def stored_lines(run: RunDirectory, name: str) -> list[Any]:
    """Return the values of a JSONL file; none if it is absent."""
    file = run.path / name
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line] if file.exists() else []


def keep_lines(run: RunDirectory, name: str, lines: list[Any]) -> None:
    """Rewrite a JSONL file."""
    run.write_text(name, "".join(f"{json.dumps(line)}\n" for line in lines))
