"""Serving engines, one file each, imported as `mtbench.engines.<file>` and named by `mtbench ls engines`."""
