"""Trains a small Mixture-of-Experts language model on real text under a capacity policy.

Usage: python -m examples.train_lm [--config FILE] [--data PATH] [--KEY VALUE | KEY=VALUE] ...

FILE is YAML; examples/train_lm/configs has one for each policy. Any key replaces the file's value:

  python -m examples.train_lm --config examples/train_lm/configs/drop.yaml --steps 50 policy.factor=1.0
  python -m examples.train_lm --data my_texts/ --out runs/mine

The folder of the run gets steps.jsonl, one line per step, and run.png.

Several processes train as one: --distributed auto on TPU pods, SLURM, Open MPI and Kubernetes, elsewhere

  python -m examples.train_lm --coordinator HOST:PORT --num-processes 2 --process-id 0  # on HOST
  python -m examples.train_lm --coordinator HOST:PORT --num-processes 2 --process-id 1

The first one prints and writes. Ctrl-C in one of them stops all before the same step, and so does SIGTERM. If one
dies, the others end with an error.

Exit codes: 0 done; 2 bad arguments, nothing was written; 3 a buffer overflowed and the policy could not go on;
130 stopped by Ctrl-C. After 3 and 130 the steps done so far are summed up.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from examples.train_lm import data, distributed
from examples.train_lm.config import Config, parse
from examples.train_lm.distributed import Processes
from examples.train_lm.loop import Result, run
from examples.train_lm.mesh import make_mesh, simulate_devices
from examples.train_lm.report import figure, table
from examples.train_lm.train import Training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\nKeys. {inspect.getdoc(Config)}\n\n{inspect.getdoc(Processes)}")
        return 0
    try:
        return command(argv)
    except KeyboardInterrupt:  # before there was anything to sum up, or for the second time
        print("train_lm: stopped at once", file=sys.stderr)
        return 130


def command(argv: Sequence[str]) -> int:
    """Checks everything that the user may get wrong before anything is written, then trains."""
    try:
        processes, words = distributed.parse(argv)
        config = parse(words)
        simulate_devices()
        processes.connect()
        text = data.load(config.data, window=config.seq_len + 1)
        mesh = make_mesh(experts=config.experts, expert_parallel=config.expert_parallel)
        with jax.set_mesh(mesh):
            training = Training.of(config)
        first = jax.process_index() == 0
        if first:
            config.out_dir.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print("train_lm: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    with jax.set_mesh(mesh):
        result = report(training, text, mesh) if first else run(training, text, mesh, Path(os.devnull))
    distributed.wait_for_all()  # for the figure
    if result.overflow is not None:
        print(f"train_lm: {result.overflow}", file=sys.stderr)
        return 3
    return 130 if result.stopped else 0


def report(training: Training, text: data.Text, mesh: jax.sharding.Mesh) -> Result:
    """Trains with the mesh in context, prints what comes of it and draws the figure."""
    config, unigram = training.config, data.unigram_loss(text)
    print(f"text      {text.source}: {len(text.train):,} bytes to train on, {len(text.validation):,} to validate")
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    print(f"devices   {mesh.size} of {mesh.devices.flat[0].device_kind}, {shape}")
    result = run(training, text, mesh, config.out_dir / "steps.jsonl")
    print(f"\n{table(training, result, unigram)}")
    if result.records:
        figure(training, result, unigram, config.out_dir / "run.png")
        print(f"\nwritten   {config.out_dir}/run.png, {config.out_dir}/steps.jsonl")
    return result


if __name__ == "__main__":
    sys.exit(main())
