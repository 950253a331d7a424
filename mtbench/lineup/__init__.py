"""Which arms run on these checkpoints, and the plan of their work."""
