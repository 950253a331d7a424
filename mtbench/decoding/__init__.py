"""The decode loop, and what a method is."""
