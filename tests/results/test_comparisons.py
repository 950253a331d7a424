"""Arms by several engines, with two ways of batching and several batch sizes: only alike cells are compared."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_records import cell_data, doubted, generation_line, result_cell, speedup
from rich.console import Console
from schemas import validator
from small import save_small
from stages import assemble, generate, read_stored, score, write_report

from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.records import dump
from mtbench.report.progress import RunProgress
from mtbench.report.summary import over_batch_sizes
from mtbench.report.terminal import results_tables
from mtbench.results.comparisons import compare, floor, stops_paying
from mtbench.results.figure_formats import Alone, Percentiles, Verdict
from mtbench.results.format import BreakEven, ResultCell, Results
from mtbench.results.lossless_format import Floor
from mtbench.results.samples import CellData
from mtbench.results.subtasks import by_part

pytestmark = pytest.mark.whole

OUTSIDE = ("hf-generate@ar", "hf-generate:cache=static@ar")
UNMEASURED = doubted("3 of 6 blocks")
BARELY = Verdict(word="inconclusive", alone=Alone(word="faster", level=0.975, low=1.02, high=1.08, arms=4, looks=1))
HIDDEN = (
    *("prefill_s", "decode_s", "device_s", "parts", "kv_bytes"),
    *("draft_forwards", "draft_forwards_per_token", "draft_s", "head_s", "acceptance"),
)


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> RunRequest:
    root = tmp_path_factory.mktemp("checkpoints")
    return RunRequest(
        checkpoint={"ar": str(save_small(root / "ar", 1)), "mars": str(save_small(root / "mars", 2))},
        method=["ar", "ar:on=mars", "mars:tau=0.3", "hf-generate", "hf-generate:cache=static"],
        batch_size=(1, 2, 3),
        batching=("static", "refill"),
        limit=33,
        rounds=2,
        max_new_tokens=2,
        device="cpu",
    )


@pytest.fixture(scope="module")
def run(request_: RunRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A whole run and its report, without the pass for peak memory."""
    plan = make_plan(request_)
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "run")
    run.write_json("environment.json", {"command": ["mtbench", "run"]})
    run.write_json("plan.json", dump(plan))
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
    with RunProgress(Console(quiet=True)) as progress:
        generate(run, progress)
    score(run)
    write_report(run, assemble(run))
    return run


@pytest.fixture(scope="module")
def results(run: RunDirectory) -> Results:
    return run.read("results.json", Results)


def cells_of(results: Results, batch_size: int, batching: str = "static") -> dict[str, ResultCell]:
    found = (c for c in results.cells if (c.batch_size, c.batching) == (batch_size, batching))
    return {c.arm: c for c in found}


def test_a_refilled_block_has_eight_prompts_for_every_slot(request_: RunRequest) -> None:
    """Blocks hold all items once, are alike in size and have at least 8R items. One slot has no refilled group, and
    an outside engine has no refilled cell.
    """
    groups = make_plan(request_).groups
    assert [(g.batch_size, g.batching) for g in groups] == [
        (1, "static"),
        (2, "static"),
        (2, "refill"),
        (3, "static"),
        (3, "refill"),
    ]
    assert [len(block) for block in groups[2].blocks] == [16, 17]
    assert [len(block) for block in groups[4].blocks] == [33]
    assert sorted(i for block in groups[2].blocks for i in block) == list(range(33))
    assert [len(g.cells) for g in groups] == [5, 5, 3, 5, 3]
    assert groups[4].cells[2] == "arithmetic.mars-tau0.3.mars.graph.refill.b3"


def test_the_plan_warns_of_too_few_items(request_: RunRequest) -> None:
    """The warning gives the items for 6 blocks of 8R. Another one says that an outside engine has no refill."""
    warnings = make_plan(request_).warnings()
    assert "arithmetic at batch size 2, refill: inconclusive: 2 of 6 blocks; 6 take 96 items" in warnings[0]
    assert "batch size 3, refill: inconclusive: 1 of 6 blocks; 6 take 144 items" in warnings[1]
    assert warnings[-1] == "hf-generate: static batches only, since the loop is not ours; no refill"


def test_refill_of_single_slots_alone_is_refused(request_: RunRequest) -> None:
    """Nothing would be left to run."""
    with pytest.raises(UserError, match="--batching refill leaves nothing to run"):
        make_plan(request_.changed(batching=("refill",), batch_size=(1,)))


def test_all_that_was_planned_is_measured(results: Results) -> None:
    """Every cell is ok and none is void, with any engine and batching. Items are requests, not slots."""
    assert [(c.status, c.void, c.repeated_identical) for c in results.cells] == [("ok", [], 1)] * 21
    refilled = cells_of(results, 3, "refill")["mars:tau=0.3@mars/graph"]
    assert (refilled.items, refilled.blocks) == (33, 1)
    assert refilled.parts is not None
    assert 0.5 < refilled.parts.utilisation <= 1
    assert refilled.parts.rows == 3
    assert refilled.commit_latency_s == Percentiles(p50=None, p95=None)


def test_the_values_that_an_outside_engine_hides_are_null(results: Results) -> None:
    """They are never 0, and nothing is derived from them. Tokens, wall time and accuracy are known."""
    for arm in OUTSIDE:
        cell = cells_of(results, 3)[arm]
        assert [getattr(cell, name) for name in HIDDEN] == [None] * len(HIDDEN)
        assert (cell.tokens_per_forward, cell.tokens_per_forward_ci, cell.commit_histogram) == (None, None, {})
        assert (cell.positions_fed_per_token, cell.ttft_s.p50, cell.engine) == (None, None, None)
        assert (cell.tokens_per_s.value or 0) > 0
        assert cell.accuracy is not None
        assert cell.accuracy.n == 33


def test_an_outside_engine_is_compared_with_ar(results: Results) -> None:
    """It has the same tokens, with both caches."""
    for arm in OUTSIDE:
        graded = cells_of(results, 3)[arm].lossless
        assert graded is not None
        assert (graded.against, graded.grade, graded.identical) == ("ar@ar/graph", "exact", 33)


def sized(
    batch_size: int, answers: dict[str, list[int]], batching: str = "static", error: str | None = None
) -> CellData:
    """A cell of `ar` with nothing but answers."""
    lines = [generation_line(item=item, token_ids=token_ids) for item, token_ids in answers.items()]
    return cell_data(lines, [], arm="ar", batch_size=batch_size, batching=batching, error=error)


def test_the_floor_counts_common_items_of_the_outermost_sizes() -> None:
    """Sizes between do not count, nor do failed cells. Static batches come before refilled ones."""
    one, four, eight = sized(1, {"a": [1], "b": [2]}), sized(4, {"a": [9]}), sized(8, {"a": [1], "b": [3], "c": [4]})
    expected = Floor(arm="ar", batch_sizes=[1, 8], items=2, identical=1)
    assert floor([four, eight, one]) == expected
    assert floor([eight, one, sized(16, {}), sized(32, {"a": [1]}, error="out of memory")]) == expected
    assert floor([eight, one, sized(8, {"a": [1], "b": [2]}, "refill")]) == expected
    refilled = [sized(2, {"a": [1]}, "refill"), sized(4, {"a": [1]}, "refill")]
    assert floor(refilled) == expected.changed(batch_sizes=[2, 4], items=1)


def test_there_is_no_floor_of_one_batch_size() -> None:
    """The floor is None, and never a share of no items."""
    one = sized(1, {"a": [1]})
    assert floor([one]) is None
    assert floor([one, sized(1, {"a": [1]}, "refill")]) is None
    assert floor([one, sized(8, {"z": [1]})]) is None
    assert floor([]) is None


def test_a_ratio_over_another_engine_has_the_engines_part_with_it(results: Results) -> None:
    """It is marked, has no factors, and equals the plain ratio times the gain over plain by the same engine."""
    cells = cells_of(results, 3)
    mars = cells["mars:tau=0.3@mars/graph"]
    assert [(s.baseline, s.includes_engine) for s in mars.speedup] == [
        ("ar@mars/graph", False),
        ("ar@ar/graph", False),
        (OUTSIDE[0], True),
        (OUTSIDE[1], True),
    ]
    over_plain = mars.speedup[1].value or 0
    for entry in mars.speedup[2:]:
        assert entry.factors is None
        assert entry.plain is not None
        assert entry.plain.arm == "ar@ar/graph"
        assert entry.value == pytest.approx((entry.plain.value or 0) * over_plain)
    assert [s.plain for s in cells["ar@ar/graph"].speedup] == [None, None]
    assert {a.baseline for a in mars.accuracy_vs} == {"ar@mars/graph", "ar@ar/graph"}
    assert not any(s.includes_engine for c in cells_of(results, 3, "refill").values() for s in c.speedup)


def test_a_task_is_compared_with_the_same_engine_alone(run: RunDirectory) -> None:
    """A task's table cannot mark the part of another engine, so it would be read as the method's."""
    stored = read_stored(run)
    plan, group = stored.plan, stored.plan.groups[0]
    of_group = {one.cell.arm: one for name, one in stored.cells.items() if name in group.cells}
    items = list(plan.suites[0].items)
    for i in group.blocks[0]:
        items[i] = items[i].changed(item=f"other/{i}/0")
    apart = by_part(of_group, items, group.blocks, None, partial(compare, synchronisation_s=0.0, max_loss=0.02))
    compared = [entry for parts in apart.values() for task in parts["tasks"] for entry in task.speedup]
    assert {entry.baseline for entry in compared} == {"ar@mars/graph", "ar@ar/graph"}
    assert {task.task for task in apart["mars:tau=0.3@mars/graph"]["tasks"]} == {"other", "arithmetic"}


def test_where_arms_stop_paying_is_reported_for_the_same_engine_only(results: Results) -> None:
    """There is one entry for each arm, baseline and batching that ran at several sizes, with its verdicts."""
    entries = results.stops_paying
    assert {(e.arm, e.baseline, e.batching, tuple(e.swept)) for e in entries} == {
        (arm, baseline, batching, sizes)
        for arm, baseline in (
            ("ar@mars/graph", "ar@ar/graph"),
            ("mars:tau=0.3@mars/graph", "ar@mars/graph"),
            ("mars:tau=0.3@mars/graph", "ar@ar/graph"),
        )
        for batching, sizes in (("static", (1, 2, 3)), ("refill", (2, 3)))
    }
    assert {e.batch_size for e in entries} == {None}
    too_little = ("of 6 blocks at batch size 3", "1 s needed at batch size 3")
    assert {e.reason for e in entries if not (e.reason or "").endswith(too_little)} == set()


@pytest.mark.parametrize(
    ("words", "stops", "reason"),
    [
        (("faster", "same", "slower"), 4, None),
        (("faster", "faster", "inconclusive"), None, "neither faster nor shown to be no faster at batch size 16"),
        (("same", "inconclusive", BARELY), 1, None),
        (("faster", "same", "faster"), None, None),
        (("faster", "inconclusive", "same"), 16, None),
        ((UNMEASURED, UNMEASURED, UNMEASURED), None, "3 of 6 blocks at batch size 16"),
        (("faster", "same", UNMEASURED), None, "3 of 6 blocks at batch size 16"),
        ((UNMEASURED, UNMEASURED, "faster"), None, None),
        (("same", UNMEASURED, "same"), 16, None),
    ],
)
def test_too_few_measurements_do_not_decide_where_an_arm_stops_paying(
    words: tuple[Any, ...], stops: int | None, reason: str | None
) -> None:
    """A size with too few measurements decides nothing; larger sizes may still decide."""
    cells = [
        result_cell(arm=arm, batch_size=size, speedup=speedups)
        for size, word in zip((1, 4, 16), words, strict=True)
        for arm, speedups in (("ar", []), ("mars", [speedup(baseline="ar", verdict=word)]))
    ]
    (entry,) = stops_paying(cells)
    assert (entry.batch_size, entry.reason) == (stops, reason)


@pytest.mark.parametrize(
    ("stops", "last", "says"),
    [
        (None, "faster", "mars over ar: faster at batch size 1, 4, 16; it still pays at the largest."),
        (16, "same", "mars over ar: faster at batch size 1, 4; same at batch size 16; it stops paying at 16."),
        (None, "inconclusive", "; it is not known where it stops paying: 3 of 6 blocks at batch size 16."),
    ],
)
def test_a_sentence_says_where_an_arm_stops_paying(stops: int | None, last: Any, says: str) -> None:
    """It claims no more than the verdicts."""
    entry = BreakEven(
        suite="arithmetic",
        arm="mars",
        baseline="ar",
        batching="static",
        swept=[1, 4, 16],
        words=["faster", "faster", last],
        batch_size=stops,
        reason="3 of 6 blocks at batch size 16" if last == "inconclusive" else None,
    )
    assert over_batch_sizes(entry).endswith(says)


def test_the_report_separates_batchings_and_engines(run: RunDirectory) -> None:
    """Static and refilled batches have sections, other engines have a column, and a sweep has a figure."""
    markdown, page = ((run.path / name).read_text() for name in ("report.md", "report.html"))
    headings = re.findall(r"^## (.*)$", markdown, re.MULTILINE)
    assert headings[1:3] == ["arithmetic, batch size 2", "arithmetic, batch size 2, refill"]
    sections = dict(zip(headings, markdown.split("\n## ")[1:], strict=True))
    static, refilled = sections["arithmetic, batch size 3"], sections["arithmetic, batch size 3, refill"]
    assert "| incl. engine |" in static
    assert re.search(r"\(against transformers generate( cache=static)?\)|than transformers generate", static)
    assert "plain Plain decoding (ar) ×" in static
    assert "incl. engine" not in refilled
    assert refilled.count("Between commits: for refilled slots the step at which a row starts is not stored") == 1
    assert "the step at which a row starts" not in static
    summary = static.split("\n\n")[2]
    assert "transformers generate" not in summary
    assert "it is not known where it stops paying: " in page
    assert (run.path / "figures/arithmetic.batch-sizes.svg").is_file()
    assert not list(run.path.glob("figures/*refill.batch-sizes*"))
    for text in (markdown, re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)):
        assert not re.search(r"\b(None|nan|NaN)\b", text)


def test_the_terminal_separates_batchings(results: Results) -> None:
    """Each way of batching has a table. Ratios over other engines are on the page."""
    text = printed(results, 140)
    assert text.count("refill") == 2
    assert "vs hf-generate" not in text


def printed(results: Results, width: int) -> str:
    console = Console(width=width, record=True)
    console.print(*results_tables(results, width)[0])
    return console.export_text()


@pytest.mark.parametrize("kind", ["generation", "timing", "plan", "results"])
def test_the_files_follow_their_schemas(run: RunDirectory, kind: str) -> None:
    """Also the values that an engine hides, and refilled cells."""
    found = sorted(run.path.glob(f"{kind}.json")) or sorted((run.path / f"{kind}s").glob("*.jsonl"))
    for document in (json.loads(line) for file in found for line in as_lines(file)):
        validator(kind).validate(document)


def as_lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
