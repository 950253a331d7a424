"""BFCL v4: which functions an answer calls, and with which arguments (single turns, Python's types).

Paper: "The Berkeley Function Calling Leaderboard", Patil et al., ICML 2025. Data: the package `bfcl-eval` (Apache-2.0).
The score follows the published rule of its AST checker: the expected calls in any order, each argument among its
possible values; texts are compared without case, spaces and `,./-_*^`, and numbers by value. The prompt is not the
leaderboard's, so the scores are not comparable with it: the chat template writes the functions, or INSTRUCTIONS do.

    pip download --no-deps bfcl-eval && unzip -d DIR bfcl_eval-*.whl   # or the files of its folder data in DIR/bfcl
    mtbench run --suite bfcl --data-dir DIR --limit 32
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtbench.errors import UserError
from mtbench.evaluation.answer_format import AnswerFormat, calls
from mtbench.evaluation.dataset_files import read_json_lines
from mtbench.evaluation.multi_turn import interleave
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Reading, Source, Suite, Template

ANY = ["string", "number", "boolean", "object", "array"]
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": ANY}  # its types -> those of JSON Schema
INSTRUCTIONS = "Answer with calls of these functions only, in the format [name(argument=value, ...), ...]:"


@SUITES.register("bfcl")
class Bfcl(Suite):
    metric = "ast"
    subtasks = ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple")

    def __init__(self, variant: str, source: Source) -> None:
        folders = [source.data_dir / name for name in ("bfcl", "bfcl_eval/data")] if source.data_dir else []
        folder = next((one for one in folders if (one / "possible_answer").is_dir()), None)
        if variant:
            raise UserError(f"suite 'bfcl' has no variants, so {variant!r} is not allowed behind the colon")
        if folder is None:
            raise UserError("suite 'bfcl' needs `--data-dir DIR` with the data of the package bfcl-eval in DIR/bfcl")
        self.task = {"name": "bfcl", "num_fewshot": 0, "chat_template": True}
        self._rows = {name: _read(folder, name) for name in source.subtasks or self.subtasks}
        answers = [_read(folder / "possible_answer", name) for name in self._rows]
        self._expected = {item: row["ground_truth"] for of_task in answers for item, row in of_task.items()}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        rows = interleave([*of_task.items()][:limit] for of_task in self._rows.values())
        return [_prompt(item, row, template) for item, row in rows]

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        return {item: _read_calls(text, self._expected[item]) for item, text in answers.items()}


def _read_calls(text: str, expected: list[dict[str, Any]]) -> Reading:
    """Compare with the calls `{name: {argument: its possible values, "" if it may be left out}}`."""
    try:
        found = calls(text)
    except Exception:  # it does not parse
        found = []
    if not found:
        return Reading(0.0, "no calls")
    for [(name, possible)] in map(dict.items, expected):
        fitting = [call for call in found if call[0] == name and _equals(call[1], possible)]
        if not fitting:
            return Reading(0.0)
        found.remove(fitting[0])
    return Reading(float(not found))


def _equals(value: Any, one: Any) -> bool:
    """Return whether a value is a possible one. The keys of an object have lists of possible values."""
    if isinstance(value, dict) and isinstance(one, dict):
        lists = [(value.get(key, ""), among if isinstance(among, list) else [among]) for key, among in one.items()]
        return value.keys() <= one.keys() and all(any(_equals(of, other) for other in among) for of, among in lists)
    if isinstance(value, list) and isinstance(one, list):
        return len(value) == len(one) and all(map(_equals, value, one))
    plain = [re.sub(r"[ ,./\-_*^]", "", v).lower().replace("'", '"') if isinstance(v, str) else v for v in (value, one)]
    return isinstance(value, bool) == isinstance(one, bool) and plain[0] == plain[1]


def _prompt(item: str, row: Mapping[str, Any], template: Template) -> Prompt:
    [[first, *others]], functions = row["question"], _schema(row["function"])
    tools = [{"type": "function", "function": function} for function in functions]
    text = template([first, *others], tools=tools)
    if functions[0]["name"] not in text:
        listed = "\n".join([INSTRUCTIONS, *map(json.dumps, functions)])
        text = template([{**first, "content": f"{listed}\n\n{first['content']}"}, *others])
    return Prompt(item=item, text=text, answer_format=AnswerFormat(tools=tools))


def _schema(value: Any) -> Any:
    """Return a function's description with the names of types in JSON Schema."""
    if isinstance(value, dict):
        of_type = TYPES.get(value["type"]) if isinstance(value.get("type"), str) else None
        return {key: _schema(of) for key, of in value.items()} | ({"type": of_type} if of_type else {})
    return [_schema(one) for one in value] if isinstance(value, list) else value


def _read(folder: Path, name: str) -> dict[str, Any]:
    with (folder / f"BFCL_v4_{name}.json").open("rb") as file:
        return {f"{name}/{row['id']}/0": row for _, row in read_json_lines(file)}
