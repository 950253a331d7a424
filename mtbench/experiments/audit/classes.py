"""Why two answers differ: the classes of an audit, and the tests in the order in which they are made.

A class needs evidence that the others lack; what no test shows is unexplained, with what is known of it. Tests of a
pair get an item's two answers; those of a side get a side with tokens that arithmetic does not explain. The first test
that holds gives the cause.
"""

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from mtbench.document.formatting import counted, listed
from mtbench.experiments.audit.cases import LETTERS, OTHER, Case, Letter, Pool, forwards
from mtbench.experiments.audit.explanation import nearest
from mtbench.experiments.audit.format import Shown
from mtbench.measure.lossless_check import first_difference

FEW = 0.1  # largest share of the tokens that a lossy arm accepts


class Cause(NamedTuple):
    """The class of an answer. `why`: what holds for all answers of the cause; `here`: what was seen in this one.

    Proofs are stored data and trials; a pattern is which tokens are off, if not by chance; a hint shows nothing.
    """

    name: str
    why: str
    here: str = ""
    by: Shown = "proof"
    fault: bool | None = None  # None: as its class


def _few_shot(case: Case) -> Cause | None:
    """Prompts with other numbers of examples, as the suites say."""
    shots = [(side.task or {}).get("num_fewshot") for side in (case.known.a, case.known.b)]
    if case.a.prompt == case.b.prompt or shots[0] == shots[1]:
        return None
    return Cause("metric", f"few-shot prompt: A has {shots[0]} examples, B {shots[1]}")


def _earlier(case: Case) -> Cause | None:
    """A later turn, whose prompt has an earlier answer that differs."""
    before = next((of for of in case.known.cases if of.item == case.a.follows), None)
    if case.a.prompt == case.b.prompt or before is None or (cause := name(before)).name in ("same", "metric"):
        return None
    return cause._replace(here=f"its prompt has the answer to {before.item}, which differs")


def _template(case: Case) -> Cause | None:
    ours, theirs, known = case.a.prompt, case.b.prompt, case.known
    if ours is None or theirs is None or ours == theirs:
        return _other_tokens(case)
    place = first_difference(ours, theirs)
    shown = [repr(known.text(ids[max(0, place - 2) : place + 6])) for ids in (ours, theirs)]
    short, long = sorted((ours, theirs), key=len)
    dates = [(side.task or {}).get("template_date") for side in (known.a, known.b)]
    why = "another template or question"
    if short == long[1:] and short[:1] == long[:1]:
        why = "the first token is there twice"
    elif known.text(ours) == known.text(theirs):
        why = "the same text in other tokens: another tokenizer, or special tokens written as text"
    elif dates[0] != dates[1]:
        why = f"the chat template reads the clock: A has {dates[0]}, B {dates[1]}"
    here = f"from token {place} on: A has {shown[0]}, B {shown[1]}; {len(ours)} and {len(theirs)} prompt tokens"
    return Cause("template/tokenizer", f"prompts differ ({why})", here)


def _other_tokens(case: Case) -> Cause | None:
    """The same text in other tokens, where a server may have sent a text."""
    known, same = case.known, case.a.text == case.b.text != ""
    if not same or case.a.tokens == case.b.tokens or (known.a.ours and known.b.ours) or case.is_prefix:
        return None
    if known.text(case.a.tokens) != known.text(case.b.tokens):
        return None
    return Cause("template/tokenizer", "the answers are the same text in other tokens: another tokenizer")


def _same(case: Case) -> Cause | None:
    """The same tokens, and perhaps other scores."""
    scores, tasks = (case.a.score, case.b.score), [side.task or {} for side in (case.known.a, case.known.b)]
    if case.a.tokens != case.b.tokens:
        return None
    if None in scores or scores[0] == scores[1]:
        return Cause("same", "the same tokens")
    names = [name for name in {**tasks[0], **tasks[1]} if tasks[0].get(name) != tasks[1].get(name)]
    because = listed(f"{name} is {tasks[0].get(name)!r} and {tasks[1].get(name)!r}" for name in names)
    why = "the same tokens have other scores" + (f": {because}" if because else "")
    return Cause("metric", why, f"scores {scores[0]:g} and {scores[1]:g}")


def _lacking(case: Case) -> Cause | None:
    """A text that is not, or not all, there."""
    parser = "may lack reasoning text, or the tokens around it; ask a server without a reasoning parser"
    for side, answer in (("A", case.a), ("B", case.b)):
        if not answer.tokens or not answer.whole:
            why = parser if answer.tokens else "has no answer"
            return Cause("unexplained", f"{side} {why}", by="hint")
    return None


RULES = {"end": "an end token", "stop": "a stop string", "length": "the budget of tokens", None: "an unknown rule"}


def _stop(case: Case) -> Cause | None:
    both, one, other, why = (("A", case.a), ("B", case.b)), case.a.text, case.b.text, ""
    broken = False
    if case.is_prefix:
        why = "the same tokens up to the end of the shorter"
    elif (case.known.a.texts or case.known.b.texts) and (one.startswith(other) or other.startswith(one)):
        why = "the same text up to the end of the shorter; a text does not have its end tokens"
    for letter in () if why else LETTERS:
        side, ended = case.of(letter), case.answer(OTHER[letter])
        ended_there = case.judged is not None and len(ended.tokens) == case.judged.first + 1
        if not case.far(letter, case.known.bound) or not ended_there or ended.finish != "end":
            continue
        if side.endless is not None and side.endless <= case.known.bound:
            plan = case.side(letter)
            broken = bool(case.known.end_ids) and plan.max_new_tokens is not None and not plan.endless
            why = f"{letter.upper()} goes on as the model does if end tokens are ignored"
            why += ", against its plan.json" * broken
    ends = listed(f"{RULES.get(of.finish, of.finish)} ended {name}" for name, of in both)
    here = listed(f"{name} has {counted(len(of.tokens), 'token')}" for name, of in both)
    return Cause("stop/budget", f"{why}: {ends}", here, fault=broken or None) if why else None


def _broken(case: Case) -> Cause | None:
    """An end that the plan of its side forbids. Runs with more tokens than the plan allows are refused when opened."""
    for letter in LETTERS:
        side, answer = case.side(letter), case.answer(letter)
        stop = next((stop for stop in answer.stop if stop in answer.text), None)
        ends, ended = case.known.end_ids, answer.finish
        end = next((n for n, token in enumerate(answer.tokens[:-1], start=1) if token in ends), None)
        budget, has = side.max_new_tokens, f"{letter.upper()} has {counted(len(answer.tokens), 'token')}"
        if budget is None or not answer.tokens:
            continue
        no_stop = ended == "stop" and not answer.stop
        no_end = ended == "end" and (side.endless or (ends and answer.tokens[-1] not in ends))
        if stop is not None:
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
    """Tokens that arithmetic explains, or choices at the temperatures of two plans."""
    known, hot = case.known, [case.known.a.temperature, case.known.b.temperature]
    if case.judged is None or case.off:
        return None
    at_first = max(case.short(letter, case.judged.first) for letter in LETTERS)
    here = f"the first two that differ are within {at_first:.2g} of the largest logit"
    if hot[0] != hot[1]:
        why = f"temperature {hot[0]:g} and {hot[1]:g}: each side's tokens are the model's choices at its own"
        return Cause("sampling", why, here)
    if not any(case.far(letter, known.noise) for letter in LETTERS):
        return Cause("near-tie", f"all tokens are within the noise of {known.noise:.2g} of the largest logit", here)
    why = f"tokens are beyond the noise, {known.noise:.2g}, and within an engine's own numerics, {known.bound:.2g}"
    return Cause("rounding", why, here)


def _checkpoints(case: Case) -> Cause | None:
    if case.judged is None:
        return Cause("unexplained", "nothing could be judged: no side has the prompt", by="hint")
    return None if case.known.same_weights is not False else Cause("weights", case.known.checkpoints)


PAIR = (_few_shot, _earlier, _template, _same, _lacking, _stop, _within, _checkpoints)

# --- Of a side whose tokens are off -----------------------------------------------------------------------------------


def _rows(case: Case, letter: Letter) -> Cause | None:
    """The tokens of another item of the batch."""
    if (other := case.known.pool(letter).mixed.get(case.item)) is None or _by_order(case, letter):
        return None
    here = f"it goes on with the tokens of {other}, as {OTHER[letter].upper()} has them"
    return Cause("cache/position", "answers go on with the tokens of other items: rows are mixed up", here)


def _by_order(case: Case, letter: Letter) -> bool:
    """Whether an answer of a file without prompts was paired by its place, which may be another one."""
    return case.side(letter).texts and not case.answer(letter).raw_prompt


def _accepted(case: Case, letter: Letter) -> Cause | None:
    """Tokens that are off only where a forward accepted drafts."""
    pool, side, answer = case.known.pool(letter), case.side(letter), case.answer(letter)
    few = len(pool.far) <= FEW * pool.tokens
    if side.claims == "lossy" and side.plain is False and answer.commits is None and few:
        return Cause("lossy", "lossy by design; which steps accepted such tokens is not stored (null)", by="hint")
    if (end := pool.drafts) is None:
        return None
    why = f"all {counted(len(pool.far), 'token')} that are off are drafts, none is the {end} of a forward"
    first = case.far(letter, case.known.bound)[0]
    step, of = next((n, of) for n, of in enumerate(forwards(answer), start=1) if first in of)
    here = f"forward {step} committed {len(of)} tokens, and token {first} is number {first - of.start + 1} of them"
    lossy = side.claims == "lossy"
    return Cause("lossy" if lossy else "acceptance fault", "lossy by design: " * lossy + why, here, "pattern")


def _tried(case: Case, letter: Letter) -> Cause | None:
    """What a trial shows, in the answers that it explains; those on which none was made are like the others."""
    pool, side = case.known.pool(letter), case.side(letter)
    found = pool.explanation
    if found is None or found.name is None or (found.name == "weights" and side.schema):
        return None
    tried = {of.item for line in pool.trials if line.trial == found.trials[0] for of in line.tried}
    if case.item in tried - found.items:
        return None
    if found.chance is None:
        change = found.trials[0].partition(", ")[0]  # without the tokens from which on it is there
        others = [text for text in found.trials[1:] if not text.startswith(change)]
        equal = f" (equally well: {'; '.join(others[:3])})" if others else ""
        become = f"{found.before - found.after} of {found.before} tokens that are off become choices"
        why = f"with {found.trials[0]}{equal}, {become}, in {counted(len(found.items), 'answer')}"
        fed = found.name == "template/tokenizer" and side.ours  # with the tokens of the prompt: no template was there
        return Cause(found.name, why, fault=fed or None)
    may_draw = side.claims == "distribution" or side.temperature > 0
    plan = "as its method or plan says, with another seed" if may_draw else "and its plan is greedy"
    why = f"as likely as {found.trials[0]} (p = {found.chance:.2g}), {plan}"
    return Cause(found.name, why, fault=None if may_draw or side.texts else True)


def _pattern(case: Case, letter: Letter) -> Cause | None:
    """Which tokens are off, in answers that no trial explains."""
    pool, why = case.known.pool(letter), ""
    if pool.starts_at is not None:
        why = f"no answer is off before position {pool.starts_at}, and those that reach it are"
    elif pool.in_rows:
        why = f"only rows {listed(pool.some_rows)} of the batch are off, in several blocks"
    elif _plain_is_right(case, letter) and pool.left:
        first = min(index for _, index in pool.far)
        why = f"{len(pool.far)} tokens are off, and none of the first {first} of any answer; plain decoding is right: "
        why += "what a draft left is read"
    return Cause("cache/position", why, by="pattern") if why else None


def _plain_is_right(case: Case, letter: Letter) -> bool:
    """Whether a side drafts, and plain decoding of its checkpoint at its batch size has no token that is off."""
    side, other = case.side(letter), case.side(OTHER[letter])
    drafts = side.plain is False and other.plain is True and side.batch_size == other.batch_size
    return bool(drafts and case.known.same_weights and not case.known.pool(OTHER[letter]).cases)


def _unexplained(case: Case, letter: Letter) -> Cause:
    """What is known of the tokens that no test explains."""
    pool = case.known.pool(letter)
    hints = "".join(f". Hint: {hint}" for hint in _hints(case, letter))
    return Cause("unexplained", f"{_size(pool)}; {_excluded(pool)}{hints}", by="hint")


def _size(pool: Pool) -> str:
    side, short = pool.known.side(pool.letter), sorted(case.short(pool.letter, index) for case, index in pool.far)
    first, index = min(pool.far, key=lambda of: of[1])
    position = len(first.answer(pool.letter).prompt or ()) + index
    rows = f" (rows {listed(pool.some_rows)} only)" if pool.some_rows else ""
    plan = f"; its plan has temperature {side.temperature:g}" if side.temperature else "; its plan is greedy"
    return (
        f"{len(pool.far)} of {pool.tokens} judged tokens are off, in {len(pool.cases)} of "
        f"{counted(len(pool.known.cases), 'answer')}{rows}, from token {index} (position {position}) on; "
        f"{median(short):.2g} below the choice (median), {short[-1]:.2g} at most{'' if side.texts else plan}"
    )


def _excluded(pool: Pool) -> str:
    """Return what the trials say of a side, or of the answers that its explanation leaves."""
    if (found := pool.explanation) is not None:
        better = (
            f"{found.before - found.after} of {found.before} tokens become choices with {'; '.join(found.trials[:4])}"
        )
        alike = f", which stand for {' or '.join(found.classes)}" if len(found.classes) > 1 else ""
        few = f"; that may be chance: {counted(found.more, 'more such token')} would tell" if found.more else ""
        return better + alike + few + (f", in other answers: {found.name}" if found.name else "")
    near = [f"{line.trial} ({line.before - line.after} of {line.before})" for line in nearest(pool.trials)]
    drawn = [f"as drawn tokens p = {line.chance:.1g}" for line in pool.trials if line.chance is not None]
    tried = f"none of {counted(len(pool.trials), 'trial')} explains them" if pool.trials else "no trial was made"
    return "; ".join([tried, *([f"nearest: {listed(near)}"] if near else []), *drawn])


def _hints(case: Case, letter: Letter) -> Iterator[str]:
    pool, side, other = case.known.pool(letter), case.side(letter), case.side(OTHER[letter])
    if _by_order(case, letter) and (pool.explanation is None or pool.mixed):
        yield "it has no prompts, and order paired the answers; vLLM shuffles without `--disable-shuffle`"
        return
    if side.schema:
        yield "the plan has a JSON schema, and the audit does not know which tokens it forces"
    if pool.some_rows and not pool.in_rows:
        yield "only some rows are off; more blocks would tell"
    if pool.everywhere:
        yield "weights, or keys and values of the prompt: it is there from the first tokens on, in every answer"
    if case.known.checkpoints and case.known.same_weights is None:
        yield case.known.checkpoints
    if _plain_is_right(case, letter):
        yield "a draft that was accepted, or what it left: plain decoding is right"
    elif not case.known.pool(OTHER[letter]).cases and case.known.same_weights and side.engine == other.engine:
        yield f"the same checkpoint and engine are right as {other.arm} at batch size {other.batch_size}"


SIDE = (_rows, _accepted, _tried, _pattern, _unexplained)
FAULTS = ("cache/position", "acceptance fault", "unexplained")
CLASSES = {
    "same": "The same tokens and, where both have one, the same score.",
    "near-tie": "Both tokens are within the noise of the arithmetic.",
    "rounding": "Both tokens are within the engine's own numerical variation, or that of coarser logits.",
    "template/tokenizer": "The prompts, or the same text, have other tokens.",
    "stop/budget": "One answer ends earlier, by another rule.",
    "sampling": "The tokens are chosen by another rule: temperature, penalty, filter or seed.",
    "lossy": "The arm accepts such tokens by design, and does not claim to be lossless.",
    "weights": "One side computes with other weights.",
    "cache/position": "One side reads other keys and values, or other positions.",
    "acceptance fault": "A draft was accepted that is not the model's choice.",
    "metric": "The same tokens or question, scored or asked in another way.",
    "unexplained": "No test shows a cause.",
}


def name(case: Case) -> Cause:
    """Return the cause of a difference. An answer that breaks its plan is a fault, whatever else is there."""
    found = next(filter(None, (test(case) for test in PAIR)), None) or _of_sides(case)
    broken = None if found.name == "same" else _broken(case)
    if broken is None or found.name in ("stop/budget", "near-tie", "rounding"):
        return broken or found
    return found._replace(why=f"{found.why}; {broken.why}", fault=True)


def _of_sides(case: Case) -> Cause:
    """Return the cause of the side that is off. If both are, that of the worse one, which names the other."""
    found = []
    for letter in case.off:
        cause = next(filter(None, (test(case, letter) for test in SIDE)))
        found.append(cause._replace(why=f"{letter.upper()}: {cause.why}"))
    *others, worst = sorted(found, key=lambda of: (is_fault(case, of), of.by == "hint"))
    return worst._replace(why="; ".join([worst.why, *(f"{of.why} ({of.name})" for of in others)]))


def is_fault(case: Case, cause: Cause) -> bool:
    """Return whether a cause is a fault: weights are one if both sides have the same checkpoint."""
    if cause.fault is not None:
        return cause.fault
    return cause.name in FAULTS or (cause.name == "weights" and case.known.same_weights is True)
