"""Benchmarks, one file each, imported as `mtbench.suites.<file>`; `mtbench ls suites` lists them."""
