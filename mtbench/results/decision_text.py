"""A recommendation as a sentence, and the recommendations of all batch sizes as the first sentence of a page."""

from collections.abc import Sequence

from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import few, points
from mtbench.results.decision_format import Choice, Recommendation
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, SPEED_MARGIN, decimals

DEMONSTRATION, OPEN, TOO_CLOSE = "On this demonstration", "no decision yet", "too close to tell here"
EPSILON_NEEDS = f"{EPSILON_POSITIONS_NEEDED:,} tokens of it are needed to tell other tokens from rounding"
MOST_COLLAPSED = 2  # arms that are named before a decision to keep plain decoding
ALL_USED = (
    "Every block of the race was used: more would tell with more prompts, or with a higher `--limit`. Of several batch "
    "sizes the smaller ones have few blocks: race one alone."
)


def headline(recommendations: Sequence[Recommendation]) -> str:
    """Return what to use, from the largest batch size down. Batch sizes with the same answer share one.

    >>> headline([])
    'Nothing can be recommended: no real arm was measured.'
    """
    if not recommendations:
        return "Nothing can be recommended: no real arm was measured."
    suites = list(dict.fromkeys(rec.suite for rec in recommendations))
    parts = []
    for suite in suites:
        of_suite = [rec for rec in recommendations if rec.suite == suite]
        parts.append((f"{suite}: " if len(suites) > 1 else "") + _of_suite(of_suite))
    text = _capital(" ".join(parts))
    return _on_demonstration(text) if all(rec.demonstration for rec in recommendations) else text


def sentence(rec: Recommendation) -> str:
    """Return a recommendation with its remarks."""
    text = " ".join([_of_suite([rec]), *beside(rec)])
    return _on_demonstration(text) if rec.demonstration else text


def _on_demonstration(text: str) -> str:
    return f"{DEMONSTRATION}, {text[0].lower()}{text[1:]}"


def beside(rec: Recommendation) -> list[str]:
    """Return the arms that are as good as the chosen one, and the arms that may be faster."""
    parts = []
    if rec.as_good:
        parts.append(f"Not told apart from the arm to use: {', '.join(rec.as_good)}.")
    if rec.word == "use" and rec.undecided is not None:
        beaten = rec.within_loss is not None and _value(rec.undecided) <= _value(rec.within_loss)
        may = "may be faster than plain decoding with the same tokens" if beaten else "may be faster still"
        shown = speed(rec.undecided)
        parts.append(f"{rec.undecided.arm} {may}{f' ({shown})' if shown else ''}: {rec.doubt}.")
    if rec.also_open:
        parts.append(f"Also open: {few(rec.also_open)}.")
    return parts


def _of_suite(recommendations: Sequence[Recommendation]) -> str:
    engines = len({rec.engine for rec in recommendations})
    groups: dict[tuple[str | None, str], list[Recommendation]] = {}
    for rec in sorted(_largest_first(recommendations), key=lambda rec: rec.word != "use"):
        other = f". By value, the answer would be: {rec.by_value}" if rec.by_value else ""
        groups.setdefault((rec.engine, f"{answer(rec)}{other}"), []).append(rec)
    texts = list[str]()
    for (engine, said), of in groups.items():
        place = (f"{_in_engine(engine)}, " if engines > 1 else "") + _where(of)
        is_open = said.startswith(OPEN)
        texts.append(_capital(f"{OPEN} {place}{said.removeprefix(OPEN)}." if is_open else f"{place}: {said}."))
    return " ".join(texts)


def with_engine(name: str | None, text: str) -> str:
    """Return a sentence that begins with its engine."""
    return _capital(f"{_in_engine(name)}, {text[0].lower()}{text[1:]}")


def _in_engine(name: str | None) -> str:
    """Return an engine as a place. A results file may name an engine of a package that is not installed."""
    if name is None:
        return "in mtbench's loop"
    return f"in {SERVING_ENGINES[name].title if name in SERVING_ENGINES else name}"


def _why(rec: Recommendation) -> str:
    """Return why there is no decision, its needs, and the method to use until then."""
    undecided = rec.undecided
    if rec.baseline is None:
        return rec.doubt or "no arm could be compared with plain decoding"
    if undecided is None:
        return "no sound arm was compared with plain decoding"
    shown = speed(undecided)
    gain = f"{undecided.arm} is {'open' if shown is None else shown}"
    return f"{gain}; {rec.doubt}. For now, keep plain decoding"


def _no_gain(rec: Recommendation) -> str:
    """Return that no arm gains more than the margin, and the bounds within which this holds."""
    bounds = []
    if len(rec.allowed) + len(rec.misses_slo) < rec.compared:
        bounds.append("the accepted loss of accuracy")
    if rec.misses_slo:
        bounds.append("the limits of latency")
    within = f" within {' and '.join(bounds)}" if bounds else ""
    return f"no arm gains more than {SPEED_MARGIN:.0%}{within}".replace("%", " %")


def answer(rec: Recommendation) -> str:
    """Return what to use in one place, without the place."""
    first = f"look first at {'; at '.join(rec.collapsed[:MOST_COLLAPSED])}. As it is, " if rec.collapsed else ""
    if rec.word == "plain":
        return f"{first}keep plain decoding: {_no_gain(rec)}"
    if rec.word == "cannot tell":
        return f"{first}{OPEN}: {_why(rec)}"
    parts = []
    if rec.same_tokens is not None:
        gain = f"{speed(rec.same_tokens)}, {rec.same_tokens.kept or 'same tokens'}"
        parts.append(f"use {rec.same_tokens.arm}: {gain}")
    if rec.within_loss is not None:
        gain = f"{speed(rec.within_loss)}{_cost(rec.within_loss)}"
        parts.append(f"{_if_accepted(rec)} {rec.within_loss.arm}: {gain}")
    return "; or, ".join(parts)


def _if_accepted(rec: Recommendation) -> str:
    points = f"{rec.max_loss:g} point{'' if rec.max_loss == 1 else 's'}"
    if rec.same_tokens is None:
        return f"no arm with the same tokens is shown to be faster; if a loss of up to {points} is acceptable, use"
    return f"if a loss of up to {points} is acceptable,"


def _value(choice: Choice) -> float:
    return choice.speedup.value or 0.0


def speed(choice: Choice) -> str | None:
    """Return the speed of an arm over that of plain decoding by its interval, in words; None if it has none."""
    low, high = choice.speedup.ci_low, choice.speedup.ci_high
    if low is None or high is None:
        return None
    adjusted = "" if choice.level == 0.95 else ", adjusted for all comparisons"  # the tables have 95 %
    places, level = decimals(high), f"{100 * choice.level:.4g} %{adjusted}"
    if round(low, places) > 1 or high >= 2:
        return f"{low:.{places}f} to {high:.{places}f} times ({level}) as fast as plain decoding"
    least, most = round(100 * low) - 100, round(100 * high) - 100
    gain = f"{-least} % slower to {most} % faster"
    if least >= 0 or most <= 0:
        gain = f"{least} to {most} % faster" if least >= 0 else f"{-most} to {-least} % slower"
    return f"{gain} than plain decoding ({level})"


def _cost(choice: Choice) -> str:
    cost = choice.accuracy
    if cost is None:
        return ""
    between = "" if cost.ci_low is None or cost.ci_high is None else f" [{points(cost.ci_low)}, {points(cost.ci_high)}]"
    return f", accuracy {points(cost.difference)}{between} points on {cost.n:,} items"


def _where(recommendations: Sequence[Recommendation]) -> str:
    """Return the batch sizes, such as `at batch sizes 8 and 1`."""
    names = []
    for rec in _largest_first(recommendations):
        notes = ["refilled"] if rec.batching == "refill" else []
        notes += [f"{rec.prompts:,} of {rec.planned:,} prompts"] if rec.prompts < rec.planned else []
        names.append(f"{rec.batch_size} ({', '.join(notes)})" if notes else str(rec.batch_size))
    if len(names) == 1:
        return f"at batch size {names[0]}"
    return f"at batch sizes {', '.join(names[:-1])} and {names[-1]}"


def _largest_first(recommendations: Sequence[Recommendation]) -> list[Recommendation]:
    return sorted(recommendations, key=lambda rec: -rec.batch_size)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
