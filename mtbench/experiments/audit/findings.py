"""From judged lines to the findings of an audit: the noise of each pair of arms, the class of each answer, the sums."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mtbench.document.formatting import counted, listed
from mtbench.experiments.audit.cases import Case, Known
from mtbench.experiments.audit.classes import CLASSES, is_fault, name
from mtbench.experiments.audit.format import Audit, ClassCount, Divergence, JudgedLine, NoiseLine, PairRecord
from mtbench.experiments.audit.judge import coarse
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Pair, Side
from mtbench.measure.lossless_check import first_difference
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


def known_of(pairs: Sequence[Pair], lines: Lines, noises: Mapping[str, NoiseLine], judge: Inspected) -> list[Known]:
    """Return what is known of each pair of arms, with its answers."""
    every, found = all_pairs(pairs), list[Known]()

    def text(ids: Sequence[int]) -> str:
        return str(judge.tokenizer.decode(list(ids)))

    apart = {(p.a.name, p.b.name): _apart(number, p, lines) for number, p in enumerate(every)}
    for number, pair in enumerate(pairs):
        own = {
            apart[a.name, b.name]: f"{a.arm} at batch sizes {a.batch_size} and {b.batch_size}" for a, b in pair.siblings
        }
        noise = EXACT_EPSILON["float64"]
        for side in pair[:2]:
            dtype = coarse(side)
            if dtype is None or dtype not in noises:
                pass  # exact, or nothing had to be judged
            elif side.dtype == dtype:
                noise = max(noise, bound_of(noises[dtype]))
            else:
                own[bound_of(noises[dtype])] = f"{dtype}, in which an engine may compute some of its products"
            noise = max(noise, EXACT_EPSILON.get(str(side.dtype), 0.0))
        rounding = max(own, default=None)
        why = own.get(rounding or 0.0, "the engine")
        models = [side.model for side in pair[:2]]
        ends = judge.end_ids if None in models or models[0] == models[1] else ()
        same = True if models[0] == models[1] is not None else None
        known = Known(pair.a, pair.b, noise, rounding, text, frozenset(ends), same, why=why)
        known.cases += [
            Case(item, pair.a.answers[item], pair.b.answers[item], lines.get((number, item)), known)
            for item in pair.items
        ]
        found.append(known)
    return found


def bound_of(measured: NoiseLine) -> float:
    """Return the shortfall up to which two runs in a number type may choose another token each."""
    return MOST_NOISE if measured.spread is None else min(MOST_NOISE, SPREADS * measured.spread)


def reference(number: int, pair: Pair, lines: Lines) -> Side:
    """Return the side that is less off: a fault would change the noise that is measured on its answers."""
    judged = [lines[number, item] for item in pair.items if (number, item) in lines]
    off = [
        sum(min(MOST_NOISE, short) for line in judged for short in getattr(line, field).short.values())
        for field in ("side_a", "side_b")
    ]
    return pair.a if off[0] <= off[1] else pair.b


def _apart(number: int, pair: Pair, lines: Lines) -> float:
    """Return the largest shortfall at the first differences of a pair."""
    judged = [lines[number, item] for item in pair.items if (number, item) in lines]
    tokens = [token for line in judged for token in (line.a, line.b) if token is not None]
    return min(EPSILON_CAP, max((token.shortfall for token in tokens), default=0.0))


def audit(request: AuditRequest, model: str | None, known: Sequence[Known], notes: Sequence[str]) -> Audit:
    """Return the findings: the class of every answer, and one sentence."""
    findings = [finding for number, pair in enumerate(known) for finding in _findings(number, pair)]
    counts = Counter(finding.name for finding in findings)
    faults = Counter(finding.name for finding in findings if finding.fault)
    counts["same"] = sum(len(pair.cases) for pair in known) - len(findings)
    classes = [
        ClassCount(name=key, answers=counts[key], faults=faults[key], says=kind.says) for key, kind in CLASSES.items()
    ]
    return Audit(
        schema_version=1,
        request=request,
        model=model,
        sentence=_sentence(known, findings, classes),
        explained=not faults,
        pairs=[
            PairRecord(
                a=of.a.name, b=of.b.name, suite=of.a.suite, items=len(of.cases), noise=of.noise, rounding=of.rounding
            )
            for of in known
        ],
        classes=classes,
        trials=[line for of in known for line in of.trials],
        findings=findings,
        notes=list(notes),
    )


def _findings(number: int, known: Known) -> Iterator[Divergence]:
    for case in known.cases:
        cause = name(case)
        if cause.name == "same":
            continue
        differ = case.a.tokens != case.b.tokens
        off, side = min(((case.far(letter, known.bound)[0], letter) for letter in case.off), default=(None, None))
        yield Divergence(
            pair=number,
            item=case.item,
            name=cause.name,
            fault=is_fault(case, cause),
            by=cause.by,
            evidence=cause.why,
            here=cause.here,
            first=first_difference(case.a.tokens, case.b.tokens) if differ else None,
            off="both" if len(case.off) == 2 else next(iter(case.off), None),
            off_from=off,
            off_by=None if off is None or side is None else case.short(side, off),
            judged=case.judged,
        )


def _sentence(known: Sequence[Known], findings: Sequence[Divergence], classes: Sequence[ClassCount]) -> str:
    """Return the findings in one sentence. A single answer of a class, and the first of a fault, has its place."""
    items = sum(len(pair.cases) for pair in known)
    if not findings:
        return f"B equals A in all {counted(items, 'answer')}."
    parts = []
    for of in classes:
        those = [finding for finding in findings if finding.name == of.name]
        if those:
            place = f" at {place_of(those[0])}" if len(those) == 1 else f", the first at {place_of(those[0])}"
            parts.append(f"{len(those)} {of.name}{place if len(those) == 1 or of.faults else ''}")
    return f"B differs from A in {len(findings)} of {counted(items, 'answer')}: {listed(parts)}."


def place_of(finding: Divergence) -> str:
    """Return the item, and the first token that is off, else that differs."""
    token = finding.first if finding.off_from is None else finding.off_from
    return f"item {finding.item}" + ("" if token is None else f", token {token}")
