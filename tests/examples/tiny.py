"""A tiny run on fixed text: the model of the quick benchmark, so that what one compiles serves the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.policies import QUICK
from examples.train_lm.__main__ import main

TEXT = str(Path(__file__).parents[2] / "LICENSE")
OVERRIDES = {**QUICK, "data": TEXT}
ARGV = [f"{key}={value}" for key, value in OVERRIDES.items()]
STEPS = int(QUICK["steps"])


class Run(NamedTuple):
    code: int
    out: str
    err: str
    records: list[dict[str, Any]]
    figure: bytes


def train(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Run:
    capsys.readouterr()
    code = main([*ARGV, f"out={folder}", *words])
    log, figure = folder / "steps.jsonl", folder / "run.png"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Run(code, *capsys.readouterr(), records, figure.read_bytes() if figure.exists() else b"")
