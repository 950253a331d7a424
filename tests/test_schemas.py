"""The formats on disk: what a run writes is what the schemas that ship with mtbench say."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from schemas import validator

from mtbench.runs.directory import RunDirectory

KINDS = ("generation", "timing", "plan", "results")


def never(constant: str) -> Any:
    raise AssertionError(f"{constant} in a file of the run")


def documents(run: RunDirectory, kind: str) -> Iterator[Any]:
    """Every document of a kind, read by a parser that knows no NaN."""
    if kind in ("plan", "results"):
        yield json.loads((run.path / f"{kind}.json").read_text(), parse_constant=never)
    for file in sorted((run.path / f"{kind}s").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            yield json.loads(line, parse_constant=never)


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_themselves_valid(kind: str) -> None:
    """Each schema is one by draft 2020-12."""
    Draft202012Validator.check_schema(validator(kind).schema)


LATER = {  # keys that runs of earlier versions do not have
    "plan": {"plugins"},
    "timing": {"cpu_s", "disturbed", "histogram", "reported_by", "uncompiled"},
    "results": {"price_per_hour"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_as_the_schemas_say(small_run: RunDirectory, kind: str) -> None:
    """All that a real run wrote, the unscored suite and what could not be measured included, passes."""
    found = list(documents(small_run, kind))
    assert found
    for document in found:
        validator(kind).validate(document)


@pytest.mark.parametrize("kind", KINDS)
def test_no_key_may_be_missing(small_run: RunDirectory, kind: str) -> None:
    """Every key that a schema names at the top is required, so a renamed one is noticed. Older runs lack some."""
    document = next(documents(small_run, kind))
    check = validator(kind)
    assert isinstance(check.schema, dict)
    for key in check.schema["properties"].keys() - LATER.get(kind, set()):
        assert not check.is_valid({k: v for k, v in document.items() if k != key}), key


def test_what_may_be_null_and_what_not(small_run: RunDirectory) -> None:
    """A line without its token ids is refused, as are no forwards; an engine that hides its counts is not."""
    line = next(documents(small_run, "generation"))
    assert not validator("generation").is_valid({**line, "token_ids": None})
    assert not validator("generation").is_valid({**line, "forwards": 0})
    hidden = dict.fromkeys(("forwards", "commits", "positions_fed", "draft_forwards", "drafted"))
    assert validator("generation").is_valid({**line, **hidden})


def test_acceptance_is_whole_or_null(small_run: RunDirectory) -> None:
    """Every owner's figure has its place, be it null; a share is at most 1, and a floor has two batch sizes."""
    results, check = next(documents(small_run, "results")), validator("results")
    told = next(c for c in results["cells"] if c["acceptance"] and c["lossless"])

    def valid(**changes: Any) -> bool:
        return check.is_valid({**results, "cells": [{**told, **changes}]})

    acceptance, lossless = told["acceptance"], told["lossless"]
    assert valid(acceptance=None)
    assert valid(acceptance={**acceptance, "derived": dict.fromkeys(acceptance["derived"]), "per_position": None})
    assert not valid(acceptance={**acceptance, "derived": {"vllm": 1.5}})
    assert not valid(acceptance={**acceptance, "per_position": [1.2]})
    assert valid(lossless={**lossless, "floor": None})
    assert not valid(lossless={**lossless, "floor": {**lossless["floor"], "batch_sizes": [1]}})
    assert not valid(tasks=[{"task": "qa"}])
