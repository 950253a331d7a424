"""The classes that rest on which tokens are off: each needs a pattern that is not by chance, else it is unexplained."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_answers import AR, faulty_run, honest_run
from planted_faults import shifted_rope

import mtbench
from mtbench.document.model import Points, Table
from mtbench.experiments.audit import experiment
from mtbench.experiments.audit.cases import Case, Known
from mtbench.experiments.audit.classes import is_fault, name
from mtbench.experiments.audit.document import document, verdict_of
from mtbench.experiments.audit.findings import audit
from mtbench.experiments.audit.format import JudgedLine, SideJudged, TrialLine, Tried
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Side, SideAnswer

TOKENS = 40
FAR = 3.0  # shortfall of a token that is off
PLAIN = Side("a", "a", "s", "ar", {}, model="m", dtype="float32", engine="e", batch_size=4, plain=True, ours=True)
DRAFTING = replace(PLAIN, name="b", arm="speculative", plain=False)
Off = Mapping[int, Sequence[int]]  # by item, the tokens that are off


def known(off: Off, side: Side, items: int = 16, **answer: Any) -> Known:
    """Return a pair whose B is off in these tokens. answer: functions that give fields of B's answers of an item."""
    found = Known(PLAIN, side, 1e-4, None, str, same_weights=True)
    for item in range(items):
        mine = SideAnswer([0] * 10, list(range(TOKENS)), "t", "length")
        theirs = replace(mine, **{field: make(item) for field, make in answer.items()})
        mine = replace(mine, tokens=theirs.tokens)
        judged = None
        if item in off:
            first = min(off[item])
            theirs = replace(theirs, tokens=[t + 100 * (i >= first) for i, t in enumerate(theirs.tokens)])
            right = SideJudged(text="x", probabilities=[0.9] * (TOKENS - first), short={}, endless=None)
            sure, short = [0.9] * (len(theirs.tokens) - first), {str(i): FAR for i in off[item]}
            wrong = SideJudged(text="y", probabilities=sure, short=short, endless=None)
            judged = JudgedLine(pair=0, item=str(item), first=first, side_a=right, side_b=wrong)
        found.cases.append(Case(str(item), mine, theirs, judged, found))
    return found


def names(of: Known) -> set[str]:
    return {found for case in of.cases if (found := name(case).name) != "same"}


def rows_of(batch: int) -> dict[str, Any]:
    return {"row": lambda item: item % batch, "block": lambda item: item // batch}


def steps(size: int) -> dict[str, Any]:
    """Forwards that commit `size` tokens each."""
    return {"commits": lambda _: [size] * (TOKENS // size)}


def rejected(_: int) -> list[int]:
    return [4, 4, 2] + [3] * 10


EVERYWHERE = {item: [3, 9, 14, 22, 30] for item in range(16)}
TWO_ROWS = {item: [5, 9] for item in range(16) if item % 4 < 2}
DRAFTS = {item: [1, 6, 13, 18, 26] for item in range(4)}
STEPS = {"late": [21, 24, 30, 35], "early": [1, 6, 17, 30]}
LATE, EARLY = ({item: [n + item % 3 for n in of] for item in range(8)} for of in STEPS.values())
PATTERNS: dict[str, tuple[Known, str]] = {
    "rows 0 and 1 of four blocks": (
        known({n: [5, 9] for n in range(16) if n % 4 < 2}, PLAIN, **rows_of(4)),
        "cache/position",
    ),
    "one block: a row is an item": (known({0: [5, 9, 20], 1: [5, 8]}, PLAIN, 4, **rows_of(4)), "unexplained"),
    "two answers of one row": (known({0: [5, 9], 8: [5, 8]}, PLAIN, **rows_of(4)), "unexplained"),
    "from a length on": (
        known({n: [30, 34] for n in range(10)}, PLAIN, tokens=lambda n: list(range(TOKENS if n < 10 else 25))),
        "cache/position",
    ),
    "one long answer": (known({0: [30]}, PLAIN, tokens=lambda n: list(range(TOKENS if n < 1 else 25))), "unexplained"),
    "everywhere": (known(EVERYWHERE, PLAIN), "unexplained"),
    "drafts in many forwards": (
        known(DRAFTS, DRAFTING, **steps(4)),
        "acceptance fault",
    ),
    "one forward with a wrong draft": (known({3: [9, 10]}, DRAFTING, **steps(4)), "acceptance fault"),
    "a draft at the very end": (known({3: [38]}, DRAFTING, **steps(4)), "unexplained"),
    "drafts by chance": (known({3: [9, 17]}, DRAFTING, **steps(4)), "unexplained"),
    "own choices of a drafting arm": (known(LATE, DRAFTING, commits=rejected), "cache/position"),
    "own choices, from the first forward on": (known(EARLY, DRAFTING, commits=rejected), "unexplained"),
    "hidden forwards": (known(LATE, DRAFTING), "cache/position"),
    "plain decoding is right at another batch size": (known(LATE, replace(DRAFTING, batch_size=8)), "unexplained"),
    "hidden forwards, off from the start": (known(EARLY, DRAFTING), "unexplained"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_a_class_unless_it_may_be_chance(pattern: str) -> None:
    of, expected = PATTERNS[pattern]
    assert names(of) == {expected}, name(next(case for case in of.cases if case.judged)).why


def trial(text: str, kind: str, explained: Sequence[int], off: Off) -> TrialLine:
    tried = [
        Tried(
            item=str(item),
            tokens=TOKENS,
            before=len(tokens),
            after=0 if item in explained else len(tokens),
            misfit_before=3.0 * len(tokens),
            misfit=0.0 if item in explained else 3.0 * len(tokens),
        )
        for item, tokens in off.items()
    ]
    before, after = sum(of.before for of in tried), sum(of.after for of in tried)
    return TrialLine(
        pair=0, side="b", trial=text, name=kind, answers=len(tried), before=before, after=after, tried=tried
    )


def test_an_answer_is_of_a_class_only_if_the_trial_explains_it() -> None:
    of = known(EVERYWHERE, PLAIN)
    of.add([trial("a window of 8", "cache/position", range(14), EVERYWHERE)])
    found = [name(case).name for case in of.cases]
    assert found == ["cache/position"] * 14 + ["unexplained"] * 2
    assert "in other answers: cache/position" in name(of.cases[15]).why


def test_a_pattern_holds_in_answers_that_the_trial_of_others_does_not_explain() -> None:
    of = known(LATE, DRAFTING, commits=rejected)
    of.add([trial("weights in 8 bits", "weights", range(7), LATE)])
    assert [name(case).name for case in of.cases[:8]] == ["weights"] * 7 + ["cache/position"]


def test_stored_data_settle_a_side_without_trials_unless_few_tokens_may_be_chance() -> None:
    for off, settled in ((DRAFTS, True), ({3: [9, 10, 11]}, False), ({3: [8, 9, 10]}, True), ({3: [9]}, False)):
        assert known(off, DRAFTING, **steps(4)).pool("b").settled is settled, off
    assert not known(DRAFTS, PLAIN, **steps(4)).pool("b").settled


def test_sides_of_equal_weights_under_two_names_are_judged_by_their_tokens() -> None:
    """Another checkpoint explains a side, and the same one does not; where only names are known, they are a hint."""
    for same, expected, fault in (
        (True, "cache/position", True),
        (None, "cache/position", True),
        (False, "weights", False),
    ):
        of = known(TWO_ROWS, replace(PLAIN, model="n"), **rows_of(4))
        of.same_weights, of.checkpoints = same, "A decoded with m, B with n"
        assert names(of) == {expected}
        assert audit(AuditRequest(a="a", b="b"), "m", [of], []).explained is not fault
    of = known(EVERYWHERE, replace(PLAIN, model="n"))
    of.same_weights, of.checkpoints = None, "A decoded with m, B with n"
    assert "Hint: A decoded with m, B with n" in name(of.cases[0]).why


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"template_date": "2026-11-29"}, "the chat template reads the clock: A has 2026-11-28, B 2026-11-29"),
        ({"template_date": "2026-11-28"}, "another template or question"),
    ],
)
def test_prompts_of_two_days_are_named(task: dict[str, Any], why: str) -> None:
    of = known({}, replace(PLAIN, task=task), items=1, prompt=lambda _: [1] * 10)
    of.a = replace(PLAIN, task={"template_date": "2026-11-28"})
    cause = name(of.cases[0])
    assert (cause.name, cause.why) == ("template/tokenizer", f"prompts differ ({why})")


def test_a_prompt_that_mtbench_fed_wrongly_is_a_fault() -> None:
    for ours in (True, False):
        of = known(EVERYWHERE, replace(PLAIN, ours=ours))
        of.add([trial("the first message left out", "template/tokenizer", range(16), EVERYWHERE)])
        assert is_fault(of.cases[0], name(of.cases[0])) is ours


def test_most_rows_of_a_block_may_be_off_by_chance() -> None:
    of = known({n: [5, 9] for n in range(7)}, replace(PLAIN, batch_size=8), 8, **rows_of(8))
    assert "row" not in name(of.cases[0]).why


def test_variants_of_the_best_trial_are_not_said_to_explain_equally_well() -> None:
    of = known(EVERYWHERE, PLAIN)
    texts = "layer 3 left out, from new token 7 on", "layer 3 left out", "layer 2 left out, in some rows"
    of.add(trial(text, "weights", range(16), EVERYWHERE) for text in texts)
    assert f"with {texts[0]} (equally well: {texts[2]}), 80 of 80" in name(of.cases[0]).why


def test_trials_of_two_classes_that_explain_alike_name_none() -> None:
    of = known(EVERYWHERE, PLAIN)
    of.add(trial(text, kind, range(16), EVERYWHERE) for text, kind in (("x", "weights"), ("y", "cache/position")))
    cause = name(of.cases[0])
    assert (cause.name, cause.by) == ("unexplained", "hint")
    assert "which stand for weights or cache/position" in cause.why


def test_unexplained_says_what_is_known() -> None:
    why = name(known(EVERYWHERE, PLAIN).cases[0]).why
    assert "80 of 592 judged tokens are off, in 16 of 16 answers, from token 3 (position 13) on" in why
    assert "3 below the choice (median), 3 at most; its plan is greedy" in why
    assert "Hint: weights, or keys and values of the prompt" in why


def test_weights_are_not_named_where_a_schema_forces_tokens() -> None:
    of = known(EVERYWHERE, replace(PLAIN, schema=True))
    of.add([trial("weights in 8 bits", "weights", range(16), EVERYWHERE)])
    cause = name(of.cases[0])
    assert cause.name == "unexplained"
    assert "the plan has a JSON schema" in cause.why


def test_drawn_tokens_of_a_greedy_plan_are_a_fault_unless_the_method_draws() -> None:
    drawn = trial("tokens sampled at temperature 0.3", "sampling", range(16), EVERYWHERE).changed(chance=0.4)
    for claims, fault in (("lossless", True), ("distribution", False)):
        of = known(EVERYWHERE, replace(PLAIN, claims=claims))
        of.add([drawn])
        found = audit(AuditRequest(a="a", b="b"), "m", [of], [])
        assert {finding.name for finding in found.findings} == {"sampling"}
        assert found.explained is not fault
        assert verdict_of(found) == ("FAULT" if fault else "explained by: sampling")


def test_a_later_turn_has_the_cause_of_the_answer_in_its_prompt() -> None:
    of = known({0: [5, 9]}, PLAIN, 2)
    later = of.cases[1]
    of.cases[1] = replace(
        later, a=replace(later.a, follows="0"), b=replace(later.b, follows="0", prompt=[1, 2], tokens=[7]), judged=None
    )
    assert name(of.cases[1]).why == name(of.cases[0]).why
    assert name(of.cases[1]).here == "its prompt has the answer to 0, which differs"


def test_the_terminal_has_a_row_for_each_cause() -> None:
    of = known(TWO_ROWS, PLAIN, **rows_of(4))
    table, points = document(audit(AuditRequest(a="a", b="b"), "m", [of], []), []).sections[0].blocks
    assert isinstance(table, Table)
    assert isinstance(points, Points)
    [row] = table.rows
    assert [row.name, *(entry.value for entry in row.entries)] == ["1 cache/position", "8", "FAULT", "0", "5", "3"]
    [point] = points.points
    assert str(point).startswith("cache/position, by a pattern: B: only rows 0, 1 of the batch are off")


def test_the_word_does_not_depend_on_where_the_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes in one directory and in two, of a fault that no trial explains."""
    monkeypatch.setattr(experiment, "run_trials", lambda *_: [])
    both = honest_run(tmp_path / "both", method=("ar",), batch_size=(1, 4), limit=4, max_new_tokens=24)
    wrong = faulty_run(tmp_path / "b", shifted_rope(3), method=("ar",), batch_size=(4,), limit=4, max_new_tokens=24)
    shutil.copy(next((wrong / "generations").iterdir()), both / f"generations/{AR}.b4.jsonl")
    shutil.copytree(both, tmp_path / "other")
    found = [
        mtbench.audit(
            f"{both}:{AR}.b1", f"{place}:{AR}.b4", out=tmp_path / place.name[:1] / "audit", device="cpu"
        ).record
        for place in (both, tmp_path / "other")
    ]
    assert found[0]["sentence"] == found[1]["sentence"]
    assert [of["evidence"] for of in found[0]["findings"]] == [of["evidence"] for of in found[1]["findings"]]
