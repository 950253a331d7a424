"""How a race went: who left, what is open, what it took. Made from decision.json, for the page and report.md."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mtbench.decoding.serving_engines import NONE_HAS_IT
from mtbench.document.formatting import counted, listed, number, percent, seconds
from mtbench.report.arm_names import in_words
from mtbench.report.phrases import batches, suite_name
from mtbench.results.decision_format import Decision, Looks, Recommendation
from mtbench.results.decision_text import ALL_USED, budget_spent, times
from mtbench.results.format import ResultCell, Results

LIMITS = {"ttft": "time to the first token", "itl": "time between commits"}  # names in `--slo`


class Part(NamedTuple):
    """A part of the section: a sentence, rows of a name and a text, or both."""

    heading: str
    text: str = ""
    rows: Sequence[tuple[str, str]] = ()
    code: bool = False  # the texts of the rows are commands or options


def race_parts(results: Results, decision: Decision | None, names: Mapping[str, str]) -> list[Part]:
    """Return the parts of the section, with arms in words; none without a decision."""
    if decision is None:
        return []
    found = [_asked(decision)]
    found += [_left(looks, results.cells, decision) for looks in decision.looks]
    found += [_open(decision), _spent(decision), _errors(decision)]
    found += deploy_parts(decision)
    if decision.refused:
        found.append(Part("What could not be raced", rows=[*decision.refused.items()]))
    found.append(Part("Repeat the race", rows=[("Command", shlex.join(decision.command))], code=True))
    return [
        part._replace(
            text=in_words(part.text, names),
            rows=[(in_words(name, names), text if part.code else in_words(text, names)) for name, text in part.rows],
        )
        for part in found
    ]


def deploy_parts(decision: Decision) -> list[Part]:
    """Return the commands that start a serving engine with the recommended arms, if there are such arms."""
    rows = [(f"{arm}, {engine}", text) for arm, of_arm in decision.serving.items() for engine, text in of_arm.items()]
    texts = [f"{arm}: {NONE_HAS_IT}." for arm, of_arm in decision.serving.items() if not of_arm]
    for arm, of_arm in decision.serving_notes.items():
        texts += [f"{arm}, {engine}: {note}" for engine, note in of_arm.items()]
    return [Part("Deploy (not measured there)", " ".join(texts), rows, code=True)] if decision.serving else []


def _asked(decision: Decision) -> Part:
    limits = [f"{LIMITS.get(name, name)} at most {seconds(limit)}" for name, limit in decision.slo_s.items()]
    rows = [("Objective", decision.objective), ("Accepted loss of accuracy, in points", f"{100 * decision.max_loss:g}")]
    if limits:
        rows.append(("Limits", f"{listed(limits)}, for 95 % of the requests or commits"))
    return Part("What was asked", rows=rows)


def _left(looks: Looks, cells: Sequence[ResultCell], decision: Decision) -> Part:
    """Return what became of each arm of a group: those that left first come first."""
    place = f"{suite_name(looks.suite)}, {batches(looks.batch_size, 'static')}"
    blocks = counted(max(looks.planned, default=0), "block")
    text = f"Arms were compared after {_and(looks.made)} of {blocks}."
    if not looks.made:
        text = f"Arms are compared after {_and(looks.planned)} of {blocks}; none of these is reached yet."
    rows = [
        (gone.arm, f"after {counted(gone.block, 'block')}: {gone.reason}" if gone.block else gone.reason)
        for gone in decision.left
        if (gone.suite, gone.batch_size) == (looks.suite, looks.batch_size)
    ]
    of_group = [cell for cell in cells if (cell.suite, cell.batch_size) == (looks.suite, looks.batch_size)]
    rows += [(cell.arm, _stayed(cell)) for cell in of_group if cell.arm not in dict(rows)]
    over = {cell.arm for cell in of_group if cell.cell in decision.over_slo}
    rows = [(arm, f"{text}; over a limit, so it is not recommended" if arm in over else text) for arm, text in rows]
    return Part(f"Who left, and when: {place}", text, rows)


def _stayed(cell: ResultCell) -> str:
    if cell.error:
        return f"failed: {cell.error}"
    return f"{'there' if cell.status == 'partial' else 'stayed'} to the end, {counted(cell.blocks, 'block')}"


def _open(decision: Decision) -> Part:
    texts = [] if decision.complete else [budget_spent(decision, "mtbench choose -o DIR --resume")]
    if decision.least:
        texts.append("The choice rests on one measurement of each arm, which has no interval.")
    rows = [*_doubts(decision.recommendations)]
    if rows and decision.complete and not decision.least:
        texts.append(ALL_USED)
    if not rows:
        texts.append("No arm without a verdict looks faster.")
    return Part("What is open", " ".join(texts), rows)


def _doubts(recommendations: Sequence[Recommendation]) -> Iterator[tuple[str, str]]:
    for found in recommendations:
        place = f"{suite_name(found.suite)}, {batches(found.batch_size, found.batching)}"
        if found.undecided is not None:
            gain = "" if found.undecided.speedup.value is None else f" ({times(found.undecided)})"
            yield place, f"{found.undecided.arm}{gain}: {found.doubt}"
            yield from ((place, f"{arm}: open, too") for arm in found.also_open)
        elif found.word == "cannot tell":
            yield place, found.text


def _spent(decision: Decision) -> Part:
    spent = decision.spent
    texts = []
    if spent.forwards_full:
        share = percent(spent.forwards / spent.forwards_full, 0)
        texts.append(f"{spent.forwards:,} of {spent.forwards_full:,} forwards of the full grid ({share} %).")
    if spent.decoding_full_s:
        texts.append(f"{seconds(spent.decoding_s)} of {seconds(spent.decoding_full_s)} of decoding.")
    texts.append("The full grid is every arm on every block; it is estimated from the blocks that were decoded.")
    return Part("What it took", " ".join(texts))


def _errors(decision: Decision) -> Part:
    levels = decision.levels
    between, worse, kept, close = (
        number(100 * level, 1)
        for level in (levels.between_arms, levels.accuracy_worse, levels.accuracy_not_worse, levels.close)
    )
    return Part(
        "Error levels",
        f"The errors below are probabilities at each batch size, over all looks and arms. A bound on the times of two "
        f"arms is wrong: at most {between} %. An allowed arm is called too inaccurate: at most {worse} %. An arm that "
        f"is too inaccurate is called allowed: at most {kept} %. Arms within {close} % of the fastest count as good.",
    )


def _and(numbers: Sequence[int]) -> str:
    """Return numbers such as `6, 8 and 11`."""
    return " and ".join(part for part in (listed(numbers[:-1]), str(numbers[-1])) if part) if numbers else ""
