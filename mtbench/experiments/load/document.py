"""The document of a load: goodput, latency and accuracy of each arm at each level, and how the arms compare."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

from mtbench.document.formatting import NONE, bounds, count, counted, interval, listed, number, seconds
from mtbench.document.model import Beside, Block, Document, Entry, Notes, Pairs, Row, Section, Table
from mtbench.experiments.load.figures import draw
from mtbench.experiments.load.format import Comparison, Latency, Load, LoadCell, LoadPlan
from mtbench.experiments.load.planning import started_at
from mtbench.records import cleaned
from mtbench.report.phrases import shown_verdict
from mtbench.report.text import quota

COLUMNS = [
    ("answered", "requests that were answered, of those that were sent; rejected: the server was full"),
    ("achieved", "answered requests per second"),
    ("goodput", "requests per second that were answered within all limits"),
    ("correct goodput", "of these, those that were answered correctly"),
    ("accuracy", "mean score of the answered items, in percent; an item that came again counts with its first answer"),
    ("TTFT p95", "time to the first token: 95th percentile; below it p50 and p99"),
    ("TPOT p95", "time per later token, by the client's formula: 95th percentile; below it p50 and p99"),
    ("whole p95", "time from a request's start to its last token: 95th percentile; below it p50 and p99"),
    ("tokens per s", "tokens of all answers per second"),
    ("tokens per forward", "tokens over the forward passes of their rows, as the server counts them"),
    ("J per token", "energy of the GPU over tokens, idle time included"),
    ("cached", "tokens of the prompts that the server had cached, in percent of their tokens"),
]
COMPARED = [
    ("time", "the other's time to the last token over the arm's, on the requests that both answered; over 1 is faster"),
    ("goodput", "the arm's goodput over the other's"),
    ("accuracy, points", "the arm's accuracy less the other's, on the items that both answered"),
]
LIMITS = {"ttft": "first token", "tpot": "later token", "e2e": "whole request"}
BRIEF_TURNS = ("goodput", "TTFT p95", "cached", "TPOT p95", "answered")
WAITS = " A later turn is sent when the turn before is answered and its think time is over."
BRIEF = ("goodput", "answered", "correct goodput", "accuracy", "TTFT p95", "TPOT p95", "whole p95")


def document(load: Load, *, drawn: bool = True) -> Document:
    """Return what a load shows; the terminal needs no figures."""
    load = cleaned(load)
    figures = draw(load) if drawn else []
    return Document(
        title=f"Quality and speed under load: {load.request.suite}",
        lead=_lead(load),
        subject=subject(load),
        warnings=[] if load.complete else ["Points are missing; go on with --resume."],
        source="`load.json`",
        sections=[
            *([Section("Figures", [Beside(figures)])] if figures else []),
            *(Section(_level(load, level), _blocks(load, level)) for level in _levels(load)),
            Section("Servers", [_servers(load)], folded=True),
            Section("Machine and settings", [Pairs(_machine(load))], folded=True, link="Machine"),
            Section("How to read it", [Notes(reading(load))], folded=True),
        ],
    )


def plan_document(planned: LoadPlan) -> Document:
    """Return what a dry run shows: the arms, and the points of a round."""
    request = planned.request
    servers = {arm.name: arm.url or f"{arm.engine or 'mtbench serve'}, started by this command" for arm in planned.arms}
    arms = [Row(name, [Entry(server)]) for name, server in servers.items()]
    sent = {level: started_at(request, level) for level in request.levels}
    kind = "per second" if request.request_rate else "at a time"
    each = listed(f"{level:g} {kind}: {counted(sent[level], planned.unit)}" for level in sorted(sent))
    every = sum(len(point.items) for point in planned.points)
    sending_s = sum(size / level for level, size in sent.items()) * len(planned.arms) * request.rounds
    time = f" Sending alone takes {seconds(sending_s)}." if request.request_rate else ""
    return Document(
        title="Plan",
        lead=f"{counted(len(planned.points), 'point')} in {counted(request.rounds, 'round')}. {each}. "
        f"{counted(every, 'request')} over {counted(len(planned.items), 'item')} of {request.suite}.{time}",
        sections=[Section("Servers", [Table([("server", "")], arms, text=True)])],
    )


def _blocks(load: Load, level: float) -> list[Block]:
    numbers = {arm.name: place for place, arm in enumerate(load.arms, start=1)}
    cells = _cells(load, level)
    found = [Row(c.arm, _entries(c), numbers[c.arm], notes=[("flag", flag) for flag in c.flags]) for c in cells]
    turns = [Row(f"turn {part.turn}", _entries(part), group=cell.arm) for cell in cells for part in cell.turns]
    pairs = [Row(c.arm, [Entry(c.baseline), *_compared(c)]) for c in load.comparisons if c.level == level]
    caption = "Every pair of arms, on the same requests; 95% intervals in brackets"
    compared = Table([("against", ""), *COMPARED], pairs, caption=caption)
    arms = Table(COLUMNS, found, caption="By arm; 95% intervals in brackets", brief=BRIEF).filled()
    caption = "By turn of a conversation; 95% intervals in brackets"
    by_turn = Table(COLUMNS, turns, "turn", caption, brief=BRIEF_TURNS).filled()
    return [arms, *([by_turn] if turns else []), *([compared] if pairs else [])]


def subject(load: Load) -> str:
    """Return what was done, as a sentence."""
    arrivals = "Poisson arrivals" if load.request.poisson else "constant gaps"
    how = f"request rates with {arrivals}" if load.request.request_rate else "fixed concurrency"
    limits = listed(f"{LIMITS[name]} {seconds(limit)}" for name, limit in load.request.slo.items())
    good = f"Limits: {limits}." if limits else "No limits are set: every answer is good."
    drawn = f"; {load.request.words}" * bool(load.request.words)
    return (
        f"{load.request.suite}: {counted(len(load.arms), 'arm')} under {how}, sent by {load.client.name} "
        f"{load.client.version}{drawn}. {good}"
    )


def _lead(load: Load) -> str:
    """Return the arm with the most correct goodput at the highest level, by its estimate."""
    levels = _levels(load)
    if not levels:
        return "No point has ended yet."
    cells = _cells(load, levels[-1])
    scored = [(cell, cell.correct_goodput or cell.goodput) for cell in cells]
    best, most = max(scored, key=lambda entry: entry[1].value or 0.0)
    what = "answered correctly within all limits" if best.correct_goodput else "answered within all limits"
    found, ends = "no estimate has an interval", interval(bounds(most))
    if ends is not None:
        found = f"{best.arm} has the highest estimate: {number(most.value)} {ends} requests per second {what}"
    return f"At {_level(load, levels[-1])}, {found}."


def _entries(cell: LoadCell) -> list[Entry]:
    refused = listed(f"{n} {word}" for n, word in ((cell.rejected, "rejected"), (cell.failed, "failed")) if n)
    return [
        Entry(f"{count(cell.ok)} of {count(cell.sent)}", refused or None),
        Entry.of(cell.achieved_rate),
        Entry.of(cell.goodput),
        Entry.of(cell.correct_goodput),
        Entry.of(cell.accuracy, 100, 1),
        _percentiles(cell.ttft),
        _percentiles(cell.tpot),
        _percentiles(cell.e2e),
        Entry.of(cell.tokens_per_s),
        Entry.of(cell.tokens_per_forward),
        Entry.of(cell.j_per_token),
        Entry.of(cell.cached_share, 100, 1),
    ]


def _compared(comparison: Comparison) -> list[Entry]:
    accuracy = None if comparison.accuracy_verdict is None else shown_verdict(comparison.accuracy_verdict)
    return [
        replace(Entry.of(comparison.speedup), verdict=shown_verdict(comparison.speed_verdict)),
        replace(Entry.of(comparison.goodput_ratio), verdict=shown_verdict(comparison.goodput_verdict)),
        replace(Entry.of(comparison.accuracy_difference, 100, 1), verdict=accuracy),
    ]


def _percentiles(latency: Latency) -> Entry:
    limits = bounds(latency.p95)
    if latency.p95.value is None:
        return Entry()
    others = f"p50 {seconds(latency.p50.value)}, p99 {seconds(latency.p99.value)}"
    ends = f"[{seconds(limits[0])}, {seconds(limits[1])}]" if limits else None
    return Entry(seconds(latency.p95.value), ends, detail=others)


def _cells(load: Load, level: float) -> list[LoadCell]:
    return [cell for cell in load.cells if cell.level == level]


def _levels(load: Load) -> list[float]:
    return sorted({cell.level for cell in load.cells})


def _level(load: Load, level: float) -> str:
    noun = load.unit if level == 1 else f"{load.unit}s"
    return f"{level:g} {noun} {'per second' if load.request.request_rate else 'at a time'}"


def _servers(load: Load) -> Table:
    rows = []
    for place, arm in enumerate(load.arms, start=1):
        served = f"{arm.engine}: {shlex.join(arm.command)}" if arm.command else arm.url or NONE
        rows.append(Row(arm.name, [Entry(served), Entry(arm.model)], place))
    return Table([("server", ""), ("model", "")], rows, caption="What answered for each arm", text=True)


def _machine(load: Load) -> list[tuple[str, str]]:
    found = load.environment
    gpu = found.gpu.name if found.gpu is not None else "none"
    return [
        ("Processor", f"{found.processor}, {found.cores} cores{quota(found)}"),
        ("GPU", gpu or NONE),
        ("System", found.platform or NONE),
        ("mtbench", " ".join(filter(None, (found.mtbench, found.git)))),
        ("torch", (found.packages or {}).get("torch") or NONE),
        ("Client", f"{load.client.name} {load.client.version}, on the same machine"),
        ("Rows", f"{load.request.max_num_seqs}; at most {load.request.max_queue} requests wait"),
        ("Tokens of an answer", f"at most {load.max_new_tokens}"),
        ("Rounds", count(load.request.rounds)),
        ("Seed", str(load.request.seed)),
        ("Started", load.started),
    ]


def reading(load: Load) -> list[tuple[str, str]]:
    """Return how the figures are defined."""
    formulas: Mapping[str, str] = load.client.formulas
    return [
        (
            "Round",
            "Every arm runs at every level once in a round, and gets a server of its own for it. The order of arms "
            "and levels is drawn in each round. In a round all arms get the same requests at a level."
            f"{WAITS if load.unit == 'conversation' else ''}",
        ),
        (
            "Rates",
            "Amounts over the time from the first request to the last answer, or over the planned time of sending "
            "where that is longer. Intervals are t intervals over rounds; they need 5 rounds.",
        ),
        ("Goodput", "Correct goodput counts answers with a score of at least 0.5."),
        *((f"{word} by {load.client.name}", f"{formulas[word.lower()]}.") for word in ("TTFT", "TPOT", "E2E")),
        ("Percentiles", "The mean over rounds of the round's percentile, over answered requests."),
        ("Accuracy", "Wilson interval over items. Rejected requests are no wrong answers; goodput lacks them."),
        (
            "Words",
            "A speed is faster or slower if its interval lies beyond 2%, the same if it lies inside, else "
            "inconclusive. Accuracy is not worse if it lies above the margin of "
            f"{load.request.max_loss:g} points. Words are adjusted for the number of arms at a level.",
        ),
    ]
