"""Results of other tools: their files become figures with their owners' definitions. Nothing here computes a ratio."""
