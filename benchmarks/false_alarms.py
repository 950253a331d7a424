"""How often would the gate fail without a reason? From real processes of one build, paired at random.

    mtbench gate --base ENV --head ENV --pairs 30 -o DIR [plan options]     # one build twice: 60 processes
    python benchmarks/false_alarms.py DIR [--trials 1000]

Each trial draws the processes of DIR in random order, makes pairs of them and lets the gate decide. A FAIL is a false
alarm, for all processes are of one build. Fresh pairs, which confirm a FAIL, are drawn in another random order.
"""

import argparse
import math
import random
from collections import Counter
from pathlib import Path
from statistics import stdev

from mtbench.experiments.gate import decision
from mtbench.experiments.gate.pairs import read_pairs
from mtbench.statistics import wilson


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--max-slowdown", type=float, default=2, help="in percent")
    arguments = parser.parse_args()
    margin = arguments.max_slowdown / 100
    pairs = read_pairs(arguments.directory / "pairs")
    cells = sorted(set.intersection(*(set(pair.cells) for pair in pairs)))
    sides = [({c: p.cells[c].base.wall_s for c in cells}, {c: p.cells[c].head.wall_s for c in cells}) for p in pairs]
    processes = [process for pair in sides for process in pair]
    chance = random.Random(0)
    noise = {cell: stdev(_drawn(processes, cells, chance)[cell]) for cell in cells}
    print(f"{len(processes)} processes; standard deviation of a pair:", {c: f"{sd:.2%}" for c, sd in noise.items()})
    most = len(processes) // 2
    for name, at in (
        ("as many looks as pairs", decision.looks(None, margin, most)),
        ("looks of 1 % noise", decision.looks(0.01, margin)),
    ):
        words: Counter[str] = Counter()
        for _ in range(arguments.trials):
            decided = decision.decide(_drawn(processes, cells, chance), at, margin)
            words[decided.word] += 1
            if decided.word == "FAIL":
                wanted = decision.confirmation_pairs(decided, at)
                fresh = {cell: d[:wanted] for cell, d in _drawn(processes, cells, chance).items()}
                words["confirmed"] += bool(decision.confirmed(decided, fresh))
        alarms = wilson(words["confirmed"], arguments.trials)
        print(
            f"{name} {at}: {dict(words)}; false alarms {alarms.value:.2%} [{alarms.ci_low:.2%}, {alarms.ci_high:.2%}]"
        )


def _drawn(processes: list[dict[str, float]], cells: list[str], chance: random.Random) -> dict[str, list[float]]:
    """Return log ratios by cell of the seconds of processes in random order, two by two."""
    order = chance.sample(range(len(processes)), len(processes))
    seconds = {cell: [process[cell] for process in processes] for cell in cells}
    return {
        cell: [math.log(of_cell[b] / of_cell[a]) for a, b in zip(order[::2], order[1::2], strict=False)]
        for cell, of_cell in seconds.items()
    }


if __name__ == "__main__":
    main()
