"""What a run recommends: by group, from the words of results.json alone."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from made_records import doubted, made_results, result_cell, speedup

from mtbench.document.formatting import interval
from mtbench.plan.formats import Elimination
from mtbench.plan.plan import Simulated
from mtbench.records import dump
from mtbench.report.summary import decided
from mtbench.results.decision import Bounds, Intervals, headline, recommend
from mtbench.results.decision_format import Choice, Recommendation
from mtbench.results.decision_text import speed as speed_in_words
from mtbench.results.figure_formats import AccuracyComparison, Agreement, Alone, Estimate, NeededItems, Verdict
from mtbench.results.format import ResultCell
from mtbench.results.lossless_format import Lossless
from mtbench.results.verdicts import speed_verdicts
from mtbench.statistics import Ratio

PLAIN, TUNED = "ar@ar/graph", "ar@mars/graph"


def plain(arm: str = PLAIN, **given: Any) -> ResultCell:
    on = arm.partition("@")[2].partition("/")[0]
    return result_cell(
        arm=arm, reference=True, on=on, checkpoints={on: f"embedded:tiny/{on}"}, demonstration=False, **given
    )


def graded(grade: Any = "exact", against: str = PLAIN) -> Lossless:
    return Lossless(
        against=against,
        grade=grade,
        items=9,
        identical=9,
        first_divergence=None,
        epsilon=None,
        worst_margin=None,
        near_ties=None,
        floor=None,
    )


def lost(
    gained: int = 0, losses: int = 0, n: int = 1000, verdict: Any = "not worse", needed: int | None = None
) -> AccuracyComparison:
    judged = Verdict(word=verdict)
    if needed is not None:
        judged = judged.changed(needed=NeededItems(n=needed, observed=True))
    values: dict[str, Any] = {
        "baseline": PLAIN,
        "difference": (gained - losses) / n,
        "ci_low": -0.01,
        "ci_high": 0.01,
        "p_mcnemar": None,
    }
    return AccuracyComparison(**values | {"gained": gained, "lost": losses, "n": n, "verdict": judged})


def arm(name: str, value: float, verdict: Any = "faster", *, spread: float = 1.05, **given: Any) -> ResultCell:
    """An arm on the checkpoint of plain decoding; lossless and graded exact unless said otherwise."""
    times = speedup(baseline=PLAIN, value=value, ci_low=value / spread, ci_high=value * spread, verdict=verdict)
    values: dict[str, Any] = {
        "arm": name,
        "speedup": [times],
        "lossless": graded(),
        "blocks": 16,
        "demonstration": False,
    }
    return result_cell(**values | given)


def lossy(name: str, value: float, accuracy: AccuracyComparison, **given: Any) -> ResultCell:
    return arm(name, value, claims="lossy", lossless=None, accuracy_vs=[accuracy], **given)


def one(cells: list[ResultCell], max_loss: float = 2) -> Recommendation:
    [found] = recommend(cells, max_loss=max_loss)
    return found


def names(found: Recommendation) -> list[str | None]:
    choices = (found.same_tokens, found.within_loss)
    return [None if choice is None else choice.arm for choice in choices]


def test_the_fastest_arm_with_the_same_tokens_is_used() -> None:
    found = one([plain(), arm("a", 1.5), arm("b", 2.0), arm("c", 1.2, "inconclusive")])
    assert (found.word, names(found), found.baseline) == ("use", ["b", None], PLAIN)
    assert found.text == "At batch size 1: use b: 1.90 to 2.10 times (95 %) as fast as plain decoding, same tokens."


@pytest.mark.parametrize(
    "given",
    [
        {"lossless": graded("divergent"), "void": ["claims to be lossless, and its tokens are not those"]},
        {"lossless": graded("inconclusive")},
        {"lossless": None},
        {"lossless": graded(against=TUNED)},
        {"status": "failed", "error": "stopped"},
        {"on": "mars", "checkpoints": {"mars": "embedded:tiny/mars"}},
    ],
)
def test_an_arm_that_is_not_shown_to_have_the_same_tokens_is_not_used(given: dict[str, Any]) -> None:
    """On another checkpoint, too: the tokens that it keeps are not those of the model that one would deploy."""
    found = one([plain(), arm("a", 1.2), arm("b", 2.0, **given)])
    assert names(found) == ["a", None]


def test_heads_beside_frozen_weights_have_the_same_tokens_if_all_answers_agree() -> None:
    """Their checkpoint is another one, and holds the weights of plain decoding."""
    own: dict[str, Any] = {"on": "medusa", "checkpoints": {"medusa": "embedded:tiny/medusa"}, "lossless": None}
    agreeing: dict[str, Any] = {"agreement": [Agreement(baseline=PLAIN, items=40, identical=40)]}
    assert names(one([plain(), arm("a", 2.0, **own, **agreeing)])) == ["a", None]
    assert names(one([plain(), lossy("a", 2.0, lost(verdict="inconclusive"), **agreeing)])) == [None] * 2
    differing: dict[str, Any] = {"agreement": [Agreement(baseline=PLAIN, items=40, identical=39)]}
    assert names(one([plain(), arm("a", 2.0, **own, **differing)])) == [None] * 2


@pytest.mark.parametrize("claims", ["lossless", "lossy"])
def test_an_arm_with_too_few_valid_answers_is_not_used(claims: Any) -> None:
    """Whatever it promises, and whatever its grade: an agent's program stops at such an answer."""
    values: dict[str, Any] = {"claims": claims, "accuracy_vs": [lost(verdict="not worse")]}
    for word, chosen in (("worse than margin", None), ("inconclusive", "b"), ("not worse", "b")):
        found = one([plain(), arm("b", 2.0, valid_vs=[lost(verdict=word)], **values)])
        assert [*filter(None, names(found)), None][0] == chosen
        assert found.word == ("use" if chosen else "plain")


def test_each_serving_engine_has_an_answer_of_its_own() -> None:
    """A gain in one engine is none in another. An engine with plain decoding only has no answer."""
    there = "ar@ar/vllm"
    gained = speedup(baseline=there, value=1.4, ci_low=1.3, ci_high=1.5, verdict="faster")
    lookup = arm("lookup@ar/vllm", 1.4, speedup=[gained], lossless=graded(against=there), engine="vllm")
    cells = [
        plain(),
        arm("lookup@ar/graph", 0.7, "slower"),
        plain(there, engine="vllm"),
        lookup,
        plain("ar@ar/llamacpp", engine="llamacpp"),
    ]
    ours, theirs = recommend(cells, max_loss=2)
    assert (ours.engine, ours.word, ours.compared) == (None, "plain", 1)
    assert (theirs.engine, names(theirs)) == ("vllm", ["lookup@ar/vllm", None])
    said = headline([ours, theirs])
    assert said.startswith("In vLLM, at batch size 1: use lookup@ar/vllm: 1.30 to 1.50 times")
    assert "In mtbench's loop, at batch size 1: keep plain decoding" in said
    assert headline([theirs]).startswith("At batch size 1: use lookup")
    rival = lookup.changed(arm="suffix@ar/vllm")
    assert [*decided(made_results([*cells, rival]), None).beside.values()] == [
        "In vLLM, not told apart from the arm to use: suffix@ar/vllm."
    ]


def test_an_arm_that_promises_the_distribution_needs_no_grade() -> None:
    found = one([plain(), arm("a", 2.0, claims="distribution", lossless=None)])
    assert names(found) == ["a", None]
    assert found.text.endswith("as fast as plain decoding, same distribution (promised).")


def test_tokens_that_differ_by_rounding_are_counted() -> None:
    rounded = graded("near-tie").changed(identical=4)
    assert (
        "same tokens up to rounding (4 of 9 answers identical)" in one([plain(), arm("a", 2.0, lossless=rounded)]).text
    )


def test_a_fast_arm_without_a_grade_says_what_a_grade_takes() -> None:
    found = one([plain(), arm("a", 2.0, lossless=graded("inconclusive"))])
    assert found.word == "cannot tell"
    assert "(2,000 tokens of it are needed to tell other tokens from rounding)" in found.text


def test_a_lossy_arm_is_named_only_if_it_is_faster_and_shown_to_lose_no_more() -> None:
    kept = arm("kept", 1.5)
    assert names(one([plain(), kept, lossy("l", 2.0, lost())])) == ["kept", "l"]
    assert names(one([plain(), kept, lossy("l", 1.55, lost())])) == ["kept", None]  # the intervals overlap
    assert names(one([plain(), kept, lossy("l", 2.0, lost(verdict="inconclusive"))])) == ["kept", None]
    assert names(one([plain(), lossy("l", 2.0, lost(verdict="worse by less than the margin"))])) == [None, "l"]
    assert "loss of up to 2 points" in one([plain(), kept, lossy("l", 2.0, lost())]).text


def test_accuracy_is_that_of_the_batch_size_with_the_most_items() -> None:
    """Smaller batch sizes answer their first blocks only."""
    few = [plain(), lossy("l", 2.0, lost(n=24, verdict="inconclusive"))]
    many = [cell.changed(batch_size=8) for cell in (plain(), lossy("l", 1.5, lost(n=1000)))]
    at_one, at_eight = recommend([*few, *many], max_loss=2)
    assert (at_one.batch_size, names(at_one), names(at_eight)) == (1, [None, "l"], [None, "l"])
    assert at_one.within_loss is not None
    assert at_one.within_loss.accuracy is not None
    assert (at_one.within_loss.accuracy.n, at_one.within_loss.accuracy.batch_size) == (1000, 8)
    assert one(few).word == "cannot tell"


@dataclass
class OneIsFaster(Intervals):
    """A paired comparison that shows what the intervals do not."""

    arm: str
    than: str

    def faster(self, cell: ResultCell, other: ResultCell) -> bool:
        return (cell.arm, other.arm) == (self.arm, self.than)


def test_a_paired_comparison_takes_the_place_of_the_intervals() -> None:
    cells = [plain(), arm("kept", 1.5), lossy("l", 1.55, lost())]
    [found] = recommend(cells, max_loss=2, pairs=OneIsFaster("l", "kept"))
    assert names(found) == ["kept", "l"]


def test_plain_decoding_is_kept_if_every_arm_is_out() -> None:
    slow = [arm("a", 0.8, "slower"), arm("b", 1.0, "same", spread=1.01)]
    slow += [lossy("c", 2.0, lost(0, 90, verdict="worse than margin"))]
    found = one([plain(), *slow])
    assert (found.word, names(found)) == ("plain", [None] * 2)
    assert headline([found]) == (
        "At batch size 1: keep plain decoding: no arm gains more than 2 % within the accepted loss of accuracy."
    )
    assert one([plain(), *slow[:2]]).text == "At batch size 1: keep plain decoding: no arm gains more than 2 %."


def test_plain_decoding_is_the_answer_if_no_arm_can_be_2_percent_faster() -> None:
    """An arm whose word is `inconclusive` need not be open: 0.78 to 0.95 holds nothing that is worth a change."""
    slow = arm("a", 0.8, "slower")
    within = one([plain(), slow, arm("b", 0.86, "inconclusive", spread=1.18)])  # up to 1.015
    assert (within.word, within.undecided) == ("plain", None)
    assert one([plain(), slow, arm("b", 0.86, "inconclusive", spread=1.19)]).word == "cannot tell"  # up to 1.023
    short = arm("b", 0.86, doubted("0.3 s timed, 1 s needed", "too short"), spread=1.01)
    assert one([plain(), slow, short]).word == "cannot tell"


def test_plain_decoding_is_the_answer_at_the_level_of_2_5_percent() -> None:
    """By the bound of the 95 % interval: of 16 blocks of an arm that is 2 % faster, t is below −2.131 in 2.5 %.

    The word `same` tests at 5 % (−1.753), and does not decide.
    """
    log_se = 0.005
    for quantile, word in ((1.8, "cannot tell"), (2.13, "cannot tell"), (2.132, "plain")):
        log = math.log(1.02) - quantile * log_se
        low, high = (math.exp(log + side * 2.13145 * log_se) for side in (-1, 1))
        timed = Ratio(math.exp(log), low, high, log_se, 16, "block")
        [verdict] = speed_verdicts([timed], [None])
        assert verdict.word == "same"
        times = speedup(baseline=PLAIN, value=timed.value, ci_low=low, ci_high=high, verdict=verdict)
        assert one([plain(), arm("a", 1.0, speedup=[times])]).word == word


def test_no_conclusion_says_what_one_takes() -> None:
    open_ = arm("a", 1.1, "inconclusive", spread=1.12)
    found = one([plain(), arm("b", 0.8, "slower"), open_])
    assert found.word == "cannot tell"  # 37 blocks: 16 · (log 1.12 / log(1.1/1.02))²
    assert found.text == (
        "No decision yet at batch size 1: a is 2 % slower to 23 % faster than plain decoding (95 %); at least 37 "
        "blocks would show whether it is faster (16 were timed). For now, keep plain decoding."
    )
    found = one([plain(), lossy("l", 2.0, lost(verdict="inconclusive", needed=2500))])
    assert found.word == "cannot tell"
    assert "at least 2,500 items" in found.text
    assert headline([found]).startswith("No decision yet at batch size 1: l is 1.90 to 2.10 times (95 %) as fast as")


@pytest.mark.parametrize("ends", [(None, None), (40.0, 60.0)], ids=["no interval", "an interval"])
@pytest.mark.parametrize("value", [47.8, 0.478])
@pytest.mark.parametrize(
    "why",
    ["1 of 6 blocks", "0.3 s timed, 1 s needed", "the machine was disturbed in block 3 of a", "the arm is void"],
)
def test_no_sentence_has_a_figure_without_a_verdict(
    value: float, ends: tuple[float | None, float | None], why: str
) -> None:
    """Neither of an arm that is open alone, nor of one beside the arm to use."""
    low, high = ends
    times = speedup(baseline=PLAIN, value=value, ci_low=low, ci_high=high, verdict=doubted(why))
    open_ = arm("a", value, speedup=[times])
    alone, beside_ = one([plain(), open_]), one([plain(), arm("b", 0.3), open_])
    for found in (alone, beside_):
        text = found.text + headline([found])
        assert f"its speed has no verdict ({why}" in text
        assert not any(figure in text for figure in ("47", "0.48", "40.0", "60.0"))
    assert alone.text.startswith("No decision yet at batch size 1: a is open; its speed has no verdict")
    assert "a may be faster still: its speed has no verdict" in beside_.text


def test_the_interval_that_is_shown_agrees_with_the_word() -> None:
    """1.07 to 1.18 is no reason to ask for more blocks: where an adjusted level withholds a word, its interval is."""
    alone = Alone(word="faster", level=0.9929, low=1.01, high=1.24, arms=7, looks=1)
    found = one([plain(), arm("a", 1.12, Verdict(word="inconclusive", alone=alone), spread=1.05)])
    assert found.undecided is not None
    assert (found.undecided.level, found.undecided.speedup.ci_low) == (0.9929, 1.01)
    assert "a is 1.01 to 1.24 times (99.29 %, adjusted for all comparisons) as fast as plain decoding;" in found.text
    assert "; at least 20 blocks would show" in found.text
    same = one([plain(), arm("a", 1.12, spread=1.05)])
    assert same.same_tokens is not None
    assert (same.same_tokens.level, same.word) == (0.95, "use")


class AfterLooks(Intervals):
    """The bounds of a race, whose level is shared by its looks."""

    def bounds(self, cell: ResultCell, other: ResultCell, *, tested: bool = False) -> Bounds:
        return Bounds(0.89, 1.04, 0.995)


def test_an_arm_that_was_slower_is_not_called_fast() -> None:
    """At 95 % it is shown to gain less than 2 %, at the level of a race it is not."""
    slower = arm("a", 0.96, "inconclusive")
    assert one([plain(), slower]).text.endswith("keep plain decoding: no arm gains more than 2 %.")
    [found] = recommend([plain(), slower], max_loss=2, pairs=AfterLooks())
    assert found.text == (
        "No decision yet at batch size 1: a is 11 % slower to 4 % faster than plain decoding "
        "(99.5 %, adjusted for all comparisons); at least 27 blocks would show whether it is faster (16 were timed). "
        "For now, keep plain decoding."
    )


def test_more_blocks_than_anyone_would_time_have_a_number_too() -> None:
    found = one([plain(), arm("a", 1.021, "inconclusive")])
    assert "whether it is faster is too close to tell here (16 blocks were timed)" in found.text


def test_a_faster_arm_that_is_open_is_named_beside_the_one_to_use() -> None:
    wanting = lossy("l", 2.0, lost(verdict="inconclusive", needed=2500))
    found = one([plain(), arm("a", 1.5), wanting])
    assert (found.word, names(found)) == ("use", ["a", None])
    assert (
        "l may be faster still (1.90 to 2.10 times (95 %) as fast as plain decoding): at least 2,500 items"
        in found.text
    )
    assert one([plain(), arm("a", 2.5), wanting]).undecided is None
    second = lossy("m", 1.9, lost(verdict="inconclusive", needed=2500))
    both = one([plain(), arm("a", 1.5), second, wanting])
    assert (both.undecided is not None and both.undecided.arm, both.also_open) == ("l", ["m"])
    assert both.text.endswith("Also open: m.")


def test_an_arm_with_the_same_tokens_stays_open_beside_a_faster_lossy_one() -> None:
    """The lossy one costs accuracy; whether the other is faster is not known."""
    found = one([plain(), arm("s", 1.12, "inconclusive", spread=1.14), lossy("l", 1.5, lost())])
    assert (names(found), found.undecided and found.undecided.arm) == ([None, "l"], "s")
    assert "no arm with the same tokens is shown to be faster" in found.text
    assert "s may be faster than plain decoding with the same tokens (2 % slower to 28 % faster than " in found.text


def test_arms_over_a_limit_of_their_latency_leave_plain_decoding() -> None:
    cells = [plain(), arm("a", 2.0, cell="a"), arm("b", 1.5, cell="b")]
    [found] = recommend(cells, max_loss=2, misses_slo=["a"])
    assert (names(found), found.misses_slo) == (["b", None], ["a"])
    [found] = recommend(cells, max_loss=2, misses_slo=["a", "b"])
    assert (found.word, found.baseline) == ("plain", PLAIN)
    assert headline([found]) == (
        "At batch size 1: keep plain decoding: no arm gains more than 2 % within the limits of latency."
    )


def test_a_doubt_names_speed_and_accuracy_if_both_are_open() -> None:
    found = one([plain(), lossy("l", 1.03, lost(verdict="inconclusive", needed=2500), verdict="inconclusive")])
    assert found.doubt is not None
    assert "blocks would show whether it is faster" in found.doubt
    assert "; at least 2,500 items would show" in found.doubt


def test_arms_that_did_not_start_are_the_reason_for_no_conclusion() -> None:
    gone = Elimination(cell="b", block=0, lost=False, reason="at a larger batch size its accuracy is: inconclusive")
    unstarted = result_cell(arm="l", status="left", left=gone, speedup=[], demonstration=True)
    found = one([plain(), unstarted])
    assert found.text.startswith("On this demonstration, no decision yet at batch size 1: no arm started, since")


def test_an_arm_that_lost_a_race_is_chosen_last() -> None:
    """On fewer blocks it may look faster than the arm that it lost against."""
    gone = Elimination(cell="b", block=6, lost=True, reason="surely slower than a")
    cells = [plain(), arm("a", 1.5), arm("b", 1.6, status="left", left=gone)]
    assert names(one(cells)) == ["a", None]
    assert one([plain(), arm("b", 1.0, "inconclusive", left=gone)]).word == "plain"


def test_an_arm_that_lost_to_an_unsound_one_may_still_be_the_best() -> None:
    """The rival turned out to be void, or it is not among the arms, since a latency is over its limit."""
    gone = Elimination(cell="b", block=6, lost=True, reason="surely slower than a", rival="a")
    open_, rival = arm("b", 1.1, "inconclusive", cell="b", status="left", left=gone), arm("a", 1.5, cell="a")
    assert one([plain(), rival, open_]).undecided is None
    for cells in ([plain(), rival.changed(void=["its tokens are others"]), open_], [plain(), open_]):
        found = one(cells)
        assert (found.word, found.undecided and found.undecided.arm) == ("cannot tell", "b")
    beaten = gone.changed(rival="ar.b1")
    assert one([plain(cell="ar.b1"), open_.changed(left=beaten)]).word == "plain"


def test_without_plain_decoding_or_arms_there_is_no_conclusion() -> None:
    assert one([arm("a", 2.0)]).word == "cannot tell"
    assert "could be compared with plain decoding" in one([plain(), result_cell(arm="a")]).text
    assert one([plain(), result_cell(arm="a")]).baseline is None


def test_plain_decoding_is_that_on_the_checkpoint_that_one_would_deploy() -> None:
    """An arm on a tuned checkpoint is compared with plain decoding on the untuned one where that ran."""
    on_tuned: dict[str, Any] = {
        "on": "mars",
        "checkpoints": {"mars": "embedded:tiny/mars"},
        "lossless": graded(against=TUNED),
    }
    same = speedup(baseline=TUNED, value=3.0, ci_low=2.9, ci_high=3.1, verdict="faster")
    deployed = speedup(baseline=PLAIN, value=1.5, ci_low=1.4, ci_high=1.6, verdict="faster")
    tuned = arm("a", 1.0, **on_tuned, accuracy_vs=[lost()])
    both = one([plain(), plain(TUNED), tuned.changed(speedup=[same, deployed])])
    assert both.baseline == PLAIN
    assert both.within_loss is not None
    assert both.within_loss.speedup.value == 1.5
    alone = one([plain(TUNED), tuned.changed(speedup=[same])])
    assert (alone.baseline, names(alone)) == (TUNED, ["a", None])


def test_a_ratio_that_contains_the_engine_recommends_nothing() -> None:
    engine = speedup(baseline=PLAIN, value=3.0, verdict="faster", includes_engine=True, plain=None)
    assert names(one([plain(), arm("a", 1.0, speedup=[engine])])) == [None] * 2


def test_simulated_cells_have_no_recommendation() -> None:
    simulated = Simulated(weights="random:small", accept=None, note=None)
    assert recommend([plain(simulated=simulated), arm("a", 2.0, simulated=simulated)], max_loss=2) == []
    assert headline([]) == "Nothing can be recommended: no real arm was measured."


def test_the_headline_joins_batch_sizes_with_the_same_answer() -> None:
    def at(size: int, *arms: ResultCell) -> Recommendation:
        return one([cell.changed(batch_size=size, cell=f"{cell.arm[:1]}{size}") for cell in (plain(), *arms)])

    sizes = [at(1, arm("a", 2.0)), at(4, arm("a", 1.5))]
    sizes += [at(8, arm("a", 1.0, "same", spread=1.01)), at(64, arm("a", 0.5, "slower"))]
    assert headline(sizes) == (
        "At batch size 4: use a: 1.43 to 1.58 times (95 %) as fast as plain decoding, same tokens. At batch size 1: "
        "use a: 1.90 to 2.10 times (95 %) as fast as plain decoding, same tokens. At batch sizes 64 and 8: keep plain "
        "decoding: no arm gains more than 2 %."
    )


def test_a_demonstration_says_so_first() -> None:
    found = one([plain().changed(demonstration=True), arm("a", 2.0).changed(demonstration=True)])
    assert found.text.startswith("On this demonstration, at batch size 1: use a")
    assert headline([found]).startswith("On this demonstration, at batch size 1: use a")


def test_a_sentence_has_the_interval_of_the_table() -> None:
    """`0.63 to 15.74` beside `[0.6, 15.7]` would be two figures to a reader."""
    for value, spread in ((3.15, 5.0), (3.15, 1.05), (110.0, 1.5)):
        shown = interval((value / spread, value * spread))
        assert shown is not None
        found = one([plain(), arm("b", value, spread=spread)])
        assert f"{shown.strip('[]').replace(', ', ' to ')} times (95 %)" in found.text


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.18, 1.29, "1.18 to 1.29 times (95 %) as fast as plain decoding"),
        (1.0, 1.05, "0 to 5 % faster than plain decoding (95 %)"),
        (0.98, 1.23, "2 % slower to 23 % faster than plain decoding (95 %)"),
        (0.87, 0.95, "5 to 13 % slower than plain decoding (95 %)"),
        (0.63, 15.74, "0.6 to 15.7 times (95 %) as fast as plain decoding"),
    ],
)
def test_a_speed_is_said_in_plain_words(low: float, high: float, words: str) -> None:
    choice = Choice(arm="a", speedup=Estimate(value=1.0, ci_low=low, ci_high=high), accuracy=None)
    assert speed_in_words(choice) == words


def test_a_decision_names_its_prompts_if_it_rests_on_fewer_than_planned() -> None:
    found = one([plain(), arm("a", 1.5)])
    assert headline([found.changed(prompts=16, planned=20)]).startswith("At batch size 1 (16 of 20 prompts): use a")
    assert headline([found.changed(prompts=20, planned=20)]).startswith("At batch size 1: use a")


BY_VALUE = " By value, the answer would be: "


@pytest.mark.parametrize(
    ("score", "value", "word", "other"),
    [
        ("worse than margin", "not worse", "plain", "use"),
        ("not worse", "worse than margin", "use", "keep plain decoding"),
        ("inconclusive", "not worse", "cannot tell", "use"),
        ("not worse", "inconclusive", "use", "no decision yet"),
        ("not worse", "worse by less than the margin", "use", None),
        ("worse than margin", "worse than margin", "plain", None),
    ],
)
def test_a_decision_says_if_it_depends_on_the_reading(score: Any, value: Any, word: str, other: str | None) -> None:
    """In its sentence, in the headline and in a key, which another decision lacks."""
    accuracies: dict[str, Any] = {"accuracy_vs": [lost(verdict=score)], "by_value_vs": [lost(verdict=value)]}
    slow = arm("a", 1.0, "same", spread=1.01)
    found = one([plain(), slow, arm("b", 2.0, claims="lossy", lossless=None, **accuracies)])
    assert found.word == word
    if other is None:
        assert "by_value" not in dump(found)
        assert BY_VALUE not in found.text
    else:
        assert found.by_value is not None
        assert found.by_value.startswith(other) or f" {other} b: " in found.by_value
        assert f"{BY_VALUE}{found.by_value}." in found.text
        assert f"{BY_VALUE}{found.by_value}." in headline([found])


@pytest.mark.parametrize(
    ("words", "rival", "chosen", "by_value"),
    [
        ({"b": ("worse than margin", "not worse")}, None, "c", "b"),
        ({"c": ("not worse", "worse than margin")}, "c-cell", "c", "b"),
        ({"b": ("not worse", "not worse")}, None, "c", None),
        ({"d": ("not worse", "worse than margin")}, "c-cell", "c", None),
    ],
)
def test_an_arm_that_left_for_an_accuracy_that_is_another_by_value_has_not_lost(
    words: dict[str, tuple[Any, Any]], rival: str | None, chosen: str, by_value: str | None
) -> None:
    """Its own accuracy, or that of the arm that it lost to; any other that lost is chosen last."""

    def raced(name: str, speed: float, **given: Any) -> ResultCell:
        score, value = words.get(name, ("not worse", "not worse"))
        accuracies: dict[str, Any] = {"accuracy_vs": [lost(verdict=score)], "by_value_vs": [lost(verdict=value)]}
        return arm(name, speed, claims="lossy", lossless=None, cell=f"{name}-cell", **accuracies, **given)

    left = Elimination(cell="b-cell", block=8, lost=True, reason="it lost", rival=rival)
    fastest = 1.7 if rival is None else 1.4
    found = one([plain(), raced("b", fastest, left=left), raced("c", 1.5), raced("d", 1.2)])
    assert names(found) == [None, chosen]
    assert (found.by_value or "").partition(" use ")[2].partition(":")[0] == (by_value or "")
