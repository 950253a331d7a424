"""Runs on the embedded checkpoint whose answers have a planted fault: a copy of an honest run, with other answers."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from planted_faults import Fault
from torch import Tensor
from whole import finish, start

from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.experiments.audit.sides import Side
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.reading import Answer, judged_logits
from mtbench.models.families import family
from mtbench.models.runner import ModelRunner
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine
from mtbench.plan.plan import Plan, RunRequest
from mtbench.records import dump

AR = "arithmetic.ar.ar.graph"  # the cell of plain decoding, without its batch size
SPECULATIVE = "arithmetic.speculative.ar.graph"
Choose = Callable[[Tensor, Sequence[int]], int]  # of logits (V,) and the tokens so far


def honest_run(path: Path, **request: Any) -> Path:
    """Return a run of plain and speculative decoding, at batch sizes 1 and 4."""
    return faulty_run(path, nullcontext, **request)


def faulty_run(path: Path, fault: Fault, **request: Any) -> Path:
    """Return a run that was planned and decoded with a fault."""
    asked = {"limit": 8, "batch_size": (1, 4), "rounds": 1, "max_new_tokens": 64, "method": ("ar", "speculative")}
    with fault():
        run = start(path, RunRequest(device="cpu", **{**asked, **request}))
        finish(run)
    return run.path


def planted(
    honest: Path, path: Path, changes: Mapping[str, Callable[[GenerationLine, int], Mapping[str, Any]]]
) -> Path:
    """Return a copy of a run. changes: by cell, what is other in the line of an item, given the item's number."""
    shutil.copytree(honest, path)
    for cell, change in changes.items():
        file = path / f"generations/{cell}.jsonl"
        run = RunDirectory(path)
        lines = run.read_lines(f"generations/{cell}.jsonl", GenerationLine)
        made = [line.changed(**change(line, int(line.item.split("/")[1]))) for line in lines]
        file.write_text("".join(json.dumps(dump(line)) + "\n" for line in made))
    return path


def decoded_again(side: Side, run: Path, fault: Fault = nullcontext, **request: Any) -> Side:
    """Return a side whose requests were decoded again, with a fault; `run`: its plan. request: other options."""
    planned = make_plan(RunDirectory(run).read("plan.json", Plan).request.changed(**request))
    cell, prompts = planned.cells[-1], [answer.prompt or [] for answer in side.answers.values()]
    budget = planned.suites[0].max_new_tokens
    asked = [Request(prompt_ids=ids, max_new_tokens=budget, seed=planned.item_seed(n)) for n, ids in enumerate(prompts)]
    with fault():
        made, _ = ModelPool(planned.request).decode(cell, asked, room=planned.suites[0].room)
    answers = {
        item: replace(old, tokens=new.token_ids, text=new.text, finish=new.finish_reason, commits=new.commits)
        for (item, old), new in zip(side.answers.items(), made, strict=True)
    }
    method = METHODS[cell.method]
    return replace(
        side,
        name=f"{side.name}, again",
        arm=cell.arm,
        answers=answers,
        dtype=planned.request.dtype,
        claims=cell.claims,
        plain=method.reference,
    )


def judge_runner() -> ModelRunner:
    """Return transformers' modules on the embedded checkpoint."""
    torch.set_num_threads(1)
    return ModelPool(RunRequest(device="cpu", dtype="float32")).runner("ar", family("tiny").checkpoint("ar"), None)


@torch.inference_mode()
def decoded(
    runner: ModelRunner,
    prompt: Sequence[int],
    limit: int,
    choose: Choose = lambda logits, _: int(logits.argmax()),
    begun: Sequence[int] = (),
) -> list[int]:
    """Return the tokens of greedy or other choices, up to an end token."""
    tokens = list(begun)
    while len(tokens) < limit and not (tokens and tokens[-1] in runner.checkpoint.end_ids):
        [(_, _, logits)] = judged_logits(runner, [Answer([*prompt, *tokens], [0])])
        tokens.append(choose(logits[0], tokens))
    return tokens


def told(tokens: Sequence[int], runner: ModelRunner, **more: Any) -> dict[str, Any]:
    """Return the fields of a line for other tokens of plain decoding."""
    ended = tokens[-1] in runner.checkpoint.end_ids
    text = runner.checkpoint.tokenizer.decode(list(tokens), skip_special_tokens=True)
    return {
        "token_ids": list(tokens),
        "text": text,
        "commits": [1] * len(tokens),
        "forwards": len(tokens),
        "finish_reason": "end" if ended else "length",
    } | more
