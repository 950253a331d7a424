"""The data of the report's generation viewer: every arm's answer to an item, token by token.

The idea is Figure 1 of the MARS paper (arXiv 2604.07023): the shade of a token shows how many tokens its forward
committed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from mtbench.decoding.output import first_difference
from mtbench.models import gguf
from mtbench.models.families import RANDOM, RANDOM_TOKENIZER, locate
from mtbench.models.token_text import INCOMPLETE, exact_text, special_ids
from mtbench.plan.formats import GenerationLine, Readings, Scores, StoredReading
from mtbench.plan.plan import Group, Plan
from mtbench.plan.run import Run
from mtbench.records import Record, dump
from mtbench.report.phrases import suite_name
from mtbench.results.comparisons import OwnSpeedups, own_speedups
from mtbench.results.format import ResultCell, Results

ITEMS = 40  # per suite and batch size
LETTERS = 1_500_000  # of all answers and prompts together, so that the page stays under some 3 MB
PROMPT_LETTERS = 6000
BYTES_OF_A_LETTER = 4  # most bytes of a letter in UTF-8, so most tokens that one letter can be split into
NO_TOKENIZER = "A tokenizer could not be loaded when this page was made, so its texts have no shades."
LATER_TURNS = "The prompt of a later turn is the first arm's. Every arm continues from its own answers."
RECORDED_TURNS = "The prompt of a later turn holds recorded answers. All arms have the same."

Decode = Callable[[Sequence[int], Sequence[int]], str]  # the text of ids behind other ids
Place = tuple[int, int]  # token, and letter in it


class Against(Record):
    """How an answer compares with the baseline's."""

    arm: str
    same: int | None  # tokens before the first that differs; None: the same tokens


class ViewedAnswer(Record):
    """An arm's answer to an item. `text` stands in for `pieces` if the tokenizer is not available."""

    pieces: list[str] | None  # the text of each token
    text: str | None
    commits: list[int] | None
    forwards: int | None
    tokens: int | None
    special: list[int]  # indices of special tokens
    begins: Place | None  # the answer behind its reasoning; None: it has no reasoning
    cut: Place | None  # a stop string
    finish: str
    score: float | None
    by_value: float | None
    unread: str | None
    against: Against | None


class ShownItem(Record):
    """An item with the answer of every arm; None: no answer is stored."""

    item: str
    marked: bool  # an answer is unread, or its readings differ
    prompt: str | None
    answers: list[ViewedAnswer | None]


class ShownArm(Record):
    """An arm, its readable name, and its number in the tables."""

    arm: str
    name: str
    number: int


class ShownGroup(Record):
    """The items of one suite and batch size."""

    suite: str
    batch_size: int
    batching: str
    arms: list[ShownArm]
    items: list[ShownItem]
    of: int  # answered items, of which `items` are the first


class Viewer(Record):
    """The page's JSON for its script."""

    groups: list[ShownGroup]
    notes: list[str]
    marked: bool  # an item is


@cache
def _tokenizer(source: str) -> Any:
    """Return a checkpoint's own tokenizer, never from the network; None if it cannot be loaded."""
    try:
        from transformers import AutoTokenizer

        if gguf.is_gguf(source):
            return gguf.header(source).tokenizer
        folder = locate(RANDOM_TOKENIZER if source.startswith(RANDOM) else source)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # a report is rebuilt anywhere, with or without the checkpoints
        return None


def split(ids: Sequence[int], prompt: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token behind a prompt. A letter made of several tokens stands with the last of them."""
    alone = {i: decode([i], prompt) for i in set(ids)}
    if "".join(alone[i] for i in ids) == decode(ids, prompt):
        return [alone[i] for i in ids]
    pieces, shown = list[str](), 0  # ids[:shown] are in `pieces`
    for end in range(1, len(ids) + 1):
        now = decode(ids[shown:end], [*prompt, *ids[:shown]])
        unfinished = now.endswith(INCOMPLETE) and end < len(ids) and end - shown < BYTES_OF_A_LETTER
        pieces.append("" if unfinished else now)
        shown = shown if unfinished else end
    return pieces


@dataclass(frozen=True)
class _Generations:
    """The stored answers of one group."""

    cells: Sequence[ResultCell]
    own: OwnSpeedups
    lines: Mapping[str, Mapping[str, GenerationLine]]  # by cell and item
    scores: Mapping[str, Mapping[str, float]]  # by cell and item
    readings: Mapping[str, Mapping[str, StoredReading]]  # by cell and item
    names: Mapping[str, str]  # readable name of every arm

    def marked(self, item: str) -> bool:
        """Whether an answer to the item is unread, or its readings differ."""
        found = [(self.readings.get(c.cell, {}).get(item), self.scores.get(c.cell, {}).get(item)) for c in self.cells]
        return any(one is not None and (one.unread or one.by_value not in (None, score)) for one, score in found)


def viewer(run: Run, results: Results, numbers: Mapping[str, int], names: Mapping[str, str]) -> Viewer:
    """Return the data of the viewer, small enough to be part of the page. numbers, names: of each arm, by its id."""
    _tokenizer.cache_clear()  # a checkpoint may have changed
    plan, files = run.plan, run.directory
    scores = files.read("scores.json", Scores).root if files.has("scores.json") else {}
    readings = files.read("readings.json", Readings).root if files.has("readings.json") else {}
    by_name = {cell.cell: cell for cell in results.cells}
    groups = []
    for group in plan.groups:
        cells = [by_name[name] for name in group.cells]
        lines = {name: {line.item: line for line in run.answers[name]} for name in group.cells}
        generations = _Generations(cells, own_speedups(cells), lines, scores, readings, names)
        shown = _group(plan, group, generations, numbers)
        if shown.items:
            groups.append(shown)
    notes = []
    answers = [answer for group in groups for item in group.items for answer in item.answers]
    if any(answer is not None and answer.pieces is None for answer in answers):
        notes.append(NO_TOKENIZER)
    later = {item.shared is None for suite in plan.suites for item in suite.items if item.follows is not None}
    notes += [note for own, note in ((True, LATER_TURNS), (False, RECORDED_TURNS)) if own in later]
    return Viewer(groups=groups, notes=notes, marked=any(item.marked for group in groups for item in group.items))


def _group(plan: Plan, group: Group, generations: _Generations, numbers: Mapping[str, int]) -> ShownGroup:
    suite = plan.suite(group.suite)
    numbered = {item.item: number for number, item in enumerate(suite.items)}
    answered = [name for name in numbered if any(name in by_item for by_item in generations.lines.values())]
    first = [*filter(generations.marked, answered)][: ITEMS // 2]
    answered.sort(key=lambda name: name not in first)
    items, letters = [], 0
    for name in answered[:ITEMS]:
        items.append(_item(name, generations, [] if suite.withheld else suite.prompt(numbered[name])))
        letters += len(json.dumps(dump(items[-1]), ensure_ascii=False))
        if letters > LETTERS / len(plan.groups):
            break
    return ShownGroup(
        suite=suite_name(group.suite),
        batch_size=group.batch_size,
        batching=group.batching,
        arms=[
            ShownArm(arm=cell.arm, name=generations.names[cell.arm], number=numbers[cell.arm])
            for cell in generations.cells
        ],
        items=items,
        of=len(answered),
    )


def _item(name: str, generations: _Generations, planned: Sequence[int]) -> ShownItem:
    prompts = [by_item[name].prompt_ids or planned for by_item in generations.lines.values() if name in by_item]
    tokenizer = _tokenizer(_source(generations.cells[0]))
    prompt = None
    if prompts[0] and tokenizer is not None:
        prompt = _sound(exact_text(tokenizer, prompts[0]))
        if len(prompt) > PROMPT_LETTERS:
            prompt = f"… {prompt[-PROMPT_LETTERS:]}"
    answers = [_answer(name, cell, generations, planned) for cell in generations.cells]
    return ShownItem(item=name, marked=generations.marked(name), prompt=prompt, answers=answers)


def _answer(item: str, cell: ResultCell, generations: _Generations, planned: Sequence[int]) -> ViewedAnswer | None:
    """Return an arm's answer to an item; None if there is none."""
    line = generations.lines[cell.cell].get(item)
    if line is None:
        return None
    tokenizer, pieces, special = _tokenizer(_source(cell)), None, list[int]()
    if tokenizer is not None:
        decode = partial(exact_text, tokenizer)
        pieces = [_sound(piece) for piece in split(line.token_ids, line.prompt_ids or planned, decode)]
        special = [i for i, token in enumerate(line.token_ids) if token in special_ids(tokenizer)]
    text = [_sound(line.text)] if pieces is None else pieces
    read = generations.readings.get(cell.cell, {}).get(item, StoredReading())
    return ViewedAnswer(
        pieces=pieces,
        text=text[0] if pieces is None else None,
        commits=line.commits,
        forwards=line.forwards,
        tokens=len(line.token_ids),
        special=special,
        begins=_place(text, special, line.reasoning) if line.reasoning else None,
        cut=_place(text, special, len(line.text), stop=True) if line.finish_reason == "stop" else None,
        finish=line.finish_reason,
        score=generations.scores.get(cell.cell, {}).get(item),
        by_value=read.by_value,
        unread=read.unread,
        against=_against(item, cell, line, generations),
    )


def _against(item: str, cell: ResultCell, line: GenerationLine, generations: _Generations) -> Against | None:
    """Return how an answer compares with that of the arm's baseline; None without a baseline or its answer."""
    baseline = _baseline(cell, generations.own)
    cells = [other.cell for other in generations.cells if other.arm == baseline]
    other = generations.lines[cells[0]].get(item) if cells else None
    if baseline is None or other is None:
        return None
    same = None if line.token_ids == other.token_ids else first_difference(line.token_ids, other.token_ids)
    return Against(arm=generations.names[baseline], same=same)


def _baseline(cell: ResultCell, own: OwnSpeedups) -> str | None:
    """Return the baseline on the arm's checkpoint, else any by its engine, else the arm whose tokens it promises."""
    speedup = own.same.get(cell.arm) or own.deployed.get(cell.arm)
    if speedup is not None:
        return speedup.baseline
    return None if cell.lossless is None else cell.lossless.against


def _place(pieces: Sequence[str], special: Sequence[int], letters: int, *, stop: bool = False) -> Place:
    """Return the place behind so many letters of the shown text, and behind special tokens there unless they `stop`."""
    for index, piece in enumerate(pieces):
        if index not in special or (stop and not letters):
            if letters < len(piece):
                return index, letters
            letters -= len(piece)
    return len(pieces), 0


def _source(cell: ResultCell) -> str:
    return cell.checkpoints[cell.on]


def _sound(text: str) -> str:
    """Return text that can be written as UTF-8."""
    return text.encode(errors="replace").decode()
