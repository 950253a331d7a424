"""mtbench as a library: a comparison on the embedded checkpoints, as data frames. Takes seconds on a CPU.

python examples/library.py DIR
"""

import sys

import mtbench


def main(out: str) -> None:
    results = mtbench.run(
        out=out,
        method=["ar:on=mars", "mars:tau=1|0.8"],  # `ar` on the same checkpoint is the baseline
        limit=8,
        batch_size=8,
        rounds=1,
    )
    cells = results.to_frame()
    print(cells[["arm", "accuracy.value", "tokens_per_forward", "speedup.value", "speedup.baseline"]].to_string())

    items = mtbench.read(out).items()  # the same run, read from its directory
    print(items.groupby("arm")[["tokens", "forwards", "score"]].mean().to_string())


if __name__ == "__main__":
    main(sys.argv[1])
