"""How often `mtbench choose` is wrong, and what it saves: simulated races over the blocks of a run that was measured.

    mtbench run --suite arithmetic --batch-size 8 --rounds 1 --limit 240 --method ar --method … -o RUN
    python benchmarks/choose_errors.py RUN [--races 1000] [--blocks 120] [--max-loss 1]
    python benchmarks/choose_errors.py [--races 1000] [--blocks 64]      # without a run: made-up blocks

A race draws blocks of the run, with their times, answers and scores, so that all block-to-block noise is that of the
machine. Its arms are those of the run, scaled by a known factor, and made-up ones near the leader: the time of an arm
with the noise of another block. Their truth is that of all blocks of the run. Lossy arms lose a known share of the
answers; some lose exactly what is accepted, where an error is most likely.

Without a run, times are log-normal, and t bounds are tried beside the bounds of a race: one bound at the levels of a
race, where sizes of blocks differ and where the ratio of two arms differs, too; whole races in which all arms but one
are just over 2 % slower than that one; and the blocks of races whose arms differ.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from mtbench import statistics
from mtbench.experiments.choose.race import CLOSE, Block, RacedArm, looks, replay
from mtbench.experiments.choose.runner import Racing
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Race
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.statistics import as_share

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from made_races import Truth, chosen_is_behind, decide, draw, missed_any, missed_same, wrongly_kept

LOSSES = (0.0, 0.5, 1.0, 1.0, 2.0, 10.0)  # of made-up lossy arms, in shares of the accepted loss
NEAR = 0.05  # made-up arms are within this share of an arm of the run
SPREADS, NOISE, ARMS = (0.3, 0.7, 1.0), 0.1, 9  # log standard deviations
BLOCKS = (6, 8, 11, 16, 24, 36, 64)
LEVELS = (0.025 / 5, 0.025 / 50)  # of a bound
TRIALS, AT_ONCE = 400_000, 40_000

Times = npt.NDArray[np.float64]
Rule = Callable[..., statistics.Ratio]


def t_ratio(above: Sequence[float], below: Sequence[float], *, looks: int, among: int = 1) -> statistics.Ratio:
    return statistics.ratio_of_totals([above], [below], level=1 - 0.05 / (looks * max(1, among)))


RULES: dict[str, Rule] = {"t": t_ratio, "race": statistics.shared_ratio}


def t_interval(above: Times, below: Times, level: float) -> Times:
    """Return the bounds (2, trials) of `ratio_of_totals` on the log scale."""
    from scipy.special import stdtrit

    units = above.shape[1]
    x, y = (wall / wall.sum(axis=1, keepdims=True) for wall in (above, below))
    reach: Times = stdtrit(units - 1, (1 + level) / 2) * np.sqrt(units / (units - 1) * ((x - y) ** 2).sum(axis=1))
    centre: Times = np.log(above.sum(axis=1) / below.sum(axis=1))
    return np.stack([centre - reach, centre + reach])


def failures(units: int, spread: float, ratios: float, rng: np.random.Generator) -> dict[str, float]:
    """Return by rule how often a bound fails, over its level: the most of both bounds and both levels."""
    counts = {name: np.zeros((len(LEVELS), 2)) for name in RULES}
    for _ in range(TRIALS // AT_ONCE):
        size, noise, other = (sd * rng.standard_normal((AT_ONCE, units)) for sd in (spread, NOISE, ratios))
        below = np.exp(size + NOISE * rng.standard_normal(size.shape) + other - ratios**2 / 2)
        for place, level in enumerate(LEVELS):
            found = t_interval(np.exp(size + noise), below, 1 - 2 * level)
            wider = statistics.log_normal_interval(np.exp(size + noise), below, level=1 - 2 * level)
            of_race = np.array([np.minimum(found[0], wider[0]), np.maximum(found[1], wider[1])])
            for name, (low, high) in (("t", found), ("race", of_race)):
                counts[name][place] += [(low > 0).sum(), (high < 0).sum()]
    return {name: float((count / TRIALS / np.array(LEVELS)[:, None]).max()) for name, count in counts.items()}


def made_up(races: int, blocks: int, seed: int) -> None:
    """Print how often bounds and races fail, and the blocks that races decode."""
    at = looks(blocks)
    table = Table("blocks differ in", "spread", *map(str, BLOCKS), title="failures of a bound / level: t, race")
    for kind in ("size", "size and ratio"):
        for spread in SPREADS:
            rng = np.random.default_rng(seed)
            cells = [failures(units, spread, spread * (kind != "size"), rng) for units in BLOCKS]
            table.add_row(kind, str(spread), *(f"{cell['t']:.1f} {cell['race']:.1f}" for cell in cells))
    Console().print(table)
    table = Table(
        "spread", "bounds", "the best arm is lost", "blocks decoded", title=f"{races:,} races, {blocks} blocks"
    )
    near = [Truth("best", 1.2), *(Truth(f"a{n}", 1.2 / (1.001 + CLOSE)) for n in range(ARMS - 1))]
    for spread in SPREADS:
        for name, rule in RULES.items():
            statistics.shared_ratio = rule
            rng, lost, used = np.random.default_rng(seed), 0, 0
            for _ in range(races):
                outcome = replay(draw(near, blocks, 0, rng, spread=NOISE, sizes=spread), at, 2)
                lost += any(gone.lost and gone.cell == "best" for gone in outcome.left)
                far = [Truth(f"a{n}", float(speed)) for n, speed in enumerate(np.exp(rng.normal(0.1, 0.3, ARMS)))]
                left = replay(draw(far, blocks, 0, rng, spread=NOISE, sizes=spread), at, 2).left
                used += sum(departure.block for departure in left) + blocks * (1 + ARMS - len(left))
            share = statistics.wilson(lost, races)
            interval = f"[{share.ci_low:.1%}, {share.ci_high:.1%}]"
            table.add_row(str(spread), name, f"{share.value:.1%} {interval}", f"{used / races:.0f}")
    Console().print(table)


def measured(path: Path) -> list[RacedArm]:
    """Return the arms of the largest batch size of a run."""
    run = Run.open(RunDirectory.open(path))
    group = max(run.plan.groups, key=lambda group: group.batch_size)
    run.race = Race(schema_version=2, request={}, slo_s={}, refused={}, looks={})
    found = Racing(run, Execution()).entrants(group)
    clean = [b for b in range(len(group.blocks)) if all(len(e.blocks) > b and e.blocks[b].wall_s for e in found)]
    return [replace(e, blocks=[e.blocks[b] for b in clean]) for e in found]


def walls(entrant: RacedArm) -> npt.NDArray[np.float64]:
    return np.array([block.wall_s for block in entrant.blocks], float)


def simulated(
    arms: Sequence[RacedArm], blocks: int, max_loss: float, rng: np.random.Generator
) -> tuple[list[RacedArm], list[Truth]]:
    """Return the entrants of a race, and their truth."""
    plain = next(e for e in arms if e.reference)
    drawn, base = rng.integers(0, len(plain.blocks), blocks), walls(plain)
    scores = [{f"{n}/{item}": s for item, s in plain.blocks[b].scores.items()} for n, b in enumerate(drawn)]
    entrants = [_entrant(plain, base[drawn], scores, same=True)]
    truths = []
    for arm in [e for e in arms if not e.reference]:
        time = walls(arm)
        noise = np.log(time / base)
        noise -= noise.mean()
        factor = float(np.exp(rng.normal(0, 0.2)))
        lossy = not arm.claims_lossless
        loss = float(rng.choice(LOSSES)) * max_loss if lossy else None
        own = scores if loss is None else _lossy(scores, as_share(loss), rng)
        near = time.mean() * factor * (1 + rng.uniform(-NEAR, NEAR))
        residual = np.exp(rng.choice(noise, blocks)) / np.exp(noise).mean()
        made = {"measured": time[drawn] * factor, "near": base[drawn] / base.mean() * near * residual}
        true = {"measured": time.mean() * factor, "near": near}
        for kind, wall_s in made.items():
            name = f"{arm.name}-{kind}"
            entrants.append(_entrant(replace(arm, name=name), wall_s, own, same=not lossy))
            truths.append(Truth(name, float(base.mean() / true[kind]), loss))
    return entrants, truths


def _entrant(
    arm: RacedArm, wall_s: npt.NDArray[np.float64], scores: Sequence[dict[str, float]], *, same: bool
) -> RacedArm:
    blocks = [Block(float(wall), of_block, same) for wall, of_block in zip(wall_s, scores, strict=True)]
    return replace(arm, blocks=blocks, claims_lossless=same, allows_rounding=False, accuracy=None)


def _lossy(scores: Sequence[dict[str, float]], loss: float, rng: np.random.Generator) -> list[dict[str, float]]:
    """Return scores with a known expected loss: 1 % of the items are gained, and 1 % and the loss are lost."""
    right = np.mean([score for of_block in scores for score in of_block.values()])
    lost, gained = (0.01 + loss) / right, 0.01 / (1 - right)
    return [
        {item: float(rng.random() >= lost if score else rng.random() < gained) for item, score in of_block.items()}
        for of_block in scores
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--races", type=int, default=1000)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--max-loss", type=float, default=1.0, help="in points")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.run is None:
        made_up(given.races, given.blocks or 64, given.seed)
        return
    given.blocks = given.blocks or 120
    arms, rng = measured(given.run), np.random.default_rng(given.seed)
    counts = dict.fromkeys(("same", "any", "behind", "kept", "cannot tell", "plain", "not told apart", "undecided"), 0)
    used = full = 0
    for _ in range(given.races):
        entrants, truths = simulated(arms, given.blocks, given.max_loss, rng)
        found, _, decoded = decide(entrants, given.max_loss)
        used, full = used + decoded, full + given.blocks * len(entrants)
        counts["same"] += missed_same(found, truths)
        counts["any"] += missed_any(found, truths, given.max_loss)
        counts["behind"] += chosen_is_behind(found, truths, given.max_loss)
        counts["kept"] += wrongly_kept(found, truths, given.max_loss)
        counts["not told apart"] += bool(found.as_good)
        counts["undecided"] += found.undecided is not None
        if found.word != "use":
            counts[found.word] += 1
    table = Table(
        "of all races", "share", title=f"{given.races:,} races of {len(arms) * 2 - 2} arms, {given.blocks} blocks"
    )
    rows = {
        "an arm with the same tokens is over 2 % faster, and is not named": counts["same"] / given.races,
        "an allowed arm is over 2 % faster, and is not named": counts["any"] / given.races,
        "an allowed arm is over 2 % faster than the one to use, named or not": counts["behind"] / given.races,
        "an arm is wrongly said to lose no more than accepted": counts["kept"] / given.races,
        "blocks decoded, of the full grid": used / full,
        "the decision is plain decoding": counts["plain"] / given.races,
        "no conclusion": counts["cannot tell"] / given.races,
        "arms are named that are not told apart": counts["not told apart"] / given.races,
        "a faster arm is named whose accuracy or speed is open": counts["undecided"] / given.races,
    }
    for name, share in rows.items():
        table.add_row(name, f"{100 * share:.1f} %")
    Console().print(table)


if __name__ == "__main__":
    main()
