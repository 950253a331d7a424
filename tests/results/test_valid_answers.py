"""Answers that must meet a JSON schema, in an engine that holds them to it: their share, comparison, grade and page."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_engine import PLUGIN, Scripted, install
from stored import stored_json
from whole import forget_plugin_files

import mtbench
from mtbench import plugins
from mtbench.models.loading import inspect
from mtbench.plan.directory import RunDirectory

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TEXT = '{"city": "Rome"}'


@pytest.fixture
def formatted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """The tokens of TEXT. The scripted engine is a plugin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plugins.load_file(PLUGIN)
    tokenizer = inspect("embedded:tiny/ar", offline=True, needs_mask=False).tokenizer
    yield tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    forget_plugin_files()


@pytest.mark.whole
def test_a_draft_that_is_accepted_across_a_quote_makes_answers_invalid(formatted: list[int], tmp_path: Path) -> None:
    """The server gets the schema, and mtbench's loop decodes freely. What the schema forces is no fault of an arm.

    The items are counted, the first is named with its fault, and an audit follows.
    """
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    asked = [{"messages": [{"role": "user", "content": f"City {n}"}], "response_format": wanted} for n in range(12)]
    (prompts := tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    install(Scripted, "scripted==1", says=formatted, loses=formatted[1], wants={"schema": SCHEMA})
    found = mtbench.run(
        suite=f"conversations:{prompts}",
        family="tiny",
        method=("ar", "ar:engine=scripted", "prompt-lookup:engine=scripted"),
        batch_size=2,
        rounds=1,
        max_new_tokens=len(formatted),
        out=tmp_path / "run",
    ).record
    ours, plain, drafted = found["cells"]
    run = RunDirectory.open(tmp_path / "run")
    [suite] = stored_json(run, "plan.json")["suites"]
    odd = [item for item, share in stored_json(run, "valid.json")[drafted["cell"]].items() if not share]
    assert set(odd) == {item["item"] for item in suite["items"] if sum(item["prompt_ids"]) % 2}
    assert 2 < len(odd) < 10
    assert [cell["valid"]["value"] for cell in (ours, plain, drafted)] == [0, 1, 1 - len(odd) / 12]
    free = "answers are not constrained: its engine takes no JSON schema"
    assert [free in cell["flags"] for cell in (ours, plain, drafted)] == [True, False, False]
    [versus] = drafted["valid_vs"]
    assert (versus["baseline"], versus["lost"], versus["gained"], versus["n"]) == (plain["arm"], len(odd), 0, 12)
    assert versus["ci_high"] < -0.02
    assert plain["lossless"] is None
    graded = drafted["lossless"]
    assert (graded["grade"], graded["identical"], graded["first_divergence"]) == ("divergent", 12 - len(odd), 13)
    judged = stored_json(run, f"lossless/{drafted['cell']}.json")["items"]
    assert {item: list(short) for item, short in judged.items()} == {item: ["13"] for item in odd}
    said = f"{odd[0]} is not valid (not JSON at character 10), and plain decoding's answer is, and the audit"
    page = (tmp_path / "run" / "report.md").read_text()
    assert said in page
    assert "| valid, % |" in page
    assert "### Valid answers compared" in page
