"""The configuration of a run: a YAML file, and any of its keys again on the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_blocks.capacity import positive_int
from policies import from_config

CONFIGS = Path(__file__).parent / "configs"
DEFAULT = CONFIGS / "retry_dropless.yaml"
FROM_ZERO = {"checkpoint_every", "seed", "lag", "warmup_steps"}
RESUME = ("auto", "never")


@dataclasses.dataclass(frozen=True)
class Config:
    """All numbers of one run.

    Attributes:
      policy: name and numbers of the capacity policy, as ``policies.from_config`` takes them.
      data: a text file, or a folder of them. null: the Python sources of the standard library.
      out: folder for the figure, the log and the checkpoints. null: ``runs/`` and the name of the policy.
      checkpoint_every: steps from one checkpoint to the next. 0: none.
      keep: newest checkpoints to keep.
      resume: auto: go on from the checkpoints in the folder, if there are any. never: start over, and set them aside.
      seed: of the initial parameters and of the batches.
      steps: optimiser steps.
      batch_size: sequences in one optimiser step.
      micro_batches: parts that a batch is computed in, one after the other.
      seq_len: bytes of a sequence.
      eval_batches: batches of validation text, each of batch_size / micro_batches sequences.
      lag: steps in flight while the host dispatches the next one.
      layers: decoder layers, each of attention and experts.
      width: D.
      heads: of the attention.
      experts: E, of each layer.
      experts_per_tok: k.
      expert_width: F.
      expert_parallel: devices that share the experts, at most; the others share the batch.
      aux_loss_coeff: weight of the load-balancing loss.
      expert_bias_rate: step of the expert bias that balances the router without a loss. 0: no bias.
      learning_rate: after the warmup; it then falls to 0 along a cosine.
      warmup_steps: of the learning rate.
      weight_decay: of AdamW.
      clip_norm: largest norm of the gradient.

    Raises:
      ValueError: naming the key, its value and what it must be.
    """

    policy: Mapping[str, Any]
    data: str | None = None
    out: str | None = None
    checkpoint_every: int = 0
    keep: int = 3
    resume: str = "auto"
    seed: int = 0
    steps: int = 120
    batch_size: int = 16
    micro_batches: int = 1
    seq_len: int = 128
    eval_batches: int = 8
    lag: int = 1
    layers: int = 3
    width: int = 128
    heads: int = 4
    experts: int = 8
    experts_per_tok: int = 2
    expert_width: int = 256
    expert_parallel: int = 4
    aux_loss_coeff: float = 0.01
    expert_bias_rate: float = 0.0
    learning_rate: float = 0.003
    warmup_steps: int = 12
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        from_config(self.policy)  # tells what is wrong with it
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                positive_int(field.name, value, minimum=0 if field.name in FROM_ZERO else 1)
            elif field.type == "float":
                _number(field.name, value)
            elif field.type == "str | None" and not (value is None or (isinstance(value, str) and value)):
                raise ValueError(f"{field.name} must be a path or null, got {value!r}")
        if self.resume not in RESUME:
            raise ValueError(f"resume must be one of {RESUME}, got {self.resume!r}")
        if self.clip_norm == 0:
            raise ValueError("clip_norm must be above 0, got 0; it scales the gradient")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}; rotary positions pair "
                "up the channels of a head"
            )
        if self.batch_size % self.micro_batches:
            raise ValueError(f"batch_size={self.batch_size} must be a multiple of micro_batches={self.micro_batches}")

    @property
    def rows(self) -> int:
        """Sequences that are computed at once."""
        return self.batch_size // self.micro_batches

    @property
    def out_dir(self) -> Path:
        """Where the run writes."""
        return Path("runs", self.policy["name"]) if self.out is None else Path(self.out)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def parse(argv: Sequence[str]) -> Config:
    """Reads the configuration that a command line describes.

    Args:
      argv: ``--config FILE`` and overrides, each ``key=value``, ``--key=value`` or ``--key value``. A key of the
        policy is written ``policy.key``; values are YAML.

    Raises:
      ValueError: if a key is unknown or a value is wrong.
      OSError: if the file cannot be read.

    Example:
      >>> config = parse(["--steps", "20", "policy.factor=0.5"])
      >>> config.steps, config.policy["factor"]
      (20, 0.5)
    """
    path, overrides = DEFAULT, {}
    for key, value in pairs(list(argv)):
        if key == "config":
            path = Path(value)
        else:
            overrides[key] = value
    return build(read(path), overrides)


def build(values: Mapping[str, Any], overrides: Mapping[str, str]) -> Config:
    """The configuration of a file's values with some of them replaced by texts from the command line."""
    merged = dict(values)
    for key, text in overrides.items():
        head, _, tail = key.partition(".")
        if not tail:
            merged[head] = _value(key, text)
        elif head == "policy":
            merged["policy"] = {**_mapping("policy", merged.get("policy", {})), tail: _value(key, text)}
        else:
            raise ValueError(f"unknown key {key!r}; only policy has keys of its own")
    valid = [field.name for field in dataclasses.fields(Config)]
    if unknown := [key for key in merged if key not in valid]:
        raise ValueError(f"unknown keys {unknown}; valid are {valid}")
    if "policy" not in merged:
        raise ValueError("the key policy is missing; give the name and the numbers of a capacity policy")
    # YAML reads 1e-3, which has no dot, as a text.
    kinds = {field.name: field.type for field in dataclasses.fields(Config)}
    return Config(**{key: _as_float(value) if kinds[key] == "float" else value for key, value in merged.items()})


def read(path: Path) -> Mapping[str, Any]:
    """The keys and values of a YAML file."""
    if not path.is_file():
        raise ValueError(f"config must be a YAML file such as {DEFAULT.name}, got {str(path)!r}, which is not there")
    try:
        return _mapping(f"the file {path}", yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {path} is not YAML: {error}") from None


def pairs(words: list[str]) -> list[tuple[str, str]]:
    """``key=value``, ``--key=value`` and ``--key value`` as pairs of key and text."""
    pairs = []
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--") or not words:
                raise ValueError(f"{word!r} is not an option; write key=value or --key value")
            value = words.pop(0)
        pairs.append((key.replace("-", "_"), value))
    return pairs


def _value(key: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{key} must be a YAML value, got {text!r}") from None
    return _as_float(value) if key.startswith("policy.") else value


def _as_float(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must hold keys and values, got {value!r}")
    return value
