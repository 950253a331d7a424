"""When the corpus of the audit calls a name right, wrong or unexplained."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from audit_matrix import judged, matrix, rates

HARMLESS = {"near-tie", "rounding", "stop/budget"}


def found(**named: int) -> dict[str, Any]:
    """Return an audit of 16 answers; `named`: answers of each class."""
    findings = [
        {"name": (of := name.replace("_", "/").replace("0", "-")), "fault": of not in HARMLESS, "evidence": "as it is"}
        for name, count in named.items()
        for _ in range(count)
    ]
    return {"findings": findings, "pairs": [{"items": 16}], "explained": not any(f["fault"] for f in findings)}


@pytest.mark.parametrize(
    ("named", "verdict"),
    [
        ({"cache_position": 9}, "right"),
        ({"cache_position": 9, "near0tie": 3}, "right"),
        ({"cache_position": 9, "unexplained": 3}, "right"),
        ({"cache_position": 9, "weights": 1}, "wrong"),
        ({"cache_position": 3, "unexplained": 9}, "unexplained"),
        ({"unexplained": 9, "weights": 1}, "wrong"),
        ({"near0tie": 9, "unexplained": 3}, "wrong"),
        ({"weights": 9}, "wrong"),
        ({}, "no effect"),
    ],
)
def test_a_verdict_needs_most_answers_and_no_wrong_name(named: dict[str, int], verdict: str) -> None:
    assert judged({"expected": "cache/position", "fails": False}, found(**named))["verdict"] == verdict


def test_a_plan_that_is_not_kept_needs_exit_code_1() -> None:
    row = {"expected": "stop/budget", "fails": True}
    assert judged(row, found(stop_budget=9))["verdict"] == "wrong"
    assert judged(row, found(stop_budget=9) | {"explained": False})["verdict"] == "right"


def test_the_matrix_counts_each_plant_and_each_honest_pair_once() -> None:
    rows = [
        {"expected": "weights", "named": {"weights": 5, "near-tie": 2}, "verdict": "right"},
        {"expected": "weights", "named": {}, "verdict": "no effect"},
    ]
    counts = matrix(rows, [{"named": {}}, {"named": {"near-tie": 2}}])
    assert counts == {"weights": {"weights": 1, "no effect": 1}, "honest": {"same": 1, "near-tie": 1}}
    assert rates(rows)["plants"] == 1
    assert rates(rows)["right"][0] == 1
