"""Evaluation on held-out conversations: loss, accuracy by distance ahead, and calibration of the confidence.

The confidence thresholds of multi-token decoding rely on the calibration.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mtbench.training.schedule import Schedule

EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # of the confidence's bins


def evaluate(forward: Callable[..., Mapping[str, Any]], schedule: Schedule, device: torch.device) -> dict[str, Any]:
    """Return loss, accuracy by `ahead` and calibration on the conversations of a schedule of one step.

    `forward` returns `parts` (P,), `right` and `confidence` (N,) for a batch's tensors. Predictions that are 0 ahead
    lie after the end of the text and are never decoded: they count only in the loss. The calibration covers the
    predictions beyond the next token, or all of them if every prediction is of the next token.
    """
    parts = torch.zeros(len(schedule.objective.parts))
    columns = []
    for number in range(len(schedule)):
        batch = {name: tensor.to(device) for name, tensor in schedule[number].items()}
        with torch.no_grad():
            output = forward(**batch)
        parts += output["parts"].float().cpu()
        columns.append((batch["ahead"].cpu(), output["right"].cpu(), output["confidence"].cpu()))
    ahead, right, confidence = (torch.cat(column) for column in zip(*columns, strict=True))
    ahead, right, confidence = (column[ahead > 0] for column in (ahead, right, confidence))
    beyond_next = ahead > 1
    calibrated = beyond_next if beyond_next.any() else torch.ones_like(right)
    return {
        "conversations": len(schedule.examples),
        "loss": round(parts.sum().item(), 5),
        **{name: round(value, 5) for name, value in zip(schedule.objective.parts, parts.tolist(), strict=True)},
        "ahead": [
            {"ahead": n, "n": int((ahead == n).sum()), "accuracy": round(right[ahead == n].float().mean().item(), 5)}
            for n in ahead.unique().tolist()
        ],
        "calibration": calibration(right[calibrated], confidence[calibrated]),
    }


def calibration(right: Tensor, confidence: Tensor) -> list[dict[str, float]]:
    """Return, per non-empty bin of the confidence: number of predictions, mean confidence, accuracy."""
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
