"""`mtbench audit`: two outputs differ, and the reference model says why."""
