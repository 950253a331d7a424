"""Acceptance that collapses is flagged."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from made_records import cell_data, generation_line, result_cell, speedup
from scripted_engine import Scripted
from stages import assemble, begin_run, generate
from whole import Quiet

from mtbench.clients.serving_engine import Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.lineup.planner import make_plan
from mtbench.options.engine_options import EngineOption
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.report.main_table import notes_of
from mtbench.report.summary import warnings
from mtbench.results import collapse
from mtbench.results.decision import recommend
from mtbench.results.samples import CellData


def drafting(length: float, engine: str = "scripted", *, method: str = "speculative", **given: Any) -> CellData:
    """Eight blocks with answers of 60 tokens, about `length` of them per forward after the prefill."""
    lines = [
        generation_line(
            item=f"a/{n}/0", block=n, token_ids=[1] * (60 + n % 2), forwards=1 + round((59 + n % 2) / length)
        )
        for n in range(8)
    ]
    options = {"draft": "draft"} if method == "speculative" else {}
    return cell_data(
        lines, [], **{"arm": f"{method}@ar/{engine}", "method": method, "engine": engine, "options": options, **given}
    )


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """An engine with a scripted server, of which options say how many drafts of an answer are accepted."""

    class Mine(Scripted):
        title = "Scripted"
        methods: ClassVar[Table] = {"ar": lambda *_: Setting(""), "speculative": lambda *_: Setting("draft")}

        def __init__(self) -> None:
            super().__init__({})

        def launch(self, python: Path, serving: Any, port: int) -> list[str]:
            words = dict(zip(serving.options[::2], serving.options[1::2], strict=True))
            accepted = next(iter(words.values()), "accepts=0")
            self.script = {"says": [9], "accepted": int(accepted.partition("=")[2])}
            return super().launch(python, serving, port)

        @classmethod
        def python(cls) -> Path:
            return Path(sys.executable)

    SERVING_ENGINES.register("scripted")(Mine)
    yield
    SERVING_ENGINES.forget(__name__)


@pytest.mark.parametrize(
    ("cell", "twin", "text"),
    [
        (drafting(1.0), None, "its drafts are hardly ever accepted (1.00 tokens per forward)"),
        (
            drafting(1.6),
            drafting(2.4, "graph"),
            "its drafts are accepted less than those of speculative@ar/graph (1.59 and 2.33 tokens per forward)",
        ),
        (
            drafting(2.3, engine_options=["cache=fp8"], claims="lossy"),
            drafting(2.4),
            "its drafts are accepted less than those of speculative@ar/scripted (2.29 and 2.38 tokens per forward)",
        ),
    ],
)
def test_a_collapse_is_said(cell: CellData, twin: CellData | None, text: str) -> None:
    """At any level where drafts are of no use; else against the same drafts elsewhere, by the interval of the ratio."""
    assert collapse.find(cell, [cell, *([twin] if twin else [])]) == text


@pytest.mark.parametrize(
    ("cell", "twin"),
    [
        (drafting(1.3), None),
        (drafting(2.3), drafting(2.4, "graph")),
        (drafting(1.0, method="prompt-lookup"), None),
        (drafting(1.0, method="prompt-lookup"), drafting(1.6, "graph", method="prompt-lookup")),
        (drafting(1.6), drafting(2.4, "graph", options={"draft": "draft", "ahead": 9})),
        (drafting(1.0, method="ar"), None),
        (drafting(1.0, "graph", method="mars", options={"tau": 0.5}), None),
    ],
    ids=[
        "some are accepted",
        "engines count otherwise",
        "copies",
        "copies elsewhere",
        "other drafts",
        "plain",
        "lossy",
    ],
)
def test_what_is_no_collapse(cell: CellData, twin: CellData | None) -> None:
    """Each engine copies others from the text, which are often rejected. Unmasking by a threshold may be slow."""
    assert collapse.find(cell, [cell, *([twin] if twin else [])]) is None


def test_an_engine_may_hide_its_forwards() -> None:
    hidden = drafting(1.0)
    hidden.lines["a/0/0"] = generation_line(item="a/0/0", block=0)
    assert collapse.find(hidden, [hidden]) is None


def test_a_servers_collapse_is_in_the_results_and_on_the_page(tmp_path: Path) -> None:
    """Less is accepted with another cache."""
    options = ["scripted:kv-cache-dtype=accepts=9|accepts=1"]
    asked = RunRequest(
        suite=["arithmetic"],
        method=["ar", "speculative:ahead=3"],
        engine=["scripted"],
        engine_option=[*map(EngineOption.read, options)],
        limit=8,
        batch_size=[1],
        rounds=1,
        max_new_tokens=16,
    )
    run = begin_run(tmp_path / "run", make_plan(asked))
    generate(run, Quiet(), Execution(engine_options=frozenset(map(EngineOption.read, options))))
    cells = assemble(run).cells
    assert [bool(cell.collapse) for cell in cells] == [False, False, False, True]
    last = cells[-1]
    assert ("flag", f"{last.collapse}.") in notes_of(last)
    assert f"{last.arm}: {last.collapse}." in warnings(cells)


def test_a_race_names_a_collapse_before_it_keeps_plain_decoding() -> None:
    slow = speedup(value=0.8, ci_low=0.7, ci_high=0.9, verdict="slower")
    found = "its drafts are hardly ever accepted"
    arm = result_cell(arm="speculative@ar/graph", method="speculative", speedup=[slow], collapse=found)
    [decided] = recommend([result_cell(arm="ar@ar/graph", reference=True, speedup=[]), arm], max_loss=2)
    assert decided.word == "plain"
    assert (
        "look first at speculative@ar/graph: its drafts are hardly ever accepted. As it is, keep plain" in decided.text
    )
