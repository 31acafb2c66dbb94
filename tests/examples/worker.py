"""One process of several, as `test_distributed` starts them; what it finds wrong ends it with an error.

Usage: python -m tests.examples.worker SCENARIO FOLDER FAULTY [OPTION ...]

FAULTY is the process that a fault is put into, OPTIONs are those of `examples.train_lm`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from examples.train_lm import data, distributed
from examples.train_lm.__main__ import main
from examples.train_lm.mesh import AXES, make_mesh, own_rows, spread
from examples.train_lm.stop import stop_on_signal
from moe_blocks import Capacity, MoEBlock
from policies import EvalRunner, RetryDropless, StepRunner
from tests.policies import toy

BLOCK = MoEBlock(8, 2, 32, expert_axis="expert", batch_axes=AXES, aux_loss_coeff=0.01)
ROWS, TOKENS, WIDTH = 8, 16, 16
POLICY = RetryDropless(factor=1.5)
CROWDED = (1, 3)  # steps whose last rows, those of the last processes, all go to the same experts
STEPS = 5
LATE = 2.0  # seconds
FAULT = 3  # the step of a fault


def rows_of(step: int) -> Float[np.ndarray, "rows tokens width"]:
    """The batch of a step: all rows of all processes."""
    x = np.random.default_rng(step).standard_normal((ROWS, TOKENS, WIDTH), np.float32)
    if step in CROWDED:
        x[ROWS // 2 :] = x[-1, -1]
    return x


def step(params: Any, x: Array, *, capacity: Capacity) -> tuple[Any, Array, dict[str, Array]]:
    def loss_fn(params: Any) -> tuple[Array, Array]:
        y, aux_loss, total_recv_tokens = BLOCK.apply(params, x, capacity=capacity)
        return jnp.mean((y - x) ** 2) + aux_loss, total_recv_tokens

    (loss, total_recv_tokens), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), total_recv_tokens, {"loss": loss}


def eval_step(params: Any, batch: tuple[Array, Array], *, capacity: Capacity) -> tuple[Array, dict[str, Array]]:
    x, real = batch
    y, _, total_recv_tokens = BLOCK.apply(params, x, token_mask=real, capacity=capacity)
    weights = real[..., None].astype(x.dtype)
    return total_recv_tokens, {"loss": jnp.sum((y - x) ** 2 * weights) / jnp.sum(weights)}


def init(mesh: jax.sharding.Mesh) -> Any:
    def boxed(key: Array) -> Any:
        return BLOCK.init(key, jnp.zeros((ROWS, TOKENS, WIDTH)))

    key = jax.random.key(0)
    names = nn.get_partition_spec(jax.eval_shape(boxed, key))
    shardings = nn.logical_to_mesh_sharding(names, mesh, [("expert", "expert")])
    return jax.jit(lambda key: nn.unbox(boxed(key)), out_shardings=shardings)(key)


def runner() -> StepRunner:
    return StepRunner(step, POLICY, BLOCK.capacity_spec((ROWS, TOKENS, WIDTH)))


def host(leaf: Array) -> np.ndarray:
    """The parts of a leaf that this process holds; where it holds none, NaN."""
    parts = np.full(leaf.shape, np.nan, leaf.dtype)
    for shard in leaf.addressable_shards:
        parts[shard.index] = shard.data
    return parts


def train(mesh: jax.sharding.Mesh, delay: float = 0.0) -> tuple[StepRunner, dict[str, Any]]:
    """Steps of which some are crowded in some of the processes."""

    def batches() -> Iterator[Array]:
        for number in range(STEPS):
            time.sleep(delay if number == FAULT else 0)
            yield spread(rows_of(number)[own_rows(mesh, ROWS)], mesh, ROWS)

    training, state = runner(), init(mesh)
    training.compile(state, next(batches()))
    distributed.wait_for_all()
    reports = list(training.run(state, batches()))
    leaves = jax.tree_util.tree_leaves_with_path(training.state)
    return training, {
        "losses": [float(report.metrics["loss"]) for report in reports],
        "attempts": [report.attempts for report in reports],
        "demands": [report.demand for report in reports],
        "state": {jax.tree_util.keystr(path): host(leaf) for path, leaf in leaves},
    }


def evaluate(training: StepRunner, mesh: jax.sharding.Mesh) -> list[float]:
    """Losses of a whole batch, and of shorter ones: rows that are all padding in some processes, then fewer rows."""
    own, everywhere = own_rows(mesh, ROWS), NamedSharding(mesh, PartitionSpec())
    real = np.ones((2, ROWS, TOKENS), bool)
    real[1, ROWS // 2 :] = False
    padded = [(spread(rows_of(9)[own], mesh, ROWS), spread(mask[own], mesh, ROWS)) for mask in real]
    shorter = jax.device_put((rows_of(9)[: ROWS // 2], real[0, : ROWS // 2]), everywhere)
    reports = EvalRunner(eval_step).run(training.state, [*padded, shorter])
    return [float(report.metrics["loss"]) for report in reports]


def steps_until_stopped(training: StepRunner, mesh: jax.sharding.Mesh, here: bool) -> int:
    """Steps that are done when one process gets a Ctrl-C."""
    with stop_on_signal() as stop:

        def batches() -> Iterator[Array]:
            for number in itertools.count():
                if stop.before_next_step():
                    return
                if number == FAULT and here:
                    signal.raise_signal(signal.SIGINT)
                yield spread(rows_of(0)[own_rows(mesh, ROWS)], mesh, ROWS)

        return len(list(training.run(training.state, batches())))


def states_of_every_kind(mesh: jax.sharding.Mesh) -> None:
    """Whatever a leaf is and wherever it lies, the run is that of one process, to the bit."""
    demands = (1, 9, 2, 9, 9, 3, 1)
    wanted, _ = toy.by_hand(None, *demands)
    here = toy.state_of_every_kind()  # made by each process for itself, on its first device
    committed = jax.device_put(toy.state_of_every_kind(), jax.local_devices()[0])
    with jax.set_mesh(mesh):
        training = StepRunner(toy.step, RetryDropless(1.0), toy.SPEC)
        for state in (here, committed, toy.state_of_every_kind()):
            attempts = [report.attempts for report in training.run(state, toy.batches(*demands))]
            assert attempts == [1, 2, 1, 2, 2, 1, 1], attempts
            assert toy.same_bits(training.state, wanted)


def endless(mesh: jax.sharding.Mesh, fault: Any) -> None:
    """Steps without end, until a fault."""

    def batches() -> Iterator[Array]:
        number = 0
        while True:
            if number == FAULT:
                fault()
            yield spread(rows_of(number)[own_rows(mesh, ROWS)], mesh, ROWS)
            number += 1

    def mean_step(total: Array, x: Array, *, capacity: Capacity) -> tuple[Array, Array, dict[str, Array]]:
        return total + x.mean(), jnp.ones(1, jnp.int32), {}

    state, training = jnp.zeros(()), StepRunner(mean_step, POLICY, toy.SPEC)
    training.compile(state, next(batches()))
    distributed.wait_for_all()
    for report in training.run(state, batches()):
        print("step", report.step, flush=True)


def fail() -> None:
    raise OSError("the data is gone")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "failed": fail,
}


def late(batch: Any) -> Any:
    """The data of `examples.train_lm`, one batch of which comes late."""

    def wrapped(*args: Any, step: int, **kwargs: Any) -> Any:
        time.sleep(LATE if step == FAULT else 0)
        return batch(*args, step=step, **kwargs)

    return wrapped


def run(scenario: str, folder: Path, faulty: int, options: list[str]) -> int:
    processes, _ = distributed.parse(options)
    name, here = str(processes.process_id), processes.process_id == faulty
    if scenario == "train":
        data.batch = late(data.batch) if here else data.batch
        return main([*options, f"out={folder / name}"])
    processes.connect()
    mesh = make_mesh(experts=8, expert_parallel=4)
    if scenario == "states":
        states_of_every_kind(mesh)
    with jax.set_mesh(mesh):
        if scenario in FAULTS:
            endless(mesh, FAULTS[scenario] if here else lambda: None)
        training, found = train(mesh, LATE if here else 0.0)
        if scenario == "states":
            found["evaluation"] = evaluate(training, mesh)
        found["stopped"] = steps_until_stopped(training, mesh, here)
    (folder / name).write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    scenario, folder, faulty, *options = sys.argv[1:]
    sys.exit(run(scenario, Path(folder), int(faulty), options))
