"""The text of a report around its tables: the question, the machine, and how to read it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtbench.document.formatting import NONE, counted, few, listed, memory, number
from mtbench.errors import UserError
from mtbench.models.families import RECORD, read_training_record
from mtbench.plan.formats import GpuInfo, Machine, SessionRecord
from mtbench.plan.request import SamplingOptions
from mtbench.report.phrases import checkpoint_names, is_overridden, suite_name
from mtbench.results.format import ResultCell, Results


def question(cells: Sequence[ResultCell]) -> str:
    """Return the question of the run."""
    arms = {cell.arm for cell in cells if cell.status != "failed"}
    suites = dict.fromkeys(suite_name(cell.suite) for cell in cells)
    which = f"Which of {len(arms)} arms decodes" if len(arms) > 1 else "How does one arm decode"
    return f"{which}{' fastest' if len(arms) > 1 else ''} on {listed(suites)}?"


def subject(results: Results) -> str:
    """Return what was measured: checkpoints, machine, batch sizes and sampling."""
    sizes = dict.fromkeys(cell.batch_size for cell in results.cells)
    noun = "batch size" if len(sizes) == 1 else "batch sizes"
    parts = [checkpoint_names(results.cells), machine(results), f"{noun} {listed(sizes)}" if sizes else ""]
    return " · ".join(part for part in (*parts, sampling(results).words) if part)


def sampling(results: Results) -> SamplingOptions:
    """Return how tokens were drawn; results of an earlier mtbench have the temperature alone."""
    return results.sampling or SamplingOptions(temperature=results.temperature)


def machine(results: Results) -> str:
    """Return the machine that decoded last: its GPU, or its processor; empty if it is not known."""
    stored = results.environment
    used: Machine = stored.sessions[-1] if stored.sessions else stored
    on_gpu = any(cell.device == "cuda" for cell in results.cells)
    if used.gpu is not None and used.gpu.name and on_gpu:
        return used.gpu.name
    if not used.processor:
        return ""
    return f"{used.processor} ({counted(used.cores, 'core')}{quota(used)})" if used.cores else used.processor


def quota(used: Machine) -> str:
    """Return what to say of a CPU quota after the number of cores; empty if there is none."""
    return "" if used.cpu_quota is None else f", CPU quota of {used.cpu_quota:g} cores"


def facts(cells: Sequence[ResultCell]) -> list[str]:
    """Return what all arms of a section share."""
    first, task = cells[0], cells[0].task
    found = [counted(max(cell.items for cell in cells), "item")]
    if task.get("num_fewshot") is not None:
        found.append(f"{task['num_fewshot']}-shot")
    if "chat_template" in task:
        options = [f"{name}={json.dumps(value)}" for name, value in task.get("template_options", {}).items()]
        found.append(", ".join(["chat template", *options]) if task["chat_template"] else "no chat template")
    found.append(f"at most {first.max_new_tokens:,} new tokens")
    if first.length == "fixed":
        found.append("fixed length: end tokens ignored")
    if first.batching == "refill":
        found.append("refilled: the slot of a finished row takes the next prompt")
    found.append(timed(cells))
    if first.dtype:
        found.append(first.dtype)
    found.append(f"scored by {first.accuracy.metric}" if first.accuracy else "not scored")
    if task.get("sandbox") is False:
        found.append("generated code ran without a sandbox")
    return found


def has_begun(cell: ResultCell) -> bool:
    """Return whether a cell has an answer or a time, or failed."""
    return bool(cell.status in ("ok", "failed") or cell.items or cell.samples.used or cell.samples.dropped)


def not_begun(cells: Sequence[ResultCell]) -> list[str]:
    """Return the arms without an answer, in a sentence for each reason."""
    arms: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if not has_begun(cell)):
        arms.setdefault(cell.left.reason if cell.left else "the run is not finished", []).append(cell.arm)
    return [f"Not run: {few(names)}: {reason}." for reason, names in arms.items()]


def timed(cells: Sequence[ResultCell]) -> str:
    """Return what the speeds rest on: later rounds repeat the first blocks only."""
    most = max(cells, key=lambda cell: cell.blocks)
    part = most.batch_size == 1 and most.blocks < most.items
    blocks = f"{most.blocks:,} of {most.items:,} prompts" if part else counted(most.blocks, "block")
    rounds = most.samples.used // max(1, most.blocks)
    return f"speed from {blocks}{f' in {rounds} rounds' if rounds > 1 else ''}"


def environment(results: Results) -> list[tuple[str, str]]:
    """Return machine, software and settings of the run in pairs; unknown values are left out."""
    stored, command = results.environment, results.command
    session = stored.sessions[-1] if stored.sessions else SessionRecord()
    used: Machine = stored.sessions[-1] if stored.sessions else stored
    starts = [start for start in (stored.started, *(s.started for s in stored.sessions)) if start]
    packages = [f"{name} {version}" for name, version in (used.packages or {}).items() if version]
    pairs: list[tuple[str, str | int | None]] = [
        ("Processor", f"{used.processor}, {used.cores} cores{quota(used)}"),
        ("GPU", "none" if used.gpu is None else _gpu_text(used.gpu)),
        ("Other programs on the GPU", session.strangers_reason and f"not seen: {session.strangers_reason}"),
        ("Roofline probe", _probe_text(session, used.gpu)),
        ("Idle power", None if stored.idle_power_w is None else f"{number(stored.idle_power_w)} W"),
        (
            "Device and type",
            listed(value for cell in results.cells[:1] for value in (cell.device, cell.dtype) if value),
        ),
        ("Layers", listed(dict.fromkeys((session.layers or {}).values()))),
        ("mtbench's kernels", session.kernels_off and f"off: {session.kernels_off}"),
        ("Threads", session.threads),
        ("Platform", used.platform),
        ("Versions", listed([f"mtbench {used.mtbench}", f"Python {used.python}", *packages])),
        ("Code", used.git),
        ("Checkpoints", _checkpoints_text(results.cells)),
        ("Weights", listed(weights(results))),
        ("Command", shlex.join([Path(word).name for word in command[:1]] + [*command[1:]]) or NONE),
        ("Seed", results.seed),
        ("Price per hour", None if results.price_per_hour is None else number(results.price_per_hour)),
        ("Started", listed(dict.fromkeys(starts))),
        ("Sessions", max(1, len(stored.sessions))),
        ("Run", f"{results.run_id} (plan {results.plan_sha256[:16]}…)"),
    ]
    return [(name, str(value)) for name, value in pairs if value not in (None, "")]


def training_records(cells: Sequence[ResultCell]) -> dict[str, Path]:
    """Return the files on this machine that say how checkpoints were trained, by the name of a fact."""
    sources = {role: source for cell in cells for role, source in cell.checkpoints.items()}
    files = {f"Training record of {role}": Path(source).absolute() / RECORD for role, source in sources.items()}
    return {name: file for name, file in files.items() if file.is_file()}


def training_cost(file: Path) -> str:
    """Return where a training record is, and what it says of the cost: positions, forward passes, FLOPs."""
    try:
        record = read_training_record(file.parent)
    except UserError:
        return str(file)
    if not record.get("flops"):
        return str(file)
    student, teacher = (record.get("forwards", {}).get(who, 0) for who in ("student", "teacher"))
    passes = f"{student:,} forward passes" + (f" and {teacher:,} of the teacher" if teacher else "")
    return f"{file} ({record.get('tokens', {}).get('fed', 0):,} positions fed, {passes}, {record['flops']:.3g} FLOPs)"


def weights(results: Results) -> list[str]:
    """Return what the converted weights were made from, and in which type they are."""
    sessions = results.environment.sessions
    return list(dict.fromkeys(made for session in sessions for made in (session.converted or {}).values()))


def _gpu_text(gpu: GpuInfo) -> str:
    parts = (
        gpu.name,
        gpu.memory_bytes and memory(gpu.memory_bytes),
        gpu.driver and f"driver {gpu.driver}",
        gpu.power_cap_w and f"power cap {number(gpu.power_cap_w)} W",
        gpu.max_clock_mhz and f"at most {gpu.max_clock_mhz} MHz",
    )
    return listed(filter(None, parts))


def _probe_text(session: SessionRecord, gpu: GpuInfo | None) -> str | None:
    """Return the speeds of the GPU, or why they are not known; None without a GPU."""
    if session.probe is None:
        return None if gpu is None else session.probe_reason
    copied, multiplied = session.probe.bandwidth_bytes_per_s / 1e12, session.probe.matmul_flop_per_s / 1e12
    read = session.probe.read_bytes_per_s
    reads = "" if read is None else f"{number(read / 1e12)} TB/s read, "
    return f"{reads}{number(copied)} TB/s copied on the device, {number(multiplied)} TFLOP/s multiplied in this type"


def _checkpoints_text(cells: Sequence[ResultCell]) -> str:
    sources = {}
    for cell in cells:
        for role, source in cell.checkpoints.items():
            name = role if is_overridden(cell.family, role, source) else f"{cell.family} {role}"
            parts = Path(source).parts
            sources[name] = source if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"
    return "; ".join(f"{name}: {source}" for name, source in sources.items())


def method_notes(results: Results) -> list[tuple[str, str]]:
    """Return the notes on how to read the report, each with its heading."""
    drawn, choice = sampling(results), "Greedy decoding."
    if drawn.temperature:
        choice = f"{drawn.words.capitalize()}; all arms share one random seed per request and position."
    values = {
        "level": f"{100 * results.statistics.level:g}%",
        "speed_margin": f"{100 * results.statistics.speed_margin:g}%",
        "max_loss": f"{results.statistics.max_loss:g} points",
        "choice": choice,
        "disabled": "apply, but for those that the command names,"
        if drawn.sampling_source == "model" and drawn.temperature
        else "(repetition_penalty, temperature and the like) are disabled",
    }
    return [(heading, note.format(**values)) for heading, note in NOTES.items()]


NOTES: Mapping[str, str] = {
    "What to use": (
        "The decision at the top is made from verdicts and intervals. An arm can be used if it is faster than plain "
        "decoding on the checkpoint that one would deploy, and has its tokens, or an accuracy that is shown to lose "
        "less than {max_loss}. Of such arms the fastest is named. If no arm passes and one is undecided, "
        "there is no decision yet. A race leaves out arms over its limits."
    ),
    "Speedup": (
        "Wall time of the baseline over that of the arm, on the same prompts: the gain that a user sees. Every rate "
        "and ratio is a ratio of totals. The main table has the speedup over plain decoding on the checkpoint that one "
        "would deploy. It contains the effect of training, if the arm has a checkpoint of its own. Over the baseline "
        "on the same checkpoint it is the gain of decoding; the table Speed has both. Both baselines ran by the "
        "arm's own engine."
    ),
    "Tokens per forward": (
        "Committed tokens over forward passes of the model, including those that committed nothing. Prefill commits "
        "nothing, so autoregressive decoding has exactly 1.00."
    ),
    "Acceptance": (
        "All tokens that a forward commits but one are accepted guesses. Other projects define acceptance in other "
        "ways. Their figures stand under their names, computed from the same commits by the owner's formula. Compare "
        "such a figure only with the same owner's."
    ),
    "Intervals": (
        "In brackets, at {level}. Speed: a t interval on the log scale over blocks of prompts. A block is one batch, "
        "or the prompts that pass through the same refilled slots. Every timed block has the same number of rounds, "
        "and its time is their median. The interval holds for other prompts of this kind on this machine, not for "
        "other machines or sessions. Of arms that decoded apart, speed has intervals over rounds: they hold for these "
        "prompts and other starts of the servers. Tokens per forward: the same, over blocks, since a row can wait for "
        "its neighbours. Accuracy: Wilson. Differences of accuracy: Tango's score interval, on the same items. "
        "Intervals are pointwise. Verdicts are adjusted for several arms by Holm. Where the adjustment withholds a "
        "verdict, the verdict says so and gives the adjusted interval."
    ),
    "Verdicts": (
        "Speed: faster or slower if the interval lies beyond {speed_margin}, same if the 90% interval lies within it. "
        "Accuracy: not worse if the 90% lower bound loses less than {max_loss}, worse if the interval lies "
        "below 0. Anything else is inconclusive, which is a result, too."
    ),
    "Lossless": (
        "A grade says whether the tokens are those of the arm that is promised. Every emitted token is fed back to the "
        "plain model. Exact: the same tokens. Near-tie: other tokens, each within rounding error of the largest logit. "
        "Divergent: a token beyond that. Inconclusive: other tokens, and nothing to judge them by, since there are too "
        "few positions to measure the rounding error or re-scoring could not run. The floor next to a grade is the "
        "effect of batching alone: the promised arm at the smallest against the largest batch size of the run. Arms "
        "that are lossy by design, and arms that promise the same distribution and not the same tokens, have no grade."
    ),
    "Same rules for all arms": (
        "{choice} Sampling defaults of a checkpoint {disabled} for "
        "every arm, baselines included. Arms run next to each other inside every block, in random order, after a "
        "warm-up. Accuracy and speed come from the same generations."
    ),
    "Void and note": (
        "A void arm cannot be trusted: it has no verdict, nor have arms whose baseline is void, and the summary leaves "
        "it out. A note says how to read an arm's values."
    ),
}


def gaps(cells: Sequence[ResultCell]) -> list[str]:
    """Return why columns are missing, each reason once, and where a percentile is a single value."""
    answered = [cell for cell in cells if cell.status != "failed"]
    sentences = _reasons("Energy per token", {cell.arm: cell.energy_reason for cell in answered})
    sentences += _reasons("% of roofline", {cell.arm: cell.roofline_reason for cell in answered})
    if any(cell.device == "cpu" and cell.peak_memory_bytes is None for cell in answered):
        sentences.append("Peak memory: on a CPU it is measured only with `--peak-memory`.")
    if any(cell.batching == "refill" for cell in answered):
        sentences.append("Between commits: for refilled slots the step at which a row starts is not stored.")
    if any(cell.samples.used == 1 and cell.ttft_s.p50 is not None for cell in answered):
        sentences.append("First token: one block was timed, so median and 95th percentile are the same sample.")
    return sentences


def _reasons(what: str, reasons: Mapping[str, str | None]) -> list[str]:
    """Return a sentence per reason, with the arms that it holds for unless it holds for all."""
    sentences = []
    for reason in filter(None, dict.fromkeys(reasons.values())):
        arms = [arm for arm, of_arm in reasons.items() if of_arm == reason]
        of = "" if len(arms) == len(reasons) else f" of {listed(arms)}"
        sentences.append(f"{what}{of}: {reason}.")
    return sentences
