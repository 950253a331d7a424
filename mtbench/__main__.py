"""`python -m mtbench` is the command `mtbench`."""

from mtbench.cli import main

main()
