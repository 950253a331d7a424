"""The summary of a section, and remarks on single arms.

Verdicts decide what a sentence says; estimates only add numbers. Each sentence is a template chosen by the case.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtbench import statistics
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import bounds, counted, interval, number, percent, times
from mtbench.report.phrases import breaks_promise, fewer_items, floors, spread_over_tasks
from mtbench.results import decision, verdict_words
from mtbench.results.figure_formats import Speedup, Spread
from mtbench.results.format import ResultCell

NOTED_BELOW = 0.95  # a factor of at least this is not named
KEPT = ("not worse", "worse by less")  # verdicts that limit the loss of accuracy to the margin


@dataclass(frozen=True, slots=True)
class _Arm:
    """An arm that is compared with a baseline; neither failed nor void."""

    cell: ResultCell
    speedup: Speedup
    baseline: ResultCell

    @property
    def name(self) -> str:
        return self.cell.arm

    @property
    def gain(self) -> str:
        """How many times as fast, and on which task least and most."""
        limits = interval(bounds(self.speedup))
        value = f"{number(self.speedup.value, 2)} {limits}" if limits else number(self.speedup.value, 2)
        return _with_spread(f"{value} times as fast", self.speedup.spread)

    @property
    def cost(self) -> str:
        """Accuracy against the baseline's, and tokens per forward."""
        right, right0 = _accuracy(self.cell), _accuracy(self.baseline)
        if not self.cell.tokens_per_forward:
            return f"{right} correct against {right0}"
        per_forward = f"{number(self.cell.tokens_per_forward, 2)} tokens per forward"
        return f"{right} correct against {right0}, at {_with_spread(per_forward, self.cell.tokens_per_forward_spread)}"

    @property
    def same_tokens(self) -> int:
        """The items, if the arm has its baseline's tokens on all of them; else 0."""
        agreement = next((a for a in self.cell.agreement if a.baseline == self.speedup.baseline), None)
        return agreement.items if agreement is not None and agreement.identical == agreement.items else 0

    @property
    def keeps_promise(self) -> bool:
        """Whether it claims its baseline's tokens and is graded to have them, near-ties aside."""
        lossless = self.cell.lossless
        return lossless is not None and lossless.against == self.speedup.baseline and lossless.grade in decision.KEPT

    @property
    def keeps_accuracy(self) -> bool:
        """Whether accuracy is shown to stay within the margin. Tokens equal to the baseline's need no verdict."""
        lossless = self.cell.lossless
        if lossless is not None and lossless.grade == "exact" and lossless.against == self.speedup.baseline:
            return True
        verdicts = [a.verdict for a in self.cell.accuracy_vs if a.baseline == self.speedup.baseline]
        return bool(verdicts) and verdicts[0].startswith(KEPT)


def summary(
    cells: Sequence[ResultCell], own: Mapping[str, Speedup], suite: str, batches: str, margin: float
) -> list[str]:
    """Return the gain in speed, the cells left out, and the cost of the gain in accuracy.

    own: arm -> its speedup of the main table. Both run by the same engine, so that the gain of an engine is not counted
    as a gain of the method.
    """
    place = f"On {suite} at {batches}"
    arms = _compared(cells, own)
    if not arms:
        nothing = f"{place}, no arm can be compared with a baseline"
        return [f"{nothing}{_advice(cells, own)}.", *_left_out(cells)]
    faster = [arm for arm in arms if arm.speedup.verdict == "faster"]
    slower = [arm for arm in arms if arm.speedup.verdict == "slower"]
    sentences = [f"{place}, {_speed(arms, faster)}."]
    if slower:
        sentences.append(_slower(arms, slower))
    return [*sentences, *_left_out(cells), _price(cells, arms, faster, margin)]


def warnings(cells: Sequence[ResultCell]) -> list[str]:
    """Return what a reader must know before any figure: an unfinished run, and arms that break their promise.

    cells: those of the whole run.
    """
    found = []
    unfinished = sum(cell.status == "partial" for cell in cells)
    if unfinished:
        of_all = f"{unfinished} of {counted(len(cells), 'cell')}"
        found.append(f"The run is not finished: blocks are missing in {of_all}; continue with `--resume`.")
    found += [
        f"{cell.arm} claims to be lossless and is not: its tokens are not those of {cell.lossless.against}."
        for cell in cells
        if cell.lossless is not None and breaks_promise(cell)
    ]
    found += [
        f"{flag.replace(statistics.DISTURBED, f'The machine was disturbed while {cell.arm} decoded')}."
        for cell in cells
        for flag in cell.flags
        if flag.startswith(statistics.DISTURBED)
    ]
    return list(dict.fromkeys(found))


def _compared(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> list[_Arm]:
    """Return the arms that can be compared with their baseline."""
    sound = {cell.arm: cell for cell in cells if cell.status != "failed" and not cell.void}
    return [
        _Arm(cell, own[arm], sound[own[arm].baseline])
        for arm, cell in sound.items()
        if arm in own and own[arm].baseline in sound and not cell.reference
    ]


def _speed(arms: Sequence[_Arm], faster: Sequence[_Arm]) -> str:
    """Return how many arms are faster than their baseline, and by how much."""
    names = {arm.speedup.baseline for arm in arms}
    baseline = names.pop() if len(names) == 1 else "their baselines"
    if not faster:
        reasons = {arm.speedup.verdict.partition(": ")[2] for arm in arms}
        reason = reasons.pop() if len(reasons) == 1 else ""
        because = f" ({reason})" if reason else ""
        if len(arms) == 1:
            return f"{arms[0].name} is not shown to be faster than {baseline}{because}"
        return f"none of {len(arms)} arms is shown to be faster than {baseline}{because}"
    if len(arms) == 1:
        return f"{arms[0].name} is faster than {baseline}: {faster[0].gain}"
    if len(faster) == 1:
        return f"1 of {len(arms)} arms is faster than {baseline}: {faster[0].gain}"
    gains = sorted(arm.speedup.value or 0.0 for arm in faster)
    gain = f"{number(gains[0], 2)} to {number(gains[-1], 2)} times as fast"
    if len(faster) < len(arms):
        return f"{len(faster)} of {len(arms)} arms are faster than {baseline}: {gain}"
    if len(arms) == 2:
        return f"both arms are faster than {baseline}: {gain}"
    return f"all {len(arms)} arms are faster than {baseline}: {gain}"


def _slower(arms: Sequence[_Arm], slower: Sequence[_Arm]) -> str:
    if len(arms) == 1:
        return "It is slower."
    return "1 arm is slower." if len(slower) == 1 else f"{len(slower)} arms are slower."


def _left_out(cells: Sequence[ResultCell]) -> list[str]:
    """Return how many cells the summary leaves out, and why."""
    failed = sum(cell.status == "failed" for cell in cells)
    void = sum(bool(cell.void) for cell in cells)
    if failed and void:
        return [f"Left out: {failed} failed, {void} void."]
    if failed:
        return [f"Left out: {failed} failed."]
    return [f"Left out: {void} void."] if void else []


def _price(cells: Sequence[ResultCell], arms: Sequence[_Arm], faster: Sequence[_Arm], margin: float) -> str:
    """Return the cost of the speed in accuracy."""
    scores = [cell.accuracy.value for cell in cells if cell.accuracy and cell.accuracy.value is not None]
    within = "1 point" if margin == 0.01 else f"{100 * margin:g} points"
    if not scores and all(arm.keeps_promise for arm in faster or arms):
        which = "The faster arms" if faster else "The arms"
        return f"Nothing was scored. {which} are graded exact or near-tie, so their methods cost no accuracy."
    if not scores:
        return "Nothing was scored, so the cost of speed in accuracy is not known."
    if not faster:
        same = [arm.same_tokens for arm in arms if arm.same_tokens]
        kept = sum(arm.keeps_accuracy and not arm.same_tokens for arm in arms)
        low, high = f"{percent(min(scores))}%", f"{percent(max(scores))}%"
        spread = f"Accuracy is {low}." if low == high else f"Accuracies lie between {low} and {high}."
        if same:
            verb = "has" if len(same) == 1 else "have"
            items = "the only item" if max(same) == 1 else f"all {max(same):,} items"
            spread += f" {counted(len(same), 'arm')} {verb} the baseline's tokens on {items}."
        if not kept and len(same) == len(arms):
            return spread
        if not kept:
            none = "No other arm" if same else "No arm"
            return f"{spread} {none} is shown to stay within {within} of the baseline's on the same items."
        verb = "is" if kept == 1 else "are"
        return (
            f"{spread} {counted(kept, 'arm')} {verb} shown to stay within {within} of the baseline's on the same items."
        )
    kept_arms = [arm for arm in faster if arm.keeps_accuracy]
    if not kept_arms:
        return f"No faster arm is shown to keep accuracy within {within} of the baseline's on the same items."
    best = max(kept_arms, key=lambda arm: arm.speedup.value or 0.0)
    if len(faster) == 1:
        return f"The faster arm keeps accuracy within {within} of the baseline's: {best.cost}."
    fastest = f"{best.name}, {best.gain} with {best.cost}"
    if len(kept_arms) == 1:
        return f"1 of the faster arms keeps accuracy within {within} of the baseline's: {fastest}."
    subject = f"{len(kept_arms)} of the faster arms"
    if len(kept_arms) == len(faster):
        subject = "Both faster arms" if len(faster) == 2 else "All faster arms"
    return f"{subject} keep accuracy within {within} of the baseline's. The fastest of these is {fastest}."


def _with_spread(figure: str, spread: Spread | None) -> str:
    over_tasks = spread_over_tasks(spread)
    return f"{figure} ({over_tasks})" if over_tasks else figure


def _accuracy(cell: ResultCell) -> str:
    return f"{percent(None if cell.accuracy is None else cell.accuracy.value)}%"


def _advice(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> str:
    """Return which reference to add if an arm on our engine has none on its own checkpoint."""
    reference = next(name for name in METHODS if METHODS[name].reference and not METHODS[name].outside)
    roles = {cell.on for cell in cells if cell.method == reference}
    missing = [
        cell.on for cell in cells if not cell.reference and cell.engine and cell.arm not in own and cell.on not in roles
    ]
    specs = [reference if on == reference else f"{reference}:on={on}" for on in dict.fromkeys(missing)]
    return f"; add {' and '.join(f'`--method {spec}`' for spec in specs)}" if specs else ""


def remarks(cells: Sequence[ResultCell], own: Mapping[str, Speedup]) -> list[str]:
    """Return what the table does not say: that other batch sizes have more items, and why arms are not faster.

    That is, arms that commit more per forward. The last sentences say how well references agree with themselves.
    """
    fewer = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in fewer_items(cells)]
    sentences = [_unrewarded(arm) for arm in _compared(cells, own)]
    return [*fewer, *(s for s in sentences if s is not None), *(f"{floor}." for floor in floors(cells))]


def _unrewarded(arm: _Arm) -> str | None:
    """Return why an arm that commits more per forward than its baseline is not faster, or None."""
    per_forward, per_forward0 = arm.cell.tokens_per_forward, arm.baseline.tokens_per_forward
    gain, plain = number(per_forward), number(per_forward0)
    commits_more = (per_forward or 0) > (per_forward0 or math.inf) and gain != plain
    verdict = arm.speedup.verdict
    if not commits_more or verdict.startswith("faster") or verdict_words.withheld(verdict):
        return None
    words = {"slower": "is slower than", "same": "is no faster than"}
    relation = words.get(verdict, "is not shown to be faster than")
    costs = "; ".join(_costs(arm)) or "the reason was not measured"
    return (
        f"{arm.name} commits {gain} tokens per forward (baseline: {plain}) and {relation} {arm.speedup.baseline}: "
        f"{costs}."
    )


def _costs(arm: _Arm) -> list[str]:
    """Return the measured costs of an arm's tokens per forward."""
    clauses = [_forward_cost(arm), _draft_cost(arm.cell)]
    if arm.cell.head_s and arm.cell.decode_s:
        clauses.append(f"heads take {percent(arm.cell.head_s / arm.cell.decode_s, 0)}% of decoding")
    factors = arm.speedup.factors
    if factors is not None:
        for factor, loss in (
            (factors.utilisation, "fewer rows are live in a forward"),
            (factors.host, "the device computes in a smaller share of decode time"),
            (factors.decode_share, "a smaller share of the wall time is decoding"),
        ):
            if factor < NOTED_BELOW:
                clauses.append(f"{loss} ({times(factor)})")
    length = arm.speedup.length_ratio
    if length and length > 1 + statistics.LENGTH_RATIO_SHOWN_BEYOND:
        clauses.append(f"its answers are {number(length)} times as long")
    return [clause for clause in clauses if clause is not None]


def _forward_cost(arm: _Arm) -> str | None:
    """Return how much longer and wider a forward is than the baseline's."""
    factors = arm.speedup.factors
    slowed = 1 / factors.forward_time if factors is not None else 0.0
    fed, fed0 = arm.cell.positions_fed_per_forward, arm.baseline.positions_fed_per_forward
    positions = f"{number(fed)} positions instead of {number(fed0)}" if fed and fed0 and fed > fed0 else None
    if slowed > 1 and positions:
        return f"a forward takes {number(slowed)} times as long and feeds {positions}"
    if slowed > 1:
        return f"a forward takes {number(slowed)} times as long"
    return f"a forward feeds {positions}" if positions else None


def _draft_cost(cell: ResultCell) -> str | None:
    """Return how many forwards drafting needs, and its share of decoding."""
    if not cell.draft_forwards_per_token:
        return None
    forwards = number(cell.draft_forwards_per_token * (cell.tokens_per_forward or 0.0))
    need = f"drafting needs {forwards} forwards per forward of the target"
    if not cell.draft_s or not cell.decode_s:
        return need
    return f"{need} and takes {percent(cell.draft_s / cell.decode_s, 0)}% of decoding"
