"""How a product of few positions is divided among the programs of a GPU, and the time that a division takes.

The outputs are divided into groups, and the inputs into steps. The steps of all groups form one sequence, and each
program takes an equal share of it (stream-K, https://arxiv.org/abs/2301.03598). A share may end inside a group; then
several programs have a part of the group's sum, and the parts are added afterwards. Larger groups read the positions
fewer times from the L2 cache; shares of whole groups have no parts to add; smaller shares occupy more multiprocessors.

`plan` takes the division that is fastest at few positions and at many, by the estimate of `Plan.time_s`. It depends on
the weight's shape and the GPU only, never on the number of positions: a sum has the same parts in every batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

STEP = 64  # inputs of a step: 128 bytes of a row in half precision, a line of the cache
GROUPS = (64, 128, 256)  # outputs of a group; 64 is the least of the matrix unit (wgmma)
TILE = 128  # outputs of a program at few positions: two programs halve a group of 256
FEW = 64  # positions; beyond, a program takes a whole group
MIN_STEPS = 4  # of a share: below it, adding parts costs more than reading
PADDED = (16, 128)  # positions for which a plan is chosen: of one row or a batch, and of a batch that drafts

# Rates of an H200. A plan needs their ratios only.
MEMORY_BYTES_PER_S = 4.0e12  # of a product: 93 % of what a copy reaches
# 5.6 TB/s were measured on an H100 PCIe with 114 multiprocessors at 1.755 GHz (chipsandcheese.com, 2 July 2023); a
# module has 132 at 1.98 GHz.
L2_BYTES_PER_S = 7.3e12
PROCESSOR_BYTES_PER_S = 110e9  # 64 bytes a clock from the L2 cache
LATENCY_S = 0.8e-6  # of a read from the L2 cache in use
COUNTER_S = 1.2e-6  # to store a part, make it visible and count it
KERNEL_S = 1.3e-6  # from the end of one kernel's work to the start of the next one's


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of a product."""

    outputs: int  # rows of the weight; with SwiGLU, of gate and up
    inputs: int
    rows: int  # of the weight, in a group
    share: int  # steps of a program

    @property
    def steps(self) -> int:
        """Steps of a group."""
        return -(-self.inputs // STEP)

    @property
    def groups(self) -> int:
        return -(-self.outputs // self.rows)

    @property
    def shares(self) -> int:
        return -(-self.groups * self.steps // self.share)

    def parts(self, group: int) -> int:
        """Return the number of shares that have steps of a group."""
        begin = group * self.steps
        return (begin + self.steps - 1) // self.share - begin // self.share + 1

    @property
    def most_parts(self) -> int:
        return _most_parts(self)

    def tile(self, positions: int) -> int:
        """Return the rows of a program."""
        return self.rows if positions > FEW else min(self.rows, TILE)

    def apart(self, positions: int) -> bool:
        """Return whether a second kernel adds the parts: with more programs than the one per tile that arrives last."""
        return positions > FEW and self.most_parts > 1

    def part_bytes(self, positions: int) -> int:
        """Return the bytes of all parts, which are written once and read once."""
        parts = sum(self.parts(group) for group in range(self.groups) if self.parts(group) > 1)
        return parts * self.rows * positions * 4

    def l2_bytes(self, positions: int, element_bytes: int = 2) -> int:
        """Return the bytes that pass between L2 cache and multiprocessors, without the outputs."""
        tiles = self.groups * self.rows // self.tile(positions)
        read = (self.groups * self.rows + tiles * positions) * self.steps * STEP
        return read * element_bytes + 2 * self.part_bytes(positions)

    def time_s(
        self,
        positions: int,
        processors: int,
        memory_bytes_per_s: float = MEMORY_BYTES_PER_S,
        l2_bytes_per_s: float = L2_BYTES_PER_S,
    ) -> float:
        """Return the estimated time of the product, in half precision, over positions that are padded.

        The slowest of memory, L2 cache and multiprocessors decides. Shares beyond a whole number for each
        multiprocessor run alone.
        """
        all_s = max(2 * self.outputs * self.inputs / memory_bytes_per_s, self.l2_bytes(positions) / l2_bytes_per_s)
        per_step = 2 * STEP * (self.rows + self.rows // self.tile(positions) * positions)
        share_s = self.share * per_step / PROCESSOR_BYTES_PER_S
        rounds, rest = divmod(self.shares, processors)
        read_s = all_s * rounds * processors / self.shares
        read_s += max(all_s * rest / self.shares, share_s) if rest else 0.0
        return read_s + self._adding_s(positions, l2_bytes_per_s)

    def _adding_s(self, positions: int, l2_bytes_per_s: float) -> float:
        if self.most_parts == 1:
            return 0.0
        if self.apart(positions):
            return KERNEL_S + LATENCY_S + self.part_bytes(positions) / l2_bytes_per_s
        return COUNTER_S + LATENCY_S + self.most_parts * self.tile(positions) * positions * 4 / PROCESSOR_BYTES_PER_S


@cache
def _most_parts(divided: Plan) -> int:
    return max(map(divided.parts, range(divided.groups)))


@cache
def plan(outputs: int, inputs: int, processors: int) -> Plan:
    """Return the plan for a weight (outputs, inputs) on a GPU with so many multiprocessors."""
    return min(
        _plans(outputs, inputs, processors), key=lambda plan: sum(plan.time_s(count, processors) for count in PADDED)
    )


def _plans(outputs: int, inputs: int, processors: int) -> Iterator[Plan]:
    """Yield plans of each group size: whole groups, groups in equal parts, and equal shares for all processors."""
    for rows in GROUPS:
        whole = Plan(outputs, inputs, rows, 1)
        steps, total = whole.steps, whole.groups * whole.steps
        shares = {-(-steps // parts) for parts in (1, 2, 3, 4, 6, 8)} | {-(-total // (n * processors)) for n in (1, 2)}
        for share in sorted(shares, reverse=True):
            if share >= min(MIN_STEPS, steps):
                yield Plan(outputs, inputs, rows, share)
