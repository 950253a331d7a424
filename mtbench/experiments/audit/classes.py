"""Why two answers differ: the classes of an audit, and the tests in the order in which they are made.

The first test that holds gives the cause. Stored data prove it: prompts, scores, ends, plans, checkpoints, and which
tokens of a forward are drafts. Without such data, tokens beyond rounding are not explained.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from mtbench.decoding.output import first_difference
from mtbench.document.formatting import counted, listed
from mtbench.experiments.audit.cases import LETTERS, OTHER, Arms, Case, Letter
from mtbench.experiments.audit.sides import SideAnswer

FEW = 0.1  # largest share of the tokens that a lossy arm accepts, if its forwards are not stored
CHANCE = 0.01  # probability below which tokens are not drafts by chance
UNEXPLAINED = "beyond rounding, not explained"
CLASSES = {
    "same": "The same tokens and, where both have one, the same score.",
    "near-tie": "All tokens are within the noise: rounding chose between them.",
    "template/tokenizer": "The prompts, or the same text, have other tokens.",
    "stop/budget": "One answer ends earlier, by another rule.",
    "sampling": "The plans have other sampling, or the tokens are drawn by random numbers that are not stored.",
    "weights": "The checkpoints have other values.",
    "metric": "The same tokens or question, scored or asked in another way.",
    "lossy": "The arm accepts such drafts by design, and does not claim to be lossless.",
    "filter fault": "A token was drawn that the plan's top-k, top-p or min-p removes.",
    "acceptance fault": "A draft was accepted that is not the model's choice.",
    "not judged": "An answer or its prompt is not, or not all, stored.",
    UNEXPLAINED: "Tokens are further below the model's choice than rounding explains, and no stored data say why.",
}


class Cause(NamedTuple):
    """The class of an answer. `why`: what holds for all answers of the cause; `here`: what was seen in this one."""

    name: str
    why: str
    here: str = ""
    fault: bool = False


def _few_shot(case: Case) -> Cause | None:
    shots = [(side.task or {}).get("num_fewshot") for side in (case.arms.a, case.arms.b)]
    if case.a.prompt == case.b.prompt or shots[0] == shots[1]:
        return None
    return Cause("metric", f"few-shot prompt: A has {shots[0]} examples, B {shots[1]}")


def _earlier(case: Case) -> Cause | None:
    before = next((of for of in case.arms.cases if of.item == case.a.follows), None)
    if case.a.prompt == case.b.prompt or before is None or (cause := name(before)).name in ("same", "metric"):
        return None
    return cause._replace(here=f"its prompt has the answer to {before.item}, which differs")


def _template(case: Case) -> Cause | None:
    ours, theirs, arms = case.a.prompt, case.b.prompt, case.arms
    if ours is None or theirs is None or ours == theirs:
        return _other_tokens(case)
    place = first_difference(ours, theirs)
    shown = [repr(arms.text(ids[max(0, place - 2) : place + 6])) for ids in (ours, theirs)]
    short, long = sorted((ours, theirs), key=len)
    dates = [(side.task or {}).get("template_date") for side in (arms.a, arms.b)]
    why = "another template or question"
    if short == long[1:] and short[:1] == long[:1]:
        why = "the first token is there twice"
    elif arms.text(ours) == arms.text(theirs):
        why = "the same text in other tokens: another tokenizer, or special tokens written as text"
    elif dates[0] != dates[1]:
        why = f"the chat template reads the clock: A has {dates[0]}, B {dates[1]}"
    here = f"from token {place} on: A has {shown[0]}, B {shown[1]}; {len(ours)} and {len(theirs)} prompt tokens"
    return Cause("template/tokenizer", f"prompts differ ({why})", here)


def _other_tokens(case: Case) -> Cause | None:
    """The same text in other tokens, where a server may have sent a text."""
    arms, same = case.arms, case.a.text == case.b.text != ""
    if not same or case.a.tokens == case.b.tokens or (arms.a.ours and arms.b.ours) or case.is_prefix:
        return None
    if arms.text(case.a.tokens) != arms.text(case.b.tokens):
        return None
    return Cause("template/tokenizer", "the answers are the same text in other tokens: another tokenizer")


def _same(case: Case) -> Cause | None:
    scores, tasks = (case.a.score, case.b.score), [side.task or {} for side in (case.arms.a, case.arms.b)]
    if case.a.tokens != case.b.tokens:
        return None
    if None in scores or scores[0] == scores[1]:
        return Cause("same", "the same tokens")
    names = [name for name in {**tasks[0], **tasks[1]} if tasks[0].get(name) != tasks[1].get(name)]
    because = listed(f"{name} is {tasks[0].get(name)!r} and {tasks[1].get(name)!r}" for name in names)
    why = "the same tokens have other scores" + (f": {because}" if because else "")
    return Cause("metric", why, f"scores {scores[0]:g} and {scores[1]:g}")


def _lacking(case: Case) -> Cause | None:
    for side, answer in (("A", case.a), ("B", case.b)):
        if not answer.tokens:
            return Cause("not judged", f"{side} has no answer", fault=True)
        if not answer.whole:
            why = f"{side} may lack reasoning text; ask a server without a reasoning parser"
            return Cause("not judged", why, fault=True)
    return None


RULES = {"end": "an end token", "stop": "a stop string", "length": "the budget of tokens", None: "an unknown rule"}


def _stop(case: Case) -> Cause | None:
    both, one, other, why = (("A", case.a), ("B", case.b)), case.a.text, case.b.text, ""
    broken = False
    if case.is_prefix:
        why = "the same tokens up to the end of the shorter"
    elif (case.arms.a.texts or case.arms.b.texts) and (one.startswith(other) or other.startswith(one)):
        why = "the same text up to the end of the shorter; a text does not have its end tokens"
    for letter in () if why else LETTERS:
        side, ended = case.of(letter), case.answer(OTHER[letter])
        ended_there = case.judged is not None and len(ended.tokens) == case.judged.first + 1
        if not case.off(letter) or not ended_there or ended.finish != "end":
            continue
        if side.endless is not None and side.endless <= case.arms.noise:
            plan = case.arms.side(letter)
            broken = bool(case.arms.end_ids) and plan.max_new_tokens is not None and not plan.endless
            why = f"{letter.upper()} goes on as the model does if end tokens are ignored"
            why += ", against its plan.json" * broken
    ends = listed(f"{RULES.get(of.finish, of.finish)} ended {name}" for name, of in both)
    here = listed(f"{name} has {counted(len(of.tokens), 'token')}" for name, of in both)
    return Cause("stop/budget", f"{why}: {ends}", here, fault=broken) if why else None


def _broken(case: Case) -> Cause | None:
    """An end that the plan of its side forbids."""
    for letter in LETTERS:
        side, answer = case.arms.side(letter), case.answer(letter)
        stop = next((stop for stop in answer.stop if stop in answer.text), None)
        ends, ended = case.arms.end_ids, answer.finish
        end = next((n for n, token in enumerate(answer.tokens[:-1], start=1) if token in ends), None)
        budget, has = side.max_new_tokens, f"{letter.upper()} has {counted(len(answer.tokens), 'token')}"
        if budget is None or not answer.tokens:
            continue
        no_stop = ended == "stop" and not answer.stop
        no_end = ended == "end" and (side.endless or (ends and answer.tokens[-1] not in ends))
        if len(answer.tokens) > budget:
            why, here = f"goes on behind max_new_tokens={budget}", has
        elif stop is not None:
            why, here = f"goes on behind the stop string {stop!r}", f"{has}: {answer.text[-60:]!r}"
        elif end is not None and not side.endless:
            why, here = "goes on behind an end token", f"{has}, and number {end} is an end token"
        elif no_stop or no_end or (ended == "length" and len(answer.tokens) < budget):
            why, here = f"ends before max_new_tokens={budget}, without an end token or a stop string", has
        else:
            continue
        return Cause("stop/budget", f"{letter.upper()} {why}, against its plan.json", here, fault=True)
    return None


def _within(case: Case) -> Cause | None:
    """Tokens that rounding explains, or choices by the sampling of two plans."""
    arms, both = case.arms, [asdict(case.arms.a.sampling), asdict(case.arms.b.sampling)]
    if case.judged is None:
        return Cause("not judged", "no side has the prompt", fault=True)
    if any(case.off(letter) for letter in LETTERS):
        return None
    first = max(case.short(letter, case.judged.first) for letter in LETTERS)
    here = f"the first two that differ are within {first:.2g} of the largest logit"
    if both[0] != both[1]:
        others = [f"{name} {one:g} and {both[1][name]:g}" for name, one in both[0].items() if one != both[1][name]]
        why = f"{listed(others)}: each side's tokens are the model's choices at its own"
        return Cause("sampling", why, here)
    return Cause("near-tie", f"all tokens are within the noise of {arms.noise:.2g} of the largest logit", here)


def _checkpoints(case: Case) -> Cause | None:
    same, how = case.arms.weights
    return Cause("weights", how) if same is False else None


PAIR = (_few_shot, _earlier, _template, _same, _lacking, _stop, _within, _checkpoints)

# --- Of a side with tokens that are off -------------------------------------------------------------------------------


def _outside(case: Case, letter: Letter) -> Cause | None:
    """A token that the filters remove, whichever random numbers drew it."""
    arms, side = case.arms, case.arms.side(letter)
    those = [(of, index) for of in arms.cases for index in of.outside(letter)]
    if not case.outside(letter) or (side.ours and side.claims == "lossy"):
        return None
    most = max(of.of(letter).outside[str(index)] for of, index in those)
    why = f"{counted(len(those), 'token')} of those that its plan removes, {side.sampling}"
    return Cause("filter fault", f"{why}; {most:.2g} beyond the limit at most", _forward(case, letter), fault=True)


def _drawn(case: Case, letter: Letter) -> Cause | None:
    side = case.arms.side(letter)
    if not side.sampling.temperature or (side.ours and side.claims != "distribution"):
        return None
    return Cause("sampling", f"drawn at {side.sampling} by random numbers that are not stored")


def _accepted(case: Case, letter: Letter) -> Cause | None:
    arms, side, off = case.arms, case.arms.side(letter), case.arms.off(letter)
    lossy = side.claims == "lossy" and side.plain is False
    if lossy and case.answer(letter).commits is None and len(off) <= FEW * arms.judged(letter):
        return Cause("lossy", "lossy by design; which forwards accepted such tokens is not stored (null)")
    chance = min(_drafts_by_chance(arms, letter, place) for place in (0, -1))
    if chance >= (1.0 if lossy else CHANCE):
        return None
    why, here = f"all {counted(len(off), 'token')} that are off are drafts", _forward(case, letter)
    if lossy:
        return Cause("lossy", f"lossy by design: {why}", here)
    return Cause("acceptance fault", why, here, fault=True)


def _drafts_by_chance(arms: Arms, letter: Letter, place: int) -> float:
    """Return the probability that tokens which are off anywhere are all drafts; 1 if one is none.

    place: of the token of a forward that the model itself chose, first (0) or last (-1).
    """
    off = arms.off(letter)
    steps = {case: forwards(case.answer(letter)) for case, _ in off}
    if arms.side(letter).plain is not False or not all(steps.values()):
        return 1.0
    own = {case: {step[place] for step in (of if place == 0 else of[:-1]) if step} for case, of in steps.items()}
    if any(index in own[case] for case, index in off):
        return 1.0
    judged = sum(len(case.span(letter)) for case in steps)
    chosen = sum(len(own[case] & {*case.span(letter)}) for case in steps)
    share: float = (1 - chosen / max(1, judged)) ** len(off)
    return share


def forwards(answer: SideAnswer) -> list[range]:
    """Return the tokens of each forward; empty: they are not stored, or each forward gave one token."""
    commits = answer.commits or []
    steps = [range(end - size, end) for size, end in zip(commits, accumulate(commits), strict=True)]
    return steps if max(commits, default=0) > 1 else []


def _forward(case: Case, letter: Letter) -> str:
    """Return which part of a forward the first token that is off is; empty: it is not stored."""
    first = case.off(letter)[0]
    for number, step in enumerate(forwards(case.answer(letter)), start=1):
        if first in step:
            place = first - step.start + 1
            return f"forward {number} committed {len(step)} tokens, and token {first} is number {place} of them"
    return ""


def _unexplained(case: Case, letter: Letter) -> Cause:
    arms, side, off = case.arms, case.arms.side(letter), case.arms.off(letter)
    shorts = sorted(of.short(letter, index) for of, index in off)
    first, index = min(off, key=lambda of: of[1])
    answers, every = len({of.item for of, _ in off}), counted(len(arms.cases), "answer")
    plan = "" if side.texts else f"; its plan: {side.sampling}"
    why = (
        f"{len(off)} of {arms.judged(letter)} judged tokens are off, in {answers} of {every}, from token {index} "
        f"(position {len(first.answer(letter).prompt or ()) + index}) on; {median(shorts):.2g} below the choice "
        f"(median), {shorts[-1]:.2g} at most{plan}"
    )
    if not arms.off(OTHER[letter]):
        why += f"; {OTHER[letter].upper()} has none"
    if side.schema:
        why += "; the plan has a JSON schema, and the audit does not know which tokens it forces"
    if arms.weights[0] is None and arms.weights[1]:
        why += f"; {arms.weights[1]}"
    return Cause(UNEXPLAINED, why, _forward(case, letter), fault=True)


SIDE: tuple[Callable[[Case, Letter], Cause | None], ...] = (_outside, _drawn, _accepted, _unexplained)


def name(case: Case) -> Cause:
    """Return the cause of a difference. An answer that breaks its plan is a fault, whatever else is there."""
    found = next(filter(None, (test(case) for test in PAIR)), None) or _of_sides(case)
    broken = None if found.name == "same" else _broken(case)
    if broken is None or found.name in ("stop/budget", "near-tie"):
        return broken or found
    return found._replace(why=f"{found.why}; {broken.why}", fault=True)


def _of_sides(case: Case) -> Cause:
    """Return the cause of the side that is off. If both are, that of the worse one, which names the other."""
    found = []
    for letter in filter(case.off, LETTERS):
        cause = next(filter(None, (test(case, letter) for test in SIDE)))
        found.append(cause._replace(why=f"{letter.upper()}: {cause.why}"))
    *others, worst = sorted(found, key=lambda of: (of.fault, of.name == UNEXPLAINED))
    return worst._replace(why="; ".join([worst.why, *(f"{of.why} ({of.name})" for of in others)]))
