"""Going on where an earlier run stopped: its checkpoints, and the part of its log that they vouch for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from examples.train_lm import data
from examples.train_lm.config import Config
from examples.train_lm.train import Training
from policies import from_config
from policies.checkpoints import Checkpointer, Restored


def folder_of(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return config.out_dir / "checkpoints"


def check(config: Config) -> None:
    """Refuses to start from zero beside checkpoints, unless that was asked for.

    Raises:
      ValueError: if there are checkpoints and the config would neither go on from them nor set them aside.
    """
    folder = folder_of(config)
    if config.checkpoint_every == 0 and config.resume == "auto" and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds the checkpoints of an earlier run; give its checkpoint_every to go on from them, "
            "resume=never to start over, or another out"
        )


def take_up(training: Training, text: data.Text, mesh: Mesh, checkpoints: Checkpointer | None) -> Restored | None:
    """The newest checkpoint there is, with the mesh in context.

    Raises:
      CheckpointError: if there are checkpoints and none can be read.
      MismatchError: if the sizes of the model have changed.
    """
    if checkpoints is None:
        return None
    policy = from_config(training.config.policy)
    return checkpoints.restore(training.abstract(mesh), policy, training.spec, config=identity(training.config, text))


def set_aside(config: Config) -> None:
    """With ``resume=never``: what an earlier run left gets another name, so that nothing is lost or mixed up."""
    folder = folder_of(config)
    if config.resume == "never" and folder.is_dir():
        number = 1
        while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
            number += 1
        folder.rename(old)
        print(f"starting over; the earlier checkpoints are now in {old}")


def identity(config: Config, text: data.Text) -> dict[str, Any]:
    """What a run is, as JSON: its numbers and the text that it is trained on."""
    numbers = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("out", "resume")}
    return {**numbers, "text": {"source": text.source, "crc32": zlib.crc32(text.train.tobytes())}}


def cut_log(path: Path, steps: int) -> list[dict[str, Any]]:
    """Leaves in the log the first ``steps`` steps and returns them.

    What was logged beyond the checkpoint will be done again. The last line may be half of one.
    """
    kept: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if entry["step"] < steps:
                kept[entry["step"]] = entry
    if len(kept) < steps:
        print(
            f"train_lm: {path} tells {len(kept)} of the {steps} steps done; the others are not in it", file=sys.stderr
        )
    whole = path.with_name(f"{path.name}.tmp")
    whole.write_text("".join(json.dumps(entry) + "\n" for entry in kept.values()), encoding="utf-8")
    os.replace(whole, path)
    return list(kept.values())
