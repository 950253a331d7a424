"""Check whether an arm emits the tokens that it promises: teacher-forced rescoring, and a grade.

One forward pass of the same checkpoint over the finished text rescores every emitted token. A token is accepted if it
is the argmax, or if its logit is within ε of the largest. So one flipped near-tie does not condemn the tokens after it.
The judge is always transformers' modules (the engine `eager`), whichever engine the arm ran on: no engine judges
itself. It judges the answers of the reference arm, too: both arms could run on the same wrong engine. An answer in a
serving engine that repeats plain decoding there needs no judge: plain decoding of ours judges that engine.

ε measures the arm's arithmetic: the 99.9th percentile of |Δlogit| of the tokens that the reference arm emitted,
between the judge at width 1 and the arm's own engine at the arm's width. So it covers engine and width together. For an
external engine, whose logits are not known, it covers the width alone. It is at most 0.5: an engine that computes
something else would make it large. In float32 and float64 it is a constant. The logits of the reference arm's tokens
are computed once for each engine and width, and serve all cells that are held to it. So does the rescoring of an answer
of the reference arm that other arms repeat: it needs no ε.

- `exact`: the tokens of the reference arm, on every item.
- `near-tie`: other answers, and each of their tokens is within ε of the argmax: the arithmetic chose, not the method.
- `divergent`: other answers, and one of their tokens is no near-tie. Or any token, even the same one, whose logit is
  further below the judge's largest than any ε allows: then both arms ran on an engine that computes something else.
- `inconclusive`: other tokens that could not be rescored.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.arms import is_ours, is_served
from mtbench.errors import UserError, first_line
from mtbench.measure.model_pool import ModelPool
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.plan.formats import GenerationLine, Grade, RescoringRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.run import Run
from mtbench.statistics import EPSILON_CAP, EPSILON_POSITIONS_NEEDED, EXACT_EPSILON, near_tie_epsilon

JUDGED_AT_ONCE = 256  # positions of one forward


class Answer(NamedTuple):
    """The tokens emitted for a prompt, and how they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


@dataclass(frozen=True)
class Rescoring:
    """Rescores the cells of a run on the models of `pool`."""

    run: Run
    plan: Plan
    pool: ModelPool
    note: Callable[[str], None]
    show: Callable[[str], None] = lambda _: None
    deadline: float = float("inf")  # by time.monotonic
    _logits: dict[tuple[str, str, str | None, int], list[float]] = field(default_factory=dict)
    _repeated: dict[tuple[str, str, str, tuple[int, ...]], Mapping[str, float]] = field(default_factory=dict)

    def check(self, cell: Cell) -> None:
        """Rescore the answers of a cell that claims to be lossless, and write lossless/<cell>.json once.

        The judge is fed at the arm's width, too. `epsilon` is None if there are too few positions.
        """
        name, files = f"lossless/{cell.cell}.json", self.run.directory
        lines = self._judged(cell) if cell.claims == "lossless" and cell.lossless_reference is not None else []
        due = {line.item for line in lines}
        if not due or (files.has(name) and files.read(name, RescoringRecord).items.keys() >= due):
            return
        width = JUDGED_AT_ONCE
        if self.pool.dtype not in EXACT_EPSILON:
            width = max([2, *(g.positions_fed // g.forwards for g in lines if g.forwards and g.positions_fed)])
        try:
            self._refuse_late()
            epsilon = self._epsilon(cell, width)
            short = self._shortfalls(cell, lines, width)
            files.write_json(name, {"epsilon": epsilon, "items": short, "why": None})
        except Exception as error:  # any fault of the model's code or files; it costs the grade, not the run
            kind = "" if isinstance(error, UserError | TimeoutError) else f"{type(error).__name__}: "
            why = f"{kind}{first_line(error).rstrip('.')}"
            files.write_json(name, {"epsilon": None, "items": {}, "why": why})
            if not isinstance(error, TimeoutError):
                self.note(f"{cell.cell} could not be re-scored: {why}")

    def _judged(self, cell: Cell) -> list[GenerationLine]:
        """Return the answers of a cell that need a judge."""
        there = [c for c in self._references(cell) if is_served(c.engine) and c.engine == cell.engine]
        plain = [line for c in there if c.batch_size == cell.batch_size for line in self._lines(c)]
        repeated = {(line.item, *line.token_ids) for line in plain}
        return [line for line in self._lines(cell) if (line.item, *line.token_ids) not in repeated]

    def _judge(self, cell: Cell) -> ModelRunner:
        """Return the judge of a cell. An id that only a serving engine may choose has its own logit there."""
        judge = self.pool.runner(cell.on, cell.checkpoints[cell.on], None)
        if is_served(cell.engine):
            judge = copy.copy(judge)
            judge.checkpoint = replace(judge.checkpoint, suppressed=judge.checkpoint.suppressed[:0])
        return judge

    def _refuse_late(self) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the time budget is spent; `--resume` does it")

    def _shortfalls(self, cell: Cell, lines: Sequence[GenerationLine], width: int) -> dict[str, Mapping[str, float]]:
        """Return the shortfalls of each answer by item. An answer that the reference arm gave is rescored once."""
        judge = self._judge(cell)
        given = {(line.item, tuple(line.token_ids)) for c in self._references(cell) for line in self._lines(c)}
        found = {}
        for line, answer in zip(lines, self._answers(cell, lines), strict=True):
            answered = (line.item, tuple(answer.tokens))
            key = (cell.suite, str(cell.lossless_reference), *answered)
            short = self._repeated[key] if key in self._repeated else shortfalls(judge, answer, width)
            if answered in given:
                self._repeated[key] = short
            found[line.item] = short
        return found

    def _epsilon(self, cell: Cell, width: int) -> float | None:
        """Return ε of the cell's engine at `width`."""
        if self.pool.dtype in EXACT_EPSILON:
            return near_tie_epsilon((), self.pool.dtype)
        plain, own = self._reference_logits(cell, None, 1), self._reference_logits(cell, cell.engine, width)
        return near_tie_epsilon([a - b for a, b in zip(plain, own, strict=True)], self.pool.dtype)

    def _reference_logits(self, cell: Cell, engine: str | None, width: int) -> list[float]:
        """Return the logits of tokens that the cell's reference arm emitted, on `engine` at `width`; None: the judge.

        Its answers at the batch size with most of them, as many as ε needs.
        """
        assert cell.lossless_reference is not None
        key = (cell.suite, cell.lossless_reference, engine, width)
        if key not in self._logits:
            most = max(self._references(cell), key=lambda c: len(self._lines(c)))
            runner = self._judge(cell)
            if engine and is_ours(engine):
                runner = self.pool.runner(cell.on, cell.checkpoints[cell.on], engine)
            logits: list[float] = []
            for answer in self._answers(most, self._lines(most)):
                if len(logits) >= EPSILON_POSITIONS_NEEDED:
                    break
                with torch.inference_mode():
                    logits += forced_logits(runner, answer, width)[0].tolist()
            self._logits[key] = logits
        return self._logits[key]

    def _references(self, cell: Cell) -> list[Cell]:
        """Return the cells of the arm that a cell is held to, at all batch sizes."""
        return [c for c in self.plan.cells if (c.suite, c.arm) == (cell.suite, cell.lossless_reference)]

    def _lines(self, cell: Cell) -> list[GenerationLine]:
        return self.run.answers[cell.cell]

    def _answers(self, cell: Cell, lines: Sequence[GenerationLine]) -> Iterator[Answer]:
        """Yield the answers of a cell's generation lines, within the time budget, and show which one is judged."""
        suite, place = self.plan.suite(cell.suite), f"{self.plan.cells.index(cell) + 1}/{len(self.plan.cells)}"
        number = {item.item: i for i, item in enumerate(suite.items)}
        for n, line in enumerate(lines, start=1):
            self._refuse_late()
            self.show(f"re-scoring: cell {place} {cell.cell}, answer {n}/{len(lines)}")
            yield Answer(
                line.prompt_ids or suite.prompt(number[line.item]),
                line.token_ids,
                self.plan.item_seed(number[line.item]),
                self.pool.temperature,
            )


@torch.inference_mode()
def shortfalls(runner: ModelRunner, answer: Answer, width: int) -> dict[str, float]:
    """Return, for each token that is not the argmax: its index -> the largest logit minus its own."""
    emitted, largest = forced_logits(runner, answer, width)
    return {str(i): round(value, 9) for i, value in enumerate((largest - emitted).tolist()) if value > 0}


def forced_logits(runner: ModelRunner, answer: Answer, width: int) -> tuple[Tensor, Tensor]:
    """Return the logit of each token of an answer and the largest logit at its position, `(tokens,)` each.

    The runner feeds `width` positions at a time. For sampled tokens the logits include the sampling noise of their
    seed.
    """
    own, largest = [], []
    for begin, logits in judged_logits(runner, answer, width):
        noisy = with_noise(logits, answer, begin)
        emitted = torch.tensor(answer.tokens[begin : begin + len(logits)], device=runner.device)[:, None]
        own.append(noisy.gather(1, emitted)[:, 0])
        largest.append(noisy.amax(1))
    return torch.cat(own), torch.cat(largest)


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
    noisy = sampling.sampled(logits[None], answer.temperature, seed, positions)[0]
    return answer.temperature * (noisy if logits.dtype == torch.float64 else noisy.float())


class Graded(NamedTuple):
    """The grade of a cell, and its basis. The names are those of results.json."""

    grade: Grade
    items: int
    identical: int
    first_divergence: int | None
    epsilon: float | None
    worst_margin: float | None
    near_ties: float | None


def grade(
    lines: Mapping[str, GenerationLine],
    against: Mapping[str, GenerationLine],
    rescored: RescoringRecord | None,
    dtype: str,
) -> Graded | None:
    """Return the grade of a cell from its generation lines by item, those of the reference arm, and the rescoring.

    None if the two have no item in common.
    """
    common = sorted(lines.keys() & against.keys())
    if not common:
        return None
    pairs = [(lines[item].token_ids, against[item].token_ids) for item in common]
    others = {item for item, (ours, theirs) in zip(common, pairs, strict=True) if ours != theirs}
    divergences = [first_difference(ours, theirs) for ours, theirs in pairs if ours != theirs]
    epsilon = worst = of_others = near_ties = None
    judged = [item for item in common if rescored is not None and item in rescored.items]
    if rescored is not None and judged and others <= set(judged):
        short = [shortfall for item in judged for shortfall in rescored.items[item].values()]
        epsilon, worst = rescored.epsilon, max(short, default=0.0)
        of_others = max((shortfall for item in others for shortfall in rescored.items[item].values()), default=0.0)
        near_ties = len(short) / sum(len(lines[item].token_ids) for item in judged)
    shown = dtype if rescored is None or worst is not None else ""  # a judge that could not run shows nothing
    return Graded(
        grade=_grade(worst, of_others, identical=not others, epsilon=epsilon, dtype=shown),
        items=len(common),
        identical=len(common) - len(divergences),
        first_divergence=min(divergences, default=None),
        epsilon=epsilon,
        worst_margin=worst,
        near_ties=near_ties,
    )


def _grade(
    worst: float | None, of_others: float | None, *, identical: bool, epsilon: float | None, dtype: str
) -> Grade:
    """Return the grade. None for a distance: not rescored.

    worst: the largest distance of a token's logit below the largest. of_others: in answers that are not those of the
    reference arm.
    """
    if worst is not None and worst > EXACT_EPSILON.get(dtype, EPSILON_CAP):
        return "divergent"
    if identical:
        return "exact"
    if epsilon is not None and of_others is not None:
        return "near-tie" if of_others <= epsilon else "divergent"
    # Not rescored: in exact arithmetic other tokens are wrong, else their grade is unknown.
    return "divergent" if dtype in EXACT_EPSILON else "inconclusive"


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length if one is a prefix of the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
