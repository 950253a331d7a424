"""Objectives, the trainer, and the recipes of whole families."""
