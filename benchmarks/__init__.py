"""Measurements; each module is a command, ``python -m benchmarks.NAME``."""
