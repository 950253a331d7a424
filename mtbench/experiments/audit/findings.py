"""From judged lines to the findings of an audit: the noise of each pair of arms, the class of each answer, the sums."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mtbench.decoding.output import first_difference
from mtbench.document.formatting import counted, listed
from mtbench.experiments.audit.cases import LETTERS, Arms, Case
from mtbench.experiments.audit.classes import CLASSES, name
from mtbench.experiments.audit.format import Audit, ClassCount, Divergence, JudgedLine, NoiseLine, PairRecord
from mtbench.experiments.audit.judge import coarse
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Pair, Side
from mtbench.models.loading import Inspected
from mtbench.statistics import EPSILON_CAP, EXACT_EPSILON

MOST_NOISE = 1.0  # a larger one is not this model's arithmetic
SPREADS = 4.0  # of the noise: more is not chance
Lines = Mapping[tuple[int, str], JudgedLine]


def all_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs, and behind them those of plain decoding that show an engine's own differences."""
    siblings = {(a.name, b.name): Pair(a, b) for pair in pairs for a, b in pair.siblings}
    return [*pairs, *siblings.values()]


def to_judge(pair: Pair, item: str) -> bool:
    """Return whether two answers to one prompt differ in a way that the judge can explain."""
    a, b = pair.a.answers[item], pair.b.answers[item]
    return a.tokens != b.tokens and a.prompt == b.prompt is not None and a.whole and b.whole


def arms_of(pairs: Sequence[Pair], lines: Lines, noises: Mapping[str, NoiseLine], judge: Inspected) -> list[Arms]:
    """Return the two arms of each pair with their answers, and the noise of both."""
    found = list[Arms]()
    apart = {(p.a.name, p.b.name): _apart(number, lines) for number, p in enumerate(all_pairs(pairs))}
    for number, pair in enumerate(pairs):
        sides = pair.a, pair.b
        exact = [EXACT_EPSILON.get(str(side.dtype), EXACT_EPSILON["float64"]) for side in sides]
        measured = [bound_of(noises[kind]) for kind in map(coarse, sides) if kind is not None and kind in noises]
        noise = max([*exact, *measured, *(apart[a.name, b.name] for a, b in pair.siblings)])
        same = None in (pair.a.model, pair.b.model) or pair.a.model == pair.b.model
        arms = Arms(pair.a, pair.b, noise, judge.tokenizer.decode, judge.end_ids if same else ())
        arms.cases += [
            Case(item, pair.a.answers[item], pair.b.answers[item], lines.get((number, item)), arms)
            for item in pair.items
        ]
        found.append(arms)
    return found


def bound_of(measured: NoiseLine) -> float:
    """Return the shortfall up to which two runs in a number type may choose another token each."""
    return MOST_NOISE if measured.spread is None else min(MOST_NOISE, SPREADS * measured.spread)


def reference(number: int, pair: Pair, lines: Lines) -> Side:
    """Return the side that is less off: a fault would change the noise that is measured on its answers."""

    def off(short: Mapping[str, float]) -> float:
        return sum(min(MOST_NOISE, one) for one in short.values())

    judged = [line for (of, _), line in lines.items() if of == number]
    return pair.a if sum(off(line.side_a.short) - off(line.side_b.short) for line in judged) <= 0 else pair.b


def _apart(number: int, lines: Lines) -> float:
    judged = [line for (of, _), line in lines.items() if of == number]
    shorts = [side.short.get(str(line.first), 0.0) for line in judged for side in (line.side_a, line.side_b)]
    return min(EPSILON_CAP, max(shorts, default=0.0))


def audit(request: AuditRequest, model: str | None, pairs: Sequence[Arms], notes: Sequence[str]) -> Audit:
    """Return the findings: the class of every answer, and one sentence."""
    findings = [finding for number, arms in enumerate(pairs) for finding in _findings(number, arms)]
    counts = Counter(finding.name for finding in findings)
    faults = Counter(finding.name for finding in findings if finding.fault)
    answers = sum(len(arms.cases) for arms in pairs)
    counts["same"] = answers - len(findings)
    classes = [
        ClassCount(name=key, answers=counts[key], faults=faults[key], says=says) for key, says in CLASSES.items()
    ]
    return Audit(
        schema_version=1,
        request=request,
        model=model,
        sentence=_sentence(answers, findings, classes),
        explained=not faults,
        pairs=[
            PairRecord(a=of.a.name, b=of.b.name, suite=of.a.suite, items=len(of.cases), noise=of.noise) for of in pairs
        ],
        classes=classes,
        findings=findings,
        notes=list(notes),
    )


def _findings(number: int, arms: Arms) -> Iterator[Divergence]:
    for case in arms.cases:
        cause = name(case)
        if cause.name == "same":
            continue
        differ = case.a.tokens != case.b.tokens
        off = [(indices[0], letter) for letter in LETTERS if (indices := case.off(letter))]
        index, side = min(off, default=(None, None))
        yield Divergence(
            pair=number,
            item=case.item,
            name=cause.name,
            fault=cause.fault,
            evidence=cause.why,
            here=cause.here,
            first=first_difference(case.a.tokens, case.b.tokens) if differ else None,
            off_from=index,
            off_by=None if index is None or side is None else case.short(side, index),
            judged=case.judged,
        )


def _sentence(answers: int, findings: Sequence[Divergence], classes: Sequence[ClassCount]) -> str:
    """Return the findings in one sentence. A single answer of a class, and the first of a fault, has its place."""
    if not findings:
        return f"B equals A in all {counted(answers, 'answer')}."
    parts = []
    for of in classes:
        those = [finding for finding in findings if finding.name == of.name]
        if those:
            place = f"{' at' if len(those) == 1 else ', the first at'} {_place(those[0])}"
            parts.append(f"{len(those)} {of.name}{place if len(those) == 1 or of.faults else ''}")
    return f"B differs from A in {len(findings)} of {counted(answers, 'answer')}: {listed(parts)}."


def _place(finding: Divergence) -> str:
    token = finding.first if finding.off_from is None else finding.off_from
    return f"item {finding.item}" + ("" if token is None else f", token {token}")
