"""Decode a plan and score its answers."""
