"""What a plan says beforehand of a verdict on accuracy: how many items it takes, how long, and whether it has them."""

import re
from typing import Any

import pytest
from made_runs import MadeRun, answer

from mtbench.document.console import Terminal
from mtbench.experiments import run
from mtbench.runs.accuracy_needs import accuracy_needs
from mtbench.runs.plan import Cell, Plan
from mtbench.runs.planner import make_plan
from mtbench.runs.run_request import RunRequest
from mtbench.runs.time_estimate import Estimate
from mtbench.statistics import n_needed

AR, LOSSY, OTHER = "arithmetic.ar.ar.graph.b2", "arithmetic.ar.mars.graph.b2", "arithmetic.ar.draft.graph.b2"
BASELINE = "ar@ar/graph"


def plan_of(items: int = 40, cells: dict[str, dict[str, Any]] | None = None, **given: Any) -> Plan:
    """A plan in blocks of two, in which every arm but `ar` is lossy and compared with `ar`. cells: changes by cell."""
    plan = MadeRun({name: [answer("a")] * items for name in (AR, LOSSY, OTHER)}, **given).plan()
    lossy: dict[str, Any] = {"claims": "lossy", "baselines": [BASELINE]}

    def changed(cell: Cell) -> Cell:
        return cell.changed(**({} if cell.cell == AR else lossy) | (cells or {}).get(cell.cell, {}))

    return plan.changed(cells=[*map(changed, plan.cells)])


def test_the_items_are_those_of_the_test_that_decides() -> None:
    """With 5 % of the items right in one arm only, no true difference, and Holm over the arms of one baseline."""
    [need] = accuracy_needs(plan_of())
    expected = n_needed(25, 25, 1000, 0.02, arms=2)
    assert expected is not None
    assert (need.needed, need.arms, need.planned, need.enough) == (expected.n, 2, 40, False)
    assert 700 < expected.n < 1500


def test_a_wider_margin_and_fewer_arms_take_fewer_items() -> None:
    """An arm with a fault is not tested."""
    [need] = accuracy_needs(plan_of())
    [wide] = accuracy_needs(plan_of(request={"max_loss": 10.0}))
    [single] = accuracy_needs(plan_of(cells={OTHER: {"fault": "none"}}))
    assert (single.arms, wide.arms) == (1, 2)
    assert (wide.needed or 0) < (single.needed or 0) < (need.needed or 0)


def test_an_arm_that_promises_the_baselines_tokens_is_not_tested() -> None:
    """It is tested against another baseline than the one whose tokens it promises."""
    lossless = {"claims": "lossless", "lossless_reference": BASELINE}
    [need] = accuracy_needs(plan_of(cells={OTHER: lossless}))
    assert need.arms == 1
    assert accuracy_needs(plan_of(cells={OTHER: lossless, LOSSY: lossless})) == []
    [other] = accuracy_needs(plan_of(cells={OTHER: lossless | {"lossless_reference": "ar@mars/graph"}}))
    assert other.arms == 2


@pytest.mark.parametrize("given", [{"metric": None}, {"cells": {AR: {"length": "fixed"}}}], ids=["metric", "fixed"])
def test_without_scores_nothing_is_needed(given: Any) -> None:
    assert accuracy_needs(plan_of(**given)) == []


def test_the_time_is_scaled_by_items() -> None:
    """Round 1 grows with the items; later rounds repeat the same blocks."""
    plan = plan_of(request={"max_loss": 10.0})
    [need] = accuracy_needs(plan.changed(groups=[plan.groups[0].changed(rounds=[20, 16, 16])]))
    assert need.needed is not None
    assert need.time_s(3.0) == pytest.approx(need.needed / 2 * 3.0 + 32 * 3.0)


@pytest.mark.parametrize(
    ("limit", "margin", "endings"),
    [
        (12, 0.02, ["planned: 6, too few; only the largest batch size has all items", "12, too few; raise `--limit`"]),
        (80, 0.1, ["planned: 24, too few; only the largest batch size has all items", "planned: 80, enough"]),
    ],
)
def test_a_dry_run_says_whether_the_items_suffice(
    limit: int, margin: float, endings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each suite and batch size, and one with the assumption."""
    plan = make_plan(RunRequest(limit=limit, method=["ar", "ar:on=mars"], batch_size=(1, 8), max_loss=100 * margin))
    small = plan.groups[0]
    blocks = small.blocks[: min(24, limit // 2)]
    plan = plan.changed(groups=[small.changed(blocks=blocks, rounds=[len(blocks)]), plan.groups[1]])
    monkeypatch.setattr(run, "estimate", lambda plan, show: Estimate([60.0, 1.0], "if so"))
    run.EXPERIMENT.dry_run(plan, (), Terminal(), Terminal(stderr=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("items for a verdict on accuracy (assumed: true difference 0, 5% of the items")
    assert [line.endswith(end) for line, end in zip(lines[-2:], endings, strict=True)] == [True, True], lines[-2:]
    assert lines[-2].startswith("arithmetic, batch size 1, 1 arm: `not worse` within ")
    assert re.search(r"items, [\d.]+ (min|h); planned", lines[-2])
