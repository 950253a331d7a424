"""A decoding method and a suite that mtbench loads by this package's entry points."""
