"""Check whether an arm emits the tokens that it promises: teacher-forced rescoring (the grade: grades.py).

One forward pass of the same checkpoint over finished texts rescores every emitted token. A token is accepted if it
is the argmax, or if its logit is within ε of the largest. So one flipped near-tie does not condemn the tokens after it.
The judge is always transformers' modules (the engine `eager`), whichever engine the arm ran on: no engine judges
itself. It judges the answers of the reference arm, too: both arms could run on the same wrong engine. An answer in a
serving engine that repeats plain decoding there needs no judge. One that the engine holds to a JSON schema has tokens
far below the judge's largest: the first difference from plain decoding there is judged, between the two tokens, both of
which the schema allows; without plain decoding there, none is. Where the run has no arm of ours that plain decoding of
an engine is held to, it is held to the judge itself, on as many tokens as ε needs.

The judge reads whole texts, several in a forward (mtbench/models/whole_texts.py); equal answers of all arms are one
text, and of texts that begin alike the common tokens are fed once.

ε measures the arm's arithmetic: the 99.9th percentile of |Δlogit| of the tokens that the reference arm emitted, between
the judge, as it reads texts, and the arm's own engine at the arm's width, or NARROW. So it covers engine and width
together. Rounding depends on shapes, and products of many positions round as the judge's do: SmolLM2-135M in bfloat16
on a CPU has a root mean square of Δlogit of 0.167 at 1, 8 and 16 positions, and 0.130 at 96. For an external engine,
whose logits are not known, it covers the width alone. It is at most 0.5: an engine that computes something else would
make it large. In float32 and float64 it is a constant.

Of a serving engine, ε is the rounding of its number type: the same percentile, between the judge in that type and in
float32. With quantised weights the type is bfloat16. The engine's own noise may be larger, where its plain decoding has
two cells in the run.

Every answer that was read is a line of lossless/readings.jsonl, so no model reads it again, for another arm or after an
interruption.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field

from torch import Tensor

from mtbench.decoding.arms import is_served
from mtbench.decoding.output import first_difference
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import duration
from mtbench.errors import UserError, first_line
from mtbench.measure.judging_time import RECORD, answers_due, enough, has_enough, plain_answers, references
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.reading import Answer, Reading
from mtbench.models.whole_texts import WholeTexts
from mtbench.plan.formats import GenerationLine, ReadingLine, RescoringRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.statistics import EPSILON_CAP, EXACT_EPSILON, near_tie_epsilon

NARROW = 8  # least positions of a forward of an arm's engine: in the time of one, with rounding of the same size
COARSE = "bfloat16"  # number type whose rounding explains an engine that does not say how it computes
READINGS = "lossless/readings.jsonl"
INTERRUPTED = "re-scoring interrupted"


@dataclass(frozen=True)
class Rescoring:
    """Rescores the cells of a run on the models of `pool`."""

    run: Run
    plan: Plan
    pool: ModelPool
    note: Callable[[str], None]
    show: Callable[[str], None] = lambda _: None
    deadline: float = float("inf")  # by time.monotonic
    _read: dict[str, ReadingLine] = field(default_factory=dict)  # by key
    _texts: dict[tuple[str, str], WholeTexts] = field(default_factory=dict)  # by source and number type

    def begin(self, cells: Iterable[Cell]) -> None:
        """Store that these cells are not judged yet, so that a process that dies leaves no other grade."""
        for cell in cells:
            if answers_due(self.run, self.plan, cell):
                self._store(cell, why=f"{INTERRUPTED}; `--resume` goes on")

    def check(self, cell: Cell) -> None:
        """Rescore the answers of a cell that claims to be lossless, and write lossless/<cell>.json once.

        `epsilon` is None if there are too few positions.
        """
        lines = answers_due(self.run, self.plan, cell)
        if not lines:
            return
        try:
            self._store(cell, self.rescored(cell, lines))
        except Exception as error:  # any fault of the model's code or files; it costs the grade, not the run
            kind = "" if isinstance(error, UserError | TimeoutError) else f"{type(error).__name__}: "
            why = f"{kind}{first_line(error).rstrip('.')}"
            self._store(cell, why=why)
            if not isinstance(error, TimeoutError):
                self.note(f"{cell.cell} could not be re-scored: {why}")

    def _store(self, cell: Cell, record: RescoringRecord | None = None, why: str | None = None) -> None:
        record = record or RescoringRecord(epsilon=None, items={}, why=why)
        self.run.directory.write_json(RECORD.format(cell.cell), dump(record))

    def rescored(self, cell: Cell, lines: Sequence[GenerationLine]) -> RescoringRecord:
        """Return the shortfalls of answers, and ε: between two readings of the reference arm's answers.

        By the judge and the arm's own engine at its width; of a serving engine by the judge in two number types.
        """
        source, own, rounding, served = cell.checkpoints[cell.on], self.pool.dtype, None, is_served(cell.engine)
        if served:
            engine = SERVING_ENGINES[str(cell.engine)]()
            packed = self.whole(source, own).packed or engine.other_weights(source) is not None
            rounding = COARSE if packed and own in EXACT_EPSILON else None
        epsilon, why = EXACT_EPSILON.get(rounding or own), None
        measured, prompts = self._measured(cell) if epsilon is None else ([], False)
        model = self.whole(source, own) if served else self.pool.runner(cell.on, source, None)
        judge = Reading(f"{source} in {own}", model, logits=epsilon is None)
        if not served:  # the answers of all arms to an item together, since they begin alike
            key = (cell.suite, source, False)
            beside = [c for c in self.plan.cells if (c.suite, c.checkpoints[c.on], is_served(c.engine)) == key]
            with suppress(TimeoutError):  # the cell's own answers may have been read
                lines_of_all = [line for c in beside for line in answers_due(self.run, self.plan, c)]
                self._forced(cell, [*lines_of_all, *measured], judge)
        if measured:
            try:
                if served:
                    other = rounding or "float32"
                    second = judge._replace(name=f"{source} in {other}", model=self.whole(source, other))
                else:
                    fed = [g.positions_fed // g.forwards for g in lines if g.forwards and g.positions_fed]
                    width = max([NARROW, *fed])
                    runner = self.pool.runner(cell.on, source, cell.engine)
                    second = Reading(f"{source} in {own} by {cell.engine}", runner, width, logits=True)
                both = (self._forced(cell, measured, reading, prompts=prompts) for reading in (judge, second))
                emitted = [[logit for line in of for logit in line.logits] for of in both]
                epsilon = near_tie_epsilon([a - b for a, b in zip(*emitted, strict=True)], rounding or own)
                if epsilon is not None and served:
                    epsilon = max(epsilon, self._noise(cell, judge))
            except RuntimeError as error:  # a second model may have no memory
                why = f"no ε: {first_line(error)}"
        return RescoringRecord(epsilon=epsilon, items=self._shortfalls(cell, lines, judge), why=why, rounding=rounding)

    def whole(self, source: str, dtype: str) -> WholeTexts:
        """Return the judge of a serving engine's answers in a number type, loaded at the first call."""
        if (source, dtype) not in self._texts:
            self._refuse_late()
            self.show(f"re-scoring: loading {source} in {dtype}")
            self._texts[source, dtype] = WholeTexts(source, dtype, self.pool.device, offline=self.pool.offline)
        return self._texts[source, dtype]

    def _refuse_late(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"{INTERRUPTED}: time budget; `--resume` goes on")

    def _shortfalls(self, cell: Cell, lines: Sequence[GenerationLine], judge: Reading) -> dict[str, dict[str, float]]:
        held = self.plan.suite(cell.suite).constrained(cell.engine)
        plain = plain_answers(self.run, self.plan, cell)
        pairs = [(a, b) for a in lines if a.item in held for b in plain if a.item == b.item]
        forced: dict[str, dict[str, float]] = {a.item: {} for a, _ in pairs}
        forced |= {item: {str(place): gap} for item, place, gap in self._gaps(cell, pairs, judge) if gap}
        free = [line for line in lines if line.item not in held]
        read = self._forced(cell, free, judge)
        return forced | {line.item: of.short for line, of in zip(free, read, strict=True)}

    def _measured(self, cell: Cell) -> tuple[list[GenerationLine], bool]:
        """Return the answers by whose tokens ε is measured, and whether tokens of their prompts count, too.

        Those of the cell's reference arm, at the batch size with most of them; an arm without one is its own. Prompts
        count for a serving engine if the answers have too few tokens. None if ε needs more tokens.
        """
        most = max((self.run.answers[c.cell] for c in references(self.plan, cell) or [cell]), key=len)
        few = not has_enough(most)
        prompts = few and is_served(cell.engine)
        return ([] if few and not prompts else enough(most, prompts=prompts)), prompts

    def _noise(self, cell: Cell, judge: Reading) -> float:
        """Return the noise of a serving engine: how far the judge holds apart two tokens of its plain decoding.

        Of the first differences between its cells: those of other batch sizes, or of an arm given twice.
        """
        key, noise = (cell.suite, cell.engine, cell.checkpoints), 0.0
        plain = [c for c in self.plan.cells if c.is_reference and (c.suite, c.engine, c.checkpoints) == key]
        for other in plain[1:]:
            answers = (self.run.answers[c.cell] for c in (plain[0], other))
            pairs = [(a, b) for a, b in itertools.product(*answers) if a.item == b.item]
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
        read, held = self._forced(cell, cut, judge), self.plan.suite(cell.suite).constrained(cell.engine)
        for (a, _, place), one, two in zip(found, read[::2], read[1::2], strict=True):
            short = [line.short.get(str(place), 0.0) for line in (one, two)]
            yield a.item, place, round(max(short) - min(short) if a.item in held else max(short), 9)

    def _forced(
        self, cell: Cell, lines: Sequence[GenerationLine], reading: Reading, *, prompts: bool = False
    ) -> list[ReadingLine]:
        """Return how each answer was read, in order; read and store those that were not, within the time budget.

        `prompts`: with its prompt, but for the first token.
        """
        suite, files = self.plan.suite(cell.suite), self.run.directory
        if not self._read:
            self._read.update((line.key, line) for line in files.read_lines(READINGS, ReadingLine))
        number = {item.item: i for i, item in enumerate(suite.items)}
        keys, due = list[str](), dict[str, tuple[int, Answer]]()
        for line in lines:
            i = number[line.item]
            prompt, tokens = line.prompt_ids or suite.prompt(i), line.token_ids
            if prompts:
                prompt, tokens = prompt[:1], [*prompt[1:], *tokens]
            answer = Answer(prompt, tokens, self.plan.item_seed(i), self.pool.sampling)
            sampled = astuple(answer.sampling)[
                : 4 if answer.sampling.filters else 1
            ]  # as releases before filters wrote it
            read_by = [type(reading.model).__name__, reading.name, reading.width, reading.logits]
            text = json.dumps([*read_by, prompt, tokens, answer.seed, *sampled])
            keys.append(hashlib.sha256(text.encode()).hexdigest())
            if keys[-1] not in self._read:
                due[keys[-1]] = i, answer
        answers = sorted(due.items(), key=lambda one: one[1][0])
        groups = reading.groups([answer for _, (_, answer) in answers])
        began_at, done, left = time.monotonic(), 0, ""
        for group in groups:
            self._refuse_late()
            self.show(f"re-scoring: answer {done + len(group)}/{len(answers)}{left}")
            found = reading.forced_logits([answers[i][1][1] for i in group])
            read = [
                ReadingLine(
                    key=answers[i][0],
                    item=suite.items[answers[i][1][0]].item,
                    logits=own.tolist() if reading.logits else [],
                    short=shortfalls(short),
                )
                for i, (own, short) in zip(group, found, strict=True)
            ]
            files.append(READINGS, map(dump, read))
            self._read.update((line.key, line) for line in read)
            done += len(group)
            left = f", {duration((time.monotonic() - began_at) / done * (len(answers) - done))} left"
        return [self._read[key] for key in keys]


def shortfalls(short: Tensor) -> dict[str, float]:
    """Return, for each token that is not the choice: its index -> its shortfall."""
    return {str(i): round(value, 9) for i, value in enumerate(short.tolist()) if value > 0}
