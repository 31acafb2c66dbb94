"""Compares the capacity policies on one model: what each costs, and what it does to the loss.

Usage: python -m benchmarks.policies [--quick] [--json FILE] [--KEY VALUE | KEY=VALUE] ...

All variants start from one state and see the same batches; they train side by side, a block of steps of each in turn.
The keys are those of examples.train_lm; --quick takes a tiny model for a few steps, to see that all works. FILE gets
every figure. Beside ours stands the published experiment that this one repeats in small, AI-Hypercomputer/maxtext#5080.

Exit codes: 0 done; 2 bad arguments.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import race, table
from benchmarks.output import check_json, environment
from examples.train_lm import data
from examples.train_lm.config import build, pairs
from examples.train_lm.loop import evaluate
from examples.train_lm.mesh import by_row, make_mesh, simulate_devices
from examples.train_lm.train import Training
from policies import EvalRunner

QUICK = {
    "steps": "8",
    "warmup_steps": "2",
    "layers": "2",
    "width": "32",
    "heads": "2",
    "expert_width": "32",
    "batch_size": "8",
    "seq_len": "32",
    "eval_batches": "1",
}
NAMES = ("steps", "batch_size", "seq_len", "layers", "width", "experts", "experts_per_tok", "expert_width")
BLOCK, QUICK_BLOCK = 4, 2  # steps of one variant before the next one has its turn
ROUNDS, QUICK_ROUNDS = 24, 6  # of the overhead's measurement


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        quick = "--quick" in words
        overrides = dict(pairs([word for word in words if word != "--quick"]))
        out = overrides.pop("json", None)
        if given := {"policy", "out", "config", "lag"} & {key.partition(".")[0] for key in overrides}:
            raise ValueError(f"the benchmark chooses {sorted(given)} itself")
        values: dict[str, Any] = {"policy": race.VARIANTS[race.BASELINE], "steps": 60}
        config = build(values, {**(QUICK if quick else {}), **overrides})
        check_json(out)
        simulate_devices()
        text = data.load(config.data, window=config.seq_len + 1)
        mesh = make_mesh(experts=config.experts, expert_parallel=config.expert_parallel)
        with jax.set_mesh(mesh):
            training = Training.of(config)
    except (ValueError, OSError) as error:
        print("benchmarks.policies: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    with jax.set_mesh(mesh):
        figures = measure(training, text, mesh, quick=quick)
    print(table.render(figures))
    if out is not None:
        Path(out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(training: Training, text: data.Text, mesh: jax.sharding.Mesh, *, quick: bool) -> dict[str, Any]:
    """Everything that the benchmark finds out, as plain numbers; the mesh is in context."""
    config, started = training.config, time.perf_counter()

    def batch(step: int) -> jax.Array:
        rows = data.batch(text.train, seed=config.seed, step=step, rows=config.batch_size, window=config.seq_len + 1)
        return jax.device_put(rows, by_row(mesh))

    variants, differences = race.train_side_by_side(
        training, training.init(mesh), batch, block=QUICK_BLOCK if quick else BLOCK
    )
    armed = variants["factor 2, retry"]
    overhead = race.measure_overhead(
        training.step,
        {"armed": armed.runner},
        variants[race.BASELINE].state,
        [batch(config.steps + i) for i in range(QUICK_BLOCK if quick else BLOCK)],
        capacity=armed.runner.policy.capacity(armed.runner.policy_state),
        rounds=QUICK_ROUNDS if quick else ROUNDS,
    )
    baseline, evaluator = variants[race.BASELINE], EvalRunner(training.eval_step)
    rows = {
        name: {
            "policy": race.VARIANTS[name],
            "final_loss": float(np.mean([r.loss for r in variant.records[-max(1, config.steps // 4) :]])),
            "validation_loss": evaluate(evaluator, training, text, mesh, variant.state),
            "throughput": race.relative_throughput(variant, baseline),
            "throughput_last_half": race.relative_throughput(variant, baseline, last_half=True),
            "retries": sum(r.retries for r in variant.records),
            "overflows": sum(r.overflow for r in variant.records),
            "dropped": float(np.mean([r.dropped for r in variant.records])),
            "final_factor": training.spec.factor(variant.records[-1].slots),
            "executables": variant.runner.executables,
            "losses": [r.loss for r in variant.records],
            "block_seconds": variant.seconds,
        }
        for name, variant in variants.items()
    }
    return {
        "environment": {
            **environment("optax"),
            "devices": f"{mesh.size} of {mesh.devices.flat[0].device_kind}",
            "mesh": dict(mesh.shape),
        },
        "config": {name: getattr(config, name) for name in NAMES},
        "block": QUICK_BLOCK if quick else BLOCK,
        "seconds": time.perf_counter() - started,
        "unigram_loss": data.unigram_loss(text),
        "dropless_factor": training.spec.factor(training.spec.dropless),
        "variants": rows,
        "same_state": differences,
        "overhead": {
            name: {clock: found._asdict() for clock, found in by_clock.items()} for name, by_clock in overhead.items()
        },
        "published": table.PUBLISHED,
    }


if __name__ == "__main__":
    sys.exit(main())
