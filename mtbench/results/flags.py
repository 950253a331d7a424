"""Flags of a cell: disturbances, changes and gaps of its measurement, and why it is void."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from mtbench import statistics
from mtbench.decoding.arms import is_ours, is_served
from mtbench.document.formatting import listed, percent
from mtbench.hardware.machine import MORE_QUOTA, NO_PROCESSOR, POWER_CAP, THERMAL, THROTTLED, waits_passively
from mtbench.measure import cache_probe
from mtbench.plan.formats import CacheRecord, Disturbed, SessionRecord, TimingLine
from mtbench.plan.plan import Cell, SuitePlan
from mtbench.results import verdicts
from mtbench.results.comparisons import Comparisons
from mtbench.results.figure_formats import ByValue, Finish, Summary, Unread
from mtbench.results.lossless_format import Lossless, PrefixCache
from mtbench.results.samples import CellData, FarOff

PROCESSOR_SHARE = 0.95  # of the wall time, that a process on a quiet CPU computes
FEW_DROPPED = 0.05  # share of samples that may be dropped without a warning above the decision
REMEDIES = {NO_PROCESSOR: "end other programs, or measure again", THROTTLED: MORE_QUOTA}  # of dropped samples
FULL_BATCH_SHARE = 0.75  # of a batch's rows: with fewer rows on average, another batch size was measured
WARM, WARM_S = 3.0, 0.02  # least ratio and difference, in seconds, of a prompt's time and a cached prompt's
ALIKE = 2 / 3  # of a prompt's tokens: one of so many takes over a third of its time to read
ANEW = "start it without its prefix cache, or anew for one batch size and `--rounds 1`"
UNREAD_SHARE = 0.05  # of the answers, above which unread ones are flagged
UNREAD_WRONG = 5  # unread wrong answers, from which on they are flagged if they are most of the wrong ones
WRONG_ANSWERS = "this is the speed of wrong answers"
ACCURACY_FLOOR = 0.05  # below this accuracy, speed is the speed of wrong answers


def void_reasons_of(data: CellData, lossless: Lossless | None) -> list[str]:
    """Return why the cell cannot be trusted. Only its own samples count: another arm's do not make it void."""
    reasons = []
    promised = data.cell.claims == "lossless" and data.cell.lossless_reference is not None
    if promised and lossless is not None and lossless.grade == "divergent":
        reasons.append(f"claims to be lossless, and its tokens are not those of {lossless.against}")
    reasons += cache_probe.faults(data.cache)
    for line in data.lines.values():
        counted = (line.forwards, len(line.token_ids))
        if line.commits is not None and (len(line.commits), sum(line.commits)) != counted:
            reasons.append(f"counts do not add up: {line.item}")
            break
    if any(t.miscounted for t in data.timings):
        reasons.append("counts do not add up: the models ran other forwards than were counted")
    if _other_tokens(data) and not is_served(data.cell.engine):
        reasons.append("tokens differ between rounds")
    if data.timings:
        dropped = sum(bool(t.dropped) for t in data.timings)
        few = verdicts.too_many_dropped(used=len(data.timings) - dropped, dropped=dropped)
        if few:
            reasons.append(few)
    return reasons


def prefix_cache(record: CacheRecord) -> PrefixCache:
    """Return what the probes of a prefix cache found."""
    items, checks = {check.item for check in record.checks}, record.checks
    equal = len(items - {check.item for check in checks if check.differs})
    noise = len({check.item for check in checks if check.is_noisy})
    warm = len({check.item for check in checks if check.cached[0]})
    same = f"{equal} of {len(items)} probes of the prefix cache give the same answers, {warm} with cached tokens"
    why = record.why if items or record.why else "`--resume` makes it"
    text = ": ".join(filter(None, (same if items else "no probe of the prefix cache was made", why)))
    return PrefixCache(probes=len(items), equal=equal, noise=noise, faults=cache_probe.faults(record), text=text)


def _other_tokens(data: CellData) -> int:
    """Return how many answers of later rounds were not those of the first."""
    return sum(t.items - t.identical for t in data.timings if t.identical is not None)


def disturbances(data: CellData, far_off: FarOff | None) -> list[str]:
    """Return external disturbances, dropped samples, and samples decoded again."""
    flags = []
    if far_off is not None:
        flags.append(
            f"{statistics.DISTURBED}: block {far_off.block} took {far_off.wall_s:.3g} s, {far_off.ratio:.2g} times its "
            "usual time, for no recorded cause; measure again in a new run"
        )
    for reason in sorted({t.dropped for t in data.timings if t.dropped}):
        lines = [t for t in data.timings if t.dropped == reason]
        flags.append(f"{len(lines)} of {len(data.timings)} samples dropped: {reason}")
        if reason in REMEDIES:
            longest = max(lines, key=lambda line: line.wall_s)
            flags[-1] += f" (block {longest.block}: {_had(longest)})"
            if len(lines) > FEW_DROPPED * len(data.timings):
                flags[-1] = f"{statistics.DISTURBED}: {flags[-1]}; {REMEDIES[reason]}"
    again = [(one, t.block) for t in data.timings for one in t.disturbed or ()]
    if again:
        one, block = max(again, key=lambda pair: pair[0].wall_s)
        times = f"decoded again {len(again)} times" if len(again) > 1 else "decoded again once"
        flags.append(f"{times}, since {one.reason} (block {block}: {_had(one)})")
    return flags


def _had(line: TimingLine | Disturbed) -> str:
    """Return the time for which a decoding had the processor, and the time for which it wanted it."""
    return f"{line.cpu_s or 0.0:.2g} of {line.wanted_s or line.wall_s:.3g} s"


def measurement_flags(data: CellData, sessions: Sequence[SessionRecord]) -> list[str]:
    """Return what a reader must know about how the cell was measured."""
    flags = []
    sampled = [sessions[t.session - 1] for t in data.samples if t.session <= len(sessions)]
    shared = [s.workers for s in sampled if s.device == "cpu" and s.workers is not None and s.workers > 1]
    if shared:  # workers on a CPU slow each other down; each GPU has a worker of its own
        part = "" if len(shared) == len(sampled) else f" in {len(shared)} of {len(sampled)} samples"
        flags.append(f"{max(shared)} workers shared the machine{part}")
    if data.samples:  # small subtasks, or a small limit, make batches smaller than their name
        rows = np.mean([t.rows for t in data.samples])
        if rows < FULL_BATCH_SHARE * data.cell.batch_size:
            flags.append(f"batches held {rows:.1f} rows of {data.cell.batch_size}")
    if any((t.throttle or 0) & POWER_CAP for t in data.timings):
        flags.append("power cap active")
    if hot := sum(bool((t.throttle or 0) & THERMAL) for t in data.timings):
        flags.append(f"slowed by heat in {hot} of {len(data.timings)} samples")
    flags += [*_processor_flags(data, sessions), *_code_flags(data, sampled)]
    counts = [(t.counted, t.tokens) for t in data.timings if t.counted is not None]
    if any(theirs != ours for theirs, ours in counts):
        theirs, ours = (sum(column) for column in zip(*counts, strict=True))
        flags.append(f"token counts differ: engine {theirs:,}, ours {ours:,}")
    return flags + _engine_flags(data)


def _engine_flags(data: CellData) -> list[str]:
    if not is_served(data.cell.engine):
        return []
    flags = []
    if other := _other_tokens(data):
        again = sum(t.items for t in data.timings if t.identical is not None)
        flags.append(f"the engine gave other tokens in {other:,} of {again:,} answers of later rounds")
    counts = [(t.accepted, t.drafted) for t in data.timings if t.accepted is not None and t.drafted is not None]
    if wrong := [(accepted, drafted) for accepted, drafted in counts if accepted > drafted]:
        accepted, drafted = (sum(column) for column in zip(*wrong, strict=True))
        flags.append(f"the engine's counts cannot be: {accepted:,} of {drafted:,} drafted tokens accepted")
    return flags


def cache_flags(data: CellData, of_arm: Sequence[CellData], unseen: Sequence[tuple[int, float]] = ()) -> list[str]:
    """Return a flag if prompts were cached: by the server's counts, else by its times to the first token.

    These are compared with those of `unseen` prompts; without these, with those of round 1 at each batch size.
    `of_arm`: the cells of the arm on the suite.
    """
    outside, samples = data.cell.engine is None, data.samples
    if data.cell.prefix_cache:  # later turns may use it
        samples = [t for t in samples if data.unit_of[t.block] == t.block]
    if kept := [t.cached_tokens for t in samples if t.cached_tokens]:
        where = f"in {len(kept)} of {len(samples)} samples, by other prompts or sent before"
        return [f"the server had cached {sum(kept):,} tokens of prompts {where}" + f"; {ANEW}" * outside]
    read = {f"in round 1 at batch size {o.cell.batch_size}": _first_tokens(o, 1) for o in of_arm if outside}
    if len(unseen) > 1:
        read = {"with prompts that it could not know": list(unseen)}
    for (when, first), number in itertools.product(read.items(), sorted({t.round for t in samples})):
        later = _first_tokens(data, number)
        pairs = [(s, float(np.median(of))) for n, s in first if (of := [t for m, t in later if m >= ALIKE * n])]
        if len(pairs) > 1:
            slow_s, fast_s = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 4]
            if slow_s > max(WARM * fast_s, fast_s + WARM_S):
                took = f"first tokens took {fast_s:.2g} s in round {number}, and {slow_s:.2g} s {when}"
                return [f"{took}: the server seems to keep prompts; {ANEW}"]
    return []


def _first_tokens(data: CellData, number: int) -> list[tuple[int, float]]:
    return [(t.prompt_tokens, t.ttft_s) for t in data.samples if t.round == number and t.ttft_s]


def _processor_flags(data: CellData, sessions: Sequence[SessionRecord]) -> list[str]:
    """Return a flag if the arm had to share the processor: on a CPU a thread that decodes wants it all the time."""
    on_cpu = [t for t in data.samples if t.session <= len(sessions) and sessions[t.session - 1].device == "cpu"]
    ran = [sessions[t.session - 1] for t in on_cpu]
    loads = [s.load_of_others or 0.0 for s in ran if waits_passively(s.waiting, s.threads)]
    seen = f"other programs used {percent(max(loads, default=0.0), 0)} % of the cores when the run began"
    flags = [f"threads waited passively: {seen}"] if loads else []
    known = [(t.cpu_s, t.wanted_s or t.wall_s) for t in on_cpu if t.cpu_s is not None and (t.wanted_s or not loads)]
    if not known or not (data.cell.computes_here or any(t.wanted_s for t in on_cpu)):
        return flags
    share = sum(cpu_s for cpu_s, _ in known) / sum(wanted_s for _, wanted_s in known)
    if share >= PROCESSOR_SHARE:
        return flags
    return [*flags, f"shared processor: the arm waited for it in {1 - share:.0%} of its time; end other programs"]


def _code_flags(data: CellData, sampled: Sequence[SessionRecord]) -> list[str]:
    """Return a flag if slower code ran than is usual. `sampled`: the session of each sample."""
    ours = [session for session in sampled if is_ours(data.cell.engine)]
    off = [session.kernels_off for session in ours if session.kernels_off]
    return [f"PyTorch's kernels ran, not mtbench's: {reason}" for reason in off[:1]]


def scoring_flags(data: CellData, suite: SuitePlan) -> list[str]:
    """Return flags if timed answers are missing, and if some have no score. Without any score there is no accuracy."""
    flags = []
    timed = sum(t.items for t in data.timings if t.round == 1)
    if missing := max(0, timed - len(data.lines)):
        flags = [f"{missing:,} of {timed:,} timed answers are missing from generations/: figures of tokens lack them"]
    unscored = data.lines.keys() - data.scores.keys()
    if suite.metric is not None and data.scores and unscored:
        due = unscored & suite.scored_items
        why = "score them all with `mtbench score`" if due else "the other items have no answer to compare with"
        flags.append(f"{len(data.lines) - len(unscored)} of {len(data.lines)} answers are scored; {why}")
    return flags


def reading_flags(
    data: CellData, group: Mapping[str, CellData], unread: Unread | None, by_value: ByValue | None
) -> list[str]:
    """Return what a reader must know about unread answers and the two readings. group: by arm."""
    flags, count = [], "{0.answers:,} of {0.of:,}".format
    if unread is not None:
        if unread.answers > UNREAD_SHARE * unread.of:
            reasons = listed(f"{n:,} {reason}" for reason, n in unread.reasons.items())
            flags.append(f"{count(unread)} answers are unread: {reasons}")
        wrong = [item in data.unread for item, score in data.scores.items() if not score]
        if sum(wrong) >= max(UNREAD_WRONG, len(wrong) // 2 + 1):
            flags.append(f"{sum(wrong):,} of {len(wrong):,} wrong answers are unread: the score is that of a format")
        for base in (group[arm] for arm in data.cell.baselines):
            read, theirs = ({item: float(item not in of.unread) for item in of.scores} for of in (data, base))
            high = statistics.paired_difference(*statistics.gains_and_losses(read, theirs)).ci_high
            if high is not None and high < 0:
                of_base = f"its baseline {base.cell.arm} {len(base.unread):,} of {len(base.scores):,}"
                flags.append(f"unread answers: {count(unread)}, {of_base}: its answers lose their format")
                break
    if by_value is not None and by_value.differs and by_value.value is not None:
        apart = by_value.value - sum(data.scores.values()) / by_value.n
        side = f"{percent(abs(apart))} points {'above' if apart > 0 else 'below'} the score"
        answers = f"right by value only {by_value.missed:,}, by the score only {by_value.false_passes:,}"
        flags.append(f"accuracy by value {percent(by_value.value)}%, {side}: see the answers that differ ({answers})")
    return flags


def result_flags(cell: Cell, summary: Summary, finish: Finish, comparisons: Comparisons) -> list[str]:
    """Return what a reader must know about accuracy and answer lengths."""
    flags = []
    accuracy = summary.accuracy.value if summary.accuracy else None
    if accuracy is not None and accuracy < ACCURACY_FLOOR:
        flags.append(f"accuracy {accuracy:.1%}, below {ACCURACY_FLOOR:.0%}: {WRONG_ANSWERS}")
    if cell.length == "natural":
        ratios = [s.length_ratio for s in comparisons.speedup if not s.includes_engine]
        length_ratio = ratios[0] if ratios else None
        cut = finish.length
        flags += verdicts.length_flags(length_ratio=length_ratio, cut_by_budget=cut, items=summary.items)
    if any(a.verdict.word == statistics.INCONCLUSIVE for a in comparisons.accuracy_vs):
        flags.append("accuracy inconclusive")
    return flags
