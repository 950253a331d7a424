"""The document of an audit: the causes, the answers that differ, and their first differences side by side."""

from collections.abc import Iterable, Sequence

from mtbench.document import model
from mtbench.document.formatting import NONE, count, counted, few, listed, number
from mtbench.document.model import Document, Entry, Row, Section, Table
from mtbench.experiments.audit.cases import LETTERS, Arms, Case
from mtbench.experiments.audit.format import Audit, Divergence

SHOWN, MOST_CAUSES, NAMED = 100, 10, 3  # first differences on the page; causes; items of a cause
BEFORE, AFTER = 6, 10  # tokens before and from the first difference
HARMLESS = ("same", "near-tie")
READING = [
    ("Judge", "The reference model reads the prompt and the tokens that A and B share, then each side's own tokens."),
    ("Shortfall", "How far the logit of a token lies below the largest at its position; 0 is the model's choice."),
    ("Noise", "The shortfall up to which rounding may choose a token of A or B. In float32 and float64 it is a "
     "constant, in other number types it is measured: four times the change of the distance of the two best logits. A "
     "token beyond it is off."),
]  # fmt: skip


def document(found: Audit, arms: Sequence[Arms]) -> Document:
    """Return the document of an audit. arms: of each pair, for the tokens side by side; empty: without them."""
    sections = []
    if causes := _causes(found.findings):
        sections.append(Section("Causes", _of_causes(found, causes)))
    cases = {(n, case.item): case for n, pair in enumerate(arms) for case in pair.cases}
    first = sorted(found.findings, key=lambda of: not of.fault)[:SHOWN] if arms else []
    if blocks := [_part(of, cases[of.pair, of.item]) for of in first]:
        sections.append(Section("First differences", blocks))
    sections.append(Section("What was compared", [_compared(found)], folded=True))
    word = verdict_of(found)
    tone: model.Tone = "bad" if not found.explained else "plain" if word not in HARMLESS else "good"
    meanings = [(of.name, of.says) for of in found.classes if of.answers]
    sections.append(Section("How to read it", [model.Notes([*READING, *meanings])], folded=True))
    return Document(
        title=found.sentence.removesuffix("."),
        lead=_lead(found),
        subject=f"A: {found.request.a}; B: {found.request.b}; judge: {found.model or 'none'}, {found.request.dtype}",
        sections=sections,
        verdict=model.Verdict(word, tone=tone, sign=model.SIGNS[tone]),
        warnings=found.notes,
        source="`audit.json`",
    )


def _lead(found: Audit) -> str:
    if not found.findings:
        return "No answer differs."
    faults = counted(sum(of.fault for of in found.findings), "answer")
    return f"With a fault, or not explained: {faults}." if not found.explained else "No difference is a fault."


def verdict_of(found: Audit) -> str:
    """Return the word of an audit: FAULT, the classes that explain it, or the harmless class that is furthest off."""
    names = [of.name for of in found.classes if of.answers]
    others = [name for name in names if name not in HARMLESS]
    if not found.explained:
        return "FAULT"
    return f"explained by: {listed(others)}" if others else max(names, key=HARMLESS.index, default=HARMLESS[0])


def _causes(findings: Iterable[Divergence]) -> list[list[Divergence]]:
    """Return the answers of each cause: faults first, and of a pair the cause of most answers."""
    found: dict[tuple[object, ...], list[Divergence]] = {}
    for of in findings:
        found.setdefault((of.pair, of.name, of.fault, of.evidence), []).append(of)
    return sorted(found.values(), key=lambda those: (not those[0].fault, those[0].pair, -len(those)))


def _of_causes(found: Audit, causes: Sequence[Sequence[Divergence]]) -> list[model.Block]:
    columns = [("answers", ""), ("fault", ""), ("item", "the first one")]
    columns += [("token", "its first token that is off, from 0; if none is, that differs"), ("below", "its shortfall")]
    rows, points = [], list[str]()
    for place, those in enumerate(causes[:MOST_CAUSES], start=1):
        of = min(those, key=lambda one: one.off_from is None)  # the first that has a token that is off
        token = of.first if of.off_from is None else of.off_from
        below = NONE if of.off_by is None else f"{of.off_by:.3g}"
        entries = [f"{len(those):,}", "FAULT" if of.fault else "no", of.item, count(token), below]
        group = f"{found.pairs[of.pair].a} – {found.pairs[of.pair].b}" if len(found.pairs) > 1 else ""
        rows.append(Row(f"{place} {of.name}", [Entry(text) for text in entries], group=group))
        here = f" ({of.item}: {of.here})" if of.here else ""
        points.append(f"{of.name}: {of.evidence}{here}. Items: {few([one.item for one in those], NAMED)}")
    if rest := causes[MOST_CAUSES:]:
        points.append(f"{counted(len(rest), 'more cause')}, of {counted(sum(map(len, rest)), 'answer')}: see the page")
    table = Table(columns, rows, "class", "Answers of B that differ from A's, by their cause", text=True)
    return [table, model.Points(points, numbered=True)]


def _part(finding: Divergence, case: Case) -> model.Part:
    place = "" if finding.first is None else f", token {finding.first}"
    blocks: list[model.Block] = [model.Text(". ".join(filter(None, (finding.evidence, finding.here))))]
    if finding.first is not None and case.a.prompt == case.b.prompt:
        blocks.append(_side_by_side(case, finding.first))
    return model.Part(f"{finding.item}: {finding.name}{place}", blocks, open=finding.fault)


def _side_by_side(case: Case, first: int) -> Table:
    rows = []
    for index in range(max(0, first - BEFORE), first + AFTER):
        entries = []
        for letter in LETTERS:
            tokens, side = case.answer(letter).tokens, case.of(letter)
            texts = [repr(case.arms.text([tokens[index]]))] if index < len(tokens) else []
            if texts and index in case.span(letter):
                texts += [number(side.probabilities[index - first], 4), f"{case.short(letter, index):.3g}"]
            entries += [Entry(text) for text in (*texts, NONE, NONE, NONE)][:3]
        if any(entry.value != NONE for entry in entries):
            rows.append(Row(str(index), entries, strong=index == first))
    columns = [(f"{name}{what}", "") for name in "AB" for what in ("", ": probability", ": shortfall")]
    return Table(columns, rows, "token", "Token by token; the first difference is emphasised", text=True)


def _compared(found: Audit) -> model.Pairs:
    pairs = (f"A: {of.a}; B: {of.b}; {of.items} items of {of.suite}; noise {of.noise:.2g}" for of in found.pairs)
    return model.Pairs([(f"Pair {place}", pair) for place, pair in enumerate(pairs, start=1)])
