"""Print the tables of this report from the scores of study.py: `python tables.py scores.json`, or FOLDER/scores."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

from mtbench.results.verdict_words import seeds_verdict
from mtbench.statistics import paired_difference, ratio_of_totals, wilson

MARGIN = 0.02  # of accuracy, as in mtbench
Scores = Mapping[tuple[str, int], Mapping[str, Any]]  # (arm, seed) -> the scores of study.py
CONTRASTS = (  # (arm, baseline, seeds needed for a claim)
    ("mars", "ar_long", 5),
    ("mars_anchored", "mars", 5),
    ("mars", "ar", 5),
    ("ar_long", "ar", 5),
    ("mars", "mars_no_sft", 3),
    ("mars_b8", "mars_no_sft_b8", 3),
    ("mars_b16", "mars_no_sft_b16", 3),
    ("mars_b16", "mars", 3),
    ("mars_no_sft_b16", "mars_no_sft", 3),
    ("mars_no_sft_weighted", "mars_no_sft", 3),
    ("mars_anchored_no_sft", "mars_no_sft", 3),
    ("block_diffusion", "ar_long", 3),
    ("block_diffusion", "mars", 3),
)


def read(place: Path) -> Scores:
    """Read a folder of scores from study.py, or one file with all scores."""
    if place.is_dir():
        entries = [json.loads(file.read_text()) for file in sorted(place.glob("*.json"))]
    else:
        entries = json.loads(place.read_text())
    return {(entry["arm"], entry["seed"]): entry for entry in entries}


def points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def signed(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def baseline_of(scores: Scores, baseline: str, seed: int) -> Mapping[str, Any] | None:
    """Return the baseline's scores for the same seed, or else those of its only seed, 42."""
    return scores.get((baseline, seed), scores.get((baseline, 42)))


def arms(scores: Scores) -> list[str]:
    return list(dict.fromkeys(arm for arm, _ in scores))


def accuracies(scores: Scores, arm: str, tau: str) -> list[float]:
    return [entry["tau"][tau]["accuracy"] for (name, _), entry in scores.items() if name == arm and tau in entry["tau"]]


def one_token_mode(scores: Scores) -> None:
    """Print each arm's accuracy at one token per forward pass."""
    rows = []
    for arm in arms(scores):
        found = accuracies(scores, arm, "1.0")
        first = next(entry for (name, _), entry in scores.items() if name == arm)
        if not found:
            continue
        right, n = first["tau"]["1.0"]["right"].count("1"), len(first["tau"]["1.0"]["right"])
        interval = wilson(right, n)
        rows.append(
            (
                f"`{arm}`",
                str(len(found)),
                points(sum(found) / len(found)),
                f"{points(min(found))}–{points(max(found))}" if len(found) > 1 else "–",
                f"{points(right / n)} [{points(interval.ci_low)}, {points(interval.ci_high)}]",
            )
        )
    table(("arm", "seeds", "mean accuracy, %", "over seeds", "first seed [95 %, items]"), rows)


def contrasts(scores: Scores, tau: str, pairs: Sequence[tuple[str, str, int]] = CONTRASTS) -> None:
    """Print the differences in accuracy between arms and baselines, by seed and over seeds."""
    rows = []
    for arm, baseline, needed in pairs:
        differences, texts = [], []
        for (name, seed), entry in scores.items():
            other = baseline_of(scores, baseline, seed)
            if name != arm or other is None or tau not in entry["tau"] or tau not in other["tau"]:
                continue
            mine, theirs = entry["tau"][tau]["right"], other["tau"][tau]["right"]
            gained = sum(a > b for a, b in zip(mine, theirs, strict=True))
            lost = sum(a < b for a, b in zip(mine, theirs, strict=True))
            d = paired_difference(gained, lost, len(mine))
            differences.append(d.difference)
            texts.append(f"{signed(d.difference)} [{signed(d.ci_low)}, {signed(d.ci_high)}]")
        if differences:
            known = [d for d in differences if d is not None]
            verdict = seeds_verdict(known, needed)
            rows.append((f"`{arm}` − `{baseline}`", "; ".join(texts), between(known), str(verdict), within(known)))
    header = (
        "contrast",
        "by seed, points [95 %, items]",
        "mean over seeds [95 %, seeds]",
        "verdict",
        "within 2 points",
    )
    table(header, rows)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return mean and 95 % t interval over seeds; for one seed the bounds are infinite."""
    n, mean = len(differences), sum(differences) / len(differences)
    if n < 2:
        return mean, -math.inf, math.inf
    se = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    reach = float(t.ppf(0.975, n - 1)) * se
    return mean, mean - reach, mean + reach


def between(differences: Sequence[float]) -> str:
    """Return mean and interval over seeds as text."""
    mean, low, high = interval(differences)
    bounds = "one seed: no interval" if math.isinf(low) else f"{signed(low)}, {signed(high)}"
    return f"{signed(mean)} [{bounds}]"


def within(differences: Sequence[float]) -> str:
    """Return whether the interval over seeds is inside the margin (yes), outside (no), or neither."""
    _, low, high = interval(differences)
    if max(-low, high) < MARGIN:
        return "yes"
    return "no" if low > MARGIN or high < -MARGIN else "cannot tell"


def windows(scores: Scores, keep: Callable[[str, int], bool]) -> None:
    """Print accuracy and tokens per forward pass at every threshold."""
    taus = ("1.0", "0.95", "0.9", "0.8", "0.7", "0.6", "0.5")
    rows = []
    for (arm, seed), entry in scores.items():
        if keep(arm, seed):
            rows.append((f"`{arm}` seed {seed}", *(at_threshold(entry["tau"].get(tau)) for tau in taus)))
    table(("arm", *(f"tau {tau}" for tau in taus)), rows)


def at_threshold(result: Mapping[str, Any] | None) -> str:
    """Return accuracy and tokens per forward pass as text."""
    if result is None:
        return "–"
    rate = ratio_of_totals([result["tokens"]], [result["forwards"]], unit="item")
    text = f"{points(result['accuracy'])} / {rate.value:.2f}"
    if rate.ci_low is None or rate.ci_high is None:
        return text
    return f"{text} ± {(rate.ci_high - rate.ci_low) / 2:.2f}"


def learned(scores: Scores) -> None:
    """Print accuracy by distance ahead, and that of predictions beyond the next token with a confidence of ≥ .95."""
    rows = []
    for (arm, seed), entry in scores.items():
        if seed in (42, 43):
            ahead = {point["ahead"]: point["accuracy"] for point in entry["evaluation"]["ahead"]}
            confident = [b for b in entry["evaluation"]["calibration"] if b["low"] >= 0.95]
            n, right = sum(b["n"] for b in confident), sum(b["n"] * b["accuracy"] for b in confident)
            shown = [points(ahead.get(k)) for k in range(1, 6)]
            rows.append((f"`{arm}`", *shown, f"{n}: {points(right / n)}" if n else "–"))
    table(("arm", *(f"{k} ahead" for k in range(1, 6)), "predictions with confidence ≥ .95: share right"), rows)


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    print("## One token per forward (tau = 1)\n")
    one_token_mode(found)
    contrasts(found, "1.0")
    print("## tau = 0.95\n")
    contrasts(found, "0.95", [("mars_anchored", "mars", 5), ("mars", "mars_no_sft", 3)])
    print("## Accuracy, % / tokens per forward\n")
    windows(found, lambda arm, seed: seed == 43 or arm == "block_diffusion")
    print("## What was learned\n")
    learned(found)
