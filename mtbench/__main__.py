"""Run the `mtbench` command by `python -m mtbench`."""

import sys

from mtbench.cli.main import main

sys.argv[0] = "mtbench"  # run records store the command by this name
main()
