"""A tiny run on fixed text: the model of the quick benchmark, so that what one compiles serves the other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.policies import QUICK

TEXT = str(Path(__file__).parents[2] / "LICENSE")
OVERRIDES = {**QUICK, "data": TEXT}
ARGV = [f"{key}={value}" for key, value in OVERRIDES.items()]
STEPS = int(QUICK["steps"])
