"""Is an arm that promises the reference's tokens held to it? Teacher-forced re-scoring, and a graded answer.

Every emitted token is judged by one pass of the same checkpoint over the finished text: it must be the argmax or within
ε of it. That is independent of how one flipped near-tie changes everything behind it. The judge is always transformers'
modules (the engine `eager`), whatever engine the arm ran on: no engine answers for itself.

ε is what the arm's arithmetic does to a logit: the 99.9th percentile of |Δlogit| of emitted tokens on the same
prefixes, between the judge at width 1 and the arm's own engine at the arm's width, so it covers engine and width
together (for an outside engine, whose logits we do not see, width alone). It is capped at 0.5, lest an engine that
computes something else excuse itself; in float32 and float64 it is a constant.

- `exact`: the same tokens as the arm it is held to, on every item.
- `near-tie`: other tokens, but each within ε of the argmax: the arithmetic chose, not the method.
- `divergent`: other tokens, of which one is no near-tie; or a token, be it the same, so far under the judge's argmax
  that no ε could excuse it: both arms ran on an engine that computes something else.
- `inconclusive`: other tokens, and nothing to judge them by.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.errors import first_line
from mtbench.models import sampling
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.runs.directory import RunDirectory
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import Cell, SuitePlan
from mtbench.runs.requests import item_seed
from mtbench.statistics import EPSILON_CAP, EPSILON_POSITIONS_NEEDED, EXACT_EPSILON, near_tie_epsilon

JUDGED_AT_ONCE = 256  # positions


class Answer(NamedTuple):
    """What was emitted, and by which dice."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


def check(run: RunDirectory, cell: Cell, suite: SuitePlan, pool: ModelPool, note: Callable[[str], None]) -> None:
    """Re-score what the cell generated, if it promises the reference's tokens: lossless/<cell>.json, written once.

    The judge is fed at the arm's width too; `epsilon` is None for too few positions.
    """
    name = f"lossless/{cell.cell}.json"
    lines = run.lines(f"generations/{cell.cell}.jsonl")
    if cell.claims != "lossless" or cell.held_to is None or not lines:
        return
    if run.has(name) and len(run.read_json(name)["items"]) == len(lines):
        return
    source = cell.checkpoints[cell.on]
    judge = pool.runner(cell.on, source, None)
    number = {item.item: i for i, item in enumerate(suite.items)}
    prompts = [g["prompt_ids"] or suite.prompt(number[g["item"]]) for g in lines]
    answers = [
        Answer(prompt, g["token_ids"], item_seed(pool.seed, number[g["item"]]), pool.temperature)
        for prompt, g in zip(prompts, lines, strict=True)
    ]
    try:
        if pool.dtype in EXACT_EPSILON:
            width, noise = JUDGED_AT_ONCE, []
        else:
            width = max([2, *(g["positions_fed"] // g["forwards"] for g in lines if g["forwards"])])
            noise = logit_noise(judge, pool.runner(cell.on, source, cell.engine), answers, width)
        short = {g["item"]: shortfalls(judge, answer, width) for g, answer in zip(lines, answers, strict=True)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        note(f"{cell.cell} could not be re-scored: out of memory ({first_line(error)})")
        return
    run.write_json(name, {"epsilon": near_tie_epsilon(noise, pool.dtype), "items": short})


@torch.inference_mode()
def shortfalls(runner: ModelRunner, answer: Answer, width: int) -> dict[str, float]:
    """Index -> how far the emitted token's logit lies under the largest, for the tokens that are not the argmax."""
    emitted, largest = forced_logits(runner, answer, width)
    return {str(i): round(value, 9) for i, value in enumerate((largest - emitted).tolist()) if value > 0}


@torch.inference_mode()
def logit_noise(judge: ModelRunner, own: ModelRunner, answers: Sequence[Answer], width: int) -> list[float]:
    """What engine and window do to emitted tokens' logits: `judge` at width 1 minus `own` at `width`, same prefixes."""
    differences: list[float] = []
    for answer in answers:
        plain, ours = (forced_logits(runner, answer, w)[0] for runner, w in ((judge, 1), (own, width)))
        differences += (plain - ours).tolist()
        if len(differences) >= EPSILON_POSITIONS_NEEDED:
            break
    return differences


def forced_logits(runner: ModelRunner, answer: Answer, width: int) -> tuple[Tensor, Tensor]:
    """Of each token of an answer, its own logit and the largest, (tokens,), fed `width` positions at a time.

    Of sampled tokens, the logits with the noise of their dice.
    """
    prompt, tokens, seed, temperature = answer
    dice = torch.tensor([seed], device=runner.device)
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=runner.device)
    runner.reserve(1, ids.shape[1])
    base = torch.tensor([ids.shape[1]], device=runner.device)
    before, behind = torch.arange(ids.shape[1], device=runner.device)[None].tensor_split((len(prompt) - 1,), 1)

    def forward(chunk: Tensor, judged: int) -> Tensor:
        metadata = AttentionMetadata(chunk, chunk, base, view=int(chunk[0, -1]) + 1)
        logits = runner.forward(ids.gather(1, chunk), metadata, judged).logits
        if not temperature:
            return logits[0].float()
        return temperature * sampling.sampled(logits, temperature, dice, chunk[:, -judged:] + 1)[0].float()

    for chunk in before.split(JUDGED_AT_ONCE, 1) if before.shape[1] else ():
        forward(chunk, judged=1)
    own, largest, begin = [], [], 0
    for chunk in behind.split(width, 1):
        logits = forward(chunk, judged=chunk.shape[1])
        emitted = torch.tensor(tokens[begin : begin + len(logits)], device=runner.device)[:, None]
        own.append(logits.gather(1, emitted)[:, 0])
        largest.append(logits.amax(1))
        begin += len(logits)
    return torch.cat(own), torch.cat(largest)


def grade(
    lines: Mapping[str, Mapping[str, Any]],
    against: Mapping[str, Mapping[str, Any]],
    rescored: Mapping[str, Any] | None,
    dtype: str,
) -> dict[str, Any] | None:
    """The verdict for one cell, from generation lines by item: its own, those it is held to, and the re-scoring."""
    common = sorted(lines.keys() & against.keys())
    if not common:
        return None
    pairs = [(item, lines[item]["token_ids"], against[item]["token_ids"]) for item in common]
    apart = {item: _first_difference(ours, theirs) for item, ours, theirs in pairs if ours != theirs}
    covered = rescored is not None and all(item in rescored["items"] for item in common)
    epsilon = rescored["epsilon"] if rescored is not None and covered else None
    short = [v for item in common for v in rescored["items"][item].values()] if rescored and covered else []
    worst = max(short, default=0.0) if covered else None
    if worst is not None and worst > EXACT_EPSILON.get(dtype, EPSILON_CAP):
        word = "divergent"
    elif not apart:
        word = "exact"
    elif epsilon is not None and worst is not None:
        word = "near-tie" if worst <= epsilon else "divergent"
    else:  # nobody judged the tokens: where the arithmetic is exact they are wrong, else it cannot be told
        word = "divergent" if dtype in EXACT_EPSILON else "inconclusive"
    return {
        "grade": word,
        "items": len(common),
        "identical": len(common) - len(apart),
        "first_divergence": min(apart.values(), default=None),
        "epsilon": epsilon,
        "worst_margin": worst,
        "near_ties": len(short) / sum(len(ours) for _, ours, _ in pairs) if covered else None,
    }


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The index of the first token that differs; the shorter length if one continues the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
