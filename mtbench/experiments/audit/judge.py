"""The reference model judges the first difference of two answers, and the tokens of each side behind it.

The logits are those of transformers' modules (mtbench/measure/lossless_check.py). A side is judged on its own tokens,
from the first difference on, `TAIL` tokens far: so a side that goes wrong later is found, too. No text is fed twice:
the two answers share prompt and tokens up to the first difference.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mtbench.decoding.output import first_difference
from mtbench.errors import UserError
from mtbench.experiments.audit.format import NOT_JUDGED, JudgedLine, NoiseLine, SideJudged
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Pair, Side, SideAnswer
from mtbench.measure.lossless_check import COARSE
from mtbench.measure.model_pool import ModelPool, use_threads
from mtbench.measure.reading import Answer, judged, judged_logits
from mtbench.models.families import locate
from mtbench.models.loading import Inspected, inspect
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import WholeTexts
from mtbench.plan.request import RunRequest
from mtbench.statistics import EXACT_EPSILON

TAIL = 64  # tokens of each side that are judged
WIDTHS = 256, 16  # positions of one forward, where noise is measured
UNSURE = 1.0  # distance of the two best logits below which a place is unsure
FARTHEST = 1e30  # of a token that cannot be emitted
PLACES = 256  # unsure places at which noise is measured: the standard error of its spread is about 5 %


def coarse(side: Side) -> str | None:
    """Return the number type whose noise is measured for a side; None if it computes exactly, as far as is known."""
    if side.dtype is not None and side.dtype not in EXACT_EPSILON:
        return side.dtype
    return None if side.ours else COARSE


@dataclass
class Judge:
    """The reference model, in the number type of the request, and in those that the sides ran in."""

    source: str
    request: AuditRequest
    _readers: dict[str, ModelRunner | WholeTexts] = field(default_factory=dict)

    @cached_property
    def checkpoint(self) -> Inspected:
        """The model's tokenizer and end tokens."""
        return inspect(locate(self.source), offline=self.request.offline)

    def _reader(self, dtype: str | None = None) -> ModelRunner | WholeTexts:
        """Return the reader of the model in a number type, loaded at the first call.

        A model that mtbench's loop cannot decode reads whole texts.
        """
        request = RunRequest().changed(
            dtype=dtype or self.request.dtype, device=self.request.device, offline=self.request.offline
        )
        if request.dtype not in self._readers:
            pool = ModelPool(request)
            try:
                self._readers[request.dtype] = pool.runner("judge", self.source, None)
            except UserError:
                self._readers[request.dtype] = WholeTexts(self.source, pool.dtype, pool.device, offline=pool.offline)
            use_threads(pool, [self.source])
        return self._readers[request.dtype]

    @torch.inference_mode()
    def judge(self, number: int, pair: Pair, item: str) -> JudgedLine:
        """Return the first difference of the two answers to an item. `number`: of the pair."""
        a, b = pair.a.answers[item], pair.b.answers[item]
        first = first_difference(a.tokens, b.tokens)
        answers = [answer_of(*of, first) for of in ((pair.a, a), (pair.b, b))]
        found: list[list[Tensor]] = [[], []]
        for n, _, logits in judged_logits(self._reader(), answers):
            found[n].append(logits)
        side_a, side_b = (self._side(answer, first, parts) for answer, parts in zip(answers, found, strict=True))
        return JudgedLine(pair=number, item=item, first=first, side_a=side_a, side_b=side_b)

    def _side(self, answer: Answer, first: int, parts: Sequence[Tensor]) -> SideJudged:
        """Return the judge's figures of a side's tokens from `first` on, by the logits of these.

        Their shortfalls without end tokens are computed only if one of them is not the judge's choice.
        """
        if not parts:
            return NOT_JUDGED
        logits = torch.cat([*parts])
        emitted = torch.tensor(answer.tokens, device=logits.device)[:, None]
        of = judged(logits, answer, 0)
        short = _by_index(of.short, first)
        hot = logits.double() / (answer.sampling.temperature or 1.0)
        log_p = hot.gather(1, emitted)[:, 0] - hot.logsumexp(1)
        endless = None
        if max(short.values(), default=0.0) > EXACT_EPSILON["float32"]:
            ends = torch.tensor(self.checkpoint.end_ids, device=logits.device)
            without = logits.index_fill(-1, ends, float("-inf"))
            endless = max(_by_index(judged(without, answer, 0).short).values(), default=0.0)
        return SideJudged(
            text=self.checkpoint.tokenizer.decode(answer.tokens[:1]),
            probabilities=[round(p, 9) for p in log_p.exp().clamp(max=1).tolist()],
            short=short,
            outside=_by_index(of.outside, first),
            endless=endless,
        )

    @torch.inference_mode()
    def noise(self, dtype: str, answers: Iterable[Answer]) -> NoiseLine:
        """Return by how much another number type changes the distance of the two best logits, root mean square.

        At unsure places of prompts and answers. Texts are read in turn by wide forwards and by narrow ones, whose sums
        are other ones.
        """
        positions, squares = 0, list[Tensor]()
        for width, answer in zip(itertools.cycle(WIDTHS), answers):
            ids = [*answer.prompt, *answer.tokens]
            text = Answer(ids[:1], ids[1:])
            read = (judged_logits(self._reader(of), [text], n) for of, n in ((None, WIDTHS[0]), (dtype, width)))
            exact, rounded = (torch.cat([logits for _, _, logits in parts]) for parts in read)
            best, two = exact.topk(2)
            apart, there = best[:, 0] - best[:, 1], rounded.gather(1, two)
            change = (apart - (there[:, 0] - there[:, 1])).double().square()
            squares.append(change[apart < UNSURE])
            positions += len(change)
            if sum(map(len, squares)) >= PLACES:
                break
        found = torch.cat(squares) if squares else torch.zeros(0)
        return NoiseLine(dtype=dtype, positions=positions, spread=float(found.mean().sqrt()) if len(found) else None)


def answer_of(side: Side, answer: SideAnswer, first: int) -> Answer:
    """Return the judged part of an answer: `TAIL` tokens from the first difference on; those before are its prompt."""
    assert answer.prompt is not None, "an answer without its prompt is not judged"
    before = [*answer.prompt, *answer.tokens[:first]]
    return Answer(before, answer.tokens[first : first + TAIL], answer.seed, side.sampling)


def _by_index(distances: Tensor, first: int = 0) -> dict[str, float]:
    """Return the distances above 0 by index, of tokens from `first` on. JSON has no infinite number, nor NaN."""
    finite = distances.nan_to_num(nan=FARTHEST, posinf=FARTHEST).tolist()
    return {str(first + i): round(min(distance, FARTHEST), 9) for i, distance in enumerate(finite) if distance > 0}
