"""The document of an audit: the classes, the answers that differ, and their first differences side by side."""

from collections.abc import Sequence

from mtbench.document.formatting import NONE, number
from mtbench.document.model import (
    SIGNS,
    Block,
    Document,
    Entry,
    Notes,
    Pairs,
    Part,
    Row,
    Section,
    Table,
    Text,
    Tone,
    Verdict,
)
from mtbench.experiments.audit.cases import Case, Known
from mtbench.experiments.audit.format import Audit, Divergence

SHOWN = 40  # first differences that the page has side by side
BEFORE, AFTER = 6, 10  # tokens before and from the first difference
READING = [
    ("Judge", "The reference model reads the prompt and the tokens that A and B share, then each side's own tokens."),
    ("Shortfall", "How far the logit of a token lies below the largest at its position; 0 is the model's choice."),
    ("Noise", "The shortfall up to which the arithmetic of A and B may choose a token. In float32 and float64 it is a "
     "constant, in other number types it is measured: the judge's model computes the same positions in them."),
    ("Classes", "They are tested in a fixed order, and the first that holds is named."),
]  # fmt: skip


def document(found: Audit, known: Sequence[Known]) -> Document:
    """Return the document of an audit. known: per pair, for the tokens side by side; empty: without them."""
    counted = [of for of in found.classes if of.answers]
    rows = [
        Row(
            of.name,
            [
                Entry(f"{of.answers:,}"),
                Entry("", verdict=_verdict("fault" if of.faults else "no fault", fault=of.faults > 0)),
                Entry(of.says),
            ],
        )
        for of in counted
    ]
    columns = [("answers", ""), ("fault", ""), ("meaning", "")]
    sections = [Section("Classes", [Table(columns, rows, "class", "Answers by the reason of their difference")])]
    if found.findings:
        sections.append(Section("Answers that differ", [_findings(found)]))
    cases = {(n, case.item): case for n, pair in enumerate(known) for case in pair.cases}
    first = sorted(found.findings, key=lambda of: not of.fault)[:SHOWN] if known else []
    if blocks := [_part(of, cases[of.pair, of.item]) for of in first]:
        sections.append(Section("First differences", blocks))
    sections.append(Section("What was compared", [_compared(found)], folded=True))
    sections.append(Section("How to read it", [Notes(READING)], folded=True))
    return Document(
        title=found.sentence.removesuffix("."),
        lead=found.sentence,
        subject=f"A: {found.request.a}; B: {found.request.b}; judge: {found.model or 'none'}, {found.request.dtype}",
        sections=sections,
        verdict=_verdict("EXPLAINED" if found.explained else "FAULT", fault=not found.explained),
        warnings=found.notes,
        source="`audit.json`",
    )


def _verdict(word: str, *, fault: bool) -> Verdict:
    tone: Tone = "bad" if fault else "good"
    return Verdict(word, tone=tone, sign=SIGNS[tone])


def _findings(found: Audit) -> Table:
    columns = [
        ("class", ""),
        ("token", "index of the first token that differs, from 0"),
        ("A", "A's token there, and its probability"),
        ("B", "B's token there, and its probability"),
        ("margin", "distance of their logits"),
        ("off", "side with tokens that arithmetic does not explain"),
        ("evidence", ""),
    ]
    rows = []
    for of in found.findings:
        tokens = [None, None] if of.judged is None else [of.judged.a, of.judged.b]
        shown = [NONE if t is None else f"{t.text!r} {t.probability:.3g}" for t in tokens]
        margin = NONE if of.margin is None else f"{of.margin:.3g}"
        place = NONE if of.first is None else str(of.first)
        entries = [of.name, place, *shown, margin, (of.off or NONE).upper(), of.evidence]
        pair = found.pairs[of.pair]
        group = f"{pair.a} – {pair.b}" if len(found.pairs) > 1 else ""
        rows.append(Row(of.item, [Entry(text) for text in entries], group=group))
    return Table(
        columns, rows, "item", "Answers of B that differ from A's", brief=("class", "token", "margin", "off"), text=True
    )


def _part(finding: Divergence, case: Case) -> Part:
    """Return a first difference, token by token."""
    place = "" if finding.first is None else f", token {finding.first}"
    blocks: list[Block] = [Text(finding.evidence)]
    if finding.first is not None and case.a.prompt == case.b.prompt:
        blocks.append(_side_by_side(case, finding.first))
    return Part(f"{finding.item}: {finding.name}{place}", blocks, open=finding.fault)


def _side_by_side(case: Case, first: int) -> Table:
    rows = []
    for index in range(max(0, first - BEFORE), first + AFTER):
        entries = []
        for letter in ("a", "b"):
            answer, side = case.answer(letter), case.of(letter)
            there = index < len(answer.tokens)
            entries.append(Entry(repr(case.known.text([answer.tokens[index]])) if there else NONE))
            judged = side is not None and there and 0 <= index - first < len(side.probabilities)
            short = side.short.get(str(index), 0.0) if side is not None and judged else None
            entries.append(Entry(number(side.probabilities[index - first], 4) if side is not None and judged else NONE))
            entries.append(Entry(NONE if short is None else f"{short:.3g}"))
        if any(entry.value != NONE for entry in entries):
            rows.append(Row(str(index), entries, strong=index == first))
    columns = [(f"{name}{what}", "") for name in "AB" for what in ("", ": probability", ": shortfall")]
    return Table(columns, rows, "token", "Token by token; the first difference is emphasised", text=True)


def _compared(found: Audit) -> Pairs:
    rows = []
    for number_, pair in enumerate(found.pairs, start=1):
        limits = f"noise {pair.noise:.2g}"
        limits += "" if pair.rounding is None else f", rounding {pair.rounding:.2g}"
        rows.append((f"Pair {number_}", f"A: {pair.a}; B: {pair.b}; {pair.items} items of {pair.suite}; {limits}"))
    return Pairs(rows)
