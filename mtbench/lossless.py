"""Is an arm that promises the reference's tokens held to it? Teacher-forced re-scoring, and a graded answer.

Every emitted token is judged by one plain pass of the same checkpoint over the finished text: it must be the argmax
or within ε of it. That is independent of how one flipped near-tie changes everything behind it.

- `exact`: the same tokens as the arm it is held to, on every item.
- `near-tie`: other tokens, but each within ε of the argmax: the arithmetic chose, not the method.
- `divergent`: anything else.
- `inconclusive`: too few positions to know ε.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtbench.decoding import PREFILL_CHUNK
from mtbench.lane import Feed, Lane
from mtbench.plan import Cell, Plan
from mtbench.rundir import RunDirectory
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, EXACT_EPSILON, near_tie_epsilon

if TYPE_CHECKING:
    from mtbench.generate import Lab

def check(run: RunDirectory, plan: Plan, cell: Cell, lab: "Lab") -> None:
    """Re-score what the cell generated, if it promises the reference's tokens: lossless/<cell>.json, written once."""
    name = f"lossless/{cell.cell}.json"
    lines = run.lines(f"generations/{cell.cell}.jsonl")
    if cell.claims != "lossless" or cell.held_to is None or not lines:
        return
    if run.has(name) and len(run.read_json(name)["items"]) == len(lines):
        return
    lane = lab.lane(cell.checkpoints[cell.on])
    answers = [(g["item"], g["prompt_ids"], g["token_ids"]) for g in lines]
    short = {item: shortfalls(lane, prompt, tokens) for item, prompt, tokens in answers}
    width = max(g["positions_fed"] // g["forwards"] for g in lines)
    noise = [] if lab.dtype in EXACT_EPSILON else width_noise(lane, [(p, t) for _, p, t in answers], width)
    epsilon = near_tie_epsilon(noise, lab.dtype)
    run.write_json(name, {"epsilon": epsilon, "items": short})


@torch.inference_mode()
def shortfalls(lane: Lane, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, float]:
    """Index -> how far the emitted token's logit lies under the largest, for the tokens that are not the argmax."""
    logits = forced_logits(lane, prompt, tokens, PREFILL_CHUNK).float()
    emitted = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    short = (logits.amax(1) - emitted).tolist()
    return {str(i): round(value, 9) for i, value in enumerate(short) if value > 0}


@torch.inference_mode()
def width_noise(lane: Lane, answers: Sequence[tuple[Sequence[int], Sequence[int]]], width: int) -> list[float]:
    """What the window's width alone does to emitted tokens' logits: between width 1 and `width`, same prefixes."""
    differences: list[float] = []
    for prompt, tokens in answers:
        column = torch.tensor(tokens, device=lane.device)[:, None]
        narrow, wide = (forced_logits(lane, prompt, tokens, w).gather(1, column) for w in (1, max(2, width)))
        differences += (narrow.float() - wide.float()).flatten().tolist()
        if len(differences) >= EPSILON_POSITIONS_NEEDED:
            break
    return differences


def forced_logits(lane: Lane, prompt: Sequence[int], tokens: Sequence[int], width: int) -> Tensor:
    """The logits that judge each of `tokens` after `prompt`, (tokens, V), fed `width` positions at a time."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=lane.device)
    lane.reserve(1, ids.shape[1])
    base = torch.tensor([ids.shape[1]], device=lane.device)
    judged = []
    for chunk in torch.arange(ids.shape[1], device=lane.device)[None].split(width, 1):
        feed = Feed(chunk, chunk, base, view=int(chunk[0, -1]) + 1)
        judged.append(lane.forward(ids.gather(1, chunk), feed, judged=chunk.shape[1])[0])
    return torch.cat(judged)[len(prompt) - 1 :]


def grade(
    lines: Mapping[str, Mapping[str, Any]], against: Mapping[str, Mapping[str, Any]], rescored: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The verdict for one cell, from generation lines by item: its own, those it is held to, and the re-scoring."""
    common = sorted(lines.keys() & against.keys())
    if not common:
        return None
    pairs = [(item, lines[item]["token_ids"], against[item]["token_ids"]) for item in common]
    apart = {item: _first_difference(ours, theirs) for item, ours, theirs in pairs if ours != theirs}
    verdict: dict[str, Any] = {
        "grade": "divergent" if apart else "exact",
        "items": len(common),
        "identical": len(common) - len(apart),
        "first_divergence": min(apart.values(), default=None),
        "epsilon": None,
        "worst_margin": None,
        "near_ties": None,
    }
    if rescored is not None:
        short = [value for item in common for value in rescored["items"][item].values()]
        tokens = sum(len(ours) for _, ours, _ in pairs)
        verdict |= {
            "epsilon": rescored["epsilon"],
            "worst_margin": max(short, default=0.0),
            "near_ties": len(short) / tokens,
        }
        if rescored["epsilon"] is None:
            verdict["grade"] = "inconclusive" if short else verdict["grade"]
        elif max(short, default=0.0) > rescored["epsilon"]:
            verdict["grade"] = "divergent"
        elif apart:
            verdict["grade"] = "near-tie"
    return verdict


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The index of the first token that differs; the shorter length if one continues the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
