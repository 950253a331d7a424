"""A race over a run directory: arms leave while it decodes.

The rule (race.py) sees stored lines only. Answers are scored at each look; scores.json is written at the end.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.suite import Suite
from mtbench.experiments.choose.race import Block, Outcome, RacedArm, replay, words
from mtbench.measure.judging_time import enough, has_enough
from mtbench.measure.score import readings_of
from mtbench.plan.formats import Elimination, GenerationLine, Race, Slo, TimingLine
from mtbench.plan.plan import MIN_BLOCKS, Cell, Group, Plan
from mtbench.plan.prompts import open_suite
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.results.aggregate import commit_gaps, percentiles
from mtbench.results.figure_formats import Percentiles
from mtbench.results.format import ResultCell
from mtbench.results.samples import SERVED_UNIT_S
from mtbench.statistics import EXACT_EPSILON, Word


@dataclass
class Racing:
    """The race of a run by its stored lines. As the hook of an execution it lets cells leave."""

    run: Run
    execution: Execution
    _suites: dict[str, Suite] = field(default_factory=dict)
    _scores: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)  # by cell, and item and text
    _accuracies: dict[str, dict[str, Word]] = field(default_factory=dict)  # verdicts by suite and arm
    _made: dict[str, int] = field(default_factory=dict)  # last look of a group; -1: none

    @property
    def plan(self) -> Plan:
        return self.run.plan

    @property
    def race(self) -> Race:
        assert self.run.race is not None, "the run is a race"
        return self.run.race

    def executing(self) -> Execution:
        """Return the execution with the race as its hook."""
        return replace(self.execution, leave=self)

    def __call__(self, cells: Sequence[str]) -> list[Elimination]:
        """Return the cells that leave now. Looks are made as soon as plain decoding has their blocks."""
        group = self.plan.group(cells[0])
        plain = next((name for name in group.cells if is_plain(self.plan.cell(name))), None)
        ended = 0 if plain is None else len(self.run.timings[plain])
        last = self._made.get(group.name, -1)
        if plain is None or (0 <= last <= ended and not any(last < look <= ended for look in self.looks(group))):
            return []
        outcome = self.outcome(group)
        self._made[group.name] = max(outcome.made, default=0)
        gone_before = {line.cell for line in self.run.left}
        left = [gone for gone in outcome.left if gone.cell not in gone_before]
        rivals = ("" if gone.rival is None else f" {self.plan.cell(gone.rival).arm}" for gone in left)
        return [gone.changed(reason=f"{gone.reason}{rival}") for gone, rival in zip(left, rivals, strict=True)]

    def let_return(self) -> None:
        """Let the arms come back that had no time to begin, and beside them those that had nothing left to show."""
        left = self.run.left
        for group in self.plan.groups:
            to_come = len(group.blocks) - max(len(self.run.timings[name]) for name in group.cells)
            own = [line for line in left if line.cell in group.cells]
            if to_come >= MIN_BLOCKS and any(line.unraced for line in own):
                left = [line for line in left if line.lost or line not in own]
        self.run.keep_left(left)

    def restore_left(self) -> None:
        """Make the looks at the stored blocks again: without its line, the blocks of a cell's group are lost."""
        for group in self.plan.groups:
            begun = any(self.run.timings[name] for name in group.cells)
            if begun and (leaving := self(group.cells)):
                self.run.add_left(leaving)

    def looks(self, group: Group) -> list[int]:
        return self.race.looks[group.name]

    def outcome(self, group: Group) -> Outcome:
        """Return the decisions of the looks at a group."""
        return replay(self.entrants(group), self.looks(group), self.plan.request.max_loss)

    def entrants(self, group: Group) -> list[RacedArm]:
        """Return the cells of a group with the leading blocks of plain decoding, and what they have of these."""
        plain = next(cell for cell in map(self.plan.cell, group.cells) if is_plain(cell))
        sessions, answers = self.run.sessions, self.run.answers
        failed = {failure.cell for failure in self.run.failures if failure.stage is None}
        left_out = {gone.cell: gone.block for gone in self.run.left if gone.unraced}
        base = {line.item: line.token_ids for line in answers[plain.cell]}
        ended = {timing.block for timing in self.run.timings[plain.cell]}
        leading = next((block for block in range(len(group.blocks)) if block not in ended), len(group.blocks))
        accuracies = self._settled_accuracies(group)
        inexact = bool(sessions) and sessions[0].dtype not in EXACT_EPSILON
        graded_after = self._graded_after(group, answers[plain.cell], plain) if inexact else 0
        entrants = []
        for cell in map(self.plan.cell, group.cells):
            timings = {timing.block: timing for timing in self.run.timings[cell.cell]}
            own = max(timings, default=-1) + 1 if cell.cell in failed else leading
            lines: list[list[GenerationLine]] = [[] for _ in range(len(group.blocks))]
            for line in answers[cell.cell]:
                lines[line.block].append(line)
            scores = self._score(group, cell, answers[cell.cell])
            blocks = [
                Block(
                    wall_s=None if (timing := timings.get(block)) is None or timing.dropped else timing.wall_s,
                    scores={line.item: scores[line.item] for line in lines[block] if line.item in scores},
                    same=all(line.token_ids == base.get(line.item) for line in lines[block]),
                )
                for block in range(min(own, leading))
            ]
            here = cell.checkpoints[cell.on] == plain.checkpoints[plain.on]
            distribution = cell.claims == "distribution" and here
            entrant = RacedArm(
                name=cell.cell,
                blocks=blocks,
                reference=cell is plain,
                claims_lossless=cell.claims == "lossless" or distribution,
                allows_rounding=distribution or (here and inexact),
                graded_after=graded_after if here and not distribution else 0,
                misses_slo=misses_slo([timings.get(block) for block in range(len(blocks))], lines, self.race.slo_s),
                accuracy=None if cell is plain else accuracies.get(cell.arm),
                unit_s=SERVED_UNIT_S if is_served(cell.engine) else 0.0,
                failed=cell.cell in failed,
                begun=bool(timings),
                left_out_after=left_out.get(cell.cell, math.inf),
            )
            entrants.append(entrant)
        return entrants

    def _graded_after(self, group: Group, lines: Sequence[GenerationLine], plain: Cell) -> int:
        """Return after how many blocks plain decoding has the tokens that a grade needs, here or in a group before.

        Groups that run later do not count: a race that is replayed decides as it did.
        """
        for before in itertools.takewhile(lambda other: other != group, self.plan.groups):
            same = [c for c in map(self.plan.cell, before.cells) if (c.suite, c.arm) == (plain.suite, plain.arm)]
            if has_enough([line for c in same for line in self.run.answers[c.cell]]):
                return 0
        first = enough(sorted(lines, key=lambda line: line.block))
        return first[-1].block + 1 if has_enough(first) else len(group.blocks)

    def _settled_accuracies(self, group: Group) -> dict[str, Word]:
        """Return by arm its accuracy verdict from the largest batch size; empty for that size itself.

        It is computed once: the largest batch size has ended when a smaller one begins.
        """
        largest = max((g for g in self.plan.groups if g.suite == group.suite), key=lambda g: g.batch_size)
        if largest.batch_size == group.batch_size:
            return {}
        if group.suite not in self._accuracies:
            entrants, at = self.entrants(largest), self.looks(largest)
            of_cells = words(entrants, at, self.plan.request.max_loss, replay(entrants, at, self.plan.request.max_loss))
            self._accuracies[group.suite] = {self.plan.cell(name).arm: word for name, word in of_cells.items()}
        return self._accuracies[group.suite]

    def _score(self, group: Group, cell: Cell, lines: Sequence[GenerationLine]) -> Mapping[str, float]:
        """Return the scores of a cell's answers by item; each answer is scored once. Empty if they cannot be scored."""
        suite = self.plan.suite(group.suite)
        if suite.metric is None or cell.length != "natural":
            return {}
        scores = self._scores.setdefault(cell.cell, {})
        new = {line.item: line for line in lines if (line.item, line.text) not in scores}
        if new:
            try:
                readings = readings_of(self._suite(group.suite), suite, [*new.values()])
            except Exception:  # a suite may raise anything; the scoring at the end reports it
                return {}
            scores |= {(item, new[item].text): reading.score for item, reading in readings.items()}
        return {line.item: scores[line.item, line.text] for line in lines if (line.item, line.text) in scores}

    def _suite(self, name: str) -> Suite:
        if name not in self._suites:
            data_dir = self.execution.data_dir or self.plan.request.data_dir
            unsandboxed = self.execution.allow_unsandboxed_code
            request = self.plan.request.changed(data_dir=data_dir, allow_unsandboxed_code=unsandboxed)
            self._suites[name] = open_suite(name, request)
        return self._suites[name]


def is_plain(cell: Cell) -> bool:
    """Return whether the cell is plain decoding: the reference that a race has beside its arms."""
    return cell.is_reference and not METHODS[cell.method].outside


def over_limits(cells: Sequence[ResultCell], slo_s: Slo) -> list[str]:
    """Return the cells that are over a limit. Plain decoding stays: it is the default."""
    return [c.cell for c in cells if not c.reference and _over(c.ttft_s, c.commit_latency_s, slo_s)]


def misses_slo(
    timings: Sequence[TimingLine | None], lines: Sequence[Sequence[GenerationLine]], slo_s: Slo
) -> list[bool]:
    """Return after each number of blocks, from 1 on, whether a cell is over a limit.

    `timings`: by block; None: it was not decoded. `lines`: answers by block.
    """
    first_s: list[float] = []
    gaps_s: list[float] = []
    over = []
    for timing, of_block in zip(timings, lines, strict=False) if slo_s else ():
        if timing is not None and not timing.dropped:
            first_s += [] if timing.ttft_s is None else [timing.ttft_s]
            gaps_s += commit_gaps(of_block, {timing.block: timing.step_s})
        over.append(_over(percentiles(first_s), percentiles(gaps_s), slo_s))
    return over


def _over(first: Percentiles, gap: Percentiles, slo_s: Slo) -> bool:
    measured = {"ttft": first.p95, "itl": gap.p95}
    return any(p95 > limit for name, limit in slo_s.items() if (p95 := measured[name]) is not None)
