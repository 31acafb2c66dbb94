"""A short chaos run, and that its comparison finds what a wrong checkpoint leads to."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from examples.train_lm import chaos
from examples.train_lm.config import Config
from tests.examples import tiny

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos") / "out"


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    """What a run with two kills prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(map(str, words))))
        code = chaos.main(["--kills", "2", f"steps={STEPS}", f"out={folder}", f"data={tiny.TEXT}", "seed=1"])
    assert code == 0, said
    return said[-1]


def config_of(folder: Path, name: str) -> Config:
    settings = chaos.settings_of({"steps": str(STEPS), "out": str(folder), "data": tiny.TEXT})
    return chaos.config_of(settings, name)


def test_killed_twice_it_comes_to_the_same(output: str) -> None:
    assert re.search(r"^  kills +2$", output, re.MULTILINE)
    assert re.search(r"^  verdict +every step once, in order, the same to the bit$", output, re.MULTILINE)
    twice = re.search(rf"of {STEPS} steps, (\d+) of which run twice", output)
    assert twice and 0 < int(twice[1]) < STEPS


def repeat_a_step(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], *lines[2:]]))


def change_a_loss(log: Path) -> None:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    entries[5]["loss"] += 1e-9
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda out: repeat_a_step(out / "steps.jsonl"), r"the log holds the steps \[0, 1, 2, 2, 3"),
        (lambda out: change_a_loss(out / "steps.jsonl"), r"step 5: \['loss'\] differ"),
        (lambda out: chaos.spoil(out / "checkpoints", "step"), "step: 20 alone, 21 after kills"),
        (lambda out: chaos.spoil(out / "checkpoints", "policy_state"), "policy_state: .*overflows=0"),
        (lambda out: shutil.rmtree(out / "checkpoints" / "20"), r"state.*differs"),
    ],
)
def test_the_comparison_finds_a_difference(
    output: str, folder: Path, tmp_path: Path, change: Callable[[Path], None], found: str
) -> None:
    alone, killed = config_of(folder, "alone"), config_of(folder, "killed1")
    assert chaos.compare(alone, killed) == []
    other = dataclasses.replace(killed, out=str(tmp_path / "other"))
    shutil.copytree(killed.out_dir, other.out_dir)
    change(other.out_dir)
    assert any(re.search(found, difference) for difference in chaos.compare(alone, other))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kill=3"], "unknown keys"),
        (["wrong=all"], "wrong must be one of"),
        (["kills=0"], "kills and steps must be at least 1"),
    ],
)
def test_bad_arguments_are_told(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert chaos.main(words) == 2
    assert message in capsys.readouterr().err
