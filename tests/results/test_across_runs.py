"""Two runs side by side: only the same items with the same prompts count, and every figure is a plain sum over them."""

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import AR, MARS, TASK, Answer, MadeRun, answer, hidden
from scipy.stats import t

from mtbench.results.across_runs import CellFigures, RunComparison, compare_runs
from mtbench.statistics import paired_difference

ITEMS = 17


def drawn(seed: int) -> list[Answer | None]:
    """Random answers, some missing and some not scored."""
    chance = random.Random(seed)

    def one() -> Answer | None:
        commits = [chance.choice((0, 1, 2, 4)) for _ in range(chance.randint(1, 5))] + [1]
        tokens = [chance.randint(1, 2) for _ in range(sum(commits))]
        return chance.choice((None, *[Answer(tokens, commits, chance.choice((0.0, 1.0, 1.0, None)))] * 6))

    return [one() for _ in range(ITEMS)]


def mixed(seed: int) -> list[Answer | None]:
    """Answers of which every third is the one that is drawn with this seed."""
    return [old if n % 3 else new for n, (old, new) in enumerate(zip(drawn(seed + 100), drawn(seed), strict=True))]


def cut(seed: int) -> list[list[int]]:
    order = random.Random(seed).sample(range(ITEMS), ITEMS)
    return [order[i : i + 2] for i in range(0, ITEMS, 2)]


def figures_of(found: RunComparison, cell: str = AR) -> CellFigures:
    figures = next(c for c in found.cells if c.cell == cell).figures
    assert figures is not None
    return figures


def compared(folder: Path, base: MadeRun, head: MadeRun) -> RunComparison:
    return compare_runs(base.read(folder / "base"), head.read(folder / "head"))


def naive_ratio(units: Iterable[Sequence[int]], *columns: Sequence[int]) -> tuple[float, float, float]:
    """The first two columns over the last two, in totals; with the interval of a ratio of four totals over units."""
    totals = [sum(column) for column in columns]
    value = totals[0] * totals[1] / (totals[2] * totals[3])
    signed = [*zip((1, 1, -1, -1), columns, totals, strict=True)]
    errors = [sum(sign * sum(of[i] for i in unit) / total for sign, of, total in signed) for unit in units]
    k = len(errors)
    reach = math.exp(t.ppf(0.975, k - 1) * math.sqrt(k / (k - 1) * sum(e * e for e in errors)))
    return value, value / reach, value * reach


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_a_plain_recomputation(tmp_path: Path, seed: int) -> None:
    """Over the items that both answered; the second plan cuts the items into other blocks."""
    answers = drawn(seed), mixed(seed)
    base = MadeRun({AR: answers[0]}, blocks=cut(1), wall_s=2.0)
    figures = figures_of(compared(tmp_path, base, MadeRun({AR: answers[1]}, blocks=cut(2)[:8])))
    kept = {n for block in cut(2)[:8] for n in block}
    pairs = {n: (a, b) for n, (a, b) in enumerate(zip(*answers, strict=True)) if a and b and n in kept}
    blocks = [[place for place, n in enumerate(pairs) if n in block] for block in cut(1)]
    runs = [[pair[side] for pair in pairs.values()] for side in (0, 1)]
    tokens = [[len(a.tokens) for a in run] for run in runs]
    forwards = [[len(a.commits or ()) for a in run] for run in runs]
    for side, figure in enumerate((figures.base, figures.head)):
        steps = [count for a in runs[side] for count in a.commits or () if count]
        assert figure.tokens_per_forward == sum(tokens[side]) / sum(forwards[side])
        assert figure.answer_length == sum(tokens[side]) / len(pairs)
        assert figure.acceptance_length == pytest.approx(sum(steps) / len(steps))
    same = sum(a.tokens == b.tokens for a, b in pairs.values())
    assert (figures.agreement.items, figures.agreement.identical) == (len(pairs), same)
    found = figures.tokens_per_forward
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx(
        naive_ratio([block for block in blocks if block], tokens[1], forwards[0], forwards[1], tokens[0])
    )
    of_base = [a.tokens for a in answers[0] if a]
    assert figures.base.tokens_per_s == pytest.approx(sum(map(len, of_base)) / (2.0 * len(cut(1))))
    scored = [(a.score, b.score) for a, b in pairs.values() if a.score is not None and b.score is not None]
    gained, lost = scored.count((0.0, 1.0)), scored.count((1.0, 0.0))
    accuracy, shares = figures.accuracy, (figures.base.accuracy, figures.head.accuracy)
    assert accuracy is not None
    assert accuracy.model_dump().items() >= paired_difference(gained, lost, len(scored))._asdict().items()
    assert [share and share.value for share in shares] == [sum(run) / len(scored) for run in zip(*scored, strict=True)]


def test_a_run_agrees_with_itself(tmp_path: Path) -> None:
    """No item differs, and the ratio is exactly 1."""
    found = compared(tmp_path, MadeRun({AR: drawn(3), MARS: drawn(4)}), MadeRun({AR: drawn(3), MARS: drawn(4)}))
    assert (found.differs, found.only_base, found.only_head) == ([], [], [])
    for cell in (AR, MARS):
        figures = figures_of(found, cell)
        assert figures.agreement.identical == figures.agreement.items
        assert figures.tokens_per_forward.value == pytest.approx(1)
        assert figures.accuracy is not None
        assert figures.accuracy.difference == 0


def test_cells_of_one_run_are_named(tmp_path: Path) -> None:
    """Only cells with the same id are compared."""
    found = compared(tmp_path, MadeRun({AR: drawn(3), MARS: drawn(4)}), MadeRun({MARS: drawn(4)}))
    assert (found.only_base, found.only_head, [c.cell for c in found.cells]) == ([AR], [], [MARS])


def test_a_missing_item_does_not_count(tmp_path: Path) -> None:
    """Nor do items beyond a smaller limit: neither their tokens nor their scores."""
    base = [answer("aaaa", 2, 0.0), answer("bb", 1), answer("cccccc", 1, 0.0)]
    figures = figures_of(compared(tmp_path, MadeRun({AR: base}), MadeRun({AR: [answer("aaaa", 4), None]})))
    assert (figures.agreement.items, figures.agreement.identical) == (1, 1)
    assert (figures.base.tokens_per_forward, figures.head.tokens_per_forward) == (2, 1)
    assert figures.base.accuracy is not None
    assert figures.head.accuracy is not None
    assert (figures.base.accuracy.value, figures.head.accuracy.value, figures.head.accuracy.n) == (0, 1, 1)


def reason(folder: Path, base: MadeRun, head: MadeRun) -> str | None:
    [cell] = compared(folder, base, head).cells
    assert (cell.figures is None) == (cell.reason is not None)
    return cell.reason


TWO = [answer("ab"), answer("cd")]


def test_other_prompts_are_not_compared(tmp_path: Path) -> None:
    """One other prompt is enough. Of a private suite only the lengths are known."""
    base = MadeRun({AR: TWO}, prompts=[[1, 2], [1, 3]])
    other = MadeRun({AR: TWO}, prompts=[[1, 2], [1, 4]])
    assert reason(tmp_path / "1", base, other) == "other prompts in 1 of 2 common items"
    private = [MadeRun({AR: TWO}, prompts=p, withheld="0" * 64) for p in ([[1, 2], [1]], [[1, 5], [1]], [[1], [1]])]
    assert reason(tmp_path / "2", private[0], private[1]) is None
    assert reason(tmp_path / "3", private[0], private[2]) == "other prompts in 1 of 2 common items"
    assert reason(tmp_path / "4", base, private[0]) == "other prompts in 2 of 2 common items"


def test_a_later_turn_may_follow_another_answer(tmp_path: Path) -> None:
    """Its prompt contains the run's own answer, so only its own tokens must be the same; the turns are one unit."""
    turns: dict[str, Any] = {"follows": {1: 0}, "blocks": [[0], [1]], "prompts": [[1, 2], [3]]}
    runs = [MadeRun({AR: [answer(first), answer("cd")]}, **turns) for first in ("ab", "xy")]
    figures = figures_of(compared(tmp_path / "1", *runs))
    assert (figures.agreement.items, figures.agreement.identical) == (2, 1)
    private = [MadeRun({AR: [answer(text), answer("cd")]}, withheld="0" * 64, **turns) for text in ("ab", "xyz")]
    assert reason(tmp_path / "3", *private) is None
    alone = MadeRun({AR: TWO}, prompts=[[1, 2], [3]])
    assert reason(tmp_path / "2", runs[0], alone) == "other prompts in 1 of 2 common items"


def test_runs_without_a_common_item_are_not_compared(tmp_path: Path) -> None:
    base = MadeRun({AR: [answer("ab"), None]})
    assert reason(tmp_path, base, MadeRun({AR: [None, answer("ab")]})) == "no item in common: 1 and 1 answers"


@pytest.mark.parametrize("failed", ["base", "head"])
def test_a_cell_that_failed_in_one_run_is_not_compared(tmp_path: Path, failed: str) -> None:
    """Whichever run it is; the other cells are compared."""
    runs = {
        name: MadeRun({AR: TWO, MARS: TWO}, failures={AR: "no memory"} if name == failed else {})
        for name in ("base", "head")
    }
    cells = compared(tmp_path, runs["base"], runs["head"]).cells
    assert cells[0].reason == f"failed in {tmp_path / failed}: no memory"
    assert cells[1].reason is None


def test_an_engine_that_hides_its_forwards_has_no_ratio(tmp_path: Path) -> None:
    """In one run or in both; tokens and accuracy are compared all the same."""
    texts = [f"a{'b' * n}" for n in range(16)]
    made = {True: MadeRun({AR: [hidden(text) for text in texts]}), False: MadeRun({AR: [*map(answer, texts)]})}
    for number, (base, head) in enumerate([(True, False), (False, True), (True, True)]):
        figures = figures_of(compared(tmp_path / str(number), made[base], made[head]))
        for hides, of_run in ((base, figures.base), (head, figures.head)):
            assert (of_run.tokens_per_forward is None) == (of_run.acceptance_length is None) == hides
        assert figures.tokens_per_forward.value is None
        assert figures.agreement.identical == 16
        assert figures.accuracy is not None


def test_an_engines_own_counters_are_those_of_all_items(tmp_path: Path) -> None:
    """So they give an acceptance length only if all items are compared."""
    counters = {"drafts": 4, "drafted": 8, "accepted": 6}
    made = [MadeRun({AR: [hidden("ab"), hidden("cd"), last]}, counters=counters) for last in (hidden("ef"), None)]
    for number, lengths in ((0, (2.5, 2.5)), (1, (None, 2.5))):
        figures = figures_of(compared(tmp_path / str(number), made[0], made[number]))
        assert (figures.base.acceptance_length, figures.head.acceptance_length) == lengths


@pytest.mark.parametrize(
    ("base", "head", "why"),
    [
        ({"task": TASK}, {"task": TASK | {"version": "2"}}, "other version of the task: version 1, 2"),
        ({}, {"metric": "pass@1"}, "other metric: exact_match, pass@1"),
        ({"metric": None}, {"metric": None}, "the suite is not scored"),
        ({"length": "fixed"}, {"length": "fixed"}, "answers of fixed length are not scored"),
        ({"task": TASK | {"subtasks": ["a"]}}, {"task": TASK | {"subtasks": ["a", "b"]}}, None),
    ],
    ids=["version", "metric", "unscored", "fixed", "subtasks"],
)
def test_accuracy_of_other_tasks_is_not_compared(tmp_path: Path, base: Any, head: Any, why: str | None) -> None:
    """Tokens are. A choice of subtasks is no other task."""
    figures = figures_of(compared(tmp_path, MadeRun({AR: TWO}, **base), MadeRun({AR: TWO}, **head)))
    assert figures.accuracy_reason == why
    assert (figures.accuracy is None) == (why is not None)
    assert figures.agreement.identical == 2


def test_accuracy_needs_scores_in_both_runs(tmp_path: Path) -> None:
    unscored = [answer("ab", score=None), answer("cd", score=None)]
    figures = figures_of(compared(tmp_path, MadeRun({AR: TWO}), MadeRun({AR: unscored})))
    assert figures.accuracy_reason == f"not scored; run `mtbench score {tmp_path / 'head'}`"


def test_other_machines_and_options_are_named(tmp_path: Path) -> None:
    """Each with its value in both runs."""
    other = {"dtype": "bfloat16", "device": "cuda", "packages": {"torch": "2.12.0"}, "gpu": {"name": "H100"}}
    head = MadeRun(
        {AR: TWO}, session=other, request={"temperature": 0.7, "top_p": 0.9, "chat_template_date": "2026-11-28"}
    )
    found = compared(tmp_path, MadeRun({AR: TWO}), head).differs
    assert {(d.name, d.base, d.head) for d in found} == {
        ("dtype", "float32", "bfloat16"),
        ("device", "cpu", "cuda"),
        ("torch", "2.13.0", "2.12.0"),
        ("GPU", None, "H100"),
        ("sampling", "greedy", "temperature 0.7, top-p 0.9"),
        ("chat template date", None, "2026-11-28"),
    }


def test_a_void_cell_is_named(tmp_path: Path) -> None:
    """Its counts do not add up."""
    wrong = [Answer([1, 2], [1], 1.0), answer("cd")]
    [cell] = compared(tmp_path, MadeRun({AR: TWO}), MadeRun({AR: wrong})).cells
    assert cell.void_base == []
    assert cell.void_head == ["counts do not add up: arithmetic/0/0"]
