"""How the arms of a group compare: speed, accuracy and agreement with their baselines, and the same over batch sizes.

A baseline on the arm's own engine shows the gain of decoding or of deployment. Comparisons with a baseline on another
engine are marked `includes_engine`. Each of these also has the speedup of plain decoding on the arm's own engine over
that baseline: the part of the ratio that is the engine's gain and not the method's.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import bounds
from mtbench.plan.plan import Batching
from mtbench.results import samples, speed_factors, verdicts
from mtbench.results.figure_formats import (
    AccuracyComparison,
    Agreement,
    Estimate,
    PlainSpeedup,
    Reason,
    SameItems,
    SpeedFactors,
    Speedup,
    Verdict,
)
from mtbench.results.format import BreakEven, ResultCell
from mtbench.results.lossless_format import Floor
from mtbench.results.samples import CellData, FarOff, far_off
from mtbench.statistics import Ratio


@dataclass(frozen=True)
class Comparisons:
    """An arm against each of its baselines, in the order of the plan."""

    speedup: list[Speedup] = field(default_factory=list)
    accuracy_vs: list[AccuracyComparison] = field(default_factory=list)
    valid_vs: list[AccuracyComparison] = field(default_factory=list)  # of the shares of valid answers
    by_value_vs: list[AccuracyComparison] = field(default_factory=list)
    agreement: list[Agreement] = field(default_factory=list)
    far_off: FarOff | None = None  # a block of the arm


class GroupKey(NamedTuple):
    """The common properties of the cells of a group: only such cells are compared."""

    suite: str
    batch_size: int
    batching: Batching


class OwnSpeedups(NamedTuple):
    """The speedups of a group's arms over baselines on their own engine, by arm."""

    same: dict[str, Speedup]  # over the baseline on the arm's own checkpoint
    deployed: dict[str, Speedup]  # over the baseline on the checkpoint that one would deploy without the method

    @property
    def headline(self) -> dict[str, Speedup]:
        """Return the gain of using an arm: over the deployed baseline, or on its own checkpoint if that is deployed."""
        return {**self.same, **self.deployed}


def groups_of(cells: Iterable[ResultCell]) -> dict[GroupKey, list[ResultCell]]:
    """Return the cells by group, in their order."""
    groups: dict[GroupKey, list[ResultCell]] = {}
    for cell in cells:
        groups.setdefault(GroupKey(cell.suite, cell.batch_size, cell.batching), []).append(cell)
    return groups


def own_speedups(cells: Sequence[ResultCell]) -> OwnSpeedups:
    """Return the speedups of each arm by kind of baseline. cells: those of one group."""
    roles = {cell.arm: cell.on for cell in cells}
    own = OwnSpeedups({}, {})
    for cell in cells:
        for speedup in cell.speedup:
            if speedup.includes_engine or speedup.baseline not in roles:
                continue
            same = roles[speedup.baseline] == cell.on
            (own.same if same else own.deployed)[cell.arm] = speedup
    return own


def by_reading(cell: ResultCell) -> list[tuple[str, str, str]]:
    """Return the verdicts on an arm's accuracy that depend on the reading: baseline, word by the score, by value."""
    by_value = {versus.baseline: versus.verdict.word for versus in cell.by_value_vs}
    words = [(v.baseline, v.verdict.word, by_value.get(v.baseline, v.verdict.word)) for v in cell.accuracy_vs]
    return [word for word in words if word[1] != word[2]]


def over_fastest_engine(cell: ResultCell) -> Speedup | None:
    """Return the speedup over the fastest reference on another engine: the lowest ratio."""
    measured = (speedup for speedup in cell.speedup if speedup.includes_engine and speedup.value is not None)
    return min(measured, key=lambda speedup: speedup.value or 0.0, default=None)


def compare(
    group: Mapping[str, CellData],
    synchronisation_s: float,
    max_loss: float,
    void: Collection[str] = (),
    looks: int = 1,
) -> dict[str, Comparisons]:
    """Return the comparisons of every arm. The verdicts on one baseline are decided over all arms together.

    void: arms that cannot be trusted. They and the arms of a void baseline have values, but no verdict. looks: number
    of looks at the verdicts while blocks are added.
    """
    disturbed = far_off(group.values())
    comparisons = {arm: Comparisons(far_off=disturbed.get(data.cell.cell)) for arm, data in group.items()}
    for baseline, arms in _compared(group, lambda data: data.cell.baselines):
        doubts = [_void_doubt(data, baseline, void) for data in arms]
        of_speed = [doubt or _disturbed(data, baseline, disturbed) for data, doubt in zip(arms, doubts, strict=True)]
        for data, speedup in _speedups(arms, baseline, synchronisation_s, of_speed, looks):
            comparisons[data.cell.arm].speedup.append(speedup)
        for data in arms:
            comparisons[data.cell.arm].agreement.append(agreement(data, baseline))
        for kind, of in (("accuracy_vs", "scores"), ("valid_vs", "validity"), ("by_value_vs", "values")):
            *judged, base = (replace(data, scores=getattr(data, of)) for data in (*arms, baseline))
            for arm, accuracy in accuracies(judged, base, max_loss, doubts, looks).items():
                getattr(comparisons[arm], kind).append(accuracy)
    for baseline, arms in _compared(group, lambda data: data.cell.engine_baselines):
        doubts = [_void_doubt(data, baseline, void) or _disturbed(data, baseline, disturbed) for data in arms]
        for data, speedup in _speedups(arms, baseline, synchronisation_s, doubts, looks):
            plain = _plain_speedup(data, baseline, group)
            comparisons[data.cell.arm].speedup.append(speedup.changed(includes_engine=True, plain=plain))
    return {arm: _in_order(comparisons[arm], data) for arm, data in group.items()}


def stops_paying(cells: Sequence[ResultCell]) -> list[BreakEven]:
    """Return from which batch size on an arm is not faster than a baseline on its engine. It needs several sizes.

    `batch_size` is the smallest size that is shown not to be faster, beyond the last size that is `faster`: only `same`
    and `slower` show it. If too little was measured at a size, only larger sizes count. It is None if the arm is faster
    at the largest size, or if too little was measured there; `reason` says which. Void and failed cells are left out.
    """
    sound = {(c.suite, c.arm, c.batching, c.batch_size) for c in cells if not c.void}
    verdicts_of: dict[tuple[str, str, str, Batching], dict[int, Verdict]] = {}
    for cell in cells:
        for speedup in cell.speedup:
            arms = (cell.arm, speedup.baseline)
            both = {(cell.suite, arm, cell.batching, cell.batch_size) for arm in arms}
            if both <= sound and not speedup.includes_engine:
                place = (cell.suite, *arms, cell.batching)
                verdicts_of.setdefault(place, {})[cell.batch_size] = speedup.verdict
    entries = []
    for (suite, arm, baseline, batching), by_size in verdicts_of.items():
        if len(by_size) < 2:
            continue
        size, reason = _where_it_stops(by_size)
        entries.append(
            BreakEven(
                suite=suite,
                arm=arm,
                baseline=baseline,
                batching=batching,
                swept=sorted(by_size),
                words=[by_size[size].word for size in sorted(by_size)],
                batch_size=size,
                reason=reason,
            )
        )
    return entries


def _where_it_stops(by_size: Mapping[int, Verdict]) -> tuple[int | None, str | None]:
    """Return `batch_size` and `reason` from the verdicts beyond the last size at which too little was measured."""
    reasons = {size: verdict.reason.text for size, verdict in by_size.items() if verdict.reason}
    unknown = max(reasons, default=0)
    words = {size: verdict.word for size, verdict in by_size.items() if size > unknown}
    if not words:
        return None, f"{reasons[unknown]} at batch size {unknown}"
    beyond = itertools.takewhile(lambda size: words[size] != "faster", sorted(words, reverse=True))
    shown = [size for size in beyond if words[size] in ("same", "slower")]
    if shown or words[max(words)] == "faster":
        return min(shown, default=None), None
    return None, f"neither faster nor shown to be no faster at batch size {max(words)}"


def floor(cells: Iterable[CellData]) -> Floor | None:
    """Return the effect of batching alone on an arm's tokens: its items at the smallest against the largest batch size.

    cells: those of one suite and arm. Static batches are preferred, since batch size 1 has nothing to refill. None if
    no two sizes have an item in common.
    """
    sound = [data for data in cells if data.lines and not data.error]
    by_size = {data.cell.batch_size: data for data in sorted(sound, key=lambda data: data.cell.batching == "static")}
    if len(by_size) < 2:
        return None
    smallest, largest = min(by_size), max(by_size)
    items, identical = _common(by_size[smallest], by_size[largest])
    if not items:
        return None
    return Floor(arm=sound[0].cell.arm, batch_sizes=[smallest, largest], items=items, identical=identical)


def same_items(data: CellData, cells: Iterable[CellData]) -> SameItems | None:
    """Return the accuracy at the largest batch size with more items, on this cell's items; None without such a size.

    cells: those of the same suite and arm. A smaller batch size runs only its first blocks. The accuracy of these items
    differs from that of all items, which reads as an effect of batching.
    """
    larger = [
        other
        for other in cells
        if other.cell.batch_size > data.cell.batch_size
        and other.scores.keys() - data.scores.keys()
        and other.scores.keys() & data.scores.keys()
    ]
    if not larger:
        return None
    other = max(larger, key=lambda d: (d.cell.batch_size, d.cell.batching == data.cell.batching))
    common = [item for item in data.scores if item in other.scores]
    return SameItems(
        batch_size=other.cell.batch_size,
        batching=other.cell.batching,
        items=len(other.scores),
        n=len(common),
        here=sum(data.scores[item] for item in common) / len(common),
        there=sum(other.scores[item] for item in common) / len(common),
    )


def _in_order(comparisons: Comparisons, data: CellData) -> Comparisons:
    order = [*data.cell.baselines, *data.cell.engine_baselines]
    for compared in (value for value in vars(comparisons).values() if isinstance(value, list)):
        compared.sort(key=lambda c: order.index(c.baseline))
    return comparisons


def _compared(
    group: Mapping[str, CellData], baselines: Callable[[CellData], list[str]]
) -> list[tuple[CellData, list[CellData]]]:
    names = dict.fromkeys(itertools.chain.from_iterable(baselines(data) for data in group.values()))
    pairs = []
    for name in names:
        if not group[name].error:
            arms = [data for data in group.values() if name in baselines(data) and not data.error]
            pairs.append((group[name], arms))
    return pairs


def _void_doubt(data: CellData, baseline: CellData, void: Collection[str]) -> Reason | None:
    """Return why void arms forbid a verdict, or None."""
    if data.cell.arm in void:
        return Reason(kind="void", text="the arm is void")
    return Reason(kind="void", text="the baseline is void") if baseline.cell.arm in void else None


def _disturbed(data: CellData, baseline: CellData, blocks: Mapping[str, FarOff]) -> Reason | None:
    """Return a remark if a block of the arm or its baseline was disturbed, or one more than the other; or None."""
    for cell in (data.cell, baseline.cell):
        if cell.cell in blocks:
            where = f"in block {blocks[cell.cell].block} of {cell.arm}"
            return Reason(kind="disturbed", text=f"{statistics.DISTURBED} {where}")
    more, less = sorted((data, baseline), key=lambda one: -one.stretch)
    if more.stretch / less.stretch > samples.STRETCHED:
        waited = [f"{1 - 1 / one.stretch:.0%} of the time of {one.cell.arm}" for one in (more, less)]
        had = f"others had the processor in {waited[0]}, and in {waited[1]}"
        return Reason(kind="disturbed", text=f"{statistics.DISTURBED}: {had}")
    return None


def _speedups(
    arms: Sequence[CellData], baseline: CellData, synchronisation_s: float, doubts: Sequence[Reason | None], looks: int
) -> list[tuple[CellData, Speedup]]:
    """Return the arms with samples of the same blocks as the baseline, each with its speedup on these.

    doubts: why an arm can have no verdict, or None.
    """
    both = [(arm, arm.beside(baseline), doubt) for arm, doubt in zip(arms, doubts, strict=True)]
    timed = [(arm, *pair, doubt) for arm, pair, doubt in both if pair is not None]
    walls = [(base.per_unit("wall_s"), data.per_unit("wall_s")) for _, data, base, _ in timed]
    units = [data.unit for _, data, _, _ in timed]
    ratios = [statistics.ratio_of_totals([w0], [w], unit=unit) for (w0, w), unit in zip(walls, units, strict=True)]
    shared = [statistics.shared_ratio(*pair, looks=looks, among=len(walls)) for pair in walls] if looks > 1 else ratios
    reasons = [
        doubt or _too_short(data, synchronisation_s) or _too_short(base, synchronisation_s)
        for _, data, base, doubt in timed
    ]
    judged = zip(timed, ratios, verdicts.speed_verdicts(shared, reasons, looks=looks), strict=True)
    return [(arm, _speedup(data, base, ratio, verdict)) for (arm, data, base, _), ratio, verdict in judged]


def _too_short(data: CellData, synchronisation_s: float) -> Reason | None:
    return verdicts.too_short([t.wall_s for t in data.samples], synchronisation_s)


def wall_ratio(data: CellData, baseline: CellData) -> Ratio:
    """Return the wall time of the baseline over that of the arm, on the blocks of both; None if they share none."""
    pair = data.beside(baseline)
    if pair is None:
        return Ratio(None, None, None, None, 0, "block")
    arm, base = pair
    return statistics.ratio_of_totals([base.per_unit("wall_s")], [arm.per_unit("wall_s")], unit=arm.unit)


def _speedup(data: CellData, baseline: CellData, ratio: Ratio, verdict: Verdict) -> Speedup:
    tokens, tokens0 = data.per_unit("tokens"), baseline.per_unit("tokens")
    wall, wall0 = data.per_unit("wall_s"), baseline.per_unit("wall_s")
    rate = statistics.ratio_of_totals([tokens, wall0], [wall, tokens0], unit=data.unit)
    repeat = statistics.ratio_of_totals([baseline.by_round("wall_s")], [data.by_round("wall_s")], unit="round")
    factors, disturbed = None, verdict.reason is not None and verdict.reason.kind == "disturbed"
    if data.totals and baseline.totals and not disturbed:
        factors = speed_factors.factors(data.totals, baseline.totals)
    return Speedup(
        baseline=baseline.cell.arm,
        value=ratio.value,
        ci_low=ratio.ci_low,
        ci_high=ratio.ci_high,
        ci_repeat=bounds(repeat),
        rate_ratio=rate.value,
        rate_ratio_ci=bounds(rate),
        length_ratio=statistics.ratio_of_totals([tokens], [tokens0]).value,
        verdict=verdict,
        factors=None if factors is None else SpeedFactors(**factors._asdict()),
        decode=_decode_ratio(data, baseline),
    )


def _decode_ratio(data: CellData, baseline: CellData) -> Estimate | None:
    """Return the decoding time of the baseline over that of the arm, on the same blocks; None if one is hidden."""
    if not data.total("decode_s") or not baseline.total("decode_s"):
        return None
    decode, decode0 = data.per_unit("decode_s"), baseline.per_unit("decode_s")
    return Estimate.of(statistics.ratio_of_totals([decode0], [decode], unit=data.unit))


def _plain_speedup(data: CellData, baseline: CellData, group: Mapping[str, CellData]) -> PlainSpeedup | None:
    """Return the speedup of plain decoding on the arm's own engine over the baseline.

    Its checkpoint is the baseline's if possible. None for a reference, an external engine, or if there is no such arm.
    """
    cell = data.cell
    if cell.engine is None or METHODS[cell.method].reference:
        return None
    plain = [
        other
        for other in group.values()
        if METHODS[other.cell.method].reference
        and other.cell.engine == cell.engine
        and other.cell.on in (baseline.cell.on, cell.on)
    ]
    chosen = min(plain, key=lambda other: other.cell.on != baseline.cell.on, default=None)
    if chosen is None or chosen.error:
        return None
    return PlainSpeedup(arm=chosen.cell.arm, **dict(Estimate.of(wall_ratio(chosen, baseline))))


def accuracies(
    arms: Sequence[CellData], baseline: CellData, max_loss: float, doubts: Sequence[Reason | None], looks: int
) -> dict[str, AccuracyComparison]:
    """Return the accuracy of each arm against the baseline, by arm; arms without a common item are left out."""
    changes = (statistics.gains_and_losses(data.scores, baseline.scores) for data in arms)
    differences = [statistics.paired_difference(*change) for change in changes]
    reasons = [doubt or _same_tokens(data, baseline) for data, doubt in zip(arms, doubts, strict=True)]
    judged = verdicts.accuracy_verdicts(differences, statistics.as_share(max_loss), reasons, looks=looks)
    of_arms = {}
    for data, difference, verdict in zip(arms, differences, judged, strict=True):
        if not difference.n:
            continue
        of_arms[data.cell.arm] = AccuracyComparison(
            baseline=baseline.cell.arm,
            **difference._asdict(),
            p_mcnemar=statistics.mcnemar_p(difference.gained, difference.lost),
            verdict=_settled(verdict, data, baseline),
        )
    return of_arms


def _settled(verdict: Verdict, data: CellData, baseline: CellData) -> Verdict:
    """Return the verdict of the test, but of promised tokens that are all there, and of arms that are never right."""
    if data.cell.claims == "lossless" and (same := _same_tokens(data, baseline)):
        return Verdict(word="not worse", reason=same)
    if verdict.word != statistics.INCONCLUSIVE or any(data.scores.values()) or any(baseline.scores.values()):
        return verdict
    return Verdict(word=verdict.word, reason=Reason(kind="nothing measured", text="neither arm has a right answer"))


def _same_tokens(data: CellData, baseline: CellData) -> Reason | None:
    """Return a reason if an arm has its baseline's tokens on all items, so that nothing needs a test; else None."""
    items, identical = _common(data, baseline)
    if not items or identical < items:
        return None
    text = f"same tokens on all {items} items" if items > 1 else "same tokens on the only item"
    return Reason(kind="same tokens", text=text)


def agreement(data: CellData, baseline: CellData) -> Agreement:
    """Return on how many items the arm has the baseline's tokens."""
    items, identical = _common(data, baseline)
    return Agreement(baseline=baseline.cell.arm, items=items, identical=identical)


def _common(data: CellData, other: CellData) -> tuple[int, int]:
    common = data.lines.keys() & other.lines.keys()
    return len(common), sum(data.lines[item].token_ids == other.lines[item].token_ids for item in common)
