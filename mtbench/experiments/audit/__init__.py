"""`mtbench audit`: why two outputs differ, by the reference model."""
