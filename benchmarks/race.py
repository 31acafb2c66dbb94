"""One model under several capacity policies, trained side by side: a block of steps of each in turn.

A machine is now slow and now fast. What is compared therefore runs one right after the other, in an order that
rotates, and is compared block by block; the median of these ratios is what counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.train_lm.loop import Record, record
from examples.train_lm.train import Training, TrainState
from moe_blocks import Capacity
from policies import StepReport, StepRunner, from_config

VARIANTS: dict[str, dict[str, Any]] = {
    "dropless": {"name": "static_factor", "factor": None},
    "factor 2, drop": {"name": "drop", "factor": 2.0},
    "factor 2, retry": {"name": "retry_dropless", "factor": 2.0},
    "factor 2, layer retry": {"name": "retry_dropless", "factor": 2.0, "scope": "layer"},
    "factor 0.125, drop": {"name": "drop", "factor": 0.125},
    "factor 0.125, retry": {"name": "retry_dropless", "factor": 0.125},
    "factor 0.125, layer retry": {"name": "retry_dropless", "factor": 0.125, "scope": "layer"},
    "adaptive from 0.125": {"name": "adaptive_grow", "initial_factor": 0.125},
}
BASELINE = "dropless"
# What is also run from the baseline's state: the retries must agree with it there, and the drop must not.
PROBED = ("factor 2, retry", "factor 0.125, retry", "factor 0.125, layer retry", "factor 0.125, drop")

PyTree = Any
Batches = Sequence[jax.Array]


@dataclasses.dataclass
class Variant:
    """A policy's own run, as far as it has come.

    Attributes:
      training: model and step, the same for all variants.
      runner: of the policy.
      state: after the steps in ``records``.
      records: one per accepted step.
      seconds: of every block; None where a program was compiled in it, which is no part of the throughput.
    """

    training: Training
    runner: StepRunner
    state: TrainState
    records: list[Record] = dataclasses.field(default_factory=list)
    seconds: list[float | None] = dataclasses.field(default_factory=list)

    def run_block(self, batches: Batches) -> None:
        """Trains on the batches."""
        compiled = self.runner.executables
        reports, self.state, seconds = run_steps(self.runner, self.state, batches)
        self.seconds.append(seconds if self.runner.executables == compiled else None)
        # All times are those of blocks.
        self.records += [record(self.training, report, seconds / len(batches)) for report in reports]


def run_steps(runner: StepRunner, state: TrainState, batches: Batches) -> tuple[list[StepReport], TrainState, float]:
    """Runs steps from a state, which it consumes; returns the reports, the new state and the seconds it took."""
    runner.start(state)
    started = time.perf_counter()
    reports = [report for batch in batches for report in runner.submit(batch)] + runner.drain()
    state = jax.block_until_ready(runner.state)
    return reports, state, time.perf_counter() - started


def copy(state: PyTree) -> PyTree:
    """A state that may be consumed while the first one stays."""
    return jax.tree.map(jnp.copy, state)


def train_side_by_side(
    training: Training, start: TrainState, batch: Callable[[int], jax.Array], *, block: int
) -> tuple[dict[str, Variant], dict[str, list[dict[str, float]]]]:
    """Trains every variant from the same state on the same batches.

    Args:
      training: what to train, and for how many steps.
      start: the state that all begin with.
      batch: the batch of a step.
      block: steps of one variant before the next one has its turn.

    Returns:
      The variants when they are done, and for each probed one its differences to the baseline at the same state: one
      entry per block, each the relative difference of ``loss`` and ``grad_norm`` of one step.
    """
    steps, spec = training.config.steps, training.spec
    variants = {
        name: Variant(training, StepRunner(training.step, from_config(config), spec), copy(start))
        for name, config in VARIANTS.items()
    }
    differences: dict[str, list[dict[str, float]]] = {name: [] for name in PROBED}
    names = list(variants)
    for number, first in enumerate(range(0, steps, block)):
        batches = [batch(step) for step in range(first, min(first + block, steps))]
        probes = {name: _probe(variants[name], variants[BASELINE].state, batches[0]) for name in PROBED}
        for name in rotated(names, number):
            variants[name].run_block(batches)
        baseline = variants[BASELINE].records[first]
        for name, metrics in probes.items():
            differences[name].append(
                {key: abs(metrics[key] - (was := getattr(baseline, key))) / abs(was) for key in ("loss", "grad_norm")}
            )
    return variants, differences


def _probe(variant: Variant, state: TrainState, batch: jax.Array) -> dict[str, float]:
    """What the variant's own programs measure in one step from another state; its own run is not touched."""
    [report], _, _ = run_steps(variant.runner, copy(state), [batch])
    return {key: float(report.metrics[key]) for key in ("loss", "grad_norm")}


def rotated(names: list[str], turn: int) -> list[str]:
    """The names from another one on at each turn.

    Example:
      >>> rotated(["a", "b", "c"], 4)
      ['b', 'c', 'a']
    """
    start = turn % len(names)
    return names[start:] + names[:start]


def relative_throughput(variant: Variant, baseline: Variant, *, last_half: bool = False) -> float | None:
    """The median over blocks of the baseline's time over the variant's; above 1 is faster. None: nothing to compare."""
    pairs = list(zip(baseline.seconds, variant.seconds, strict=True))
    pairs = pairs[len(pairs) // 2 :] if last_half else pairs
    ratios = [base / own for base, own in pairs if base is not None and own is not None]
    return statistics.median(ratios) if ratios else None


class Overhead(NamedTuple):
    """How much longer something takes than a plain jit loop, as a share: 0.01 is one percent.

    Attributes:
      median: over the rounds.
      quartiles: likewise, the lower and the upper one.
      rounds: number of paired measurements.
    """

    median: float
    quartiles: tuple[float, float]
    rounds: int


class Timed(NamedTuple):
    """What one round of one loop came to: the new state, and how long it took by each clock."""

    state: PyTree
    seconds: dict[str, float]
    retried: bool


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Loop = Callable[[PyTree], Timed]
Step = Callable[..., tuple[PyTree, PyTree, PyTree]]


def measure_overhead(
    step: Step, runners: Mapping[str, StepRunner], state: PyTree, batches: Batches, *, capacity: Capacity, rounds: int
) -> dict[str, dict[str, Overhead]]:
    """Times armed runners against a plain, donated jit loop at the same capacity.

    Args:
      step: what is timed, ``step(state, batch, *, capacity)``.
      runners: of this step, by a name; their policies may reject, and are at ``capacity``.
      state: from which each runs on; not consumed.
      batches: run in each round. Rounds in which a runner had to retry do not count for it.
      capacity: of the plain loop.
      rounds: how often to time each.

    Returns:
      For each runner, and for ``"control"``: a second plain loop of the same program, to tell what the machine alone
      makes of nothing. All relative to the plain loop, by the clock on the wall and by the time that all threads of
      the process spent computing, which other processes on the machine disturb less.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    plain = jax.jit(partial(step, capacity=capacity), donate_argnums=0, out_shardings=(shardings, None, None))

    def run_plain(state: PyTree) -> tuple[PyTree, bool]:
        for batch in batches:
            state, _, _ = plain(state, batch)
        return state, False

    def run_armed(runner: StepRunner, _: PyTree) -> tuple[PyTree, bool]:  # the runner holds its state
        reports = [report for batch in batches for report in runner.submit(batch)] + runner.drain()
        return runner.state, any(report.attempts > 1 for report in reports)

    loops: dict[str, Loop] = {name: partial(_timed, partial(run_armed, runner)) for name, runner in runners.items()}
    loops |= {name: partial(_timed, run_plain) for name in ("plain", "control")}
    for runner in runners.values():
        runner.start(copy(state))
    last = {name: loop(copy(state)) for name, loop in loops.items()}  # compiles, and fills the caches
    ratios: dict[str, dict[str, list[float]]] = {
        name: {clock: [] for clock in CLOCKS} for name in loops if name != "plain"
    }
    for turn in range(rounds):
        for name in rotated(list(loops), turn):
            last[name] = loops[name](last[name].state)
        for name, by_clock in ratios.items():
            if not last[name].retried:
                for clock, known in by_clock.items():
                    known.append(last[name].seconds[clock] / last["plain"].seconds[clock])
    return {
        name: {clock: _overhead(known) for clock, known in by_clock.items() if len(known) > 1}
        for name, by_clock in ratios.items()
    }


def _timed(run: Callable[[PyTree], tuple[PyTree, bool]], state: PyTree) -> Timed:
    started = {clock: read() for clock, read in CLOCKS.items()}
    state, retried = run(state)
    jax.block_until_ready(state)
    return Timed(state, {clock: read() - started[clock] for clock, read in CLOCKS.items()}, retried)


def _overhead(ratios: list[float]) -> Overhead:
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return Overhead(median - 1, (lower - 1, upper - 1), len(ratios))
