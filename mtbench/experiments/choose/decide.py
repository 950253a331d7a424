"""The decision of a race: decision.json, from the results of its run and the looks that were made."""

from functools import partial

from mtbench import statistics
from mtbench.experiments.choose.batch_size_schedule import measured
from mtbench.experiments.choose.deploy import deployment
from mtbench.experiments.choose.runner import Racing, over_limits
from mtbench.plan.plan import Group
from mtbench.records import dump
from mtbench.results.aggregate import Stored, read_stored
from mtbench.results.decision import Bounds, headline, recommend
from mtbench.results.decision_format import FILE, SCHEMA_VERSION, Decision, Looks, RaceCost, Recommendation
from mtbench.results.decision_text import sentence
from mtbench.results.format import ResultCell, Results


def decide(racing: Racing, results: Results, looks: list[Looks] | None = None) -> Decision:
    """Return what a race decides, and write decision.json. looks: those made, if known; else all answers are scored."""
    stored = read_stored(racing.run)
    race, over_slo = racing.race, over_limits(results.cells, racing.race.slo_s)
    pairs = _Pairs(stored)
    raced = [cell for cell in results.cells if not (cell.left and cell.left.unraced)]
    recommendations = recommend(raced, max_loss=racing.plan.request.max_loss, pairs=pairs, misses_slo=over_slo)
    recommendations = [_with_prompts(rec, stored) for rec in recommendations]
    servers = {line.cell: line.server for line in stored.preparation if line.server is not None}
    serving = deployment(recommendations, results.cells, racing.plan, servers)
    whole = not any(cell.status == "partial" for cell in results.cells)
    decision = Decision(
        schema_version=SCHEMA_VERSION,
        run_id=results.run_id,
        headline=headline(recommendations),
        complete=whole or not any(rec.is_open for rec in recommendations),
        max_loss=racing.plan.request.max_loss,
        slo_s={str(name): limit for name, limit in race.slo_s.items()},
        over_slo=over_slo,
        recommendations=recommendations,
        looks=[_looks(racing, group) for group in racing.plan.groups] if looks is None else looks,
        refused=race.refused | unraced(results),
        spent=spent_on(stored),
        serving={arm: {engine: text for engine, (text, _) in of.items()} for arm, of in serving.items()},
        schedule=measured(racing.run, recommendations),
        serving_notes={arm: {engine: note for engine, (_, note) in of.items() if note} for arm, of in serving.items()},
    )
    racing.run.directory.write_json(FILE, dump(decision))
    return decision


def unraced(results: Results) -> dict[str, str]:
    """Return the arms that the time budget had no room for, and why."""
    gone = {f"{cell.arm} at batch size {cell.batch_size}": cell.left for cell in results.cells}
    return {name: left.reason for name, left in gone.items() if left is not None and left.unraced}


def _with_prompts(rec: Recommendation, stored: Stored) -> Recommendation:
    choice = rec.same_tokens or rec.within_loss or rec.undecided
    names = (rec.baseline, choice.arm if choice else rec.baseline)
    group = next(g for g in stored.plan.groups if (g.suite, g.batch_size) == (rec.suite, rec.batch_size))
    arms = {stored.cells[name].cell.arm: stored.cells[name] for name in group.cells}
    clean = set.intersection(*(arms[name].valid if name in arms else set() for name in names))
    prompts = sum(len(group.blocks[block]) for _, block in clean)
    rec = rec.changed(prompts=prompts, planned=sum(map(len, group.blocks)))
    return rec.changed(text=sentence(rec))


class _Pairs:
    """The comparison of two cells' times on their common blocks, however often the race has looked."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self.group = stored, stored.plan.group

    def faster(self, cell: ResultCell, other: ResultCell) -> bool:
        """Return whether a cell is surely faster than another, at the level that the race gives to two arms."""
        low = self._ratio(cell, other, among=len(self.group(cell.cell).cells) - 1).ci_low
        return low is not None and low > 1

    def bounds(self, cell: ResultCell, other: ResultCell, *, tested: bool = False) -> Bounds:
        """Return the speed of a cell over another at the level that is shared by the looks.

        tested: all arms share the level, too, and the interval is symmetric on the log scale, to its longer side.
        """
        among = self._compared(cell, other) if tested else 1
        level = 1 - 2 * statistics.WORD_LEVELS["faster"] / (self.stored.looks(self.group(cell.cell)) * among)
        value, low, high, *_ = self._ratio(cell, other, among=among)
        if tested and value and low and high:
            reach = max(high / value, value / low)
            low, high = value / reach, value * reach
        return Bounds(low, high, level)

    def _compared(self, cell: ResultCell, other: ResultCell) -> int:
        base = self.stored.cells[other.cell]
        group = (self.stored.cells[name] for name in self.group(cell.cell).cells)
        of_base = (data for data in group if other.arm in data.cell.baselines and not data.error)
        return sum(data.beside(base) is not None for data in of_base)

    def _ratio(self, cell: ResultCell, other: ResultCell, *, among: int) -> statistics.Ratio:
        """Return the time of the other over that of the cell. among: claims that share the level beside the looks."""
        ours, theirs = self.stored.cells[cell.cell], self.stored.cells[other.cell]
        pair = ours.beside(theirs)
        share = partial(statistics.shared_ratio, looks=self.stored.looks(self.group(cell.cell)), among=among)
        if pair is None or not pair[0].samples:
            return share((), ())
        return share(pair[1].by_block("wall_s"), pair[0].by_block("wall_s"))


def _looks(racing: Racing, group: Group) -> Looks:
    made = racing.outcome(group).made
    return Looks(suite=group.suite, batch_size=group.batch_size, planned=racing.looks(group), made=made)


def spent_on(stored: Stored) -> RaceCost:
    """Return forwards and seconds of the decoded blocks, and those of every cell on every block of its group.

    A cell that did not start counts with the mean of its group.
    """
    used, full = [0.0, 0.0], [0.0, 0.0]
    for group in stored.plan.groups:
        timings = [stored.cells[name].timings for name in group.cells]
        of_cells = [(sum(t.batch_forwards or 0 for t in lines), sum(t.wall_s for t in lines)) for lines in timings]
        blocks = sum(map(len, timings))
        for place in (0, 1):
            total = sum(of_cell[place] for of_cell in of_cells)
            used[place] += total
            mean = total / blocks if blocks else 0.0
            for lines, of_cell in zip(timings, of_cells, strict=True):
                full[place] += len(group.blocks) * (of_cell[place] / len(lines) if lines else mean)
    forwards = [round(used[0]), round(full[0])] if used[0] else [None, None]
    return RaceCost(forwards=forwards[0], forwards_full=forwards[1], decoding_s=used[1], decoding_full_s=full[1])
