"""What a person sees in the terminal when a run is planned or done."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtbench.runs.plan import Plan
from mtbench.runs.simulation import KINDS, flags_of

ENGINE, GRADE = "incl.\nengine", "lossless"
HEADINGS = (
    "accuracy, %",
    "tokens per\nforward",
    "tokens/s",
    "speedup,\nsame model",
    "speedup,\ndeployed",
    ENGINE,
    GRADE,
)
LEAST_FIRST = (
    ENGINE,
    "speedup,\ndeployed",
    "tokens/s",
    "tokens per\nforward",
    "accuracy, %",
)  # to go where it is narrow
BREAKS = re.compile("(?<=[,:])|(?=[@/])")  # where an arm's name may be broken
ARM_WIDTH = 16  # of a column headed by an arm
DEMONSTRATION = "Demonstration: small model, CPU, synthetic task: shows the mechanics"


def disclaimers(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands over anything made from these cells: what is simulated in them, and that they show mechanics only."""
    simulated = [c["simulated"] for c in cells if c["simulated"]]
    kinds = " and ".join(word for kind, word in KINDS.items() if any(s[kind] for s in simulated))
    said = [f"Simulated {kinds}: speed only, and not that of a trained model"] if kinds else []
    return said + [DEMONSTRATION] * any(c["demonstration"] for c in cells)


def simulations(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not real about the cells of a group. References accept nothing: a replayed run lends them its lengths.

    A run has one script, and random weights of one shape.
    """
    simulated = [c for c in cells if c["simulated"]]
    weights = dict.fromkeys(c["simulated"]["weights"] for c in simulated)
    said = [f"Simulated weights: {source}." for source in weights if source]
    for reference, what in ((False, "Simulated acceptance"), (True, "Answer lengths")):
        alike: dict[str, list[str]] = {}
        for cell in simulated:
            note = cell["simulated"]["note"] or ""
            drawn, colon, _ = note.partition(":")  # a colon: acceptance is drawn, and what follows is of static batches
            if cell["simulated"]["accept"] and cell["reference"] == reference and not (reference and colon):
                alike.setdefault(drawn if cell["batching"] == "refill" else note, []).append(cell["arm"])
        accept = next((c["simulated"]["accept"] for c in simulated), None)
        for note, arms in alike.items():
            said.append(f"{what} of {', '.join(arms)}: {accept}{f' ({note})' if note else ''}.")
    return said


def plan_table(plan: Plan) -> Table:
    """What a run would do."""
    table = Table(title="Plan")
    for column, side in (
        ("suite", "left"),
        ("arm", "left"),
        ("batch", "right"),
        ("items", "right"),
        ("blocks", "right"),
    ):
        table.add_column(column, justify="right" if side == "right" else "left")
    table.add_column("rounds", justify="right")
    for group in plan.groups:
        for name in group.cells:
            items, rounds = sum(map(len, group.blocks)), "+".join(map(str, group.rounds))
            batch = f"{group.batch_size}{'' if group.batching == 'static' else f' {group.batching}'}"
            row = (group.suite, plan.cell(name).arm, batch, str(items), str(len(group.blocks)), rounds)
            table.add_row(*map(escape, row))
    return table


def results_tables(results: Mapping[str, Any], width: int) -> list[Table]:
    """One table per suite, batch size and batching, a row per arm; 95 % intervals and verdicts stand under the values.

    Where `width` columns are too few, the least important ones go; what other engines come to is then said below.
    A suite of several tasks has a second table, of these, where it is wide enough.
    """
    tables = []
    for place, cells in sections(results["cells"]).items():
        tables += [_results_table(place, cells, width), _task_table(place, cells, width)]
    return [table for table in tables if table is not None]


def _results_table(place: tuple[str, int, str], cells: Sequence[Mapping[str, Any]], width: int) -> Table:
    warnings_of = {cell["cell"]: warnings(cell) for cell in cells}
    notes = list(dict.fromkeys(note for said in warnings_of.values() for note in said))
    marks = ["".join(f"({notes.index(note) + 1})" for note in warnings_of[cell["cell"]]) for cell in cells]
    on = {c["arm"]: c["on"] for c in cells}
    rows = [_row(cell, on) for cell in cells]
    columns = {heading: [row[i] for row in rows] for i, heading in enumerate(HEADINGS)}
    if not any(strongest(cell) for cell in cells):
        del columns[ENGINE]
    names = [[*BREAKS.split(cell["arm"]), f" {mark}"] for cell, mark in zip(cells, marks, strict=True)]
    narrowest = max(len(piece) for name in names for piece in name)
    empty_first = sorted(LEAST_FIRST, key=lambda heading: set(columns.get(heading, ())) != {"–"})
    for heading in empty_first:
        if _room(columns, width) < narrowest:
            columns.pop(heading, None)
    caption = disclaimers(cells)
    caption += [] if ENGINE in columns else _over_engines(cells)
    caption += _inconclusive(cells, on) + floors(cells)
    caption += [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
    title = f"{place[0]}, {batches(*place[1:])}, {max(c['items'] for c in cells)} items"
    return _framed(title, caption, names, columns, width)


def _task_table(place: tuple[str, int, str], cells: Sequence[Mapping[str, Any]], width: int) -> Table | None:
    """Each task apart, a row for each; None where a suite has one. Arms that find no room are said below."""
    on = {c["arm"]: c["on"] for c in cells}
    tasks = list(dict.fromkeys(part["task"] for c in cells for part in c["tasks"]))
    if not tasks:
        return None
    names = [*tasks, "all items", "mean of tasks"]
    columns: dict[str, list[str]] = {}
    for cell in cells:
        apart = {part["task"]: part for part in cell["tasks"]}
        baseline = _own_and_deployed(cell, on)[0]
        values = [_task_text(part, baseline) for part in (*map(apart.get, tasks), cell)]
        columns[_lines_of(BREAKS.split(cell["arm"]), ARM_WIDTH)] = [*values, percent(cell["accuracy_macro"]) or "–"]
    if not any(cell["accuracy_macro"] for cell in cells):
        names.pop()
        columns = {heading: values[:-1] for heading, values in columns.items()}
    beyond = []
    while len(columns) > 1 and _room(columns, width) < max(map(len, names)):
        beyond.append(columns.popitem()[0].replace("\n", ""))
    scored = any(cell["accuracy"] for cell in cells)
    said = "accuracy, %; " * scored + "tokens per forward; speedup over the same model"
    caption = disclaimers(cells) + [f"on the page: {', '.join(reversed(beyond))}"] * bool(beyond)
    title = f"{place[0]}, {batches(*place[1:])}, by task: {said}"
    table = _framed(title, caption, [[name] for name in names], columns, width, of="task")
    table.show_lines = False  # one line each: there may be dozens
    return table


def _task_text(part: Mapping[str, Any] | None, baseline: str | None) -> str:
    if part is None:
        return "–"
    entry = next((s for s in part["speedup"] if s["baseline"] == baseline), None)
    speed = (
        None if entry is None or entry["ci_low"] is None else f"×{entry['value']:.2f}"
    )  # without one it says nothing
    return "  ".join(filter(None, (percent(part["accuracy"]), number(part["tokens_per_forward"], 2), speed))) or "–"


def percent(accuracy: Mapping[str, Any] | None) -> str | None:
    return None if accuracy is None or accuracy["value"] is None else f"{100 * accuracy['value']:.1f}"


def _framed(
    title: str,
    caption: Sequence[str],
    names: Sequence[Sequence[str]],
    columns: Mapping[str, Sequence[str]],
    width: int,
    of: str = "arm",
) -> Table:
    """A table of arms (or of what is said), whose names are given in the pieces they may be broken into."""
    table = Table(
        title=escape(title),
        caption=escape("\n".join(caption)),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_lines=True,
        padding=(0, 1, 0, 0),
    )
    table.add_column(of, overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == GRADE else "right", no_wrap=True)
    for name, *row in zip(names, *columns.values(), strict=True):
        table.add_row(*map(escape, [_lines_of(name, _room(columns, width)), *row]))
    return table


def _room(columns: Mapping[str, Sequence[str]], width: int) -> int:
    """What so wide a table leaves for the arms; every column has a rule and an empty place beside it."""
    widths = [max(map(len, "\n".join([heading, *values]).split("\n"))) for heading, values in columns.items()]
    return width - sum(widths) - 2 * (len(widths) + 1) - 1


def _lines_of(pieces: Sequence[str], room: int) -> str:
    """A name broken between its pieces, each line as full as it may be."""
    lines = [""]
    for piece in pieces:
        lines += [""] * (len(lines[-1]) + len(piece.rstrip()) > room)
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def _over_engines(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What arms by our engines come to over the fastest reference by another, and what plain decoding does."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for cell in cells:
        if cell["engine"] and (entry := strongest(cell)):
            found.setdefault(entry["baseline"], []).append((cell["arm"], entry))
    said = []
    for baseline, entries in found.items():
        plain = {e["plain"]["arm"]: e["plain"]["value"] for _, e in entries if e["plain"]}
        beside = f" (plain {_ratios(plain)})" if plain else ""
        said.append(f"over {baseline}: {_ratios({arm: e['value'] for arm, e in entries})}{beside}")
    return said


def _ratios(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{arm} ×{number(value, 2) or '–'}" for arm, value in values.items())


def _inconclusive(cells: Sequence[Mapping[str, Any]], on: Mapping[str, str]) -> list[str]:
    """Why speedups in the table are inconclusive, each kind of reason once."""
    reasons: dict[str, set[str]] = {}
    for cell in cells:
        for entry in cell["speedup"]:
            if entry["verdict"].startswith("inconclusive: ") and entry["baseline"] in _own_and_deployed(cell, on):
                reason = entry["verdict"].partition(": ")[2]
                reasons.setdefault(reason.rpartition(", ")[2], set()).add(reason)
    return [f"inconclusive: {'such as ' * (len(kind) > 1)}{min(kind)}" for kind in reasons.values()]


def sections(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """(suite, batch size, batching) -> the cells that are compared there, each kind apart."""
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["suite"], cell["batch_size"], cell["batching"]), []).append(cell)
    return found


def batches(size: int, batching: str) -> str:
    """How a group is batched, in words."""
    return f"batch size {size}" if batching == "static" else f"batch size {size}, {batching}"


def warnings(cell: Mapping[str, Any]) -> list[str]:
    """What a reader must know of a cell: its failure, why it is void, its flags."""
    failed = [f"failed: {cell['error']}"] if cell["error"] else []
    partial = ["not finished: `--resume` goes on"] if cell["status"] == "partial" else []
    flags = [flag for flag in cell["flags"] if flag not in flags_of(cell["simulated"])]  # said over the table
    return failed + partial + [f"void: {reason}" for reason in cell["void"]] + flags


def _row(cell: Mapping[str, Any], on: Mapping[str, str]) -> tuple[str, ...]:
    """A cell's values as in HEADINGS. on: arm -> its role."""
    accuracy = cell["accuracy"]
    if cell["status"] == "failed":
        return (*["–"] * (len(HEADINGS) - 1), "failed")
    verdicts = {a["baseline"]: a["verdict"] for a in cell["accuracy_vs"]}
    speedups = {s["baseline"]: s for s in cell["speedup"]}
    same, deployed = _own_and_deployed(cell, on)
    return (
        stacked(
            accuracy and f"{accuracy['value'] * 100:.1f}",
            accuracy and percent_bounds(accuracy),
            _word(verdicts.get(same)),
        ),
        stacked(number(cell["tokens_per_forward"], 2), bounds(cell["tokens_per_forward_ci"], 2), _accepted(cell)),
        stacked(number(cell["tokens_per_s"]["value"], 0)),
        *(
            stacked(number(s["value"], 2), bounds(ci_of(s), 2), _word(s["verdict"])) if s else "–"
            for s in (speedups.get(same), speedups.get(deployed))
        ),
        _including_engine(cell),
        lossless_text(cell),
    )


def _own_and_deployed(cell: Mapping[str, Any], on: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The baselines on the same checkpoint, and on the one that would be deployed without this method."""
    baselines = [s["baseline"] for s in cell["speedup"] if not s.get("includes_engine")]
    own = next((b for b in baselines if on[b] == cell["on"]), None)
    return own, next((b for b in baselines if b != own), None)


def _including_engine(cell: Mapping[str, Any]) -> str:
    """Over the fastest reference by another engine, and beside it the part of the arm's own engine."""
    entry = strongest(cell)
    if entry is None:
        return "–"
    plain = entry["plain"] and number(entry["plain"]["value"], 2)
    return stacked(
        number(entry["value"], 2), bounds(ci_of(entry), 2), plain and f"plain {plain}", f"vs {entry['baseline']}"
    )


def strongest(cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The comparison with the fastest of the references by another engine: the least flattering one."""
    entries = [s for s in cell["speedup"] if s.get("includes_engine") and s["value"] is not None]
    return min(entries, key=lambda s: float(s["value"]), default=None)


def lossless_text(cell: Mapping[str, Any]) -> str:
    """The grade, or why there is none. One against a twin of its own is no promise of `ar`'s tokens, and not shown."""
    if cell["lossless"] is not None and cell["claims"] == "lossless":
        return str(cell["lossless"]["grade"])
    if cell["reference"] or cell["simulated"]:
        return "–"
    return ungraded(cell).replace("not checked", "unchecked").replace(" ", "\n", 1)


def ungraded(cell: Mapping[str, Any]) -> str:
    """Why an arm has no grade."""
    if cell["simulated"]:
        return "not graded"
    if cell["claims"] == "lossless" or cell["reference"]:
        return "baseline" if cell["reference"] else "not checked"
    return "same distribution" if cell["claims"] == "distribution" else "lossy by design"


def floors(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far the arms that others are held to agree with themselves: what no grade can be held to exceed."""
    found = [c["lossless"]["floor"] for c in cells if c["lossless"] and c["lossless"]["floor"]]
    said = [
        f"{f['arm']} against itself, batch size {f['batch_sizes'][0]} and {f['batch_sizes'][1]}: "
        f"{f['identical']:,} of {f['items']:,} items have the same tokens"
        for f in found
    ]
    return list(dict.fromkeys(said))


def _accepted(cell: Mapping[str, Any]) -> str | None:
    taken = cell["acceptance"] and cell["acceptance"]["rate"]
    return None if taken is None else f"{100 * taken:.0f}% accepted"


def _word(verdict: str | None) -> str | None:
    """A verdict without its reasons."""
    return None if verdict is None else verdict.partition(":")[0].partition(",")[0]


def stacked(*lines: str | None) -> str:
    """Value over interval over verdict; a dash for what was not measured."""
    return "\n".join(line for line in lines if line) or "–"


def number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def bounds(ci: Sequence[float] | None, digits: int) -> str | None:
    return None if ci is None else f"[{ci[0]:,.{digits}f}, {ci[1]:,.{digits}f}]"


def percent_bounds(accuracy: Mapping[str, Any]) -> str:
    return f"[{accuracy['ci_low'] * 100:.1f}, {accuracy['ci_high'] * 100:.1f}]"


def ci_of(ratio: Mapping[str, Any]) -> list[float] | None:
    return None if ratio["ci_low"] is None else [ratio["ci_low"], ratio["ci_high"]]
