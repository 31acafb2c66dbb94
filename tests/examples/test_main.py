from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.train_lm import data
from examples.train_lm.__main__ import exit_code, main
from examples.train_lm.config import CONFIGS
from examples.train_lm.loop import Result
from policies import CapacityOverflowError
from tests.examples import tiny
from tests.examples.tiny import train

ROOT = Path(__file__).parents[2]
# Small models overflow at any step, so a factor of an eighth, and a ladder of two rungs.
POLICIES = {
    "static_factor": ["policy.factor=null"],
    "drop": ["policy.factor=0.125"],
    "retry_dropless": ["policy.factor=0.125"],
    "adaptive_grow": ["policy.initial_factor=0.125", "policy.growth=64"],
}


@pytest.mark.timeout(600)  # many programs to compile
def test_every_policy_trains_reports_and_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = {
        name: train(capsys, tmp_path / name, "--config", str(CONFIGS / f"{name}.yaml"), *words)
        for name, words in POLICIES.items()
    }
    for name, run in runs.items():
        assert run.code == 0, name
        assert [record["step"] for record in run.records] == list(range(tiny.STEPS)), name
        assert run.figure.startswith(b"\x89PNG"), name
        for said in ("policy", "validation loss", "unigram entropy", "demand", "capacity", "overflows", "retries"):
            assert re.search(rf"^  {said} +\S", run.out, re.MULTILINE), (name, said)
        assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s, factor \S+, overflows \d+, retries \d+", run.err), name
        assert run.records[-1]["loss"] < run.records[0]["loss"] - 0.3, name

    losses = {name: [record["loss"] for record in run.records] for name, run in runs.items()}
    retries = {name: [record["retries"] for record in run.records] for name, run in runs.items()}
    slots = {name: [(record["slots"], record["final_slots"]) for record in run.records] for name, run in runs.items()}
    # A retried run is the dropless run; 1e-5 for the rounding of eight steps, one after the other.
    assert losses["retry_dropless"] == pytest.approx(losses["static_factor"], rel=1e-5)
    assert losses["adaptive_grow"] == pytest.approx(losses["static_factor"], rel=1e-5)
    assert losses["drop"] != pytest.approx(losses["static_factor"], rel=1e-3)  # it was not so by itself
    assert retries["retry_dropless"] == [1] * tiny.STEPS
    assert retries["adaptive_grow"] == [1] + [0] * (tiny.STEPS - 1)
    assert slots["static_factor"] == [(256, 256)] * tiny.STEPS
    assert slots["drop"] == [(8, 8)] * tiny.STEPS
    assert slots["retry_dropless"] == [(8, 256)] * tiny.STEPS
    assert slots["adaptive_grow"] == [(8, 256)] + [(256, 256)] * (tiny.STEPS - 1)
    for name, run in runs.items():
        dropped = [record["dropped"] for record in run.records]
        assert all(share > 0.5 if name == "drop" else share == 0 for share in dropped), name


def test_ctrl_c_saves_and_stops_with_the_summary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, handler = data.batch, signal.getsignal(signal.SIGINT)

    def interrupted(*args: Any, step: int, **kwargs: Any) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return batch(*args, step=step, **kwargs)

    monkeypatch.setattr(data, "batch", interrupted)
    run = train(capsys, tmp_path / "run", "policy.factor=0.125", "checkpoint_every=3")
    assert run.code == 130
    assert "saved     4 steps" in run.out
    assert "stopping after the steps in flight" in run.err
    assert "Traceback" not in run.err
    assert [record["step"] for record in run.records] == [0, 1, 2, 3]
    assert "steps            4 of 8" in run.out
    assert "validation loss  not evaluated" in run.out
    assert run.figure.startswith(b"\x89PNG")
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_quits_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(data, "batch", impatient)
    run = train(capsys, tmp_path / "run")
    assert run.code == 130
    assert run.err.endswith("train_lm: stopped at once\n")
    assert not run.records


def test_an_overflow_that_stops_the_run_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--config", str(CONFIGS / "static_factor.yaml"), "policy.factor=0.125"]
    run = train(capsys, tmp_path / "run", *words)
    assert run.code == 3
    last = run.err.splitlines()[-1]
    assert last.startswith("train_lm: step 0 sent ")
    assert re.search(r"factor .*\d\.\d", last)
    assert "steps         0 of 8" in run.out
    assert not run.figure


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"stopped": signal.SIGINT}, 130),
        ({"stopped": signal.SIGTERM}, 0),
        ({"stopped": signal.SIGTERM, "saved": 0}, 143),
        ({"error": CapacityOverflowError(3, 9, 4, 2.25)}, 3),
        ({"error": OSError("gone")}, 4),
    ],
)
def test_the_exit_code_tells_how_it_ended(change: dict[str, Any], code: int) -> None:
    result = Result(
        records=[], validation_loss=None, executables=1, compile_seconds=0, stopped=None, error=None, saved=3
    )
    assert exit_code(result._replace(**change)) == code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stepz=3"], r"unknown keys \['stepz'\]"),
        (["steps=0"], "steps must be an integer of at least 1, got 0"),
        (["steps=ten"], "steps must be an integer"),
        (["steps"], "'steps' is not an option"),
        (["policy.name=none"], 'a policy config needs a "name", one of'),
        (["policy.factor=-1"], "factor must be a finite number above 0"),
        (["--config", "gone.yaml"], "config must be a YAML file"),
        (["--data", "gone.txt"], "data must be a file or a folder of text, got 'gone.txt'"),
        (["--data", os.devnull], "data must be a file or a folder of text"),
        (["seq_len=20000"], "too little text"),
        (["batch_size=12"], "gives 12 sequences at once, which the 8 devices cannot share"),
        (["resume=maybe"], r"resume must be one of \('auto', 'never'\), got 'maybe'"),
        (["checkpoint_every=-1"], "checkpoint_every must be an integer of at least 0"),
        (["keep=0"], "keep must be an integer of at least 1"),
        (["expert_parallel=0"], "expert_parallel must be an integer of at least 1"),
    ],
)
def test_bad_arguments_are_one_line_and_write_nothing(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*tiny.ARGV, *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(rf"train_lm: error: .*{message}.*\n", err)
    assert not list(tmp_path.iterdir())


def test_an_empty_text_and_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert main([*tiny.ARGV, f"data={tmp_path / 'empty'}", f"out={tmp_path / 'run'}"]) == 2
    assert re.fullmatch("train_lm: error: data must be text, but .* holds none.*\n", capsys.readouterr().err)
    assert main([*tiny.ARGV, f"out={tmp_path / 'empty'}"]) == 2
    assert re.fullmatch("train_lm: error: .*empty.*\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: python -m examples.train_lm" in out
    assert "micro_batches: " in out


def test_as_a_command_it_simulates_eight_devices(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "examples.train_lm", "--batch-size", "12", "--data", tiny.TEXT]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "which the 8 devices cannot share" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
