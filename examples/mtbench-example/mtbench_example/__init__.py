"""A decoding method and a suite that mtbench finds by this package's entry points."""
