"""Suites: the interface, the base classes, and scoring of answers."""
