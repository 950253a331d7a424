"""From judged lines to what an audit has found: the noise of each pair of arms, the class of each answer, the sums."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from mtbench.document.formatting import counted, listed
from mtbench.experiments.audit.classes import CLASSES, Case, Known, name
from mtbench.experiments.audit.format import Audit, ClassCount, Finding, JudgedLine, PairRecord
from mtbench.experiments.audit.judge import coarse
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Pair
from mtbench.runs.lossless_check import first_difference
from mtbench.statistics import EXACT_EPSILON

MOST_NOISE = 1.0  # a larger one is no arithmetic of this model
SPREAD = 2.0  # the largest noise that was seen, times this, bounds the noise of both sides
Lines = Mapping[tuple[int, str], JudgedLine]
Decode = Callable[[Sequence[int]], str]


def all_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs, and behind them those of plain decoding that show an engine's own differences."""
    siblings = {(a.name, b.name): Pair(a, b) for pair in pairs for a, b in pair.siblings}
    return [*pairs, *siblings.values()]


def to_judge(pair: Pair, item: str) -> bool:
    """Return whether two answers to one prompt differ, so that the judge can say of what."""
    a, b = pair.a.answers[item], pair.b.answers[item]
    return a.tokens != b.tokens and a.prompt == b.prompt is not None


def known_of(pairs: Sequence[Pair], lines: Lines, decode: Decode) -> list[Known]:
    """Return what is known of each pair of arms, with its differing answers."""
    every = all_pairs(pairs)
    own = {(p.a.name, p.b.name): _apart(number, p, lines) for number, p in enumerate(every)}
    found = []
    for number, pair in enumerate(pairs):
        measured = {side: _noise(lines, every, coarse(side)) for side in (pair.a, pair.b) if coarse(side)}
        exact = [EXACT_EPSILON[str(side.dtype)] for side in (pair.a, pair.b) if side.dtype in EXACT_EPSILON]
        ran = [noise for side, noise in measured.items() if side.dtype == coarse(side)]
        other = [noise for side, noise in measured.items() if side.dtype != coarse(side)]
        other += [own[a.name, b.name] for a, b in pair.siblings]
        known = Known(
            a=pair.a,
            b=pair.b,
            noise=max([*exact, *ran, EXACT_EPSILON["float64"]]),
            rounding=max(other, default=None),
            text=decode,
        )
        for item in pair.items:
            known.cases.append(Case(item, pair.a.answers[item], pair.b.answers[item], lines.get((number, item)), known))
        found.append(known)
    return found


def _noise(lines: Lines, pairs: Sequence[Pair], dtype: str | None) -> float:
    """Return the noise of a number type: what was measured on all sides that it stands for."""
    seen = [
        judged.noise
        for (number, _), line in lines.items()
        for side, judged in zip(pairs[number][:2], (line.side_a, line.side_b), strict=True)
        if judged.noise is not None and coarse(side) == dtype
    ]
    return min(MOST_NOISE, SPREAD * max(seen, default=0.0))


def _apart(number: int, pair: Pair, lines: Lines) -> float:
    """Return the largest shortfall at the first differences of a pair."""
    at_first = [Case(item, *_said(pair, item), lines.get((number, item)), None).at_first for item in pair.items]  # type: ignore[arg-type]
    return max((short for shorts in at_first for short in shorts), default=0.0)


def _said(pair: Pair, item: str) -> tuple[object, object]:
    return pair.a.answers[item], pair.b.answers[item]


def audit(request: AuditRequest, model: str | None, known: Sequence[Known], notes: Sequence[str]) -> Audit:
    """Return what was found: the class of every answer, and one sentence."""
    findings = [finding for number, pair in enumerate(known) for finding in _findings(number, pair)]
    counts = Counter(finding.name for finding in findings)
    counts["same"] = sum(len(pair.cases) for pair in known) - len(findings)
    classes = [
        ClassCount(name=key, answers=counts[key], fault=kind.fault, says=kind.says) for key, kind in CLASSES.items()
    ]
    return Audit(
        schema_version=1,
        request=request,
        model=model,
        sentence=_sentence(known, findings, classes),
        explained=not any(of.answers for of in classes if of.fault),
        pairs=[
            PairRecord(
                a=of.a.name,
                b=of.b.name,
                suite=of.a.suite,
                items=len(of.cases),
                noise=of.noise,
                rounding=of.rounding,
            )
            for of in known
        ],
        classes=classes,
        findings=findings,
        notes=list(notes),
    )


def _findings(number: int, known: Known) -> Iterator[Finding]:
    for case in known.cases:
        key, evidence = name(case)
        if key == "same":
            continue
        differ = case.a.tokens != case.b.tokens
        yield Finding(
            pair=number,
            item=case.item,
            name=key,
            evidence=evidence,
            first=first_difference(case.a.tokens, case.b.tokens) if differ else None,
            margin=abs(case.at_first[0] - case.at_first[1]) if len(case.at_first) == 2 else None,
            off="both" if len(case.off) == 2 else next(iter(case.off), None),
            judged=case.judged,
        )


def _sentence(known: Sequence[Known], findings: Sequence[Finding], classes: Sequence[ClassCount]) -> str:
    """Return what was found in one sentence. A single answer of a class is named with its place."""
    items = sum(len(pair.cases) for pair in known)
    if not findings:
        return f"B equals A in all {counted(items, 'answer')}."
    parts = []
    for of in classes:
        those = [finding for finding in findings if finding.name == of.name]
        if not those:
            continue
        [first, *more] = those
        word = "" if first.first is None else f", token {first.first}"
        place = (
            f" at item {first.item}{word}"
            if not more
            else f", the first at item {first.item}{word}"
            if of.fault
            else ""
        )
        parts.append(f"{len(those)} {of.name}{place}")
    return f"B differs from A in {len(findings)} of {counted(items, 'answer')}: {listed(parts)}."
