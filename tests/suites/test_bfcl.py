"""BFCL: prompts with functions, and the published rule of its AST checker on rows made here and on the real ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtbench.errors import UserError
from mtbench.evaluation.answer_format import AnswerFormat
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source, Suite

DATA = Path(os.environ.get("MTBENCH_DATA_DIR", "."))
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "price": {"type": "float"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "at": {"type": "dict", "properties": {"x": {"type": "float"}, "type": {"type": "any"}}},
    "box": {"type": "tuple", "items": {"type": "integer"}},
}
PARAMETERS = {"type": "dict", "properties": PROPERTIES, "required": ["city"]}
OPTIONAL = {"days": ["", 3], "price": ["", 1.0], "tags": ["", ["a", "b"]], "box": ["", [1, 2]]}
POSSIBLE = {"city": ["New York, NY", "NYC"], "at": ["", {"x": [1, 2.5], "type": ["", "here"]}], **OPTIONAL}
RIGHT: list[dict[str, Any]] = [{"days": 3}, {"price": 1}, {"tags": ["A", "b"]}, {"box": [1, 2]}, {"at": {"x": 2.5}}]
RIGHT += [{"at": {"x": 2.5, "type": "Here"}}, {"city": "new york NY"}, {}]
WRONG: list[dict[str, Any]] = [
    {"days": 4},
    {"days": True},
    {"days": "3"},
    {"tags": ["b", "a"]},
    {"at": {"type": "here"}},
]
WRONG += [{"at": {"x": 1, "z": 1}}, {"city": "Boston"}, {"wind": 1}]


def opened(folder: Path, expected: list[dict[str, Any]], name: str = "parallel") -> Suite:
    """The suite with one row."""
    (folder / "bfcl" / "possible_answer").mkdir(parents=True)
    question = [[{"role": "user", "content": "Weather?"}]]
    row = {"id": f"{name}_0", "question": question, "function": [{"name": "sky.weather", "parameters": PARAMETERS}]}
    (folder / "bfcl" / f"BFCL_v4_{name}.json").write_text(json.dumps(row))
    answer = {"id": f"{name}_0", "ground_truth": expected}
    (folder / "bfcl" / "possible_answer" / f"BFCL_v4_{name}.json").write_text(json.dumps(answer))
    suite: Suite = SUITES["bfcl"]("", Source(data_dir=folder, subtasks=(name,)))
    return suite


def said(*calls: tuple[str, dict[str, Any]]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def test_each_argument_is_among_its_possible_values(tmp_path: Path) -> None:
    """Texts without case and punctuation; one that is marked by an empty text may be missing."""
    suite, item = opened(tmp_path, [{"sky.weather": POSSIBLE}]), "parallel/parallel_0/0"
    for some, score in ((RIGHT, 1.0), (WRONG, 0.0)):
        for arguments in some:
            assert suite.score({item: said(("sky.weather", {"city": "NYC", **arguments}))}) == {item: score}, arguments
    assert suite.score({item: said(("weather", {"city": "NYC"}))}) == {item: 0.0}
    assert suite.score({item: said(("sky.weather", {}))}) == {item: 0.0}


def test_calls_are_expected_in_any_order_and_each_once(tmp_path: Path) -> None:
    rome, oslo = ("sky.weather", {"city": "Rome"}), ("sky.weather", {"city": "Oslo"})
    suite = opened(tmp_path, [{"sky.weather": {"city": ["Rome"]}}, {"sky.weather": {"city": ["Oslo"]}}])
    item = "parallel/parallel_0/0"
    right = [said(rome, oslo), said(oslo, rome), '[sky.weather(city="Oslo"), sky.weather(city="Rome")]']
    wrong = [said(rome), said(rome, rome), said(rome, oslo, oslo), "It rains.", '[sky.weather(city="Oslo"']
    assert [suite.score({item: text})[item] for text in right + wrong] == [1.0] * 3 + [0.0] * 5


def test_the_template_writes_the_functions_or_the_prompt_does(tmp_path: Path) -> None:
    """Their types are those of JSON Schema, so that calls can be checked."""
    suite = opened(tmp_path, [{"sky.weather": POSSIBLE}])
    [with_tools] = suite.prompts(lambda messages, *, tools=(): json.dumps([messages, list(tools)]), None)
    [without] = suite.prompts(lambda messages, *, tools=(): messages[-1]["content"], None)
    assert with_tools.answer_format == without.answer_format
    wanted = without.answer_format
    assert isinstance(wanted, AnswerFormat)
    wanted.refuse_faulty(without.item)
    assert (
        wanted.fault(said(("sky.weather", {"city": "NYC", "price": 1.5, "at": {"x": 1, "type": "z"}, "box": [1]})))
        is None
    )
    assert wanted.fault(said(("sky.weather", {"city": "NYC", "price": "1"})))
    assert without.text.startswith("Answer with calls of these functions only")
    assert without.text.endswith("Weather?")
    assert json.loads(with_tools.text)[0] == [{"role": "user", "content": "Weather?"}]


def test_missing_data_are_named() -> None:
    with pytest.raises(UserError, match="needs `--data-dir DIR`"):
        SUITES["bfcl"]("", Source())


def chosen(possible: Any) -> Any:
    """The first possible value; optional arguments are left out."""
    if isinstance(possible, dict):
        lists = {key: of if isinstance(of, list) else [of] for key, of in possible.items()}
        return {key: chosen(of[0]) for key, of in lists.items() if "" not in of}
    return [*map(chosen, possible)] if isinstance(possible, list) else possible


@pytest.mark.skipif(
    not any((DATA / name).is_dir() for name in ("bfcl", "bfcl_eval/data")), reason="MTBENCH_DATA_DIR has no bfcl"
)
def test_the_real_possible_answers_are_right() -> None:
    """Of 2,311 rows, two have an argument without any possible value, which nobody can answer."""
    suite: Any = SUITES["bfcl"]("", Source(data_dir=DATA))
    expected = {item: rows for item, rows in suite._expected.items() if "[]" not in json.dumps(rows)}
    assert len(expected) > 2200
    answers = {i: said(*[(n, chosen(of)) for row in rows for n, of in row.items()]) for i, rows in expected.items()}
    assert [item for item, score in suite.score(answers).items() if score != 1] == []
