"""Which conversation is trained on when, and in which row of which forward: a function of seed and step alone.

A step takes `batch_size` conversations, drawn at random; the whole step's loss is divided by what all of them share, so
neither the number of processes nor that of forwards per step changes it. Within a step, rows of like length go
together (on a CPU: no padding), or conversations are packed into rows of a fixed length (on a GPU: fixed shapes).
Batches of one length throughout, as the paper's, hold problems of one size, from which small models learn far slower.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mtbench.training.objectives import Objective, Special
from mtbench.training.packing import Example, TrainingSequence, pack
from mtbench.training.token_cache import Examples

TILE = 8  # rows that are not packed are padded to a multiple of so many tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(Dataset[dict[str, Tensor]]):
    """All forwards of a training, in order: step after step, `forwards` of each, taking turns over the processes."""

    examples: Sequence[Example]
    objective: Objective
    special: Special
    batch_size: int  # conversations per step
    epochs: float
    seed: int
    rows: int  # of a forward, at most
    packed: int  # tokens of a row that holds several conversations; 0: one conversation a row
    processes: int = 1

    @cached_property
    def turns(self) -> int:
        """Conversations of all epochs together."""
        return max(1, round(len(self.examples) * self.epochs))

    @cached_property
    def steps(self) -> int:
        return math.ceil(self.turns / self.batch_size)

    @cached_property
    def _most(self) -> int:
        """Rows of the fullest step."""
        return max(len(self._rows(step)) for step in range(self.steps)) if self.packed else self.batch_size

    @cached_property
    def forwards(self) -> int:
        """Per step, of all processes together: as many as the fullest step needs."""
        return math.ceil(self._most / self.rows / self.processes) * self.processes

    @cached_property
    def _height(self) -> int:
        """Rows of each forward: the limit, or fewer where that many are shared out evenly."""
        return math.ceil(self._most / self.forwards)

    def __len__(self) -> int:
        return self.steps * self.forwards

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """The `number`-th forward's batch, its weights divided by the shares of its whole step."""
        step, forward = divmod(number, self.forwards)
        rows = self._part(step, forward)
        if self.packed:  # every forward has the same shape, the idle end of a step too
            rows = rows + [[]] * (self._height - len(rows))
        laid = [[self._lay(turn) for turn in row] for row in rows or [[]]]
        longest = max(1, max(sum(len(one.ids) for one in row) for row in laid))
        batch = pack(laid, self.packed or math.ceil(longest / TILE) * TILE, len(self.objective.parts))
        return batch._replace(weight=batch.weight / self._share(step))._asdict()

    def conversations(self, step: int, forward: int | None = None) -> list[int]:
        """Which examples step `step` (from 0) learns from, or one of its forwards."""
        turns = self._turns(step) if forward is None else chain(*self._part(step, forward))
        return [self._example(turn) for turn in turns]

    def _turns(self, step: int) -> range:
        """Conversations are counted through all epochs."""
        return range(step * self.batch_size, min((step + 1) * self.batch_size, self.turns))

    def _example(self, turn: int) -> int:
        epoch, place = divmod(turn, len(self.examples))
        return int(order(len(self.examples), self.seed, epoch)[place])

    def _lay(self, turn: int) -> TrainingSequence:
        return self.objective.build(self.examples[self._example(turn)], self.special, dice(self.seed, turn))

    def _share(self, step: int) -> float:
        return sum(self.objective.share(*self._length(turn)) for turn in self._turns(step))

    def _length(self, turn: int) -> tuple[int, int]:
        return self._lengths[self._example(turn)]

    @cached_property
    def _lengths(self) -> list[tuple[int, int]]:
        """Of every example, gone through once: tokens, and those of its prompt."""
        if isinstance(self.examples, Examples):
            return list(zip(self.examples.lengths.tolist(), self.examples.prompts.tolist(), strict=True))
        return [(len(ids), prompt) for ids, prompt in self.examples]

    def _part(self, step: int, forward: int) -> list[list[int]]:
        """The rows of one forward; none where the step has fewer than its forwards could hold."""
        return self._rows(step)[forward * self._height : (forward + 1) * self._height]

    def _rows(self, step: int) -> list[list[int]]:
        """The step's conversations, longest first, each alone in a row or where it fits best."""
        sizes = {turn: self.objective.size(*self._length(turn)) for turn in self._turns(step)}
        longest_first = sorted(sizes, key=lambda turn: -sizes[turn])
        if not self.packed:
            return [[turn] for turn in longest_first]
        return best_fit(longest_first, sizes, self.packed)


def best_fit(turns: Sequence[int], sizes: dict[int, int], capacity: int) -> list[list[int]]:
    """Each turn into the fullest row it still fits, else into a new one."""
    rows: list[list[int]] = []
    room: list[int] = []
    for turn in turns:
        fitting = [row for row in range(len(rows)) if room[row] >= sizes[turn]]
        if fitting:
            row = min(fitting, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(turn)
        room[row] -= sizes[turn]
    return rows


@cache
def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch goes through `count` examples."""
    return torch.randperm(count, generator=dice(seed, -epoch) if epoch else torch.Generator().manual_seed(seed))


def dice(seed: int, turn: int) -> torch.Generator:
    """The randomness of one conversation. Only 32 bits of a generator's seed count, so they are mixed from both."""
    mixed = hashlib.blake2b(f"{seed} {turn}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed))
