"""The two sides of an audit: what `DIR`, `DIR:ARM` or a file of answers names, and which answers belong together.

Bad input ends here, in one line: no such arm, a run still going, an answer that is missing or not of the model.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import counted
from mtbench.errors import UserError, unknown
from mtbench.models.loading import Inspected
from mtbench.models.vocabularies import other_token
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine, Scores
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.prompts import open_plan
from mtbench.plan.run import Run
from mtbench.results.answers import Prompt
from mtbench.sampling import GREEDY, Sampling
from mtbench.statistics import EXACT_EPSILON


@dataclass(frozen=True)
class SideAnswer:
    """One answer. None: not stored. `commits`: tokens of each forward."""

    prompt: list[int] | None
    tokens: list[int]
    text: str
    finish: str | None
    score: float | None = None
    commits: list[int] | None = None
    seed: int = 0
    follows: str | None = None  # the item whose answer, as its arm gave it, is in the prompt
    stop: Sequence[str] = ()  # the plan's stop strings
    raw_prompt: Prompt | None = None  # text or messages, of an answer without `prompt`
    lacks: str | None = None  # why it is left out: its text is not, or not all, there
    whole: bool = True  # False: reasoning text seems to be missing


@dataclass(frozen=True)
class Side:
    """The answers of one cell of a run, or of a file. `name`: as people read it."""

    name: str
    source: str
    suite: str | None  # None: a file that names none
    arm: str
    answers: Mapping[str, SideAnswer]  # by item
    model: str | None = None  # checkpoint that decoded
    dtype: str | None = None
    engine: str | None = None  # None: not ours and not known
    batch_size: int | None = None
    sampling: Sampling = GREEDY
    claims: str = "lossless"
    plain: bool | None = None  # reference decoding; None: not known
    ours: bool = False  # decoded by mtbench's own loop
    max_new_tokens: int | None = None  # None: no plan says it, or a server may hide how many tokens it gave
    endless: bool = False  # end tokens end nothing, as its plan says
    task: Mapping[str, object] | None = None  # the suite's description of its prompts and scores
    schema: bool = False  # the plan has a JSON schema for answers
    texts: bool = False  # answers are texts: their tokens are made of them


class Pair(NamedTuple):
    """Two sides whose answers are compared. `siblings`: cells of plain decoding by the engine of either."""

    a: Side
    b: Side
    siblings: Sequence[tuple[Side, Side]] = ()

    @property
    def items(self) -> list[str]:
        """Items that both sides answered, in the order of A."""
        answered = [{item for item, answer in side.answers.items() if not answer.lacks} for side in self[:2]]
        return [item for item in self.a.answers if item in answered[0] & answered[1]]


class Named(NamedTuple):
    """The sides that an argument names: all in its directory or file, and the chosen ones."""

    all: Sequence[Side]
    meant: Sequence[Side]
    chosen: bool  # an arm or cell was named


def place_of(text: str) -> str:
    """Return the part of an argument that is a directory or a file. Raises UserError if there is none."""
    parts = text.split(":")
    place = next((":".join(parts[:n]) for n in range(len(parts), 0, -1) if os.path.exists(":".join(parts[:n]))), None)
    if place is None:
        raise UserError(
            f"{text!r} is no run directory or file; give DIR, DIR:ARM, or a file of answers; `mtbench run --method "
            "METHOD -o DIR` makes a run."
        )
    return place


def named(text: str, *, offline: bool = False) -> Named:
    """Return what `DIR`, `DIR:ARM` or `DIR:CELL` names. Raises UserError."""
    place = place_of(text)
    arm = text[len(place) + 1 :]
    sides = of_run(Path(place), offline=offline)
    arms = dict.fromkeys(side.arm for side in sides)
    if not arm:
        return Named(sides, sides, chosen=False)
    meant = [side for side in sides if arm in (side.arm, side.name.rpartition(":")[2])]
    meant = meant or [side for side in sides if side.arm.startswith((f"{arm}@", f"{arm}/"))]
    if not meant:
        raise unknown(f"arm of {place}", arm, arms, f"mtbench audit {place}:{next(iter(arms))} …")
    return Named(sides, meant, chosen=True)


def of_run(path: Path, *, offline: bool = False) -> list[Side]:
    """Return a side for every cell of a run. Raises UserError for a run that is not complete."""
    files = RunDirectory.open(path, "run")
    files.refuse_going()
    run = Run.open(files)
    plan = open_plan(run, offline=offline)
    scores = files.read("scores.json", Scores).root if files.has("scores.json") else {}
    failed = {line.cell for line in run.failures if line.stage is None}
    dtype = next((session.dtype for session in run.sessions), None)
    sides = [_side(run, plan, cell, dtype, scores.get(cell.cell, {})) for cell in plan.cells if cell.cell not in failed]
    if not sides:
        raise UserError(f"{str(path)!r}: every cell failed, so there are no answers to audit; see failures.jsonl.")
    return sides


def _side(run: Run, plan: Plan, cell: Cell, dtype: str | None, scores: Mapping[str, float]) -> Side:
    suite, group = plan.suite(cell.suite), plan.group(cell.cell)
    number = {item.item: index for index, item in enumerate(suite.items)}
    lines, path = run.answers[cell.cell], run.directory.path
    there = {line.item for line in lines}
    due = [suite.items[index].item for block in group.blocks for index in block]
    if (missing := [item for item in due if item not in there]) and run.race is None:
        raise UserError(
            f"{path}: cell {cell.cell} has answers to {len(there)} of {len(due)} items, the first one missing is "
            f"{missing[0]!r:.60}; finish the run with `mtbench run -o {path} --resume`."
        )
    contexts, endless = {line.item: line.context for line in lines}, cell.length == "fixed"

    def answer(line: GenerationLine) -> SideAnswer:
        index = number[line.item]
        return SideAnswer(
            prompt=line.prompt_ids or suite.prompt(index, contexts),
            tokens=line.token_ids,
            text=line.text,
            finish=line.finish_reason,
            score=scores.get(line.item),
            commits=line.commits,
            seed=plan.item_seed(index),
            follows=None if suite.is_fixed(index) else suite.items[suite.items[index].follows or 0].item,
            stop=() if endless else suite.items[index].stop,
        )

    answers = {line.item: answer(line) for line in sorted(lines, key=lambda line: number[line.item])}
    method = METHODS[cell.method]
    return Side(
        name=f"{path}:{cell.cell}",
        source=str(path),
        suite=cell.suite,
        arm=cell.arm,
        answers=answers,
        model=cell.checkpoints.get(cell.on),
        dtype=plan.request.dtype if dtype is None else dtype,
        engine=cell.engine,
        batch_size=cell.batch_size,
        sampling=plan.request.sampling,
        claims=cell.claims,
        plain=method.reference,
        ours=not method.outside and not is_served(cell.engine),
        max_new_tokens=suite.max_new_tokens if cell.accept is None and method.needs_weights else None,
        endless=endless,
        task=suite.task,
        schema=bool(suite.schemas),
    )


def pairs(a: Named, b: Named) -> list[Pair]:
    """Return which cells are compared: of the same suite and, where both have several, arm and batch size.

    Raises UserError if nothing can be compared.
    """
    suites = {side.suite for side in a.meant} & {side.suite for side in b.meant}
    any_suite = any(side.suite is None for side in (*a.meant, *b.meant))
    if not suites and not any_suite:
        theirs = [", ".join(dict.fromkeys(str(side.suite) for side in n.meant)) for n in (a, b)]
        raise UserError(f"other suites: A has {theirs[0]}, B has {theirs[1]}; give runs of the same suite.")
    found = []
    for side in b.meant:
        fitting = [o for o in a.meant if (any_suite or o.suite == side.suite) and o.name != side.name]
        if (not a.chosen and not b.chosen) or len({other.arm for other in fitting}) > 1:
            alone = len({o.arm for o in a.meant}) == 1 == len({o.arm for o in b.meant})
            fitting = [other for other in fitting if other.arm == side.arm or alone]
        same_size = [other for other in fitting if other.batch_size == side.batch_size]
        if fitting:
            found.append(_same_requests((same_size or fitting)[0], side))
    if not found:
        arms = ", ".join(dict.fromkeys(side.arm for side in (*a.meant, *b.meant)))
        raise UserError(f"A and B have no arm in common, or are the same; name one of each: DIR:ARM. Arms: {arms}.")
    for pair in found:
        if not pair.items:
            names = [next(iter(side.answers), "none") for side in (pair.a, pair.b)]
            raise UserError(
                f"other items: {pair.a.name} and {pair.b.name} have answered none in common (the first ones are "
                f"{names[0]!r:.60} and {names[1]!r:.60}); give runs of the same items."
            )
    every = [*{side.name: side for side in (*a.all, *b.all)}.values()]
    return [pair._replace(siblings=_siblings(pair, every)) for pair in found]


def _same_requests(a: Side, b: Side) -> Pair:
    """Return a pair in which both answers to a request have one name, if a side is a file.

    Requests are paired by their prompts; if a side has none, by their names or their order. Raises UserError.
    """
    if a.suite is not None and b.suite is not None:
        return Pair(a, b)
    if all(any(answer.prompt for answer in side.answers.values()) for side in (a, b)):
        found = _by_prompt(a, b)
    elif len(a.answers) == len(b.answers):
        found = [*zip(a.answers, a.answers if a.answers.keys() == b.answers.keys() else b.answers, strict=True)]
    else:
        numbers = " and ".join(f"{side.name} has {counted(len(side.answers), 'answer')}" for side in (a, b))
        raise UserError(f"other items: {numbers}, not both with prompts; give answers to the same prompts.")
    names = distinct([items[a.suite is None and b.suite is not None] for items in found])

    def renamed(side: Side, own: list[str]) -> Side:
        shared, taken = {name: side.answers[item] for name, item in zip(names, own, strict=True)}, {*own}
        rest = {f"{item} of {side.name}": one for item, one in side.answers.items() if item not in taken}
        why = "matched no request of the other side"
        return replace(side, answers=shared | {i: replace(one, lacks=one.lacks or why) for i, one in rest.items()})

    return Pair(renamed(a, [item for item, _ in found]), renamed(b, [item for _, item in found]))


def _by_prompt(a: Side, b: Side) -> list[tuple[str, str]]:
    """Return the items with the same prompt, the k-th with the k-th; a side with fewer repeats its last one.

    Other items of suites are paired by their names.
    """
    items_of: list[dict[tuple[int, ...], list[str]]] = [{}, {}]
    for of, side in zip(items_of, (a, b), strict=True):
        for item, answer in side.answers.items():
            if answer.prompt and not answer.lacks:
                of.setdefault(tuple(answer.prompt), []).append(item)
    both = [(ours, items_of[1][prompt]) for prompt, ours in items_of[0].items() if prompt in items_of[1]]
    found = [(x[min(n, len(x) - 1)], y[min(n, len(y) - 1)]) for x, y in both for n in range(max(len(x), len(y)))]
    paired = {item for items in found for item in items}
    named = [item for item in a.answers if a.suite and b.suite and item in b.answers and item not in paired]
    return [*found, *zip(named, named, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """Return distinct names: equal ones get their place as a suffix."""
    counts = Counter(names)
    unique = [f"{name} ({place})" if counts[name] > 1 else name for place, name in enumerate(names, start=1)]
    return unique if len({*unique}) == len(unique) else distinct(unique)


def _siblings(pair: Pair, sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Return pairs of cells of plain decoding at two batch sizes, by the engine of either side if it is not exact."""
    found: dict[tuple[str, str], tuple[Side, Side]] = {}
    for side in (pair.a, pair.b):
        if side.ours and side.dtype in EXACT_EPSILON:
            continue
        same = [(of.source, of.suite, of.model, of.engine, of.dtype) for of in (side, *sides)]
        plain = [other for other, of in zip(sides, same[1:], strict=True) if other.plain and of == same[0]]
        for other in plain[1:]:
            if {plain[0].name, other.name} != {pair.a.name, pair.b.name}:
                found[plain[0].name, other.name] = (plain[0], other)
    return [*found.values()]


def refuse_unknown_ids(side: Side, vocabulary: int) -> None:
    """Raise UserError for a token id that the judge does not have."""
    for item, answer in side.answers.items():
        for ids, what in ((answer.tokens, "token_ids"), (answer.prompt or [], "prompt_ids")):
            if ids and max(ids) >= vocabulary:
                raise UserError(
                    f"{side.name}: {what} of {item!r:.60} has id {max(ids)}, and the judge's vocabulary has "
                    f"{vocabulary}; give the model that decoded with `--model`."
                )


def refuse_other_model(side: Side, own: Inspected, judge: Inspected) -> None:
    """Raise UserError if a side decoded with a model of another kind, whose tokens or logits are not comparable."""
    kinds = [(c.model_type, c.hidden_size) for c in (own.config.get_text_config(), judge.config.get_text_config())]
    other = other_token(judge.tokenizer, own.tokenizer)
    if kinds[0] != kinds[1] or other is not None:
        because = f"token ids differ for {other!r:.40}" if kinds[0] == kinds[1] else f"{kinds[0]} is not {kinds[1]}"
        raise UserError(
            f"another model: {side.name} decoded with {own.source!r}, and {judge.source!r} judges ({because}); an "
            "audit compares outputs of one model."
        )
