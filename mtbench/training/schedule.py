"""The order of training: which conversations each step takes, and in which row of which forward pass.

Everything is a function of the seed and the step. A step takes `batch_size` conversations, drawn at random. The loss of
the whole step is divided by the sum of its conversations' shares, so the number of processes and of forward passes per
step does not change it. Within a step, rows of similar length go together (on a CPU: little padding), or conversations
are packed into rows of a fixed length (on a GPU: fixed shapes). Batches of one length, as in the paper, would hold
problems of one size, from which small models learn far slower.

A sample is one use of a conversation; samples are numbered through all epochs.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mtbench.training.objectives import Objective, Special
from mtbench.training.packing import Example, Examples, TrainingSequence, pack

TILE = 8  # rows that are not packed are padded to a multiple of this many tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(Dataset[dict[str, Tensor]]):
    """All forward passes of a training, in order: `forwards` for each step, distributed over the processes in turn."""

    examples: Sequence[Example]
    objective: Objective
    special: Special
    batch_size: int  # conversations per step
    epochs: float
    seed: int
    rows: int  # per forward pass, at most
    packed: int  # tokens of a row that holds several conversations; 0: one conversation per row
    processes: int = 1

    @cached_property
    def samples(self) -> int:
        """The number of conversations of all epochs together."""
        return max(1, round(len(self.examples) * self.epochs))

    @cached_property
    def steps(self) -> int:
        return math.ceil(self.samples / self.batch_size)

    @cached_property
    def _max_rows(self) -> int:
        return max(len(self._rows(step)) for step in range(self.steps)) if self.packed else self.batch_size

    @cached_property
    def forwards(self) -> int:
        """Forward passes per step, of all processes together: as many as the fullest step needs."""
        return math.ceil(self._max_rows / self.rows / self.processes) * self.processes

    def __len__(self) -> int:
        return self.steps * self.forwards

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return the batch of forward pass `number`, its weights divided by the divisor of its step."""
        step, forward = divmod(number, self.forwards)
        most = math.ceil(self._max_rows / self.forwards)  # of a forward pass: the fullest step's rows, evenly
        rows = self._rows(step)[forward * most : (forward + 1) * most]  # none if the step's rows do not reach it
        if self.packed:  # every forward pass has the same shape, also at the end of a short step
            rows = rows + [[]] * (most - len(rows))
        sequences = [[self.sequence(sample) for sample in row] for row in rows or [[]]]
        length = self.packed
        if not length:
            longest = max(1, max(sum(len(sequence.ids) for sequence in row) for row in sequences))
            length = math.ceil(longest / TILE) * TILE
        batch = pack(sequences, length, len(self.objective.parts))
        divisor = sum(self.objective.divisor_share(*self._length(sample)) for sample in self._samples(step))
        return batch._replace(weight=batch.weight / divisor)._asdict()

    def conversations(self, step: int) -> list[int]:
        """Return the indices of the examples of step `step` (from 0)."""
        return [self._example(sample) for sample in self._samples(step)]

    def _samples(self, step: int) -> range:
        return range(step * self.batch_size, min((step + 1) * self.batch_size, self.samples))

    def _example(self, sample: int) -> int:
        epoch, index = divmod(sample, len(self.examples))
        return int(order(len(self.examples), self.seed, epoch)[index])

    def sequence(self, sample: int) -> TrainingSequence:
        """Return the training sequence of a sample."""
        return self.objective.build(self.examples[self._example(sample)], self.special, generator(self.seed, sample))

    def _length(self, sample: int) -> tuple[int, int]:
        return self._lengths[self._example(sample)]

    @cached_property
    def _lengths(self) -> list[tuple[int, int]]:
        if isinstance(self.examples, Examples):
            return list(zip(self.examples.lengths.tolist(), self.examples.prompts.tolist(), strict=True))
        return [(len(ids), prompt) for ids, prompt in self.examples]

    def _rows(self, step: int) -> list[list[int]]:
        """The step's samples, longest first, each alone in a row or, if packed, in the row that it fits best."""
        sizes = {sample: self.objective.max_fed_tokens(*self._length(sample)) for sample in self._samples(step)}
        longest_first = sorted(sizes, key=lambda sample: -sizes[sample])
        if not self.packed:
            return [[sample] for sample in longest_first]
        return best_fit(longest_first, sizes, self.packed)


def best_fit(samples: Sequence[int], sizes: dict[int, int], capacity: int) -> list[list[int]]:
    """Put each sample into the fullest row that has room for it, or into a new row."""
    rows: list[list[int]] = []
    room: list[int] = []
    for sample in samples:
        fitting = [row for row in range(len(rows)) if room[row] >= sizes[sample]]
        if fitting:
            row = min(fitting, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(sample)
        room[row] -= sizes[sample]
    return rows


@cache
def order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch takes the `count` examples."""
    random = generator(seed, -epoch) if epoch else torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=random)


def generator(seed: int, sample: int) -> torch.Generator:
    """Return the random generator of one sample. A generator uses only 32 bits of its seed, so both are hashed."""
    mixed = hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed))
