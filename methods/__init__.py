"""Decoding strategies, one file each, imported as `mtbench.methods.<file>` and named by `mtbench ls methods`."""
