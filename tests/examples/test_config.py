from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from examples.train_lm.config import CONFIGS, DEFAULT, Config, build, parse, read
from policies import names

DROP = {"policy": {"name": "drop", "factor": 1.0}}


def test_there_is_a_config_for_each_policy() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(names())
    for path in CONFIGS.iterdir():
        assert parse(["--config", str(path)]).policy["name"] == path.stem


def test_the_default_is_retry_dropless() -> None:
    assert parse([]) == parse(["--config", str(DEFAULT)])
    assert parse([]).policy["name"] == "retry_dropless"
    assert parse([]).out_dir == Path("runs/retry_dropless")


@pytest.mark.parametrize("words", [["steps=20"], ["--steps=20"], ["--steps", "20"]])
def test_a_key_may_be_overridden_in_three_ways(words: list[str]) -> None:
    assert parse(words) == dataclasses.replace(parse([]), steps=20)


def test_dashes_may_stand_for_underscores() -> None:
    assert parse(["--batch-size", "24"]).batch_size == 24


def test_the_last_override_wins() -> None:
    assert parse(["--seed", "1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("1e-1", 0.1), ("null", None), ("2", 2)]
)  # YAML itself reads 1e-1 as a text
def test_a_key_of_the_policy(text: str, value: float | None) -> None:
    assert parse([f"policy.factor={text}"]).policy["factor"] == value


def test_a_number_without_a_dot_is_a_number() -> None:
    assert parse(["--learning_rate", "1e-3"]).learning_rate == 0.001


def test_a_file_may_hold_any_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {name: drop, factor: 2}\nlearning_rate: 1e-4\nsteps: 7\n")
    config = parse(["--config", str(file), "seed=5"])
    assert (config.policy["factor"], config.learning_rate, config.steps, config.seed) == (2, 1e-4, 7, 5)


def test_every_key_is_documented() -> None:
    for field in dataclasses.fields(Config):
        assert f"\n  {field.name}: " in str(inspect.getdoc(Config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stepz": "3"}, r"unknown keys \['stepz'\]; valid are \[.*'steps'"),
        ({"steps": "0"}, "steps must be an integer of at least 1, got 0"),
        ({"steps": "many"}, "steps must be an integer of at least 1, got 'many'"),
        ({"steps": "true"}, "steps must be an integer of at least 1, got True"),
        ({"steps": "{"}, "steps must be a YAML value, got '{'"),
        ({"seed": "-1"}, "seed must be an integer of at least 0, got -1"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number of at least 0, got 'fast'"),
        ({"learning_rate": "nan"}, "learning_rate must be a finite number of at least 0, got nan"),
        ({"weight_decay": "-0.1"}, "weight_decay must be a finite number of at least 0, got -0.1"),
        ({"clip_norm": "0"}, "clip_norm must be above 0"),
        ({"out": "3"}, "out must be a path or null, got 3"),
        ({"heads": "3"}, "width must be a multiple of 2 . heads = 6, got 128"),
        ({"micro_batches": "3"}, "batch_size=16 must be a multiple of micro_batches=3"),
        ({"policy.name": "grow"}, "one of .*'adaptive_grow'"),
        ({"policy.size": "3"}, r"takes the keys \('factor',\); unknown \['size'\]"),
        ({"policy.factor": "0"}, "Drop.factor must be a finite number above 0, got 0"),
        ({"policy": "drop"}, 'a policy config needs a "name"'),
        ({"model.width": "3"}, "unknown key 'model.width'"),
    ],
)
def test_a_wrong_key_or_value_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DROP, overrides)


def test_the_policy_is_needed() -> None:
    with pytest.raises(ValueError, match="the key policy is missing"):
        build({}, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps"], "'steps' is not an option"),
        (["--steps"], "'--steps' is not an option"),
        (["a.txt"], "'a.txt' is not"),
    ],
)
def test_an_option_needs_a_value(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(words)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "config must be a YAML file .* not there"), ("a: [", "is not YAML"), ("- a", "must hold keys and values"),
     ("", "must hold keys and values, got None"), (b"\xff\xfe", "is not YAML")],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    file = tmp_path / "bad.yaml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read(file)
