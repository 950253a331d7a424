"""The course of a race: the arms that left, and the cost. Made from decision.json, for the page and report.md."""

import math
from collections.abc import Mapping, Sequence

from mtbench.document.formatting import bounds, counted, interval, listed, number, percent, seconds
from mtbench.document.model import Pairs, Part, Text
from mtbench.report.arm_names import in_words
from mtbench.report.phrases import batches, suite_name
from mtbench.report.text import has_begun
from mtbench.results.decision_format import Decision, Looks, Schedule
from mtbench.results.decision_text import ALL_USED
from mtbench.results.format import ResultCell, Results

SCHEDULE = "one server for all batch sizes, with a schedule of drafts"
LIMITS = {"ttft": "time to the first token", "itl": "time between commits"}  # names in `--slo`
Rows = list[tuple[str, str]]  # name or words, and text or command


def race_parts(results: Results, decision: Decision, names: Mapping[str, str]) -> list[Part]:
    """Return the parts of the section, with readable names of arms."""

    def part(heading: str, text: str = "", rows: Sequence[tuple[str, str]] = ()) -> Part:
        named = [(in_words(name, names), in_words(words, names)) for name, words in rows]
        blocks = [Text(in_words(text, names))] if text else []
        return Part(heading, [*blocks, *([Pairs(named)] if named else [])], folded=False)

    limits = [f"{LIMITS.get(name, name)} at most {seconds(limit)}" for name, limit in decision.slo_s.items()]
    asked = [("Accepted loss of accuracy, in points", f"{decision.max_loss:g}")]
    asked += [("Limits", f"{listed(limits)}, for 95 % of the requests or commits")] if limits else []
    parts = [part("What was asked", rows=asked)]
    parts += [part(*_left(looks, results.cells, decision)) for looks in decision.looks]
    parts.append(part("What it took", _spent(decision)))
    not_run = {cell.left.reason for cell in results.cells if cell.left is not None and cell.left.unraced}  # in one line
    if refused := [(name, reason) for name, reason in decision.refused.items() if reason not in not_run]:
        parts.append(part("What could not be raced", rows=refused))
    return parts


def steps(decision: Decision, directory: object, options: str = "", *, others: bool = False) -> Rows:
    """Return what to do next after a race in a directory: words, and a command or an empty text.

    First the commands that start a server with the recommended arms. options: of the command that goes on with the
    race. others: commands for engines that were not raced, too.
    """
    found, resume = Rows(), f"mtbench choose -o {directory} --resume{options}"
    for arm, of_arm in decision.serving.items():
        for place, (engine, command) in enumerate(of_arm.items()):
            if place == 0 or others:
                name = f"{arm} in {engine}, not measured" if place else arm
                note = decision.serving_notes.get(arm, {}).get(engine)
                found += [(f"Deploy {name}:", command), *([(f"{name}: {note}", "")] if note else [])]
    if (schedule := decision.schedule) is not None:
        slow = [size.batch_size for size in schedule.sizes if size.verdict.word == "slower"]
        if schedule.command and not slow and not schedule.reason:
            found.append((f"Deploy {SCHEDULE}:", schedule.command))
        found.append((f"{SCHEDULE}: {_speed(schedule, slow)}.", ""))
    if not others and any(len(of_arm) > 1 for of_arm in decision.serving.values()):
        found.append(("For other engines, not measured:", f"{resume} --deploy all"))
    if not decision.complete:
        found.append(("The race has not ended. Go on with:", resume))
    elif any(rec.word == "cannot tell" for rec in decision.recommendations):
        found.append((ALL_USED, ""))
    return found


def _speed(schedule: Schedule, slow: Sequence[int]) -> str:
    """Return how fast a server with a schedule is, or why that is not known. slow: batch sizes."""
    if schedule.reason:
        return schedule.reason
    speeds = (
        (s.batch_size, number(s.ratio.value), interval(bounds(s.ratio)) or "[no interval]") for s in schedule.sizes
    )
    at = listed(f"{value} {ends} at {size}" for size, value, ends in speeds)
    speed = f"measured where the answers change and one below, it has {at} of the speed of the chosen arm's own server"
    return f"{speed}; it stalls at batch size {listed(slow)}, so do not use it" if slow else speed


def _left(looks: Looks, cells: Sequence[ResultCell], decision: Decision) -> tuple[str, str, Rows]:
    of_group = [c for c in cells if (c.suite, c.batch_size) == (looks.suite, looks.batch_size) and has_begun(c)]
    of_group.sort(key=lambda cell: math.inf if cell.left is None else cell.left.block)
    over = {cell.arm: "; over a limit, so it is not recommended" for cell in of_group if cell.cell in decision.over_slo}
    text = (
        f"Arms were compared after these blocks: {listed(looks.made) or 'none yet'}; planned: {listed(looks.planned)}."
    )
    return (
        f"Who left, and when: {suite_name(looks.suite)}, {batches(looks.batch_size, 'static')}",
        text,
        [(cell.arm, _fate(cell) + over.get(cell.arm, "")) for cell in of_group],
    )


def _fate(cell: ResultCell) -> str:
    if cell.left is None:
        return f"failed: {cell.error}" if cell.error else f"stayed, {counted(cell.blocks, 'block')}"
    return f"after {counted(cell.left.block, 'block')}: {cell.left.reason}" if cell.left.block else cell.left.reason


def _spent(decision: Decision) -> str:
    spent = decision.spent
    texts = []
    if spent.forwards and spent.forwards_full:
        share = percent(spent.forwards / spent.forwards_full, 0)
        texts.append(f"{spent.forwards:,} of {spent.forwards_full:,} forwards of the full grid ({share} %).")
    if spent.decoding_full_s:
        texts.append(f"{seconds(spent.decoding_s)} of {seconds(spent.decoding_full_s)} of decoding.")
    texts.append("The full grid is every arm on every block; it is estimated from the blocks that were decoded.")
    return " ".join(texts)
