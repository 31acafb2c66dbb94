"""A run that is stopped and goes on; test_main has Ctrl-C, test_chaos has kills."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.train_lm import data, resume
from examples.train_lm.config import Config, parse
from tests.examples import tiny
from tests.examples.tiny import train

WORDS = ("policy.factor=0.125", "checkpoint_every=3")


def numbers(run: tiny.Run) -> list[dict[str, Any]]:
    """The log without the times."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.records]


@pytest.mark.timeout(600)
def test_stopped_twice_it_comes_to_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(capsys, tmp_path / "whole", *WORDS)
    assert "saved     8 steps" in whole.out
    batch, folder, trouble = data.batch, tmp_path / "stopped", dict[int, Any]()

    def troubled(*args: Any, step: int, **kwargs: Any) -> Any:
        trouble.pop(step, lambda: None)()
        return batch(*args, step=step, **kwargs)

    def unreadable() -> None:
        raise OSError("text.txt: no such device")

    monkeypatch.setattr(data, "batch", troubled)
    trouble[1] = lambda: signal.raise_signal(signal.SIGTERM)
    run = train(capsys, folder, *WORDS)
    assert (run.code, len(run.records)) == (0, 2)  # step 1 was under way
    assert "saved     2 steps; the same command goes on from there" in run.out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with (folder / "steps.jsonl").open("a") as log:  # a life that was killed after its last checkpoint
        log.write(json.dumps(run.records[1] | {"step": 2}) + '\n{"step": 3, "lo')
    trouble[4] = unreadable
    run = train(capsys, folder, *WORDS, "keep=1")
    assert (run.code, len(run.records)) == (4, 4)
    assert "resumed after 2 steps\n  changed: config.keep: 3 -> 1\n" in run.out
    assert run.err.endswith("train_lm: error: text.txt: no such device\n")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["4"]

    run = train(capsys, folder, *WORDS, "keep=1")
    assert run.code == 0
    assert numbers(run) == numbers(whole)
    [told, wanted] = (re.search(r"validation loss .*", one.out) for one in (run, whole))
    assert told and wanted and told[0] == wanted[0]

    run = train(capsys, folder, *WORDS, "width=64")
    assert run.code == 2
    assert "/8 does not fit: " in run.err
    assert "was saved as float32[" in run.err
    assert len(run.records) == 8


def test_checkpoints_that_cannot_be_read_stop_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    run = train(capsys, tmp_path, *WORDS)
    assert run.code == 4
    assert "train_lm: error: none of the checkpoints in" in run.err
    assert "compiling" not in run.err


def test_to_start_over_must_be_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert train(capsys, tmp_path).code == 2
    with pytest.raises(ValueError, match="holds the checkpoints of an earlier run; .* resume=never to start over"):
        resume.check(of(tmp_path))
    for number in (1, 2):
        config = of(tmp_path, "resume=never")
        resume.check(config)
        resume.set_aside(config)
        assert not (tmp_path / "checkpoints").exists()
        assert (tmp_path / f"checkpoints.old{number}").exists()
        (tmp_path / "checkpoints").mkdir()


def of(folder: Path, *words: str) -> Config:
    return parse([*tiny.ARGV, f"out={folder}", *words])


@pytest.mark.parametrize(
    ("content", "steps", "kept", "told"),
    [
        ("", 0, [], ""),
        (None, 0, [], ""),
        ('{"step": 0}\n{"step": 1}\n{"step": 2}\n', 2, [0, 1], ""),
        ('{"step": 0}\n{"st', 1, [0], ""),
        ('{"step": 1}\n', 2, [1], "tells 1 of the 2 steps"),
        (None, 2, [], "tells 0 of the 2 steps"),
    ],
)
def test_the_log_is_cut_to_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, steps: int, kept: list[int], told: str
) -> None:
    log = tmp_path / "steps.jsonl"
    if content is not None:
        log.write_text(content)
    assert [entry["step"] for entry in resume.cut_log(log, steps)] == kept
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == kept
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]
