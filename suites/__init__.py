"""Benchmarks, one file each, imported as `mtbench.suites.<file>` and named by `mtbench ls suites`."""
