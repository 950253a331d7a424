"""`mtbench load`: real clients load servers; quality and speed come from the same requests."""
