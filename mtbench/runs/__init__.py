"""From a plan to the lines on disk."""
