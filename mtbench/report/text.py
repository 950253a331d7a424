"""The words of a report around its tables: the title, what it ran on, and how to read it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtbench.report.formatting import NONE, counted, listed, memory, number
from mtbench.report.phrases import disclaimers, is_overridden
from mtbench.results.acceptance import OWNERS
from mtbench.results.record import ResultCell, Results
from mtbench.runs.records import GpuInfo, Machine, SessionRecord

TITLE = "Multi-token decoding, compared"


def title(results: Results) -> str:
    """Return the title of the page: what everybody must know of it first."""
    return ". ".join(disclaimers(results.cells)) or TITLE


def facts(cells: Sequence[ResultCell]) -> list[str]:
    """Return what all arms of a section share."""
    first, task = cells[0], cells[0].task
    found = [counted(max(cell.items for cell in cells), "item")]
    if task.get("num_fewshot") is not None:
        found.append(f"{task['num_fewshot']}-shot")
    if "chat_template" in task:
        found.append("chat template" if task["chat_template"] else "no chat template")
    found.append(f"at most {first.max_new_tokens:,} new tokens")
    if first.length == "fixed":
        found.append("fixed length: end tokens ignored")
    if first.batching == "refill":
        found.append("a finished row's slot takes the next prompt")
    found.append(f"{counted(max(cell.blocks for cell in cells), 'block')} timed")
    if first.dtype:
        found.append(first.dtype)
    found.append(f"scored by {first.accuracy.metric}" if first.accuracy else "not scored")
    if task.get("sandbox") is False:
        found.append("programs ran unconfined")
    return found


def environment(results: Results) -> list[tuple[str, str]]:
    """Return what the run ran on, in pairs; unknown values are left out."""
    stored = results.environment
    session = stored.sessions[-1] if stored.sessions else SessionRecord()
    machine: Machine = stored.sessions[-1] if stored.sessions else stored
    starts = [start for start in (stored.started, *(s.started for s in stored.sessions)) if start]
    pairs: list[tuple[str, str | int | None]] = [
        ("Processor", f"{machine.processor}, {machine.cores} cores"),
        ("GPU", "none" if machine.gpu is None else _gpu_text(machine.gpu)),
        ("Roofline probe", _probe_text(session, machine.gpu)),
        ("Idle power", None if stored.idle_power_w is None else f"{number(stored.idle_power_w)} W"),
        ("Device and type", _device_text(results.cells)),
        ("Threads", session.threads),
        ("Platform", machine.platform),
        ("Versions", _versions_text(machine)),
        ("Code", machine.git),
        ("Checkpoints", _checkpoints_text(results.cells)),
        ("Command", _command_text(results.command)),
        ("Seed", results.seed),
        ("Started", listed(dict.fromkeys(starts))),
        ("Sessions", max(1, len(stored.sessions))),
        ("Run", f"{results.run_id} (plan {results.plan_sha256[:16]}…)"),
    ]
    return [(name, str(value)) for name, value in pairs if value not in (None, "")]


def _gpu_text(gpu: GpuInfo) -> str:
    parts = [gpu.name]
    if gpu.memory_bytes is not None:
        parts.append(memory(gpu.memory_bytes))
    if gpu.driver is not None:
        parts.append(f"driver {gpu.driver}")
    if gpu.power_cap_w is not None:
        parts.append(f"power cap {number(gpu.power_cap_w)} W")
    if gpu.max_clock_mhz is not None:
        parts.append(f"at most {gpu.max_clock_mhz} MHz")
    return listed(part for part in parts if part is not None)


def _probe_text(session: SessionRecord, gpu: GpuInfo | None) -> str | None:
    """Return the speeds of the GPU, or why they are not known; None without a GPU."""
    if session.probe is None:
        return None if gpu is None else session.probe_reason
    copied, multiplied = session.probe.bandwidth_bytes_per_s / 1e12, session.probe.matmul_flop_per_s / 1e12
    return f"{number(copied)} TB/s copied on the device, {number(multiplied)} TFLOP/s multiplied in this type"


def _device_text(cells: Sequence[ResultCell]) -> str:
    return listed(value for value in (cells[0].device, cells[0].dtype) if value) if cells else ""


def _versions_text(machine: Machine) -> str:
    packages = [f"{name} {version}" for name, version in (machine.packages or {}).items() if version]
    return listed([f"mtbench {machine.mtbench}", f"Python {machine.python}", *packages])


def _checkpoints_text(cells: Sequence[ResultCell]) -> str:
    sources = {}
    for cell in cells:
        for role, source in cell.checkpoints.items():
            name = role if is_overridden(cell.family, role, source) else f"{cell.family} {role}"
            sources[name] = _tail(source)
    return "; ".join(f"{name}: {source}" for name, source in sources.items())


def _command_text(command: Sequence[str]) -> str:
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else NONE


def _tail(source: str) -> str:
    """Return a hub id as it is, and the last two parts of a path."""
    parts = Path(source).parts
    return source if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"


def method_notes(results: Results) -> list[tuple[str, str]]:
    """Return the notes on how to read the report, each with its heading."""
    cells = results.cells
    left_out = set()
    if not any(speedup.includes_engine for cell in cells for speedup in cell.speedup):
        left_out.add("Incl. engine")
    if not any(cell.tasks for cell in cells):
        left_out.add("By task")
    choice = "Greedy decoding."
    if results.temperature:
        choice = f"Sampled at temperature {results.temperature:g}, with the same dice for every arm."
    values = {
        "level": f"{100 * results.statistics.level:g}%",
        "speed_margin": f"{100 * results.statistics.speed_margin:g}%",
        "accuracy_margin": f"{100 * results.statistics.accuracy_margin:g} points",
        "owners": "; ".join(f"{owner}: {formula}" for owner, formula in OWNERS.values()),
        "choice": choice,
    }
    return [(heading, note.format(**values)) for heading, note in NOTES.items() if heading not in left_out]


NOTES: Mapping[str, str] = {
    "Speedup": (
        "The baseline's wall-clock over the arm's on the same prompts: what a user waits. Every rate and ratio is "
        "a ratio of totals. Over the same checkpoint it says what decoding gains; over the deployment baseline it "
        "also holds what training changed. The two are never mixed, and each names its baseline. Both are by the "
        "arm's own engine."
    ),
    "Incl. engine": (
        "The same ratio over a reference by another engine, in the main table the fastest of them. It holds "
        "that engine's part, so it is no method's gain: beside it stands, as plain, what `ar` by the arm's own "
        "engine, on the checkpoint in the reference's role, comes to over the same reference, which is the "
        "engine's part alone. A dash is what an engine does not tell."
    ),
    "Tokens per forward": (
        "Committed tokens over forwards of the model, forwards that committed nothing included. Prefill commits "
        "nothing, so autoregressive decoding is at 1.00 exactly."
    ),
    "Acceptance": (
        "Of what a forward commits, all but one token are accepted guesses. Length: tokens per forward that "
        "committed any. Rate: accepted guesses over those offered. Per position: the share of those forwards that "
        "accepted so many guesses at least. Others define acceptance in ways of their own; their figures stand "
        "under their names, each by its owner's formula from the same commits, and compare with that owner's only: "
        "{owners}."
    ),
    "By task": (
        "The same measures of each task's items and blocks alone. Words are adjusted for several arms, as in "
        "the whole suite, and not for several tasks."
    ),
    "Where the speedup went": (
        "Tokens per second over the baseline's is exactly the product of five factors: tokens per forward, time "
        "of a forward, live rows per forward, share of decoding spent in the model, share of the wall-clock spent "
        "decoding. The speedup is that product over the ratio of answer lengths."
    ),
    "Intervals": (
        "In brackets, at {level}. Speed: a t interval on the log scale, the unit is a block of prompts, run as "
        "one batch or, refilled, through the same slots: it answers for other prompts of this kind on this "
        "machine, not for other machines or sessions. "
        "Tokens per forward: the same, the unit is an item. Accuracy: Wilson. Differences of accuracy: "
        "Bonett–Price, on the same items. Intervals are pointwise; the words beside them are adjusted for several "
        "arms by Holm, so a word may be withheld where an interval alone would allow it."
    ),
    "Words": (
        "Speed: faster or slower if the interval lies beyond {speed_margin}, same if the 90% interval lies within it. "
        "Accuracy: not worse if the 90% lower bound loses less than {accuracy_margin}, worse if the interval lies "
        "below 0. Anything else is inconclusive, which is a result."
    ),
    "Lossless": (
        "Graded by feeding every emitted token back to the plain model: exact (the same tokens), near-tie (other "
        "tokens, each within rounding of the best), divergent, inconclusive (other tokens, and nothing to judge "
        "them by: too few positions to know what rounding does here, or re-scoring ran out of memory). The floor "
        "beside a grade is what batching alone does: the arm that is promised, at the smallest batch size of the "
        "run against the largest. Arms lossy by design, and those that promise the same distribution and not the "
        "same tokens, are named so and not graded."
    ),
    "Same rules for all arms": (
        "{choice} Sampling defaults that a checkpoint brings along (repetition_penalty, temperature "
        "and the like) are neutralised for every arm, baselines too. Arms run next to each other inside every "
        "block, in random order, after a warm-up; accuracy and speed come from the same generations."
    ),
    "Void and mind": (
        "A void arm cannot be trusted and is left out of the summary. “Mind” is true, and to be kept in mind."
    ),
}
