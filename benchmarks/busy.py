"""Run a command beside a program that computes all the time: what does it lose?

    python benchmarks/busy.py [--threads 2] [--python-loop] -- mtbench choose …

The program multiplies small matrices by PyTorch with so many threads; with `--python-loop` it is a loop of Python. The
last line has the wall time of the command and its exit code, which is that of this script, too.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import checkout  # noqa: F401

from mtbench.programs.processes import launched

LOOP = "print(flush=True)\nwhile True: pass"
PRODUCTS = """
import torch
row, weights = torch.randn(1, 576), [torch.randn(576, 1536) for _ in range(30)]
print(flush=True)
with torch.inference_mode():
    while True:
        for weight in weights: row @ weight
"""


@contextmanager
def busy(code: str, threads: int) -> Iterator[None]:
    """Keep a program that computes beside the block. Its threads spin, as PyTorch's do by default."""
    spins = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    variables = spins | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(launched([sys.executable, "-c", code]), env=variables, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()  # it begins
            yield
            if program.poll() is not None:
                sys.exit("the program beside the command has ended: its time does not count")
        finally:
            program.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python-loop", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with busy(LOOP if options.python_loop else PRODUCTS, options.threads):
        began_at = time.monotonic()
        code = subprocess.run(options.command, check=False).returncode
        wall_s = time.monotonic() - began_at
    print(f"wall time {wall_s:.1f} s, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
