"""The plan of a run, its stored lines, and their files."""
