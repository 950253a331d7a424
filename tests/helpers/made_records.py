"""Complete records with plain values, of which a test gives only those that matter to it."""

from typing import Any

from mtbench.plan.formats import GenerationLine, TimingLine
from mtbench.plan.plan import Cell
from mtbench.results.decision import headline, recommend
from mtbench.results.decision_format import Decision, Looks, RaceCost
from mtbench.results.figure_formats import Estimate, Finish, Percentiles, Reason, Samples, Speedup, Verdict
from mtbench.results.format import ResultCell, ResultEnvironment, Results, StatisticsInfo
from mtbench.results.samples import CellData


def generation_line(**given: Any) -> GenerationLine:
    """An answer of an engine that hides everything but its tokens."""
    values: dict[str, Any] = {
        "item": "arithmetic/0/0",
        "prompt_ids": [1],
        "prompt_tokens": 1,
        "token_ids": [1],
        "text": "a",
        "forwards": None,
        "commits": None,
        "positions_fed": None,
        "draft_forwards": None,
        "drafted": None,
        "surplus": None,
        "finish_reason": "length",
        "block": 0,
    }
    return GenerationLine(**values | given)


def timing_line(**given: Any) -> TimingLine:
    """A clean block of one second by an engine that hides everything but its tokens."""
    values: dict[str, Any] = dict.fromkeys(TimingLine.model_fields)
    values |= dict.fromkeys(("session", "round", "rows", "items"), 1)
    values |= dict.fromkeys(("block", "order", "prompt_tokens", "tokens", "miscounted"), 0)
    values |= {"wall_s": 1.0, "preparation_s": 0.0}
    return TimingLine(**values | given)


def plan_cell(**given: Any) -> Cell:
    """A cell of `ar` on the suite arithmetic."""
    values: dict[str, Any] = {
        "cell": "arithmetic.ar.ar.graph.b1",
        "suite": "arithmetic",
        "arm": "ar@ar/graph",
        "method": "ar",
        "options": {},
        "on": "ar",
        "engine": "graph",
        "family": "tiny",
        "checkpoints": {"ar": "embedded:tiny/ar"},
        "batch_size": 1,
        "length": "natural",
        "batching": "static",
        "flags": [],
        "baselines": [],
        "lossless_reference": None,
        "claims": "lossless",
        "demonstration": True,
        "engine_baselines": [],
        "accept": None,
        "simulated": None,
        "fault": None,
    }
    return Cell(**values | given)


def cell_data(lines: list[GenerationLine], timings: list[TimingLine], **given: Any) -> CellData:
    """A cell with these lines, every timing of which counts. given: fields of the cell, and `error`."""
    error = given.pop("error", None)
    valid = {(t.round, t.block) for t in timings}
    blocks = {t.block for t in timings} | {line.block for line in lines}
    return CellData(
        cell=plan_cell(**given),
        lines={line.item: line for line in lines},
        timings=timings,
        valid=valid,
        repeated_blocks=max(blocks, default=0) + 1,
        unit_of={block: block for block in blocks},
        timed_unit_of={block: block for block in blocks},
        scores={},
        error=error,
    )


def made_decision(results: Results, **given: Any) -> Decision:
    """What a race decides by these results."""
    found = recommend(results.cells, max_loss=2)
    places = dict.fromkeys((cell.suite, cell.batch_size) for cell in results.cells)
    values: dict[str, Any] = {
        "schema_version": 2,
        "run_id": results.run_id,
        "headline": headline(found),
        "complete": True,
        "max_loss": 2.0,
        "slo_s": {},
        "over_slo": [],
        "recommendations": found,
        "looks": [Looks(suite=suite, batch_size=size, planned=[6, 8], made=[6]) for suite, size in places],
        "refused": {},
        "spent": RaceCost(forwards=1200, forwards_full=3000, decoding_s=12.0, decoding_full_s=30.0),
        "serving": {},
    }
    return Decision(**values | given)


def doubted(text: str, kind: Any = "too few") -> Verdict:
    """A verdict that no test decided, for this reason."""
    return Verdict(word="inconclusive", reason=Reason(kind=kind, text=text))


def speedup(*, verdict: Any = "inconclusive", **given: Any) -> Speedup:
    """A comparison in which nothing but the verdict is known; of that a word is enough."""
    figures = ("value", "ci_low", "ci_high", "ci_repeat", "rate_ratio", "rate_ratio_ci", "length_ratio", "factors")
    values: dict[str, Any] = dict.fromkeys(figures)
    judged = verdict if isinstance(verdict, Verdict) else Verdict(word=verdict)
    return Speedup(**values | {"baseline": "ar@ar/graph", "verdict": judged} | given)


def result_cell(**given: Any) -> ResultCell:
    """A cell of results.json, of which nothing was measured."""
    nothing: dict[str, Any] = dict.fromkeys(ResultCell.model_fields)
    copied = {name: getattr(plan_cell(), name) for name in Cell.model_fields if name in ResultCell.model_fields}
    counts = dict.fromkeys(("blocks", "items", "tokens"), 0)
    names = ("void", "flags", "speedup", "accuracy_vs", "valid_vs", "by_value_vs", "agreement", "tasks", "turns")
    lists: dict[str, Any] = {name: [] for name in (*names, "contexts")}
    records = {
        "samples": Samples(used=0, dropped=0),
        "tokens_per_s": Estimate(value=None, ci_low=None, ci_high=None),
        "ttft_s": Percentiles(p50=None, p95=None),
        "commit_latency_s": Percentiles(p50=None, p95=None),
        "finish": Finish(end=0, stop=0, length=0),
    }
    own: dict[str, Any] = {"status": "ok", "task": {"name": "arithmetic"}, "max_new_tokens": 8, "rounds": 1}
    own |= {"reference": False, "commit_histogram": {}, "acceptance_by": {}}
    return ResultCell(**nothing | copied | counts | lists | records | own | given)


def made_results(cells: list[ResultCell]) -> Results:
    """results.json of a run with these cells, of which nothing else is known."""
    return Results(
        schema_version=3,
        run_id="0" * 12,
        command=[],
        environment=ResultEnvironment(command=[]),
        seed=0,
        temperature=0.0,
        plan_sha256="0" * 64,
        statistics=StatisticsInfo(method="", level=0.95, speed_margin=0.02, max_loss=2),
        cells=cells,
        stops_paying=[],
    )
