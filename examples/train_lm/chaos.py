"""Kills a training at random moments, restarts it until it is done, and compares it with one that was left alone.

Usage: python -m examples.train_lm.chaos [--kills 50] [--seed 0] [--steps 240] [--out runs/chaos] [--wrong PART]

The training is examples.train_lm with a tiny model whose steps overflow often, so that many of them run twice. SIGKILL
falls while the process starts, between saves, and right after a save has begun. In the end every step must be in the
log once and in order, with the same numbers to the bit, and the last checkpoint must hold the same state, bit by bit.

PART makes the checkpoints wrong on purpose, to see that the comparison finds it: step (the number of steps done is one
too many after each restart) or policy_state (its counters begin again).

Exit codes: 0 the same; 1 different; 2 bad arguments.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from examples.train_lm.config import Config, pairs, parse
from examples.train_lm.mesh import AXES, FLAG
from examples.train_lm.resume import folder_of
from examples.train_lm.train import Training
from policies import from_config
from policies.checkpoints import Checkpointer, Restored, crc32

TINY = {
    "layers": 1, "width": 16, "heads": 1, "experts": 4, "expert_width": 16, "batch_size": 4, "seq_len": 16,
    "eval_batches": 1, "warmup_steps": 2, "checkpoint_every": 10, "policy.factor": 1.1,
}  # fmt: skip
DEVICES = 2
WRONG = ("none", "step", "policy_state")
PATIENCE = 300.0  # seconds until a life that does nothing is an error
START_SECONDS = 8.0  # about what a process takes to its first step
LINE_BYTES = 230  # about those of one step in the log
POLL = 0.002  # seconds from one look at the files to the next


@dataclasses.dataclass(frozen=True)
class Settings:
    kills: int
    seed: int
    steps: int
    out: Path
    wrong: str
    data: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        settings = settings_of(dict(pairs(words)))
    except ValueError as error:
        print("chaos: error:", error, file=sys.stderr)
        return 2
    for earlier in own(settings.out):
        shutil.rmtree(earlier)
    reference = config_of(settings, "alone")
    print(f"one training of {settings.steps} steps, left alone ...", file=sys.stderr)
    live(reference, settings, lambda _: False)
    chance, where, differences, rounds, spoilt = random.Random(settings.seed), collections.Counter[str](), [], 0, 0
    more = True
    while more:
        rounds += 1
        killed = config_of(settings, f"killed{rounds}")
        while (fell := one_life(killed, settings, chance, kill=more)) is not None:
            where[fell] += 1
            print(f"kill {where.total()} of {settings.kills}: {fell}", file=sys.stderr)
            if settings.wrong != "none" and checkpoints(folder_of(killed)):
                spoil(folder_of(killed), settings.wrong)
                spoilt += 1
            more = where.total() < settings.kills or (settings.wrong != "none" and not spoilt)
        differences += compare(reference, killed)
    print(table(settings, reference, where, rounds, differences))
    if settings.wrong != "none":
        print(f"  made wrong on purpose   {spoilt} checkpoints, without the {settings.wrong}")
    return 1 if differences else 0


def settings_of(given: dict[str, str]) -> Settings:
    """What the command line asks for.

    Raises:
      ValueError: naming what is wrong.
    """
    defaults = {"kills": "50", "seed": "0", "steps": "240", "out": "runs/chaos", "wrong": "none", "data": __file__}
    if unknown := sorted(given.keys() - defaults.keys()):
        raise ValueError(f"unknown keys {unknown}; valid are {list(defaults)}")
    values = {**defaults, **given}
    if values["wrong"] not in WRONG:
        raise ValueError(f"wrong must be one of {WRONG}, got {values['wrong']!r}")
    for key in ("kills", "seed", "steps"):
        if not values[key].isdecimal():
            raise ValueError(f"{key} must be a whole number, got {values[key]!r}")
    numbers = {key: int(values[key]) for key in ("kills", "seed", "steps")}
    if min(numbers["kills"], numbers["steps"]) < 1:
        raise ValueError(f"kills and steps must be at least 1, got {numbers}")
    out = Path(values["out"]).absolute()
    if out.exists() and (foreign := sorted({path.name for path in out.iterdir()} - {path.name for path in own(out)})):
        raise ValueError(f"out must be a new folder, or one of an earlier chaos run, got {out}, which holds {foreign}")
    return Settings(out=out, wrong=values["wrong"], data=values["data"], **numbers)


def own(out: Path) -> list[Path]:
    """What runs of this program leave in their folder."""
    return [path for pattern in ("alone", "killed*", "compiled") for path in out.glob(pattern)]


def config_of(settings: Settings, name: str) -> Config:
    """The configuration of one training."""
    keys = {**TINY, "steps": settings.steps, "data": settings.data, "out": settings.out / name}
    return parse([f"{key}={value}" for key, value in keys.items()])


def live(config: Config, settings: Settings, kill_now: Callable[[float], bool]) -> bool:
    """One process of the training; whether it was killed.

    Args:
      config: of the training.
      settings: of the whole.
      kill_now: asked again and again, with the seconds since the start.

    Raises:
      RuntimeError: if the process fails by itself, or takes too long.
    """
    keys = {**TINY, "steps": config.steps, "data": config.data, "out": config.out}
    command = [sys.executable, "-m", "examples.train_lm", *(f"{key}={value}" for key, value in keys.items())]
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(settings.out / "compiled"),
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FLAG}={DEVICES}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    config.out_dir.mkdir(parents=True, exist_ok=True)
    said = config.out_dir / "said.txt"
    with said.open("a") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        started = time.perf_counter()
        while process.poll() is None:
            if kill_now(time.perf_counter() - started) or time.perf_counter() - started > PATIENCE:
                process.kill()
                break
            time.sleep(POLL)
        code = process.wait()
    if code > 0 or time.perf_counter() - started > PATIENCE:
        raise RuntimeError(f"a life ended with code {code}; see {said}")
    return code < 0


def one_life(config: Config, settings: Settings, chance: random.Random, *, kill: bool) -> str | None:
    """Runs the training until it is killed, and tells where that fell; None if it came to its end.

    Without ``kill`` it is let alone.
    """
    log, folder = config.out_dir / "steps.jsonl", folder_of(config)
    before = log.stat().st_ino if log.exists() else None  # a life begins with a new file
    size = when = None
    saves, busy, turn = 0, False, chance.randint(1, 2)
    kind = chance.choices(("starting", "stepping", "saving"), (1, 2, 2))[0]
    lines, delay, share = chance.randint(1, 12), chance.uniform(0, 0.1), chance.random()

    def grown() -> int:
        """Bytes that this life has logged."""
        nonlocal size
        if size is None and log.exists() and log.stat().st_ino != before:
            size = log.stat().st_size
        return 0 if size is None else log.stat().st_size - size

    def begun() -> int:
        """Saves that this life has begun."""
        nonlocal saves, busy
        was, busy = busy, grown() > 0 and saving(folder)
        saves += busy and not was
        return saves

    def kill_now(seconds: float) -> bool:
        nonlocal when
        event = {
            "starting": seconds > share * START_SECONDS,
            "stepping": grown() > lines * LINE_BYTES,
            "saving": begun() >= turn,
        }[kind]
        when = seconds if event and when is None else when
        return kill and when is not None and seconds >= when + (0 if kind == "starting" else delay)

    if not live(config, settings, kill_now):
        return None
    if not grown():
        fell = "while it started"
    elif saving(folder):
        fell = "during a save"
    else:
        fell = "between saves" if checkpoints(folder) else "before the first save"
    return fell


def saving(folder: Path) -> bool:
    """Whether a checkpoint is being written: it still has its temporary name."""
    return any(folder.glob("*tmp*"))


def checkpoints(folder: Path) -> list[int]:
    """Steps done in each complete checkpoint."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def spoil(folder: Path, wrong: str) -> None:
    """Makes the newest checkpoint one that forgot something, as if the program had never saved it."""
    newest = checkpoints(folder)[-1]
    path = folder / str(newest) / "run" / "metadata"
    record = json.loads(path.read_text())["record"]
    if wrong == "step":
        record["step"] += 1
    else:
        record["policy_state"] |= {"overflows": 0, "rejections": 0}
    path.write_text(json.dumps({"crc32": crc32(record), "record": record}))
    (folder / str(newest)).rename(folder / str(record["step"]))


def compare(reference: Config, killed: Config) -> list[str]:
    """What differs between two trainings that should be one and the same, in words."""
    logs = (config.out_dir / "steps.jsonl" for config in (reference, killed))
    return [*compare_logs(*logs), *compare_ends(final(reference), final(killed))]


def compare_logs(alone: Path, killed: Path) -> list[str]:
    """Every step once and in order, and the first step whose numbers are not the same to the bit."""
    logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in (alone, killed)]
    wanted, steps = ([entry["step"] for entry in log] for log in logs)
    if steps != wanted:
        return [f"the log holds the steps {steps}"]
    for left, right in zip(*logs, strict=True):
        if differing := [key for key in left if key != "seconds" and left[key] != right[key]]:
            return [f"step {left['step']}: {differing} differ"]  # those behind it follow from it
    return []


def compare_ends(alone: Restored, killed: Restored) -> list[str]:
    """The last checkpoints: the state bit by bit, and all that is saved beside it."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(alone.state), jax.tree.leaves(killed.state), strict=True)
    return [
        f"state{jax.tree_util.keystr(path)} differs"
        for (path, left), right in pairs
        if np.asarray(left).tobytes() != np.asarray(right).tobytes()
    ] + [
        f"{field}: {getattr(alone, field)} alone, {getattr(killed, field)} after kills"
        for field in ("step", "policy_state", "data")
        if getattr(alone, field) != getattr(killed, field)
    ]


def final(config: Config) -> Restored:
    """The last checkpoint of a training, on one device."""
    mesh = jax.make_mesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    with jax.set_mesh(mesh), Checkpointer(folder_of(config), every=1) as saved:
        training = Training.of(config)
        restored = saved.restore(training.abstract(mesh), from_config(config.policy), training.spec)
    if restored is None:
        raise RuntimeError(f"no checkpoint in {folder_of(config)}")
    return restored


def table(
    settings: Settings, reference: Config, where: collections.Counter[str], rounds: int, differences: list[str]
) -> str:
    """The whole in a few lines."""
    entries = [json.loads(line) for line in (reference.out_dir / "steps.jsonl").read_text().splitlines()]
    rows: dict[str, Any] = {
        "trainings": f"{rounds} of {settings.steps} steps, {sum(e['retries'] > 0 for e in entries)} of which run twice",
        "kills": where.total(),
        **{f"  {fell}": number for fell, number in sorted(where.items())},
        "restarts": where.total(),
        "verdict": "every step once, in order, the same to the bit" if not differences else "; ".join(differences),
    }
    return "\n".join(f"  {name:<24}{value}" for name, value in rows.items())


if __name__ == "__main__":
    sys.exit(main())
