"""Formats of drafts that read the target's hidden states, one file each (mtbench/models/feature_draft.py)."""
