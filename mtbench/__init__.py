"""mtbench compares multi-token decoding methods on your model and your GPU, with numbers you can defend."""

__version__ = "0.1.0"
