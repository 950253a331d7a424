"""acceptance.yaml of a run: acceptance lengths as vLLM counts them. Its format: mtbench/lineup/acceptance_file.py."""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from mtbench.errors import printable
from mtbench.lineup.acceptance_file import OURS, curve_key, mode_of
from mtbench.lineup.simulation import most_commits
from mtbench.models.families import short_name
from mtbench.options.engine_options import with_options
from mtbench.plan.run import Run
from mtbench.results.format import ResultCell


def write_curves(run: Run, cells: Sequence[ResultCell]) -> None:
    """Write acceptance.yaml if an arm drafts and its acceptance is known: its cell's with most items and blocks."""
    ordered = sorted(cells, key=lambda cell: (cell.items, cell.blocks))
    largest = {(cell.arm, cell.suite): cell for cell in ordered if not (cell.void or cell.error)}
    rows = [row for cell in largest.values() for row in _rows(run, cell)]
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for row in (row for row in rows if row["category"] is None):
        curve = curves.setdefault(row["key"], {}).setdefault(row["mode"], {})
        curve.setdefault(row["num_speculative_tokens"], round(row["acceptance_length"], 2))
    asked, begun, variables = run.plan.request, run.environment, dict(run.plan.request.chat_template_kwargs)
    suites = ", ".join(f"{suite.suite} (output_len: {suite.max_new_tokens})" for suite in run.plan.suites)
    lines = (
        f"Acceptance length (AL) by mtbench {begun.mtbench} on {begun.gpu.name if begun.gpu else begun.processor}",
        f"dataset: {suites} | sampling: {asked.sampling} | chat_template_kwargs: {variables}",
        "key = num_speculative_tokens, the most that a forward accepts; value = AL = 1 + accepted / drafts, as in vLLM",
    )
    text = "".join(f"# {printable(line)}\n" for line in lines) + yaml.safe_dump({**curves, OURS: rows}, sort_keys=False)
    if rows:
        run.directory.write_text("acceptance.yaml", text)


def _rows(run: Run, cell: ResultCell) -> Iterator[dict[str, Any]]:
    """Yield what a cell measured, all its items and each category. Nothing if it drafts nothing, or out of order."""
    planned, variables = run.plan.cell(cell.cell), run.plan.request.chat_template_kwargs
    method, (model, *draft) = planned.built, planned.checkpoints.values()
    drafts = most_commits(method) - 1 if method.variants[-1].block == 1 else 0
    key = f"{short_name(model)}{f'/{cell.suite}' if len(run.plan.suites) > 1 else ''}"
    key += curve_key(method, with_options(cell.engine, planned.engine_options))
    marks = run.plan.suite(cell.suite).thinking
    thought = marks is not None and any(marks.places(line.token_ids) for line in run.answers[cell.cell])
    place = {"key": key, "mode": mode_of({} if thought else variables, thought), "num_speculative_tokens": drafts}
    source = {"suite": cell.suite, "arm": cell.arm, "model": model, "revision": planned.revision}
    parts = [(part.task, part.acceptance, part.items) for part in cell.tasks]
    for category, found, answers in ((None, cell.acceptance, cell.items), *parts):
        if found and found.length and found.vllm and drafts and not cell.simulated:
            more = found.vllm / found.length  # accepted behind the ends of answers, too
            low, high = [min(bound * more, drafts + 1.0) for bound in found.length_ci or ()] or (None, None)
            length = {"acceptance_length": found.vllm, "ci_low": low, "ci_high": high, "answers": answers}
            yield place | {"category": category} | length | source | {"draft": [*draft]}
