"""The plans of two builds: cut to what a process runs, and hashed by the work they ask for."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from stages import begin_run
from whole import plan_of

from mtbench.errors import UserError
from mtbench.experiments.gate import plans
from mtbench.experiments.gate.plans import Planned
from mtbench.lineup.planner import make_plan
from mtbench.plan.checks import refuse_faulty
from mtbench.plan.plan import Plan, RunRequest
from mtbench.records import dump

AR, MARS = "arithmetic.ar.ar.graph.b1", "arithmetic.mars.mars.graph.b1"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned.read(begin_run(tmp_path_factory.mktemp("plan") / "run", plan_of(4)).path)


def test_a_cut_plan_is_a_plan(planned: Planned) -> None:
    """One of two cells, two of four blocks, three rounds: `generate` accepts it; no cell refers to one that is gone."""
    cut = Plan.model_validate(plans.only(planned.stored, [MARS], blocks=2, rounds=3))
    refuse_faulty(cut)
    assert [cell.cell for cell in cut.cells] == [MARS]
    assert cut.groups[0].rounds == [2, 2, 2]
    assert cut.groups[0].blocks == planned.plan.groups[0].blocks[:2]
    assert cut.cells[0].baselines == []
    both = Plan.model_validate(plans.only(planned.stored, [AR, MARS]))
    assert [cell.baselines for cell in both.cells] == [cell.baselines for cell in planned.plan.cells]
    assert both.groups[0].blocks == planned.plan.groups[0].blocks


def test_a_cut_plan_refers_to_no_arm_of_another_group() -> None:
    """The reference has passed at batch size 1 and not at 2: the cell at 1 has no baseline left, that at 2 has."""
    stored = dump(make_plan(RunRequest(limit=4, batch_size=(1, 2), method=("ar", "mars"))))
    cut = Plan.model_validate(plans.only(stored, [MARS, f"{AR[:-1]}2", f"{MARS[:-1]}2"]))
    refuse_faulty(cut)
    assert [bool(cell.baselines) for cell in cut.cells if cell.method == "mars"] == [False, True]


def test_fields_of_other_versions_stay(planned: Planned) -> None:
    """A build gets the plan that it wrote, with what this mtbench does not know."""
    stored = {**planned.stored, "newer": 1}
    assert plans.only(stored, [AR])["newer"] == 1


def test_the_hash_is_of_the_work(planned: Planned) -> None:
    """Words about a cell do not change it; blocks, rounds, cells and options do."""
    stored = json.loads(json.dumps(planned.stored))
    whole = plans.sha256(stored)
    stored["cells"][0]["flags"] = ["another word"]
    assert plans.sha256(stored) == whole
    assert plans.sha256(plans.only(stored, [AR, MARS], blocks=2)) != whole
    assert plans.sha256(plans.only(stored, [AR, MARS], rounds=2)) != whole
    assert plans.sha256(plans.only(stored, [AR])) != whole
    stored["cells"][1]["options"]["tau"] = 0.5
    assert plans.sha256(stored) != whole


def test_other_work_is_refused_and_a_new_option_or_cell_is_told(planned: Planned) -> None:
    """Of a private suite a plan has the hash of the prompts only. A method's new option has a default."""

    def other(change: Callable[[Any], object]) -> Planned:
        stored = json.loads(json.dumps(planned.stored))
        change(stored)
        return planned._replace(plan=Plan.model_validate(stored), stored=stored)

    refused: list[tuple[Callable[[Any], object], str]] = [
        (lambda s: s["suites"][0]["items"][0]["prompt_ids"].append(1), "digest of prompts of arithmetic: "),
        (lambda s: s["suites"][0].update(withheld="0" * 64), "digest of prompts of arithmetic: "),
        (lambda s: s["groups"][0]["blocks"].reverse(), "blocks of arithmetic at batch size 1, static: "),
        (lambda s: s["cells"][1]["options"].update(tau=0.5), rf"options\.tau of {re.escape(MARS)}: 1\.0 in base, 0\.5"),
    ]
    for change, says in refused:
        with pytest.raises(UserError, match=says):
            plans.compare(planned, other(change))
    added = other(lambda s: s["cells"][1]["options"].update(fresh=1))
    fewer = planned._replace(plan=Plan.model_validate(plans.only(planned.stored, [AR], rounds=3)))
    [option] = plans.compare(planned, added)
    assert (option.level, option.text) == ("note", "options.fresh is known in head only, where it is 1")
    assert {(f.kind, f.level, f.cell) for f in plans.compare(planned, fewer)} >= {("vanished", "fail", MARS)}
    assert {(f.kind, f.level, f.cell) for f in plans.compare(fewer, planned)} >= {("new", "note", MARS)}
