"""What a report says in sentences: its title and summary, what it ran on, how to read it."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.report.formatting import NONE, ci, interval, memory, number
from mtbench.report.terminal import disclaimers, floors
from mtbench.results.acceptance import OWNERS

Cell = Mapping[str, Any]

NOTED_BELOW = 0.95  # a factor that costs less is not worth a clause
KEPT = ("not worse", "worse by less")  # verdicts that hold the loss of accuracy within the margin


def title(results: Mapping[str, Any]) -> str:
    return ". ".join(disclaimers(results["cells"])) or "Multi-token decoding, compared"


def facts(cells: Sequence[Cell]) -> list[str]:
    """What all arms of a section share."""
    first, task = cells[0], cells[0]["task"]
    shots = task.get("num_fewshot")
    facts = [
        counted(max(c["items"] for c in cells), "item"),
        f"{shots}-shot" if shots is not None else "",
        "chat template" if task.get("chat_template") else "no chat template" if "chat_template" in task else "",
        f"at most {first['max_new_tokens']:,} new tokens",
        "fixed length: end tokens ignored" if first["length"] == "fixed" else "",
        "a finished row's slot takes the next prompt" if first["batching"] == "refill" else "",
        counted(max(c["blocks"] for c in cells), "block") + " timed",
        first["dtype"] or "",
        f"scored by {first['accuracy']['metric']}" if first["accuracy"] else "not scored",
        "programs ran unconfined" if task.get("sandbox") is False else "",
    ]
    return [fact for fact in facts if fact]


def counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def summary(cells: Sequence[Cell], own: Mapping[str, Cell], suite: str, batches: str, margin: float) -> list[str]:
    """Two sentences: what was gained, and what it cost in accuracy. Verdicts speak, estimates only illustrate.

    Only of baselines by the arm's own engine: an engine's gain is no method's.
    """
    failed = sum(c["status"] == "failed" for c in cells)
    void = sum(bool(c["void"]) for c in cells)
    left_out = [f"{n} {what}" for n, what in ((failed, "failed"), (void, "void")) if n]
    beside = f" ({' and '.join(left_out)} left out)" if left_out else ""
    where = f"On {suite} at {batches}"
    sound = {c["arm"] for c in cells if c["status"] != "failed" and not c["void"]}
    arms = [c for c in cells if c["arm"] in own and {c["arm"], own[c["arm"]]["baseline"]} <= sound]
    if not arms:
        return [f"{where}, no arm can be compared with a baseline on its own checkpoint{beside}{_missing(cells, own)}."]
    faster = [c for c in arms if own[c["arm"]]["verdict"] == "faster"]
    slower = [c for c in arms if own[c["arm"]]["verdict"] == "slower"]
    baseline = _baseline_name([own[c["arm"]]["baseline"] for c in arms])
    values = sorted(own[c["arm"]]["value"] for c in faster)
    if len(faster) == 1:
        entry = own[faster[0]["arm"]]
        who = faster[0]["arm"] if len(arms) == 1 else f"1 of {len(arms)} arms"
        gain = f"{who} is faster than {baseline}: {_with_interval(entry)} times as fast"
    elif faster:
        everyone = "both" if len(arms) == 2 else f"all {len(arms)}"
        who = everyone if len(faster) == len(arms) else f"{len(faster)} of {len(arms)}"
        gain = f"{who} arms are faster than {baseline}: {values[0]:.2f} to {values[-1]:.2f} times as fast"
    else:
        who = f"{arms[0]['arm']} is not" if len(arms) == 1 else f"none of {len(arms)} arms is"
        gain = f"{who} shown to be faster than {baseline}"
        if reason := _common_reason([own[c["arm"]]["verdict"] for c in arms]):
            gain += f" ({reason})"
    it = "it" if len(arms) == 1 else str(len(slower))
    tail = f", and {it} {'is' if len(slower) == 1 else 'are'} slower" if slower else ""
    return [f"{where}, {gain}{tail}{beside}.", _price(cells, faster, own, margin)]


def _price(cells: Sequence[Cell], faster: Sequence[Cell], own: Mapping[str, Cell], margin: float) -> str:
    """The second sentence."""
    points = f"{100 * margin:g} point{'' if margin == 0.01 else 's'}"
    scored = [c for c in cells if c["accuracy"] and c["accuracy"]["value"] is not None]
    if not scored:
        return "Nothing was scored, so nothing is said of what the speed costs in accuracy."
    if not faster:
        low, high = (f"{100 * pick(c['accuracy']['value'] for c in scored):.1f}%" for pick in (min, max))
        held = sum(_keeps(c, own) for c in cells if c["arm"] in own)
        spread = f"Accuracy is {low}" if low == high else f"Accuracies lie between {low} and {high}"
        stays = f"{held} arms are" if held > 1 else f"{held or 'no'} arm is"
        return f"{spread}; {stays} shown to stay within {points} of the baseline's on the same items."
    kept = [c for c in faster if _keeps(c, own)]
    if not kept:
        who = "It is not" if len(faster) == 1 else "None of them is"
        return (
            f"{who} shown to keep accuracy within {points} of the baseline's on the same items, "
            "so speed alone recommends nothing."
        )
    best = max(kept, key=lambda c: own[c["arm"]]["value"])
    against = next(c for c in cells if c["arm"] == own[best["arm"]]["baseline"])
    gain = f"{best['tokens_per_forward']:.2f} tokens per forward" if best["tokens_per_forward"] else "that speed"
    right, right0 = (f"{100 * c['accuracy']['value']:.1f}%" for c in (best, against))
    if len(faster) == 1:
        return f"It keeps accuracy within {points} of the baseline's: {right} right against {right0}, at {gain}."
    everyone = "Both" if len(faster) == 2 else "All"
    some = f"{len(kept)} of them keep{'s' if len(kept) == 1 else ''}" if len(kept) < len(faster) else f"{everyone} keep"
    named = ", the fastest of which is" if len(kept) > 1 else ":"
    return (
        f"{some} accuracy within {points} of the baseline's{named} {best['arm']}, "
        f"{_with_interval(own[best['arm']])} times as fast with {right} right against {right0}, at {gain}."
    )


def remarks(cells: Sequence[Cell], own: Mapping[str, Cell]) -> list[str]:
    """What the main table leaves to ask: where the gain of an arm went, and how far a baseline agrees with itself."""
    by_arm = {c["arm"]: c for c in cells if c["status"] != "failed" and not c["void"]}
    pairs = [(c, own[c["arm"]]) for c in by_arm.values() if c["arm"] in own]
    said = [_unrewarded(c, by_arm[entry["baseline"]], entry) for c, entry in pairs if entry["baseline"] in by_arm]
    return [*filter(None, said), *(f"{floor}." for floor in floors(cells))]


def _unrewarded(cell: Cell, against: Cell, entry: Cell) -> str | None:
    """Where the time went of an arm that commits more per forward than its baseline and is not faster."""
    gain, plain = number(cell["tokens_per_forward"]), number(against["tokens_per_forward"])
    more = (cell["tokens_per_forward"] or 0) > (against["tokens_per_forward"] or math.inf) and gain != plain
    verdict = entry["verdict"]
    if not more or verdict.startswith("faster") or statistics.withheld(verdict):
        return None
    words = {"slower": "is slower than", "same": "is no faster than"}
    how = words.get(verdict, "is not shown to be faster than")
    speed = f"{cell['arm']} commits {gain} tokens per forward ({plain} without it) and {how} {entry['baseline']}"
    return f"{speed}: {'; '.join(_costs(cell, against, entry)) or 'where the time went was not measured'}."


def _costs(cell: Cell, against: Cell, entry: Cell) -> list[str]:
    """What an arm pays for its tokens per forward, as far as it was measured."""
    factors = entry["factors"] or {}
    said = []
    slowed = 1 / factors["forward_time"] if factors else None
    fed, fed0 = cell["positions_fed_per_forward"], against["positions_fed_per_forward"]
    wider = f"{number(fed)} positions instead of {number(fed0)}" if fed and fed0 and fed > fed0 else None
    if slowed is not None and slowed > 1:
        said.append(f"a forward takes {number(slowed)} times as long" + (f" and feeds {wider}" if wider else ""))
    elif wider:
        said.append(f"a forward feeds {wider}")
    drafts, decode_s = cell["draft_forwards_per_token"], cell["decode_s"]
    if drafts:
        share = (
            f" and takes {100 * cell['draft_s'] / decode_s:.0f}% of decoding" if cell["draft_s"] and decode_s else ""
        )
        said.append(
            f"drafting needs {number(drafts * cell['tokens_per_forward'])} forwards for each of the target's{share}"
        )
    if cell["head_s"] and decode_s:
        said.append(f"heads take {100 * cell['head_s'] / decode_s:.0f}% of decoding")
    for name, what in (
        ("utilisation", "fewer rows are live in a forward"),
        ("host", "less of decoding is spent in the model"),
        ("decode_share", "less of the time is spent decoding"),
    ):
        if factors and factors[name] < NOTED_BELOW:
            said.append(f"{what} (×{number(factors[name])})")
    if entry["length_ratio"] and entry["length_ratio"] > 1 + statistics.LENGTH_RATIO_SHOWN_BEYOND:
        said.append(f"its answers are {number(entry['length_ratio'])} times as long")
    return said


def _missing(cells: Sequence[Cell], own: Mapping[str, Cell]) -> str:
    """Which reference to add, where an arm by our engine has none on its own checkpoint."""
    reference = next(name for name in METHODS if METHODS[name].reference and not METHODS[name].outside)
    there = {c["on"] for c in cells if c["method"] == reference}
    arms = [c for c in cells if not c["reference"] and c["engine"] and c["arm"] not in own and c["on"] not in there]
    asked = [reference if on == reference else f"{reference}:on={on}" for on in dict.fromkeys(c["on"] for c in arms)]
    return f"; add {' and '.join(f'`--method {one}`' for one in asked)}" if asked else ""


def _keeps(cell: Cell, own: Mapping[str, Cell]) -> bool:
    """Is its accuracy shown to stay within the margin? Tokens that are the baseline's own need no verdict."""
    graded = cell["lossless"] or {}
    same = graded.get("grade") == "exact" and graded["against"] == own[cell["arm"]]["baseline"]
    return same or (_verdict(cell, own) or "").startswith(KEPT)


def _verdict(cell: Cell, own: Mapping[str, Cell]) -> str | None:
    """On accuracy, against the baseline on the same checkpoint."""
    baseline = own[cell["arm"]]["baseline"]
    return next((str(a["verdict"]) for a in cell["accuracy_vs"] if a["baseline"] == baseline), None)


def _baseline_name(baselines: Sequence[str]) -> str:
    different = set(baselines)
    return f"{baselines[0]} on the same checkpoint" if len(different) == 1 else "their baselines on the same checkpoint"


def _common_reason(verdicts: Sequence[str]) -> str | None:
    """Why there is no verdict, if that is the same for all."""
    reasons = {v.partition(": ")[2] for v in verdicts}
    return reasons.pop() if len(reasons) == 1 else None


def _with_interval(entry: Cell) -> str:
    return f"{entry['value']:.2f} {interval(ci(entry)) or ''}".strip()


def environment(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What it ran on, in pairs; what is not known is left out."""
    found = results["environment"]
    sessions = found.get("sessions") or [{}]
    here = {**found, **sessions[-1]}
    first = results["cells"][0] if results["cells"] else {}
    gpu = here.get("gpu")
    packages = ", ".join(f"{name} {v}" for name, v in (here.get("packages") or {}).items() if v)
    checkpoints = {
        f"{c['family']} {role}": _tail(path) for c in results["cells"] for role, path in c["checkpoints"].items()
    }
    pairs = [
        ("Processor", f"{here.get('processor')}, {here.get('cores')} cores"),
        ("GPU", _gpu_text(gpu) if gpu else "none"),
        ("Roofline probe", _probe_text(here.get("probe")) or (here.get("probe_reason") if gpu else None)),
        ("Idle power", None if found.get("idle_power_w") is None else f"{number(found['idle_power_w'])} W"),
        ("Device and type", ", ".join(filter(None, (first.get("device"), first.get("dtype"))))),
        ("Threads", here.get("threads")),
        ("Platform", here.get("platform")),
        ("Versions", f"mtbench {here.get('mtbench')}, Python {here.get('python')}, {packages}"),
        ("Code", here.get("git")),
        ("Checkpoints", "; ".join(f"{name}: {path}" for name, path in checkpoints.items())),
        ("Command", _command(results["command"])),
        ("Seed", results["seed"]),
        ("Started", ", ".join(dict.fromkeys(str(s["started"]) for s in (found, *sessions) if s.get("started")))),
        ("Sessions", len(sessions)),
        ("Run", f"{results['run_id']} (plan {results['plan_sha256'][:16]}…)"),
    ]
    return [(name, str(value)) for name, value in pairs if value not in (None, "")]


def _gpu_text(gpu: Mapping[str, Any]) -> str:
    parts = [
        str(gpu.get("name")),
        memory(gpu.get("memory_bytes")),
        f"driver {gpu.get('driver')}",
        f"power cap {number(gpu.get('power_cap_w'))} W",
        f"at most {gpu.get('max_clock_mhz')} MHz",
    ]
    return ", ".join(part for part in parts if "None" not in part and NONE not in part)


def _probe_text(probe: Mapping[str, Any] | None) -> str | None:
    if probe is None:
        return None
    copied, multiplied = probe["bandwidth_bytes_per_s"] / 1e12, probe["matmul_flop_per_s"] / 1e12
    return f"{number(copied)} TB/s copied on the device, {number(multiplied)} TFLOP/s multiplied in this type"


def _command(command: Sequence[str]) -> str:
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else NONE


def _tail(path: str) -> str:
    """A hub id as it is, the last two parts of a path."""
    parts = Path(path).parts
    return path if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"


def _choosing(results: Mapping[str, Any]) -> str:
    """How a token is chosen."""
    temperature = results.get("temperature", 0)  # older results have none: they are greedy
    if not temperature:
        return "Greedy decoding."
    return f"Sampled at temperature {temperature:g}, with the same dice for every arm."


def method_notes(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    said = results["statistics"]
    speed, accuracy = f"{100 * said['speed_margin']:g}%", f"{100 * said['accuracy_margin']:g} points"
    level = f"{100 * said['level']:g}%"
    return [
        (
            "Speedup",
            "The baseline's wall-clock over the arm's on the same prompts: what a user waits. Every rate and ratio is "
            "a ratio of totals. Over the same checkpoint it says what decoding gains; over the deployment baseline it "
            "also holds what training changed. The two are never mixed, and each names its baseline. Both are by the "
            "arm's own engine.",
        ),
        *[
            (
                "Incl. engine",
                "The same ratio over a reference by another engine, in the main table the fastest of them. It holds "
                "that engine's part, so it is no method's gain: beside it stands, as plain, what `ar` by the arm's own "
                "engine, on the checkpoint in the reference's role, comes to over the same reference, which is the "
                "engine's part alone. A dash is what an engine does not tell.",
            )
        ][: any(s.get("includes_engine") for c in results["cells"] for s in c["speedup"])],
        (
            "Tokens per forward",
            "Committed tokens over forwards of the model, forwards that committed nothing included. Prefill commits "
            "nothing, so autoregressive decoding is at 1.00 exactly.",
        ),
        (
            "Acceptance",
            "Of what a forward commits, all but one token are accepted guesses. Length: tokens per forward that "
            "committed any. Rate: accepted guesses over those offered. Per position: the share of those forwards that "
            "accepted so many guesses at least. Others define acceptance in ways of their own; their figures stand "
            "under their names, each by its owner's formula from the same commits, and compare with that owner's only: "
            + "; ".join(f"{whose}: {formula}" for whose, formula in OWNERS.values())
            + ".",
        ),
        *[
            (
                "By task",
                "The same measures of each task's items and blocks alone. Words are adjusted for several arms, as in "
                "the whole suite, and not for several tasks.",
            )
        ][: any(c["tasks"] for c in results["cells"])],
        (
            "Where the speedup went",
            "Tokens per second over the baseline's is exactly the product of five factors: tokens per forward, time "
            "of a forward, live rows per forward, share of decoding spent in the model, share of the wall-clock spent "
            "decoding. The speedup is that product over the ratio of answer lengths.",
        ),
        (
            "Intervals",
            f"In brackets, at {level}. Speed: a t interval on the log scale, the unit is a block of prompts, run as "
            "one batch or, refilled, through the same slots: it answers for other prompts of this kind on this "
            "machine, not for other machines or sessions. "
            "Tokens per forward: the same, the unit is an item. Accuracy: Wilson. Differences of accuracy: "
            "Bonett–Price, on the same items. Intervals are pointwise; the words beside them are adjusted for several "
            "arms by Holm, so a word may be withheld where an interval alone would allow it.",
        ),
        (
            "Words",
            f"Speed: faster or slower if the interval lies beyond {speed}, same if the 90% interval lies within it. "
            f"Accuracy: not worse if the 90% lower bound loses less than {accuracy}, worse if the interval lies "
            "below 0. Anything else is inconclusive, which is a result.",
        ),
        (
            "Lossless",
            "Graded by feeding every emitted token back to the plain model: exact (the same tokens), near-tie (other "
            "tokens, each within rounding of the best), divergent, inconclusive (other tokens, and nothing to judge "
            "them by: too few positions to know what rounding does here, or re-scoring ran out of memory). The floor "
            "beside a grade is what batching alone does: the arm that is promised, at the smallest batch size of the "
            "run against the largest. Arms lossy by design, and those that promise the same distribution and not the "
            "same tokens, are named so and not graded.",
        ),
        (
            "Same rules for all arms",
            f"{_choosing(results)} Sampling defaults that a checkpoint brings along (repetition_penalty, temperature "
            "and the like) are neutralised for every arm, baselines too. Arms run next to each other inside every "
            "block, in random order, after a warm-up; accuracy and speed come from the same generations.",
        ),
        (
            "Void and mind",
            "A void arm cannot be trusted and is left out of the summary. “Mind” is true, and to be kept in mind.",
        ),
    ]
