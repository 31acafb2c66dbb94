"""Trains a small Mixture-of-Experts language model on real text under a capacity policy.

Usage: python -m examples.train_lm [--config FILE] [--data PATH] [--KEY VALUE | KEY=VALUE] ...

FILE is YAML; examples/train_lm/configs has one for each policy. Any key replaces the file's value:

  python -m examples.train_lm --config examples/train_lm/configs/drop.yaml --steps 50 policy.factor=1.0
  python -m examples.train_lm --data my_texts/ --out runs/mine

The folder of the run gets steps.jsonl, one line per step, and run.png. With --checkpoint_every N it also gets a
checkpoint after every N steps and one at the end, and the same command goes on from the newest, as if the run had not
stopped: steps.jsonl then holds every step once. What differs from the run that saved it is told. Ctrl-C and SIGTERM
finish the steps in flight and save.

Several processes train as one: --distributed auto on TPU pods, SLURM, Open MPI and Kubernetes, elsewhere

  python -m examples.train_lm --coordinator HOST:PORT --num-processes 2 --process-id 0  # on HOST
  python -m examples.train_lm --coordinator HOST:PORT --num-processes 2 --process-id 1

The first one prints and writes. Ctrl-C in one of them stops all before the same step, and so does SIGTERM. If one
dies, the others end with an error.

Exit codes: 0 done, or saved after SIGTERM; 2 bad arguments, nothing was written; 3 a buffer overflowed and the policy
could not go on; 4 the data or a checkpoint could not be read, or a checkpoint not be written; 130 stopped by Ctrl-C;
143 stopped by SIGTERM without checkpoints. After 3, 130 and 143, and where the data failed, the steps done so far are
summed up.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
from collections.abc import Sequence

import jax

from examples.train_lm import data, distributed, resume
from examples.train_lm.config import Config, parse
from examples.train_lm.distributed import Processes
from examples.train_lm.loop import Result, run
from examples.train_lm.mesh import make_mesh, simulate_devices
from examples.train_lm.report import figure, table
from examples.train_lm.train import Training
from policies import CapacityOverflowError
from policies.checkpoints import Checkpointer, CheckpointError
from policies.snapshot import MismatchError


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
        resume.check(config)
        if jax.process_index() == 0:
            config.out_dir.mkdir(parents=True, exist_ok=True)
            resume.set_aside(config)
        distributed.wait_for_all()
    except (ValueError, OSError) as error:
        return fail(2, error)
    try:
        result = train(training, text, mesh)
    except MismatchError as error:
        return fail(2, error)
    except CheckpointError as error:
        return fail(4, error)
    distributed.wait_for_all()  # for the figure
    return exit_code(result)


def fail(code: int, error: Exception) -> int:
    """Tells the error in one line; returns the exit code."""
    print("train_lm: error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def train(training: Training, text: data.Text, mesh: jax.sharding.Mesh) -> Result:
    """Trains; the first process prints what comes of it and draws the figure."""
    config, unigram, tell = training.config, data.unigram_loss(text), jax.process_index() == 0
    if tell:
        shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        print(f"text      {text.source}: {len(text.train):,} bytes to train on, {len(text.validation):,} to validate")
        print(f"devices   {mesh.size} of {mesh.devices.flat[0].device_kind}, {shape}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        every, folder = config.checkpoint_every, resume.folder_of(config)
        checkpoints = stack.enter_context(Checkpointer(folder, every=every, keep=config.keep)) if every else None
        start = resume.take_up(training, text, mesh, checkpoints)
        if tell and start is not None:
            print(start)
        result = run(training, text, mesh, config.out_dir / "steps.jsonl", checkpoints, start)
    if tell:
        print(f"\n{table(training, result, unigram)}")
        if result.records:
            figure(training, result, unigram, config.out_dir / "run.png")
            print(f"\nwritten   {config.out_dir}/run.png, {config.out_dir}/steps.jsonl")
        if result.saved:
            print(f"saved     {result.saved} steps; the same command goes on from there")
    return result


def exit_code(result: Result) -> int:
    """What the run came to, as the exit code that the top of this file lists."""
    if isinstance(result.error, CapacityOverflowError):
        print(f"train_lm: {result.error}", file=sys.stderr)
        return 3
    if result.error is not None:
        return fail(4, result.error)
    if result.stopped is signal.SIGTERM:
        return 0 if result.saved else 128 + signal.SIGTERM
    return 0 if result.stopped is None else 128 + result.stopped


if __name__ == "__main__":
    sys.exit(main())
