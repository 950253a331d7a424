"""Three conversations of four turns in an engine with and without its prefix cache, and what must be cached."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mtbench
from mtbench.decoding.output import first_difference
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run


def run_conversations(engine: str, size: int, folder: Path, lookup: str, times: int = 1) -> tuple[Run, list[Any]]:
    """Return the run and the cells of results.json, one batch size. `times`: how often each question is in its turn."""
    texts = [[f"What is {n + turn} + {turn}? " * times for turn in range(4)] for n in (3, 20, 41)]
    answer = {"role": "assistant", "content": "It is 4, I think."}
    talks = [[m for text in turns for m in ({"role": "user", "content": text}, answer)] for turns in texts]
    (file := folder / "talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    found = mtbench.run(
        suite=f"conversations:{file}",
        family="tiny",
        method=("ar", lookup),
        engine=engine,
        prefix_cache="off,on",
        max_new_tokens=8,
        batch_size=size,
        rounds=2,
        dtype="float32",
        out=folder / "DIR",
    )
    return Run.open(RunDirectory.open(folder / "DIR")), found.record["cells"]


def check_conversations(run: Run, cells: list[Any], block: int) -> None:
    """Assert that no answer changes, and that whole blocks of what a conversation had are cached, in each round."""
    [suite] = run.plan.suites
    assert len(suite.items) == 12
    plain = {line.item: line.token_ids for line in run.answers[run.plan.cells[0].cell]}
    for cell, found in zip(run.plan.cells, cells, strict=True):
        assert found["lossless"]["grade"] == "exact"
        answers = {line.item: line for line in run.answers[cell.cell]}
        assert {name: line.token_ids for name, line in answers.items()} == plain
        for number, item in enumerate(suite.items):
            kept = 0
            if cell.prefix_cache and item.follows is not None:
                before = suite.prompt(item.follows) + plain[suite.items[item.follows].item][:-1]
                kept = min(first_difference(before, suite.prompt(number)), len(suite.prompt(number)) - 1)
            assert answers[item.item].cached_tokens == kept // block * block
        by_round = Counter[int]()
        for line in run.timings[cell.cell]:
            by_round[line.round] += line.cached_tokens or 0
        assert by_round[1] == by_round[2] == sum(line.cached_tokens or 0 for line in answers.values())
        probed = found.get("prefix_cache", {"probes": 0, "equal": 0, "faults": []})
        assert (probed["probes"], probed["equal"], probed["faults"]) == (*[3 * cell.prefix_cache] * 2, [])
