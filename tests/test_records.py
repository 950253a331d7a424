"""Records: what is read from files, how it is refused, and that what is written back is what was read."""

import copy
import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from made_records import speedup
from pydantic import BaseModel
from stored import stored_json, stored_lines

import mtbench
from mtbench.cli.schemas import SCHEMAS, schema
from mtbench.errors import UserError
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import (
    EnergyRecord,
    Environment,
    FailureLine,
    GenerationLine,
    MemoryRecord,
    PreparationLine,
    ReadingLine,
    Readings,
    RescoringRecord,
    Scores,
    TimingLine,
)
from mtbench.plan.plan import Plan
from mtbench.records import Record, Sparse, dump, parse, read_json, read_lines, validate
from mtbench.results.figure_formats import Accuracy
from mtbench.results.format import Results
from mtbench.results.publication import Published

STORED = Path(__file__).parents[1] / "reports" / "2026-11-21_tiny_cpu_methods"
PUBLISHED = sorted((Path(str(files("mtbench"))) / "results" / "published").glob("*.json"))
WHOLE: dict[str, type[BaseModel]] = {
    "plan.json": Plan,
    "results.json": Results,
    "environment.json": Environment,
    "energy.json": EnergyRecord,
    "scores.json": Scores,
    "readings.json": Readings,
    "lossless/*.json": RescoringRecord,
}
LINES: dict[str, type[BaseModel]] = {
    "generations/*.jsonl": GenerationLine,
    "timings/*.jsonl": TimingLine,
    "preparation.jsonl": PreparationLine,
    "failures.jsonl": FailureLine,
    "lossless/readings.jsonl": ReadingLine,
}


def check_round_trip(file: Path, record: type[BaseModel]) -> None:
    assert json.dumps(dump(read_json(file, record))) == json.dumps(json.loads(file.read_text()))


@pytest.mark.parametrize("name", WHOLE)
def test_a_document_of_a_run_comes_back_as_it_was(small_run: RunDirectory, name: str) -> None:
    """Every key, in its order, with its value."""
    found = list(small_run.path.glob(name))
    assert found
    for file in found:
        check_round_trip(file, WHOLE[name])


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_a_run_comes_back_as_it_was(small_run: RunDirectory, name: str) -> None:
    for file in small_run.path.glob(name):
        written = [json.dumps(dump(line)) + "\n" for line in read_lines(file, LINES[name])]
        assert "".join(written) == file.read_text()


def test_other_documents_come_back_as_they_were(tmp_path: Path) -> None:
    """Published tables; stored results, to which no key is added that they do not have."""
    assert PUBLISHED
    for file in PUBLISHED:
        check_round_trip(file, Published)
    check_round_trip(Path(__file__).parent / "frozen" / "run" / "expected" / "results.json", Results)
    (tmp_path / "memory.json").write_text('{"measured": 1048576, "failed": null}')
    check_round_trip(tmp_path / "memory.json", MemoryRecord)


def test_an_older_plan_gains_the_keys_that_it_lacks() -> None:
    """With their defaults."""
    older = json.loads((STORED / "plan.json").read_text())
    del older["request"]["chat_template_kwargs"]
    newer = dump(parse(json.dumps(older).encode(), Plan, "plan.json", ""))
    assert newer["request"]["chat_template_kwargs"] == {}


def test_an_older_plan_opens_unless_a_draft_has_a_token_map(small_run: RunDirectory) -> None:
    """Earlier versions wrote the key and the option without a token map, too."""
    written = json.loads((small_run.path / "plan.json").read_text())
    older = copy.deepcopy(written) | {"token_maps": {}}
    for cell in older["cells"]:
        cell["options"]["token_map"] = None
    assert json.dumps(dump(validate(older, Plan, "plan.json"))) == json.dumps(written)
    older["token_maps"]["map.json"] = "0" * 64
    with pytest.raises(UserError, match=r"plan.json: token_maps is not known to this version of mtbench; restore"):
        validate(older, Plan, "plan.json")


def test_prompts_of_a_private_suite_are_never_written(small_run: RunDirectory) -> None:
    plan = read_json(small_run.path / "plan.json", Plan)
    suite = plan.suites[0].changed(withheld=plan.suites[0].digest())
    assert suite.prompt(0)
    stored = dump(plan.changed(suites=[suite]))["suites"][0]
    assert [item["prompt_ids"] for item in stored["items"]] == [[]] * len(suite.items)


def test_null_and_absent_are_two_things() -> None:
    """A key that was given as null is written as null, a key that was not given is not written."""
    own, other = speedup(), speedup(includes_engine=True, plain=None)
    assert "plain" not in dump(own)
    assert (own.plain, own.includes_engine) == (None, False)
    assert dump(other)["plain"] is None
    with pytest.raises(UserError, match="stage is null: null is not allowed; leave the key out"):
        validate({"cell": "a", "error": "b", "stage": None}, FailureLine, "failures.jsonl")
    part: dict[str, Any] = {"metric": "exact", "value": 1.0, "stderr": 0.1, "ci_low": 0.9, "ci_high": 1.0, "n": 2}
    assert list(dump(Accuracy(**part))) == list(part)
    assert list(dump(Accuracy(**part, tasks=2)))[1] == "tasks"


class Inner(Sparse):
    """For the messages."""

    count: int = 0


class Outer(Record):
    """For the messages."""

    name: str
    parts: dict[str, list[Inner]]
    free: dict[str, Any]


GOOD: dict[str, Any] = {"name": "a", "parts": {}, "free": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "f: name is null: input should be a valid string; restore it or start a new run."),
        ({"name": "x" * 99}, None),
        ({"name": 1, "free": 1}, "f: name is 1: input should be a valid string (and 1 more); restore"),
        (
            {"parts": {"a": [{}, {"count": 1.5}]}},
            "f: parts.a[1].count is 1.5: input should be a valid integer; restore",
        ),
        ({"parts": {"a": [{"count": "1"}]}}, "f: parts.a[0].count is '1': input should be a valid integer; restore"),
        ({"soul": 1}, "f: soul is not known to this version of mtbench; restore"),
        ({"free": [1]}, "f: free is an array: input should be a valid dictionary; restore"),
    ],
)
def test_what_is_refused_is_said_in_one_line(change: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert validate(GOOD | change, Outer, "f").name == change["name"]
        return
    with pytest.raises(UserError) as refused:
        validate(GOOD | change, Outer, "f")
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json is missing; restore it or start a new run"):
        read_json(tmp_path / "plan.json", Plan)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan\.json has no schema version; this mtbench reads 1; restore it"):
        read_json(tmp_path / "plan.json", Plan)


@pytest.mark.parametrize("kind", ["plan", "results"])
def test_another_version_is_refused_before_anything_else(small_run: RunDirectory, kind: str) -> None:
    stored = stored_json(small_run, f"{kind}.json") | {"schema_version": 9, "new key": 1, "cells": 3}
    with pytest.raises(UserError, match=rf"^{kind}.json has schema version 9; this mtbench reads \d; restore it or"):
        validate(stored, WHOLE[f"{kind}.json"], f"{kind}.json")


def test_results_of_another_version_are_made_again_by_report(small_run: RunDirectory, tmp_path: Path) -> None:
    """If that can read the rest of the run."""
    shutil.copytree(small_run.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "results.json").write_text(json.dumps(stored_json(small_run, "results.json") | {"schema_version": 1}))
    with pytest.raises(UserError, match=f"this mtbench reads 3; make it again with `mtbench report {tmp_path}`"):
        mtbench.read(tmp_path)
    (tmp_path / "race.json").write_text('{"looks": {}}')
    with pytest.raises(UserError, match=r"race.json has no schema version; this mtbench reads 2; .*`mtbench choose"):
        mtbench.read(tmp_path)


def test_lines_follow_the_rules_of_a_file_that_is_only_appended_to(tmp_path: Path) -> None:
    """An absent file has no lines; a torn last line is left out; any other broken line has its number."""
    file = tmp_path / "failures.jsonl"
    assert read_lines(file, FailureLine) == []
    good = '{"cell": "a", "error": "b"}\n'
    file.write_text(good + '{"cell": "b", "error": "b", "stage": "score"}\n' + '{"cell": "c", "err')
    assert [dump(line) for line in read_lines(file, FailureLine)] == [
        {"cell": "a", "error": "b"},
        {"cell": "b", "error": "b", "stage": "score"},
    ]
    file.write_text(good + '{"cell": "c", "error": "d"}')
    assert len(read_lines(file, FailureLine)) == 1
    for broken in ("", '{"cell": "c", "err', "[]", "null", '{"cell": "c"}', '{"cell": "c", "error": 1}'):
        file.write_text(good + broken + "\n" + good)
        with pytest.raises(UserError, match=r"failures\.jsonl, line 2: .*; this file is append-only, so something"):
            read_lines(file, FailureLine)


@pytest.mark.parametrize("kind", ["generation", "timing", "plan", "results"])
def test_a_run_is_as_the_schemas_say(small_run: RunDirectory, kind: str) -> None:
    """All that a real run wrote, the unscored suite and what could not be measured included; no NaN is in a file."""

    def never(constant: str) -> Any:
        raise AssertionError(f"{constant} in a file of the run")

    check = Draft202012Validator(schema(kind))
    texts = [file.read_text() for file in small_run.path.glob(f"{kind}.json")]
    texts += [line for file in small_run.path.glob(f"{kind}s/*.jsonl") for line in file.read_text().splitlines()]
    assert texts
    for text in texts:
        check.validate(json.loads(text, parse_constant=never))


def described(part: Any) -> Iterator[tuple[str, Any]]:
    """Every property of a schema."""
    for owner in (part, *part.get("$defs", {}).values()):
        yield from owner.get("properties", {}).items()


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_valid_and_describes_every_field(kind: str) -> None:
    Draft202012Validator.check_schema(schema(kind))
    assert [name for name, field in described(schema(kind)) if not field.get("description")] == []


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of everything inside a document."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


MUTANTS: tuple[Any, ...] = (None, True, "odd", -1, 1.5, [], {})


@pytest.mark.parametrize("kind", ["generation", "timing", pytest.param("results", marks=pytest.mark.slow)])
def test_schema_and_record_refuse_the_same(small_run: RunDirectory, kind: str) -> None:
    """A document with one value changed, one key dropped or one key added is refused by both or by neither.

    But for whole numbers written as 1.0, which only JSON Schema calls integers.
    """
    if kind == "results":
        document = stored_json(small_run, "results.json")
        document["cells"] = document["cells"][-1:]
        document["environment"]["sessions"] = []
    else:
        [document, *_] = stored_lines(small_run, f"{kind}s/{next(small_run.path.glob(f'{kind}s/*mars*')).name}")
    check, record = Draft202012Validator(schema(kind)), SCHEMAS[kind][0]
    for path in list(places(document)):
        for mutant in (*MUTANTS, "drop", "add"):
            changed = copy.deepcopy(document)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            if mutant == "drop":
                del owner[path[-1]]
            elif mutant == "add" and isinstance(owner[path[-1]], dict):
                owner[path[-1]]["no such key"] = True
            else:
                owner[path[-1]] = mutant
            try:
                record.model_validate(changed)
                accepted = True
            except ValueError:
                accepted = False
            assert check.is_valid(changed) == accepted, (path, mutant)
