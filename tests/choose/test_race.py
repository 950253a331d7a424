"""The rule of a race: who leaves, why, and how often it is wrong."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_races import PLAIN, Truth, decide, draw, missed_same, wrongly_kept
from made_records import cell_data, generation_line, result_cell, timing_line
from thinned import one_in

from mtbench.experiments.choose.decide import _Pairs
from mtbench.experiments.choose.race import Block, RacedArm, looks, replay
from mtbench.experiments.choose.runner import misses_slo
from mtbench.results.comparisons import compare
from mtbench.results.decision import recommend
from mtbench.results.figure_formats import Verdict

LOSS = 2.0
LOSSES = [None, None, None, 0.0, 1.0, 3.0, 20.0]  # points, of arms; None: the tokens of plain decoding


def entrant(name: str, speed: float, blocks: int = 24, **given: object) -> RacedArm:
    """An arm whose blocks differ by a few percent, in a pattern of its own."""
    phase = sum(map(ord, name)) % 7
    walls = [(1 + 0.03 * ((b * (phase + 2)) % 5 - 2)) / speed for b in range(blocks)]
    same = bool(given.get("claims_lossless", name == PLAIN))
    found = [Block(wall, {f"{b}/{r}": 1.0 for r in range(8)}, same) for b, wall in enumerate(walls)]
    return RacedArm(name, found, reference=name == PLAIN, **given)  # type: ignore[arg-type]


def left(*entrants: RacedArm, at: list[int] | None = None) -> dict[str, tuple[int, bool]]:
    plain = next(e for e in entrants if e.reference)
    outcome = replay(entrants, at or looks(len(plain.blocks)), LOSS)
    return {d.cell: (d.block, d.lost) for d in outcome.left}


def test_slower_arms_leave_and_the_race_ends_with_its_leader() -> None:
    plain, fast, slow = (
        entrant(PLAIN, 1),
        entrant("fast", 2, claims_lossless=True),
        entrant("slow", 0.5, claims_lossless=True),
    )
    assert left(plain, fast, slow) == {"slow": (6, True), "fast": (6, False), PLAIN: (6, False)}


def test_a_contest_goes_on_for_an_arm_that_waits_until_that_has_no_time() -> None:
    """The leader and plain decoding stay for it. It is compared on the blocks that it has."""
    plain, fast = entrant(PLAIN, 1), entrant("fast", 2, claims_lossless=True)
    none = [Block(None, {}, True)]
    waits = RacedArm("waits", none * 24, claims_lossless=True)
    assert left(plain, fast, waits) == {}
    assert left(plain, fast, replace(waits, left_out_after=8)) == {"fast": (8, False), PLAIN: (8, False)}
    late = entrant("waits", 4, claims_lossless=True)
    assert left(plain, fast, replace(late, blocks=[*none * 10, *late.blocks[10:]])) == {
        "fast": (16, True),
        "waits": (16, False),
        PLAIN: (16, False),
    }


def test_a_race_goes_on_until_its_times_are_long_enough_for_a_word() -> None:
    """Six blocks of 50 ms decide who is faster, and results.json has no word on so short times."""
    arms = [entrant(PLAIN, 10), entrant("fast", 20, claims_lossless=True)]
    assert left(*arms) == {"fast": (24, False), PLAIN: (24, False)}
    assert "fast" not in left(*arms, at=[6, 16])


def test_times_of_short_blocks_of_servers_are_compared_over_parts_of_a_second() -> None:
    """In blocks of 0.1 s a server that is ahead stays ahead for some. 24 are two parts, which decide nothing."""
    arms = [entrant(PLAIN, 5), entrant("fast", 10, claims_lossless=True)]
    assert left(*arms) == {"fast": (11, False), PLAIN: (11, False)}
    assert left(*(replace(arm, unit_s=1.0) for arm in arms)) == {}


def test_an_arm_is_out_for_plain_decoding_by_a_bound_of_its_own() -> None:
    """How many other arms there are does not matter to it. Against another arm it does."""

    def drawn(name: str, speed: float, seed: int) -> RacedArm:
        noise = np.random.default_rng(seed).normal(0, 0.03, 6)
        blocks = [Block(float(np.exp(e)) / speed, {}, True) for e in noise]
        return RacedArm(name, blocks, reference=name == PLAIN, claims_lossless=True)

    plain, slower = drawn(PLAIN, 1, 1), drawn("slower", 0.93, 2)
    many = [drawn(f"far{i}", 0.5, 3 + i) for i in range(200)]
    assert left(plain, slower, at=[6])["slower"] == (6, True)
    assert left(plain, slower, *many, at=[6])["slower"] == (6, True)
    second = drawn("second", 1.2 * 0.93, 2)
    assert "second" not in left(plain, drawn("first", 1.2, 1), second, *many, at=[6])


def test_a_lossy_arm_does_not_hide_what_is_fastest_with_the_same_tokens() -> None:
    """Fast, and as right on 1,200 items; the slower arm with the same tokens is still an answer."""
    arms = [entrant(PLAIN, 1, 150), entrant("same", 1.5, 150, claims_lossless=True), entrant("lossy", 3, 150)]
    found = left(*arms)
    assert found["same"] == (6, False)
    assert not found["lossy"][1]
    assert 6 < found["lossy"][0] < 150


def test_a_lossy_arm_that_is_no_faster_than_the_same_tokens_leaves() -> None:
    found = left(entrant(PLAIN, 1), entrant("same", 2, claims_lossless=True), entrant("lossy", 1.5))
    assert found["lossy"] == (6, True)


def test_an_arm_without_a_clean_block_leads_no_contest() -> None:
    unclean = entrant("unclean", 2, claims_lossless=True)
    unclean = replace(unclean, blocks=[replace(block, wall_s=None) for block in unclean.blocks])
    plain = entrant(PLAIN, 1)
    walls = [(block.wall_s or 0) * (1.001, 0.999)[n % 2] for n, block in enumerate(plain.blocks)]
    lossy = replace(entrant("lossy", 1), blocks=[Block(wall_s, {}, same=False) for wall_s in walls])
    gone = left(plain, unclean, lossy)
    assert gone["lossy"] == (6, True)
    assert "unclean" not in gone


def test_an_arm_that_loses_too_much_leaves_and_beats_nobody() -> None:
    wrong = entrant("wrong", 5, 60)
    wrong = RacedArm("wrong", [Block(b.wall_s, dict.fromkeys(b.scores, 0.0), False) for b in wrong.blocks])
    found = left(entrant(PLAIN, 1, 60), entrant("a", 1.5, 60, claims_lossless=True), wrong)
    assert found["wrong"] == (6, True)
    assert found["a"] == (6, False)


def test_an_arm_whose_tokens_differ_must_show_its_accuracy() -> None:
    """It claims_lossless the tokens and does not keep them; where the arithmetic may choose, the promise counts."""
    broken = entrant("broken", 3, claims_lossless=True)
    broken = RacedArm(
        "broken", [Block(b.wall_s, b.scores, n != 2) for n, b in enumerate(broken.blocks)], claims_lossless=True
    )
    slow = entrant("slow", 1.2, claims_lossless=True)
    assert left(entrant(PLAIN, 1), slow, broken, at=[6, 24])["slow"] == (6, False)
    allows_rounding = RacedArm("broken", broken.blocks, claims_lossless=True, allows_rounding=True)
    assert left(entrant(PLAIN, 1), slow, allows_rounding, at=[6, 24])["slow"] == (6, True)


def test_an_arm_over_a_limit_of_its_latency_beats_nobody_and_leaves_after_24_blocks() -> None:
    """Before, its latency may fall; it may be the fastest, but it cannot be chosen."""
    plain, kept = entrant(PLAIN, 1, 60), entrant("kept", 1.5, 60, claims_lossless=True)
    late = entrant("late", 3, 60, claims_lossless=True, misses_slo=[True] * 60)
    assert left(plain, kept, late) == {"late": (24, True), "kept": (24, False), PLAIN: (24, False)}
    in_time = entrant("late", 3, 60, claims_lossless=True, misses_slo=[True] * 5 + [False] * 55)
    assert left(plain, kept, in_time) == {"kept": (6, True), "late": (6, False), PLAIN: (6, False)}


def test_a_leader_with_other_tokens_stays_until_they_can_be_told_from_rounding() -> None:
    """Slower arms leave before. A leader that has plain decoding's tokens so far needs no grade."""
    plain, slow = entrant(PLAIN, 1), entrant("slow", 0.5, claims_lossless=True)
    fast = entrant("fast", 2, claims_lossless=True, allows_rounding=True, graded_after=9)
    other = replace(fast, blocks=[replace(block, same=False) for block in fast.blocks])
    assert left(plain, slow, other) == {"slow": (6, True), "fast": (11, False), PLAIN: (11, False)}
    assert left(plain, slow, fast)["fast"] == (6, False)


def test_what_is_known_of_accuracy_at_a_larger_batch_size_is_not_tested_again() -> None:
    arms = [entrant(PLAIN, 1), entrant("kept", 3, accuracy="not worse"), entrant("slow", 2, accuracy="not worse")]
    found = left(
        *arms, entrant("worse", 4, 0, accuracy="worse than margin"), entrant("open", 4, 0, accuracy="inconclusive")
    )
    assert found == {
        "worse": (0, True),
        "open": (0, False),
        "slow": (6, True),
        "kept": (6, False),
        PLAIN: (6, False),
    }


def test_a_look_waits_for_all_arms_and_uses_its_own_blocks_only() -> None:
    """So a race that was killed, or that several workers run, decides the same."""
    arms = [entrant(PLAIN, 1), entrant("fast", 2, claims_lossless=True), entrant("slow", 0.5, 5, claims_lossless=True)]
    assert left(*arms, at=[6, 24]) == {}
    late = RacedArm("slow", [*arms[2].blocks, *arms[2].blocks[:1]], claims_lossless=True)
    assert left(arms[0], arms[1], late, at=[6, 24])["slow"] == (6, True)


def test_a_race_that_is_over_ends_in_a_decision() -> None:
    """It lasts until its leader is faster, or by the bound of the decision not 2 % faster than plain decoding."""
    rng, over = np.random.default_rng(5), 0
    for speed in np.tile((0.99, 1.0, 1.005), 12):
        found, outcome, _ = decide(draw([Truth("a", speed)], 36, 1, rng, spread=0.025), LOSS)
        assert len(outcome.left) < 2 or found.word != "cannot tell"
        over += len(outcome.left) == 2 and max(outcome.made) < 36
    assert over > 12


@pytest.mark.parametrize(("spread", "blocks"), one_in(2, [(0.04, 60), (0.08, 150)]))
def test_errors_are_rare_and_races_short(spread: float, blocks: int) -> None:
    """Of 40 races at most 5 % miss an arm over 2 % faster, or say `same accuracy` wrongly; half the forwards."""
    rng = np.random.default_rng(7)
    missed = wrong = used = full = 0
    races = 40
    for _ in range(races):
        losses = [LOSSES[i] for i in rng.integers(len(LOSSES), size=9)]
        speeds = np.exp(rng.normal(0.1, 0.3, len(losses)))
        truths = [Truth(f"a{n}", float(s), loss) for n, (s, loss) in enumerate(zip(speeds, losses, strict=True))]
        found, _, decoded = decide(draw(truths, blocks, 8, rng, spread=spread), LOSS)
        used, full = used + decoded, full + blocks * (len(truths) + 1)
        missed += missed_same(found, truths)
        wrong += wrongly_kept(found, truths, LOSS)
    assert missed <= 0.05 * races
    assert wrong <= 0.05 * races
    assert used <= 0.5 * full


def test_an_arm_without_a_word_is_shown_with_the_interval_that_its_word_is_tested_with() -> None:
    """An interval above 1.02 beside "no conclusion" contradicts itself; that of a single arm would often be."""
    rng, names, alone = np.random.default_rng(3), ["ar", *(f"a{n}" for n in range(9))], 0
    for _ in range(25):
        length = rng.lognormal(0, 0.3, 6)
        group = {
            name: cell_data(
                [],
                [timing_line(block=b, wall_s=w) for b, w in enumerate(length / speed * rng.lognormal(0, 0.08, 6))],
                cell=name,
                arm=name,
                baselines=[] if name == "ar" else ["ar"],
            )
            for name, speed in zip(names, [1.0, *rng.uniform(1.1, 1.9, 9)], strict=True)
        }
        stored: Any = SimpleNamespace(
            cells=group, looks=lambda _: 5, plan=SimpleNamespace(group=lambda _: SimpleNamespace(cells=names))
        )
        pairs, over = _Pairs(stored), compare(group, 0.0, 0.02, looks=5)
        plain = result_cell(arm="ar", cell="ar", reference=True)
        for name in names[1:]:
            cell = result_cell(arm=name, cell=name, claims="distribution", blocks=6, speedup=over[name].speedup)
            [found] = recommend([plain, cell], max_loss=LOSS, pairs=pairs)
            if over[name].speedup[0].verdict == Verdict(word="inconclusive") and found.undecided is not None:
                low, high = found.undecided.speedup.ci_low, found.undecided.speedup.ci_high
                assert low is not None
                assert high is not None
                assert low <= 1.02 < high
                assert found.undecided.level == pytest.approx(1 - 0.05 / (5 * 9))
                alone += (pairs.bounds(cell, plain).low or 0.0) > 1.02
    assert alone


def test_a_cell_is_over_a_limit_by_the_blocks_so_far() -> None:
    """Gaps of 10 ms, then of 90 ms. Samples that are not clean do not count."""
    timings = [
        timing_line(block=b, ttft_s=0.1, step_s=[0.1, gap, gap], dropped=dropped)
        for b, (gap, dropped) in enumerate([(0.01, None), (0.09, "slow clock"), (0.09, None)])
    ]
    lines = [[generation_line(item=str(b), block=b, commits=[1, 1, 1])] for b in range(3)]
    assert misses_slo(timings, lines, {"itl": 0.05}) == [False, False, True]
    assert misses_slo(timings, lines, {"ttft": 0.05}) == [True, True, True]
    assert misses_slo(timings, lines, {"ttft": 0.5, "itl": 0.1}) == [False] * 3
    assert misses_slo(timings, lines, {}) == []
