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
    [(repeat_a_step, r"the log holds the steps \[0, 1, 2, 2, 3"), (change_a_loss, r"^step 5: \['loss'\] differ$")],
)
def test_a_log_with_a_difference_is_found(
    output: str, folder: Path, tmp_path: Path, change: Callable[[Path], None], found: str
) -> None:
    alone, killed = (folder / name / "steps.jsonl" for name in ("alone", "killed1"))
    assert chaos.compare_logs(alone, killed) == []
    log = Path(shutil.copy(killed, tmp_path))
    change(log)
    [difference] = chaos.compare_logs(alone, log)
    assert re.search(found, difference)


def test_a_checkpoint_that_forgot_something_is_found(output: str, folder: Path, tmp_path: Path) -> None:
    alone, killed = chaos.final(config_of(folder, "alone")), config_of(folder, "killed1")
    found = {}
    for wrong in chaos.WRONG[1:]:
        other = dataclasses.replace(killed, out=str(tmp_path / wrong))
        shutil.copytree(killed.out_dir, other.out_dir)
        chaos.spoil(other.out_dir / "checkpoints", wrong)
        [found[wrong]] = chaos.compare_ends(alone, chaos.final(other))
    assert found["step"] == "step: 20 alone, 21 after kills"
    assert re.match("policy_state: .*overflows=[1-9].* alone, .*overflows=0", found["policy_state"])
    leaf = alone.state.params["embed"]["embedding"]
    alone.state.params["embed"]["embedding"] = leaf.at[0, 0].add(1e-6)
    assert chaos.compare_ends(alone, chaos.final(killed)) == ["state.params['embed']['embedding'] differs"]


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


def test_a_folder_of_somebody_else_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "thesis.txt").write_text("mine")
    assert chaos.main([f"out={tmp_path}"]) == 2
    assert "out must be a new folder, or one of an earlier chaos run" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "thesis.txt"]
