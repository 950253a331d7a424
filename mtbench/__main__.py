"""`python -m mtbench` is the command `mtbench`."""

import sys

from mtbench.cli.main import main

sys.argv[0] = "mtbench"  # what records call it
main()
