"""The class of an answer: what stored data prove, in its order; else tokens beyond rounding are not explained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mtbench.document.model import Points, Table
from mtbench.experiments.audit.cases import Arms, Case
from mtbench.experiments.audit.classes import UNEXPLAINED, Cause, name
from mtbench.experiments.audit.document import document, verdict_of
from mtbench.experiments.audit.findings import audit
from mtbench.experiments.audit.format import JudgedLine, SideJudged
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Side, SideAnswer
from mtbench.sampling import Sampling

TOKENS, END = 40, 99
FAR = 3.0  # shortfall of a token that is off
PLAIN = Side("a", "a", "s", "ar", {}, model="m", dtype="float32", engine="e", batch_size=4, plain=True, ours=True)
DRAFTING = replace(PLAIN, name="b", arm="speculative", plain=False)
NUCLEUS = Sampling(0.7, top_p=0.9)
LOSSY = replace(DRAFTING, claims="lossy")
Off = Mapping[int, Sequence[int]]  # by item, the tokens that are off


def pair(off: Off, side: Side, items: int = 16, noise: float = 1e-4, *, outside: bool = False, **answer: Any) -> Arms:
    """Return a pair whose B is off in these tokens. answer: functions that give fields of B's answers of an item."""
    arms = Arms(PLAIN, side, noise, str, end_ids=[END])
    for item in range(items):
        mine = SideAnswer([0] * 10, list(range(TOKENS)), "t", "length")
        theirs = replace(mine, **{field: make(item) for field, make in answer.items()})
        judged = None
        if item in off:
            first = min(off[item])
            theirs = replace(theirs, tokens=[t + 100 * (i >= first) for i, t in enumerate(theirs.tokens)])
            short = {str(i): FAR for i in off[item]}
            right, wrong = (
                SideJudged(text="x", probabilities=[0.9] * (TOKENS - first), short=of, endless=None)
                for of in ({}, short)
            )
            if outside:
                wrong = wrong.changed(outside=short)
            judged = JudgedLine(pair=0, item=str(item), first=first, side_a=right, side_b=wrong)
        arms.cases.append(Case(str(item), mine, theirs, judged, arms))
    return arms


def names(arms: Arms) -> set[str]:
    return {found for case in arms.cases if (found := name(case).name) != "same"}


def steps(size: int) -> dict[str, Any]:
    """Forwards that commit `size` tokens each."""
    return {"commits": lambda _: [size] * (TOKENS // size)}


EVERYWHERE = {item: [3, 9, 14, 22, 30] for item in range(16)}
DRAFTS = {item: [1, 6, 13, 18, 26] for item in range(4)}
CASES: dict[str, tuple[Arms, str, bool]] = {  # class, and whether it is a fault
    "within the noise": (pair(EVERYWHERE, PLAIN, noise=FAR), "near-tie", False),
    "beyond it": (pair(EVERYWHERE, PLAIN), UNEXPLAINED, True),
    "drafts only": (pair(DRAFTS, DRAFTING, **steps(4)), "acceptance fault", True),
    "drafts only, perhaps by chance": (pair({3: [9, 17]}, DRAFTING, **steps(4)), UNEXPLAINED, True),
    "drafts and own choices": (pair(DRAFTS | {9: [3, 8]}, DRAFTING, **steps(4)), UNEXPLAINED, True),
    "forwards that are not stored": (pair(DRAFTS, DRAFTING, commits=lambda _: None), UNEXPLAINED, True),
    "drafts of a lossy arm": (pair({3: [9]}, LOSSY, **steps(4)), "lossy", False),
    "own choices of a lossy arm": (pair({3: [3, 8]}, LOSSY, **steps(4)), UNEXPLAINED, True),
    "few of a lossy arm that hides its forwards": (pair({3: [9]}, LOSSY, commits=lambda _: None), "lossy", False),
    "many of a lossy arm that hides its forwards": (pair({3: [*range(9)]}, LOSSY), UNEXPLAINED, True),
    "drawn by other random numbers": (
        pair(EVERYWHERE, replace(DRAFTING, claims="distribution", sampling=Sampling(0.7))),
        "sampling",
        False,
    ),
    "another engine draws": (pair(EVERYWHERE, replace(PLAIN, ours=False, sampling=Sampling(0.7))), "sampling", False),
    "our own random numbers": (pair(EVERYWHERE, replace(PLAIN, sampling=Sampling(0.7))), UNEXPLAINED, True),
    "a greedy plan": (pair(EVERYWHERE, replace(DRAFTING, claims="distribution")), UNEXPLAINED, True),
    "another temperature": (pair({1: [3]}, replace(PLAIN, sampling=Sampling(0.7)), noise=FAR), "sampling", False),
    "other filters": (pair({1: [3]}, replace(PLAIN, sampling=Sampling(0.0, top_p=0.9)), noise=FAR), "sampling", False),
    "a draft that the filter forbids": (
        pair(DRAFTS, replace(DRAFTING, claims="distribution", sampling=NUCLEUS), outside=True),
        "filter fault",
        True,
    ),
    "an engine's token that the filter forbids": (
        pair({3: [9]}, replace(PLAIN, ours=False, sampling=NUCLEUS), outside=True),
        "filter fault",
        True,
    ),
    "forbidden by less than the noise": (
        pair({3: [9]}, replace(PLAIN, sampling=NUCLEUS), noise=FAR, outside=True),
        "sampling",
        False,
    ),
    "a lossy arm may go beyond the filter": (
        pair({3: [9]}, replace(LOSSY, sampling=NUCLEUS), outside=True, **steps(4)),
        "lossy",
        False,
    ),
    "no answer": (pair({}, PLAIN, 1, tokens=lambda _: []), "not judged", True),
    "no prompt": (pair({}, PLAIN, 1, prompt=lambda _: None, tokens=lambda _: [7]), "not judged", True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_class_and_whether_it_is_a_fault(case: str) -> None:
    arms, expected, fault = CASES[case]
    assert names(arms) == {expected}, name(next(of for of in arms.cases if of.judged)).why
    found = audit(AuditRequest(a="a", b="b"), "m", [arms], [])
    assert found.explained is not fault
    word = "FAULT" if fault else expected if expected == "near-tie" else f"explained by: {expected}"
    assert verdict_of(found) == word


SHORT: dict[str, Any] = {"max_new_tokens": TOKENS}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # B's plan, answer and evidence; empty: no fault
    "before the budget": (SHORT, {"tokens": [*range(30)]}, "B ends before max_new_tokens=40, without an end token"),
    "an end that is none": (
        SHORT,
        {"tokens": [*range(30)], "finish": "end"},
        "B ends before max_new_tokens=40, without an end token",
    ),
    "a stop that is none": (
        SHORT,
        {"tokens": [*range(30)], "finish": "stop"},
        "B ends before max_new_tokens=40, without an end token",
    ),
    "behind the budget": (SHORT, {"tokens": [*range(TOKENS + 1)]}, "B goes on behind max_new_tokens=40"),
    "behind an end token": (SHORT, {"tokens": [*range(20), END, 5]}, "B goes on behind an end token"),
    "behind a stop string": (SHORT, {"tokens": [*range(39)], "stop": ["t"]}, "B goes on behind the stop string 't'"),
    "end tokens are ignored": (
        {"max_new_tokens": TOKENS + 2, "endless": True},
        {"tokens": [*range(TOKENS), END, 5]},
        "",
    ),
    "another budget": ({"max_new_tokens": 30}, {"tokens": [*range(30)]}, ""),
    "another stop string": (SHORT, {"tokens": [*range(30)], "stop": ["u"], "finish": "stop"}, ""),
}


@pytest.mark.parametrize("case", PLANS)
def test_an_end_against_the_plan_is_a_fault(case: str) -> None:
    plan, answer, evidence = PLANS[case]
    given: dict[str, Any] = {field: lambda _, v=value: v for field, value in answer.items()}
    arms = pair({}, replace(PLAIN, **plan), 1, **given)
    found = name(arms.cases[0])
    assert found.fault is bool(evidence), found
    assert evidence in found.why
    if evidence:  # also where the difference itself has a cause
        other = pair({}, replace(PLAIN, **plan), 1, prompt=lambda _: [1], tokens=lambda _: answer["tokens"])
        other.cases[0] = replace(other.cases[0], b=replace(other.cases[0].b, **answer))
        assert name(other.cases[0]).name == "template/tokenizer"
        assert name(other.cases[0]).fault


def test_an_answer_that_goes_on_as_the_model_does_without_end_tokens_breaks_its_plan() -> None:
    for endless, fault in ((False, True), (True, False)):
        arms = pair({0: [20]}, replace(PLAIN, endless=endless, **SHORT), 1)
        [case] = arms.cases
        assert case.judged is not None
        ended = replace(case.a, tokens=[*range(20), END], finish="end")
        judged = case.judged.changed(side_b=case.judged.side_b.changed(endless=0.0))
        arms.cases[0] = case = replace(case, a=ended, judged=judged)
        assert (name(case).name, name(case).fault) == ("stop/budget", fault)
        assert "as the model does if end tokens are ignored" in name(case).why


@pytest.mark.parametrize(("same", "expected"), [(True, UNEXPLAINED), (None, UNEXPLAINED), (False, "weights")])
def test_checkpoints_with_other_values_are_the_cause(same: bool | None, expected: str) -> None:
    """Where only names are known, they are said."""
    arms = pair(EVERYWHERE, replace(PLAIN, model="n"))
    arms.weights = (same, "A decoded with m, B with n")
    cause = name(arms.cases[0])
    assert (cause.name, cause.fault) == (expected, same is not False)
    assert ("A decoded with m, B with n" in cause.why) is (same is not True)


@pytest.mark.parametrize(
    ("day", "why"),
    [
        ("2026-11-29", "the chat template reads the clock: A has 2026-11-28, B 2026-11-29"),
        ("2026-11-28", "another template or question"),
    ],
)
def test_prompts_of_two_days_are_named(day: str, why: str) -> None:
    arms = pair({}, replace(PLAIN, task={"template_date": day}), items=1, prompt=lambda _: [1] * 10)
    arms.a = replace(PLAIN, task={"template_date": "2026-11-28"})
    assert name(arms.cases[0])[:2] == ("template/tokenizer", f"prompts differ ({why})")


def test_prompts_with_another_number_of_examples_are_a_metric() -> None:
    arms = pair({}, replace(PLAIN, task={"num_fewshot": 5}), items=1, prompt=lambda _: [0] * 50)
    arms.a = replace(PLAIN, task={"num_fewshot": 0})
    assert name(arms.cases[0]) == Cause("metric", "few-shot prompt: A has 0 examples, B 5")


def test_the_same_tokens_with_another_score_are_a_metric() -> None:
    arms = pair({}, replace(PLAIN, task={"filter": "[0-9]+"}), items=1, score=lambda _: 1.0)
    arms.cases[0] = replace(arms.cases[0], a=replace(arms.cases[0].a, score=0.0))
    why = "the same tokens have other scores: filter is None and '[0-9]+'"
    assert name(arms.cases[0]) == Cause("metric", why, "scores 0 and 1")


def test_a_later_turn_has_the_cause_of_the_answer_in_its_prompt() -> None:
    arms = pair({0: [5, 9]}, PLAIN, 2)
    later = arms.cases[1]
    arms.cases[1] = replace(
        later, a=replace(later.a, follows="0"), b=replace(later.b, follows="0", prompt=[1, 2], tokens=[7]), judged=None
    )
    assert name(arms.cases[1]).why == name(arms.cases[0]).why
    assert name(arms.cases[1]).here == "its prompt has the answer to 0, which differs"


def test_unexplained_says_how_many_tokens_from_where_on_and_how_far() -> None:
    why = name(pair(EVERYWHERE, replace(PLAIN, schema=True)).cases[0]).why
    assert "80 of 592 judged tokens are off, in 16 of 16 answers, from token 3 (position 13) on" in why
    assert "3 below the choice (median), 3 at most; its plan: greedy; A has none" in why
    assert "the plan has a JSON schema" in why


def test_the_place_of_a_token_in_its_forward_is_said() -> None:
    here = name(pair({3: [9, 17]}, DRAFTING, **steps(4)).cases[3]).here
    assert here == "forward 3 committed 4 tokens, and token 9 is number 2 of them"


def test_the_terminal_has_a_row_for_each_cause() -> None:
    found = document(audit(AuditRequest(a="a", b="b"), "m", [pair({3: [5], 9: [8]}, PLAIN)], []), [])
    table, points = found.sections[0].blocks
    assert isinstance(table, Table)
    assert isinstance(points, Points)
    [row] = table.rows
    assert [row.name, *(entry.value for entry in row.entries)] == [f"1 {UNEXPLAINED}", "2", "FAULT", "3", "5", "3"]
    [point] = points.points
    assert str(point).startswith(f"{UNEXPLAINED}: B: 2 of 67 judged tokens are off")
    assert found.title not in found.lead
