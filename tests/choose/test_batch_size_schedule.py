"""The schedule of an engine by batch size: what is planned, measured and said of one that stalls."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from made_records import result_cell
from scripted_engine import Scripted
from stages import begin_run
from whole import Quiet

from mtbench.clients.serving_engine import Serving, Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.experiments.choose import batch_size_schedule as schedule
from mtbench.lineup.planner import make_plan
from mtbench.measure.executor import generate
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import Execution, RunRequest
from mtbench.plan.run import Run
from mtbench.report.race import steps
from mtbench.results import samples
from mtbench.results.decision import recommend
from mtbench.results.decision_format import Choice, Decision, RaceCost, Recommendation
from mtbench.results.figure_formats import Estimate

NOTHING = Estimate(value=None, ci_low=None, ci_high=None)
SCRIPT: dict[str, object] = {}  # of servers with a schedule


@pytest.fixture(autouse=True)
def scheduling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that holds several settings in one server. Its blocks are short, and independent."""
    monkeypatch.setattr(samples, "SERVED_UNIT_S", 0.0)

    class Scheduling(Scripted):
        package = "scheduling==1"
        methods: ClassVar[Table] = {
            "ar": lambda method, drafts: Setting(""),
            "prompt-lookup": lambda method, drafts: Setting("ngram", (str(method.ahead),)),
        }

        def __init__(self) -> None:
            super().__init__({"takes_s": 0.06})

        def scheduled(self, settings: Mapping[int, Setting]) -> Setting | None:
            table = {size: setting.words for size, setting in settings.items()}
            return Setting("ngram", (json.dumps(table),)) if len({*table.values()}) > 1 else None

        def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
            more = SCRIPT if "{" in "".join(serving.setting.words) else {}
            started = Scripted(self.script | more).launch(python, serving, port)
            return [*started, str(serving.rows), *serving.setting.words, "--port", str(port)]

        @classmethod
        def installed(cls) -> Path:
            return Path(sys.executable)

    SERVING_ENGINES.register("scheduling")(Scheduling)
    yield
    SCRIPT.clear()
    SERVING_ENGINES.forget(__name__)


def race(path: Path, *, limit: int = 32, decoded: bool = True) -> Run:
    """A run of two arms at two batch sizes, of which one prompt is decoded."""
    request = RunRequest(
        family="tiny",
        method=("ar", "prompt-lookup:ahead=4"),
        engine=("scheduling",),
        batch_size=(1, 4),
        limit=limit,
        rounds=1,
        max_new_tokens=2,
    )
    plan = make_plan(request)
    plan = plan.changed(groups=plan.groups[::-1])
    run = Run.open(begin_run(path, plan))
    if decoded:
        generate(run, Quiet(), Execution(time_budget_s=0.0))
    return run


def answers(run: Run, **chosen: str | None) -> list[Recommendation]:
    """Recommendations of an arm by batch size; None: plain decoding; "": no answer."""
    plain = "ar@ar/scheduling"
    cells = [
        result_cell(**{name: getattr(c, name) for name in ("cell", "arm", "suite", "batch_size", "engine")})
        for c in run.plan.cells
    ]
    found = []
    for rec in recommend(cells, max_loss=2):
        arm = chosen[f"b{rec.batch_size}"]
        choice = Choice(arm=f"{arm}@ar/scheduling", speedup=NOTHING, accuracy=None) if arm else None
        word: Any = "use" if arm else "plain" if arm is None else "cannot tell"
        found.append(rec.changed(same_tokens=choice, word=word, baseline=plain))
    return found


LOOKUP = "prompt-lookup:ahead=4"


def test_a_schedule_that_stalls_at_its_threshold_is_named(tmp_path: Path) -> None:
    """Beside the server that was chosen for the size. It is not offered, and a second call decodes nothing again."""
    run = race(tmp_path / "race")
    found = answers(run, b1=LOOKUP, b4=None)
    SCRIPT["stalls"] = 4
    now = time.monotonic()  # the race has taken most of the budget
    schedule.measure(run, found, Execution(time_budget_s=1000.0, began=now - 700), Quiet(), now + 300)
    measured = schedule.measured(run, found)
    assert measured is not None
    at_4, at_3 = measured.sizes
    assert (at_4.batch_size, at_4.arm, at_4.verdict.word) == (4, "ar@ar/scheduling", "slower")
    assert (at_3.batch_size, at_3.arm) == (3, f"{LOOKUP}@ar/scheduling")
    assert at_4.ratio.value is not None
    assert at_4.ratio.value < 0.5
    assert at_3.verdict.word != "slower"
    assert measured.command is not None
    assert '"4": []' in measured.command
    assert " 4 " in measured.command
    decision = Decision(
        slo_s={},
        over_slo=[],
        recommendations=[],
        looks=[],
        refused={},
        serving={},
        schema_version=2,
        run_id="x",
        headline="",
        complete=True,
        max_loss=1,
        spent=RaceCost(forwards=0, forwards_full=0, decoding_s=0, decoding_full_s=0),
        schedule=measured,
    )
    [(note, command)] = steps(decision, "DIR")
    assert command == ""
    assert note.endswith("it stalls at batch size 4, so do not use it.")
    again = Quiet(until=0)
    schedule.measure(run, found, Execution(), again, math.inf)
    assert schedule.measured(Run.open(RunDirectory(tmp_path / "race")), found) == measured


def test_a_schedule_is_measured_within_the_budget_and_with_enough_prompts(tmp_path: Path) -> None:
    run = race(tmp_path / "race")
    found = answers(run, b1=LOOKUP, b4=None)
    schedule.measure(run, found, Execution(), Quiet(), time.monotonic())
    measured = schedule.measured(run, found)
    assert measured is not None
    assert measured.reason == schedule.NOT_RUN
    few = race(tmp_path / "few", limit=8)
    found = answers(few, b1=LOOKUP, b4=None)
    schedule.measure(few, found, Execution(), Quiet(), math.inf)
    measured = schedule.measured(few, found)
    assert measured is not None
    assert measured.reason == "2 of 6 blocks"


def test_without_several_answers_there_is_no_schedule(tmp_path: Path) -> None:
    run = race(tmp_path / "race", decoded=False)
    for chosen in ({"b1": LOOKUP, "b4": LOOKUP}, {"b1": LOOKUP, "b4": ""}, {"b1": None, "b4": None}):
        assert schedule.measured(run, answers(run, **chosen)) is None
