"""Check whether an arm emits the tokens that it promises: teacher-forced rescoring (the grade: grades.py).

One forward pass of the same checkpoint over the finished text rescores every emitted token. A token is accepted if it
is the argmax, or if its logit is within ε of the largest. So one flipped near-tie does not condemn the tokens after it.
The judge is always transformers' modules (the engine `eager`), whichever engine the arm ran on: no engine judges
itself. It judges the answers of the reference arm, too: both arms could run on the same wrong engine. An answer in a
serving engine that repeats plain decoding there needs no judge. One that the engine holds to a JSON schema has tokens
far below the judge's largest: the first difference from plain decoding there is judged, between the two tokens, both of
which the schema allows; without plain decoding there, none is. Where the run has no arm of ours that plain decoding of
an engine is held to, it is held to the judge itself, on as many tokens as ε needs.

ε measures the arm's arithmetic: the 99.9th percentile of |Δlogit| of the tokens that the reference arm emitted,
between the judge at width 1 and the arm's own engine at the arm's width. So it covers engine and width together. For an
external engine, whose logits are not known, it covers the width alone. It is at most 0.5: an engine that computes
something else would make it large. In float32 and float64 it is a constant. The logits of the reference arm's tokens
are computed once for each engine and width, and serve all cells that are held to it. So does the rescoring of an answer
of the reference arm that other arms repeat: it needs no ε.

Answers of a serving engine are rescored as whole texts, several in a forward (mtbench/models/whole_texts.py). Its ε is
the rounding of its number type: the same percentile, between the judge in that type and in float32. With quantised
weights the type is bfloat16. The engine's own noise may be larger, where its plain decoding has two cells in the run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import NotNumbersError, UserError, first_line
from mtbench.measure.judging_time import answers_due, enough, plain_answers, references
from mtbench.measure.model_pool import ModelPool
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import WholeTexts
from mtbench.plan.formats import GenerationLine, RescoringRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.statistics import EPSILON_CAP, EPSILON_POSITIONS_NEEDED, EXACT_EPSILON, near_tie_epsilon

JUDGED_AT_ONCE = 256  # positions of one forward
COARSE = "bfloat16"  # number type whose rounding explains an engine that does not say how it computes


class Answer(NamedTuple):
    """The tokens emitted for a prompt, and how they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


class Reading(NamedTuple):
    """Who reads answers again, and how many positions at once if not whole texts."""

    model: ModelRunner | WholeTexts
    width: int = JUDGED_AT_ONCE


@dataclass(frozen=True)
class Rescoring:
    """Rescores the cells of a run on the models of `pool`."""

    run: Run
    plan: Plan
    pool: ModelPool
    note: Callable[[str], None]
    show: Callable[[str], None] = lambda _: None
    deadline: float = float("inf")  # by time.monotonic
    _logits: dict[tuple[str, str, Reading], list[float]] = field(default_factory=dict)
    _repeated: dict[tuple[object, ...], dict[str, float]] = field(default_factory=dict)
    _texts: dict[tuple[str, str], WholeTexts] = field(default_factory=dict)  # by source and number type

    def check(self, cell: Cell) -> None:
        """Rescore the answers of a cell that claims to be lossless, and write lossless/<cell>.json once.

        `epsilon` is None if there are too few positions.
        """
        name, files = f"lossless/{cell.cell}.json", self.run.directory
        lines = answers_due(self.run, self.plan, cell)
        due = {line.item for line in lines}
        if not due or (files.has(name) and files.read(name, RescoringRecord).items.keys() >= due):
            return
        try:
            self._refuse_late()
            files.write_json(name, dump(self.rescored(cell, lines)))
        except Exception as error:  # any fault of the model's code or files; it costs the grade, not the run
            kind = "" if isinstance(error, UserError | TimeoutError) else f"{type(error).__name__}: "
            why = f"{kind}{first_line(error).rstrip('.')}"
            files.write_json(name, dump(RescoringRecord(epsilon=None, items={}, why=why)))
            if not isinstance(error, TimeoutError):
                self.note(f"{cell.cell} could not be re-scored: {why}")

    def rescored(self, cell: Cell, lines: Sequence[GenerationLine]) -> RescoringRecord:
        """Return the shortfalls of answers, and ε: between two readings of the reference arm's answers.

        By the judge at width 1 and the arm's own engine; of a serving engine by the judge in two number types.
        """
        source, own, rounding = cell.checkpoints[cell.on], self.pool.dtype, None
        if is_served(cell.engine):
            model, engine = self.whole(source, own), SERVING_ENGINES[cell.engine]()
            packed = model.packed or engine.other_weights(source) is not None
            rounding = COARSE if packed and own in EXACT_EPSILON else None
            judge = plain = Reading(model)
        else:
            fed = [g.positions_fed // g.forwards for g in lines if g.forwards and g.positions_fed]
            runner, width = self.pool.runner(cell.on, source, None), JUDGED_AT_ONCE
            judge, plain = Reading(runner, width if own in EXACT_EPSILON else max([2, *fed])), Reading(runner, 1)
        epsilon, why = EXACT_EPSILON.get(rounding or own), None
        if epsilon is None:
            try:
                rounded = self.whole(source, rounding or "float32") if is_served(cell.engine) else None
                other = judge._replace(model=rounded or self.pool.runner(cell.on, source, cell.engine))
                both = self._reference_logits(cell, plain), self._reference_logits(cell, other)
                epsilon = near_tie_epsilon([a - b for a, b in zip(*both, strict=True)], rounding or own)
                if epsilon is not None and is_served(cell.engine):
                    epsilon = max(epsilon, self._noise(cell, judge))
            except RuntimeError as error:  # a second model may have no memory
                why = f"no ε: {first_line(error)}"
        items = self._shortfalls(cell, lines, judge)
        return RescoringRecord(epsilon=epsilon, items=items, why=why, rounding=rounding)

    def whole(self, source: str, dtype: str) -> WholeTexts:
        """Return the judge of a serving engine's answers in a number type, loaded at the first call."""
        if (source, dtype) not in self._texts:
            self._refuse_late()
            self.show(f"re-scoring: loading {source} in {dtype}")
            self._texts[source, dtype] = WholeTexts(source, dtype, self.pool.device, offline=self.pool.offline)
        return self._texts[source, dtype]

    def _refuse_late(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the time budget is spent; `--resume` does it")

    def _shortfalls(self, cell: Cell, lines: Sequence[GenerationLine], judge: Reading) -> dict[str, dict[str, float]]:
        """Return the shortfalls of each answer by item. An answer that the reference arm gave is rescored once."""
        held = self.plan.suite(cell.suite).constrained(cell.engine)
        pairs = [
            (a, b)
            for a in lines
            for b in plain_answers(self.run, self.plan, cell)
            if a.item == b.item and a.item in held
        ]
        forced: dict[str, dict[str, float]] = {a.item: {} for a, _ in pairs}
        forced |= {item: {str(place): gap} for item, place, gap in self._gaps(cell, pairs, judge) if gap}
        lines = [line for line in lines if line.item not in held]
        given = {(line.item, tuple(line.token_ids)) for c in references(self.plan, cell) for line in self._lines(c)}
        among = judge.model, cell.suite, cell.lossless_reference
        keys = [(*among, line.item, tuple(line.token_ids)) for line in lines]
        found = [self._repeated.get(key) for key in keys]
        due = [i for i, short in enumerate(found) if short is None]
        for n, emitted, largest in self._forced(cell, [lines[i] for i in due], judge):
            found[due[n]] = short = shortfalls(emitted, largest)
            if keys[due[n]][-2:] in given:
                self._repeated[keys[due[n]]] = short
        return forced | {line.item: short or {} for line, short in zip(lines, found, strict=True)}

    def _reference_logits(self, cell: Cell, reading: Reading) -> list[float]:
        """Return the logits of tokens that the cell's reference arm emitted, as many as ε needs.

        Of its answers at the batch size with most of them. An arm without a reference arm is its own. Where whole texts
        are read and the answers have too few tokens, those of their prompts count, too.
        """
        most = max(references(self.plan, cell) or [cell], key=lambda c: len(self._lines(c)))
        key = (cell.suite, most.arm, reading)
        if key not in self._logits:
            few = sum(len(line.token_ids) for line in self._lines(most)) < EPSILON_POSITIONS_NEEDED
            whole = few and isinstance(reading.model, WholeTexts)
            forced = self._forced(most, enough(self._lines(most), prompts=whole), reading, prompts=whole)
            self._logits[key] = [logit for _, emitted, _ in forced for logit in emitted.tolist()]
        return self._logits[key]

    def _noise(self, cell: Cell, judge: Reading) -> float:
        """Return the noise of a serving engine: how far the judge holds apart two tokens of its plain decoding.

        Of the first differences between its cells: those of other batch sizes, or of an arm given twice.
        """
        key, noise = (cell.suite, cell.engine, cell.checkpoints), 0.0
        plain = [c for c in self.plan.cells if c.is_reference and (c.suite, c.engine, c.checkpoints) == key]
        for other in plain[1:]:
            pairs = [(a, b) for a in self._lines(plain[0]) for b in self._lines(other) if a.item == b.item]
            noise = max([noise, *(gap for _, _, gap in self._gaps(other, pairs, judge))])
        return min(EPSILON_CAP, noise)

    def _gaps(
        self, cell: Cell, pairs: Sequence[tuple[GenerationLine, GenerationLine]], judge: Reading
    ) -> Iterator[tuple[str, int, float]]:
        """Yield item, place and size of the first difference of two answers: how far the judge holds its tokens apart.

        From its largest logit, and if a schema holds the answers, from each other.
        """
        found = [(a, b, first_difference(a.token_ids, b.token_ids)) for a, b in pairs if a.prompt_ids == b.prompt_ids]
        found = [(a, b, place) for a, b, place in found if place < min(len(a.token_ids), len(b.token_ids))]
        cut = [line.changed(token_ids=line.token_ids[: place + 1]) for a, b, place in found for line in (a, b)]
        last = {n: (float(own[-1]), float(most[-1])) for n, own, most in self._forced(cell, cut, judge)}
        held = self.plan.suite(cell.suite).constrained(cell.engine)
        for n, (a, _, place) in enumerate(found):
            (own, most), (other, _) = last[2 * n], last[2 * n + 1]
            yield a.item, place, round(abs(own - other) if a.item in held else most - min(own, other), 9)

    def _lines(self, cell: Cell) -> list[GenerationLine]:
        return self.run.answers[cell.cell]

    def _forced(
        self, cell: Cell, lines: Sequence[GenerationLine], reading: Reading, *, prompts: bool = False
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each generation line, and the `forced_logits` of its answer.

        Within the time budget; shows which one is read. `prompts`: of its prompt, too, but for the first token.
        """
        model, place = reading.model, f"{self.plan.cells.index(cell) + 1}/{len(self.plan.cells)}"
        suite = self.plan.suite(cell.suite)
        number = {item.item: i for i, item in enumerate(suite.items)}
        answers = [
            Answer(line.prompt_ids or suite.prompt(i), line.token_ids, self.plan.item_seed(i), self.pool.temperature)
            for line in lines
            for i in [number[line.item]]
        ]
        if prompts:
            answers = [of._replace(prompt=of.prompt[:1], tokens=[*of.prompt[1:], *of.tokens]) for of in answers]
        groups = [[i] for i in range(len(lines))]
        if isinstance(model, WholeTexts):
            groups = model.groups([len(of.prompt) for of in answers], [len(of.tokens) for of in answers])
        done = 0
        for group in groups:
            self._refuse_late()
            done += len(group)
            self.show(f"re-scoring: cell {place} {cell.cell}, answer {done}/{len(lines)}")
            if isinstance(model, WholeTexts):
                found = forced_together(model, [answers[i] for i in group])
            else:
                found = [forced_logits(model, answers[i], reading.width) for i in group]
            yield from ((i, *of) for i, of in zip(group, found, strict=True))


def shortfalls(emitted: Tensor, largest: Tensor) -> dict[str, float]:
    """Return, for each token that is not the argmax: its index -> the largest logit minus its own."""
    return {str(i): round(value, 9) for i, value in enumerate((largest - emitted).tolist()) if value > 0}


@torch.inference_mode()
def forced_logits(runner: ModelRunner, answer: Answer, width: int) -> tuple[Tensor, Tensor]:
    """Return the logit of each token of an answer and the largest logit at its position, `(tokens,)` each.

    The runner feeds `width` positions at a time. For sampled tokens the logits include the sampling noise of their
    seed.
    """
    own, largest = [], []
    for begin, logits in judged_logits(runner, answer, width):
        if not sampling.numbers(logits).all():
            raise NotNumbersError("the judge's logits", runner.model.dtype)
        noisy = with_noise(logits, answer, begin)
        emitted = torch.tensor(answer.tokens[begin : begin + len(logits)], device=runner.device)[:, None]
        own.append(noisy.gather(1, emitted)[:, 0])
        largest.append(noisy.amax(1))
    return torch.cat(own), torch.cat(largest)


@torch.inference_mode()
def forced_together(model: WholeTexts, answers: Sequence[Answer]) -> list[tuple[Tensor, Tensor]]:
    """Return the `forced_logits` of several answers, by one forward over their whole texts."""
    logits = model.logits([[*of.prompt, *of.tokens] for of in answers], [len(of.tokens) for of in answers])
    noisy = [with_noise(of, answer, 0) for of, answer in zip(logits, answers, strict=True)]
    emitted = [torch.tensor(of.tokens, dtype=torch.long, device=model.device)[:, None] for of in answers]
    return [(of.gather(1, ids)[:, 0], of.amax(1)) for of, ids in zip(noisy, emitted, strict=True)]


def judged_logits(
    runner: ModelRunner, answer: Answer, width: int, first: int = 0, cached: int = 0, room: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits that judge the tokens of an answer from `first` on: a token's index, logits `(n, V)` from it on.

    The runner feeds `width` positions at a time. `cached`: leading positions that its cache holds from an earlier call,
    whose answer began alike; with 0 the cache is made anew, for `room` positions at least.
    """
    prompt, tokens, device = answer.prompt, answer.tokens, runner.device
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    if not cached:
        runner.reserve(1, max(ids.shape[1], room))
    base = torch.tensor([ids.shape[1]], device=device)
    slots = torch.arange(cached, ids.shape[1], device=device)[None]
    before, behind = slots.tensor_split((len(prompt) + first - 1 - cached,), 1)

    def forward(chunk: Tensor, judged: int) -> Tensor:
        metadata = AttentionMetadata(chunk, chunk, base, view=int(chunk[0, -1]) + 1)
        logits = runner.forward(ids.gather(1, chunk), metadata, judged).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()

    for chunk in before.split(JUDGED_AT_ONCE, 1) if before.shape[1] else ():
        forward(chunk, judged=1)
    for chunk in behind.split(width, 1):
        yield first, forward(chunk, judged=chunk.shape[1])
        first += chunk.shape[1]


def with_noise(logits: Tensor, answer: Answer, first: int) -> Tensor:
    """Return logits `(n, V)` that tokens from `first` on were chosen by: with the sampling noise, if any."""
    if not answer.temperature:
        return logits
    positions = len(answer.prompt) + first + torch.arange(len(logits), device=logits.device)[None]
    seed = torch.tensor([answer.seed], device=logits.device)
    noisy = answer.temperature * sampling.sampled(logits[None], answer.temperature, seed, positions)[0]
    return noisy if logits.dtype == torch.float64 else noisy.float()


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length if one is a prefix of the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
