"""What a checkpoint has learned: its loss on conversations kept apart, how often it is right so many tokens ahead, and
whether it is as right as it is sure. The thresholds of multi-token decoding rest on the last one."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mtbench.training.schedule import Schedule

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # of the confidence's bins


def evaluate(forward: Callable[..., Mapping[str, Any]], schedule: Schedule, device: torch.device) -> dict[str, Any]:
    """Loss, accuracy by `ahead` and calibration on the conversations of a schedule of one step.

    `forward` gives `parts` (P,), `right` and `confidence` (N,) for a batch's tensors. Predictions that are 0 ahead lie
    behind the end of the text, where nothing is decoded: they count in the loss alone. The calibration is that of
    predictions beyond the next token, or of all where there are none.
    """
    parts = torch.zeros(len(schedule.objective.parts))
    found = []
    for number in range(len(schedule)):
        batch = {name: tensor.to(device) for name, tensor in schedule[number].items()}
        with torch.no_grad():
            told = forward(**batch)
        parts += told["parts"].float().cpu()
        found.append((batch["ahead"].cpu(), told["right"].cpu(), told["confidence"].cpu()))
    ahead, right, confidence = (torch.cat(column) for column in zip(*found, strict=True))
    ahead, right, confidence = (column[ahead > 0] for column in (ahead, right, confidence))
    beyond = ahead > 1 if (ahead > 1).any() else torch.ones_like(right)
    return {
        "conversations": len(schedule.examples),
        "loss": round(parts.sum().item(), 5),
        **{name: round(value, 5) for name, value in zip(schedule.objective.parts, parts.tolist(), strict=True)},
        "ahead": [
            {"ahead": n, "n": int((ahead == n).sum()), "accuracy": round(right[ahead == n].float().mean().item(), 5)}
            for n in ahead.unique().tolist()
        ],
        "calibration": calibration(right[beyond], confidence[beyond]),
    }


def calibration(right: Tensor, confidence: Tensor) -> list[dict[str, float]]:
    """By bin of the confidence: how many predictions, how sure on average, what share of them right; no empty bins."""
    bins = []
    for low, high in pairwise(EDGES):
        inside = (confidence >= low) & ((confidence < high) | (high == EDGES[-1]))
        if inside.any():
            bins.append(
                {
                    "low": low,
                    "high": high,
                    "n": int(inside.sum()),
                    "confidence": round(confidence[inside].mean().item(), 5),
                    "accuracy": round(right[inside].float().mean().item(), 5),
                }
            )
    return bins
