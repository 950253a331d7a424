"""Why two answers differ: the classes of an audit, and the tests in the order in which they are made.

The first test that holds names the class. It gets an item's two answers with what is known of them, and returns the
evidence in one sentence, or None.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mtbench.experiments.audit.cases import LETTERS, OTHER, Case, Letter, step_of
from mtbench.measure.lossless_check import first_difference

MANY = 3  # answers from which a fault counts as one of all answers

Test = Callable[[Case], str | None]


def _few_shot(case: Case) -> str | None:
    """Prompts with other numbers of examples, as the suites say."""
    shots = [(side.task or {}).get("num_fewshot") for side in (case.known.a, case.known.b)]
    if case.a.prompt == case.b.prompt or shots[0] == shots[1]:
        return None
    return f"few-shot prompt: A has {shots[0]} examples, B {shots[1]}"


def _template(case: Case) -> str | None:
    ours, theirs = case.a.prompt, case.b.prompt
    if ours is None or theirs is None or ours == theirs:
        return _other_tokens(case)
    place = first_difference(ours, theirs)
    shown = [repr(case.known.text(ids[max(0, place - 2) : place + 6])) for ids in (ours, theirs)]
    texts = [case.known.text(ids) for ids in (ours, theirs)]
    short, long = sorted((ours, theirs), key=len)
    why = "another template or question"
    if short == long[1:]:
        why = "the first token is there twice" if long[:1] == short[:1] else "one side has a token before the others"
    elif texts[0] == texts[1]:
        why = "the same text in other tokens: another tokenizer, or special tokens written as text"
    elif "".join(texts[0].split()) == "".join(texts[1].split()):
        why = "other whitespace"
    counts = f"{len(ours)} and {len(theirs)} prompt tokens"
    return f"prompts differ from token {place} on ({why}): A has {shown[0]}, B {shown[1]}; {counts}"


def _other_tokens(case: Case) -> str | None:
    """The same text in other tokens."""
    if case.a.tokens == case.b.tokens or not case.a.text or case.a.text != case.b.text:
        return None
    if case.is_prefix or case.known.text(case.a.tokens) != case.known.text(case.b.tokens):
        return None
    return "the answers are the same text in other tokens: another tokenizer"


def _same(case: Case) -> str | None:
    return "the same tokens" if case.a.tokens == case.b.tokens and not _other_score(case) else None


def _other_score(case: Case) -> bool:
    return None not in (case.a.score, case.b.score) and case.a.score != case.b.score


def _metric(case: Case) -> str | None:
    if case.a.tokens != case.b.tokens or not _other_score(case):
        return None
    tasks = [side.task or {} for side in (case.known.a, case.known.b)]
    names = [name for name in {**tasks[0], **tasks[1]} if tasks[0].get(name) != tasks[1].get(name)]
    because = "; ".join(f"{name} is {tasks[0].get(name)!r} and {tasks[1].get(name)!r}" for name in names)
    return f"the same tokens, scores {case.a.score:g} and {case.b.score:g}" + (f": {because}" if because else "")


def _lacking(case: Case) -> str | None:
    """A text that is not, or not all, there."""
    for side, answer in (("A", case.a), ("B", case.b)):
        if not answer.tokens:
            return f"{side} has no answer"
        if not answer.whole:
            return f"{side} may lack reasoning text, or the tokens around it; ask a server without a reasoning parser"
    return None


RULES = {"end": "an end token", "stop": "a stop string", "length": "the budget of tokens", None: "an unknown rule"}


def _stop(case: Case) -> str | None:
    both = (("A", case.a), ("B", case.b))
    ends = ", ".join(f"{RULES.get(o.finish, o.finish)} ended {name} after {len(o.tokens)} tokens" for name, o in both)
    if case.is_prefix:
        return f"same tokens up to the end of the shorter: {ends}"
    one, other = case.a.text, case.b.text
    if (case.known.a.texts or case.known.b.texts) and (one.startswith(other) or other.startswith(one)):
        return f"the same text up to the end of the shorter; a text does not have its end tokens: {ends}"
    for letter in LETTERS:
        side, ended = case.of(letter), case.answer(OTHER[letter])
        ended_there = case.judged is not None and len(ended.tokens) == case.judged.first + 1
        if side is None or not side.short or not ended_there or ended.finish != "end":
            continue
        if side.endless is not None and side.endless <= case.known.bound:
            return f"{letter.upper()} goes on as the model does if end tokens are ignored: {ends}"
    return None


def _near_tie(case: Case) -> str | None:
    if case.judged is None or any(case.far(letter, case.known.noise) for letter in LETTERS):
        return None
    return (
        f"both tokens are within {max(case.at_first):.2g} of the largest logit, and the noise is {case.known.noise:.2g}"
    )


def _temperatures(case: Case) -> str | None:
    """Plans with other temperatures, or an arm that promises the distribution only."""
    hot = [case.known.a.temperature, case.known.b.temperature]
    if hot[0] != hot[1] and case.judged is not None and not case.off:
        return f"temperature {hot[0]:g} and {hot[1]:g}: each side's tokens are the model's choices at its own"
    return None


def _sampled(case: Case) -> str | None:
    """Tokens as likely as sampled ones."""
    for letter in case.off:
        side = case.side(letter)
        if (temperature := case.known.pool(letter).sampled_at) is not None:
            because = "its plan is greedy" if not side.temperature else "not with the seed of its plan"
            because = "as its method promises" if side.claims == "distribution" else because
            return f"{letter.upper()}: tokens as likely as those sampled at temperature {temperature}, {because}"
    return None


def _rounding(case: Case) -> str | None:
    if case.judged is None:
        return None
    known = case.known
    if not case.off:
        far = f"{max(case.at_first):.2g} below the largest logit, more than the noise, {known.noise:.2g}"
        return f"{far}; up to {known.bound:.2g} is the difference of {known.why}"
    return None


def _lossy(case: Case) -> str | None:
    for letter in case.off:
        if case.side(letter).claims == "lossy" and (found := _accepted(case, letter)):
            return f"{letter.upper()} is lossy by design: {found}"
    return None


def _acceptance(case: Case) -> str | None:
    found = [_accepted(case, letter) for letter in case.off if case.side(letter).claims != "lossy"]
    return next(filter(None, found), None)


def _accepted(case: Case, letter: Letter) -> str | None:
    """Return that a side's tokens are off only where a forward accepted drafts."""
    pool, far = case.known.pool(letter), case.far(letter, case.known.bound)
    if case.side(letter).plain is not False or not far:
        return None
    commits, short = case.answer(letter).commits, case.short(letter, far[0])
    if commits is None:
        if not pool.rare or not case.known.right(OTHER[letter]):
            return None
        return f"token {far[0]} is {short:.3g} below the model's choice; which step accepted it is not stored (null)"
    if (end := pool.checked) is None:
        return None
    step, place, size = step_of(commits, far[0])
    return (
        f"token {far[0]} is {short:.3g} below the model's choice: forward {step} committed {size} tokens, and it is "
        f"number {place + 1} of them; all {pool.count} such tokens are drafts, none is the {end} of a forward"
    )


def _order(case: Case) -> str | None:
    """A file without prompts, whose order may be another one."""
    for letter in case.off:
        pool = case.known.pool(letter)
        promptless = case.side(letter).texts and not case.answer(letter).raw_prompt
        tried = pool.sampled_at or (pool.best and pool.best.name != "cache/position")
        if promptless and (pool.mixed or (not tried and _everywhere(case))):
            return f"{letter.upper()} has no prompts and was paired by order; vLLM shuffles without `--disable-shuffle`"
    return None


def _rows(case: Case) -> str | None:
    """The tokens of another item of the batch."""
    for letter in case.off:
        if (other := case.known.pool(letter).mixed.get(case.item)) is not None:
            side = "B" if letter == "a" else "A"
            return f"{letter.upper()} goes on with the tokens of {other}, as {side} has them: rows are mixed up"
    return None


def _tried(name: str) -> Test:
    """Return the test whether the best trial of a side belongs to a class."""

    def test(case: Case) -> str | None:
        for letter in case.off:
            best = case.known.pool(letter).best
            if best is not None and best.name == name:
                explained = f"{best.before - best.after} of {best.before} tokens that are off become choices"
                return f"{letter.upper()}: with {best.trial}, {explained} ({best.answers} answers tried)"
        return None

    return test


def _checkpoints(case: Case) -> str | None:
    return case.known.checkpoints if case.off else None


def _length(case: Case) -> str | None:
    """Differences that start at a length."""
    for letter in case.off:
        if (start := case.known.pool(letter).starts_at) is not None:
            return f"{letter.upper()}: no answer is off before position {start}, and those that reach it are"
    return None


def _some_rows(case: Case) -> str | None:
    for letter in case.off:
        if (rows := case.known.pool(letter).rows) is not None:
            return f"{letter.upper()}: only rows {', '.join(map(str, rows))} of the batch are off"
    return None


def _cache(case: Case) -> str | None:
    """Wrong tokens that no draft explains, though the other side, with the same weights and engine, is right."""
    for letter in case.off:
        pool, other = case.known.pool(letter), case.side(OTHER[letter])
        if not case.known.right(OTHER[letter]):
            continue
        if pool.after_first_step:
            later = f"{pool.count} tokens of later forwards are off, and none of a first one"
            return f"{letter.upper()}: {later}: what a rejected draft left is read"
        if case.side(letter).plain is False and other.plain and case.side(letter).model == other.model is not None:
            return f"{letter.upper()} drafts, and plain decoding of its checkpoint is right: what a draft left is read"
        if case.side(letter).machinery == other.machinery:
            where = f"{other.arm} at batch size {other.batch_size}"
            return f"{letter.upper()}: the same weights and engine give the model's choices in {where}"
    return None


def _everywhere(case: Case) -> str | None:
    """Shifted probabilities: tokens are off in most answers, in any place of a forward."""
    for letter in case.off:
        pool, every = case.known.pool(letter), len(case.known.cases)
        if len(pool.cases) >= max(MANY, every / 2):
            off = f"{pool.count} of {pool.tokens} judged tokens of {len(pool.cases)} of {every} answers"
            return f"{letter.upper()}: {off} are off, from token {pool.earliest} on: probabilities are shifted"
    return None


def _unexplained(case: Case) -> str | None:
    if case.judged is None:
        return "nothing could be judged: no side has the prompt"
    sides = " and ".join(letter.upper() for letter in case.off)
    return (
        f"{sides}: tokens up to {max(case.at_first):.3g} below the model's choice; {len(case.known.trials)} changes of "
        "the model were tried, and no test holds"
    )


class Class(NamedTuple):
    """The meaning of a class, and whether it is a fault."""

    says: str
    fault: bool = False


CLASSES: Mapping[str, Class] = {
    "same": Class("The same tokens and, where both have one, the same score."),
    "near-tie": Class("Both tokens are within the noise of the arithmetic."),
    "rounding": Class("Both tokens are within the engine's own numerical variation, or that of coarser logits."),
    "template/tokenizer": Class("The prompts, or the same text, have other tokens."),
    "stop/budget": Class("One answer ends earlier, by another rule."),
    "sampling": Class("The tokens are chosen by another rule: temperature, penalty, filter or seed."),
    "lossy": Class("The arm accepts such tokens by design, and does not claim to be lossless."),
    "weights": Class("One side computes with other weights."),
    "cache/position": Class("One side reads other keys and values, or other positions.", fault=True),
    "acceptance fault": Class("A draft was accepted that is not the model's choice.", fault=True),
    "metric": Class("The same tokens or question, scored or asked in another way."),
    "unexplained": Class("No test explains the difference.", fault=True),
}
TESTS: Sequence[tuple[str, Test]] = (  # in the order in which they are made
    ("metric", _few_shot),
    ("template/tokenizer", _template),
    ("metric", _metric),
    ("same", _same),
    ("unexplained", _lacking),
    ("stop/budget", _stop),
    ("sampling", _temperatures),
    ("near-tie", _near_tie),
    ("rounding", _rounding),
    ("weights", _checkpoints),
    ("unexplained", _order),
    ("cache/position", _rows),
    ("lossy", _lossy),
    ("acceptance fault", _acceptance),
    *((name, _tried(name)) for name in ("template/tokenizer", "cache/position", "weights", "rounding", "sampling")),
    ("sampling", _sampled),
    ("cache/position", _length),
    ("cache/position", _some_rows),
    ("cache/position", _cache),
    ("weights", _everywhere),
    ("unexplained", _unexplained),
)


def name(case: Case) -> tuple[str, str]:
    """Return the class of a case and its evidence."""
    return next((known, evidence) for known, test in TESTS if (evidence := test(case)) is not None)


def is_fault(case: Case, known: str) -> bool:
    """Return whether a class is a fault: weights are one if both sides name the same checkpoint."""
    same = case.known.a.model is not None and case.known.a.model == case.known.b.model
    return CLASSES[known].fault or (known == "weights" and same)
