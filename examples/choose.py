"""mtbench as a library: which method to use, by a race. A method of your own takes part. Takes seconds on a CPU.

python examples/choose.py DIR
"""

import sys
from pathlib import Path

import mtbench

OWN = Path(__file__).parent / "mtbench-example" / "mtbench_example" / "bigram.py"  # registers the method `bigram`


def main(out: str) -> mtbench.Chosen:
    chosen = mtbench.choose(
        out=out,
        method=["speculative", "mars:tau=0.5", "bigram"],  # without it all that can run
        plugin=OWN,
        max_loss=2,
        batch_size=4,
        limit=32,
    )
    print(chosen.decision["headline"])
    cells = chosen.results.to_frame()
    print(cells[["arm", "batch_size", "status", "accuracy.value", "speedup.value"]].to_string())
    return chosen


if __name__ == "__main__":
    main(sys.argv[1])
