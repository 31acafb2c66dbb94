"""What the transaction around a training step costs: when nothing overflows, and for each overflow.

Usage: python -m benchmarks.runner [--rounds N] [--quick] [--json FILE]

A small residual model of two MoE layers under Adam, on one device. Three StepRunners with RetryDropless, at a lag of
0, 1 and 3 steps, run beside a plain donated jit loop of the same step, and beside a second such loop, which tells what
the machine makes of no difference. Then one batch of each round crowds all tokens on the same experts: it must cost one
fallback step and as many identity steps as the lag, and nothing may be compiled.

Exit codes: 0 done; 2 bad arguments.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import race
from benchmarks.output import environment, rounds_command
from moe_blocks import Capacity, CapacitySpec, MoEBlock, Router
from policies import RetryDropless, StepRunner

LAGS = (0, 1, 3)
BATCHES = 8  # of a round; with the crowded one in the middle, more follow it than any lag
FACTOR = 2.0
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch, in the symbols of the library."""

    tokens: int = 1024
    width: int = 256
    expert_width: int = 512
    experts: int = 8
    k: int = 2

    @property
    def spec(self) -> CapacitySpec:
        """Of each layer."""
        return CapacitySpec(self.tokens, self.experts, self.k, scope="expert")


QUICK = Sizes(tokens=64, width=16, expert_width=16)


class Model(nn.Module):
    """Two residual MoE layers."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array, capacity: Capacity | None = None) -> tuple[jax.Array, list[jax.Array]]:
        demand = []
        for _ in range(2):
            moe = MoEBlock(
                num_experts=self.sizes.experts,
                num_experts_per_tok=self.sizes.k,
                intermediate_size=self.sizes.expert_width,
                router=Router(norm_topk_prob=True),
                capacity_scope="expert",
            )
            out, _, total_recv_tokens = moe(nn.LayerNorm()(x), capacity=capacity)
            x += out
            demand.append(total_recv_tokens)
        return x, demand


def training(sizes: Sizes) -> tuple[race.Step, PyTree, jax.Array, jax.Array]:
    """The step, its first state, and two batches: one that spreads over the experts and one that crowds them.

    The learning rate is zero, so that what a batch asks for does not change; all of Adam's work is done nevertheless.
    """
    model, tx = Model(sizes), optax.adam(0.0)

    def step(state: PyTree, batch: jax.Array, *, capacity: Capacity) -> tuple[PyTree, PyTree, PyTree]:
        def loss_fn(params: PyTree) -> tuple[jax.Array, Any]:
            out, demand = model.apply(params, batch, capacity)
            return jnp.mean((out - jnp.roll(batch, 1, axis=0)) ** 2), demand

        (loss, demand), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, demand, {"loss": loss}

    spread = jax.random.normal(jax.random.key(0), (sizes.tokens, sizes.width))
    params = model.init(jax.random.key(1), spread)
    return step, {"params": params, "opt_state": tx.init(params)}, spread, jnp.broadcast_to(spread[:1], spread.shape)


def measure(sizes: Sizes, *, rounds: int) -> dict[str, Any]:
    """Everything that the benchmark finds out, as plain numbers."""
    step, state, spread, crowded = training(sizes)
    capacity = Capacity(sizes.spec.slots(FACTOR))
    runners = {f"lag {lag}": StepRunner(step, RetryDropless(FACTOR), sizes.spec, lag=lag) for lag in LAGS}
    for runner in runners.values():
        runner.compile(state, spread)
    overhead = race.measure_overhead(step, runners, state, [spread] * BATCHES, capacity=capacity, rounds=rounds)
    compiled = {name: runner.executables for name, runner in runners.items()}
    rejections = _rejections(runners, spread, crowded, rounds=rounds)
    return {
        "environment": environment("optax") | {"devices": f"1 of {jax.devices()[0].device_kind}"},
        "sizes": dataclasses.asdict(sizes),
        "factor": FACTOR,
        "rounds": rounds,
        "overhead": {
            name: {clock: found._asdict() for clock, found in by_clock.items()} for name, by_clock in overhead.items()
        },
        "rejections": rejections,
        "compiled_for_the_first_overflow": {name: runners[name].executables - n for name, n in compiled.items()},
    }


def _rejections(
    runners: dict[str, StepRunner], spread: jax.Array, crowded: jax.Array, *, rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds that one overflow adds to a round, beside what its steps take: all medians."""
    quiet = [spread] * BATCHES
    upset = [*quiet[: BATCHES // 2], crowded, *quiet[BATCHES // 2 + 1 :]]
    both: dict[tuple[str, str], list[float]] = {
        (name, kind): [] for name in runners for kind in ("quiet", "upset", "capped", "fallback")
    }
    for turn in range(rounds):
        for name in race.rotated(list(runners), turn):
            runner = runners[name]
            for kind, batches, attempts in (("quiet", quiet, 1), ("upset", upset, 2)):
                started = time.perf_counter()
                reports = [report for batch in batches for report in runner.submit(batch)] + runner.drain()
                jax.block_until_ready(runner.state)
                seconds = time.perf_counter() - started
                if [report.attempts for report in reports].count(attempts) < 1 or len(reports) != len(batches):
                    raise AssertionError(
                        f"{kind} batches of {name} ran {[report.attempts for report in reports]} times"
                    )
                both[name, kind].append(seconds)
            # A crowded batch alone is one capped step, rejected, and one fallback.
            started = time.perf_counter()
            runner.submit(crowded)
            runner.drain()
            jax.block_until_ready(runner.state)
            capped = both[name, "quiet"][-1] / BATCHES
            both[name, "capped"].append(capped)
            both[name, "fallback"].append(time.perf_counter() - started - capped)
    found = {}
    for name, lag in zip(runners, LAGS, strict=True):
        capped, fallback = (statistics.median(both[name, kind]) for kind in ("capped", "fallback"))
        extra = [upset - quiet for quiet, upset in zip(both[name, "quiet"], both[name, "upset"], strict=True)]
        found[name] = {
            "capped": capped,
            "fallback": fallback,
            "rejection": statistics.median(extra),
            "predicted": fallback + lag * capped,
        }
    return found


def render(figures: dict[str, Any]) -> str:
    """The tables for people."""
    where, sizes = figures["environment"], figures["sizes"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "flax"))
    rows = [
        " ".join(f"{name}={size}" for name, size in sizes.items()) + f", factor {figures['factor']:g}, 2 layers, Adam",
        f"{where['devices']}, {where['cores']} cores, {versions}, {where['date']}, "
        f"{figures['rounds']} rounds of {BATCHES} steps",
        "",
        "no overflow: against a plain donated jit loop     wall (quartiles)          processor time (quartiles)",
    ]
    for name, by_clock in figures["overhead"].items():
        cells = (
            f"{found['median']:+.2%} ({found['quartiles'][0]:+.2%} to {found['quartiles'][1]:+.2%})"
            for found in (by_clock["wall"], by_clock["cpu"])
        )
        label = "the same plain loop again" if name == "control" else f"armed, {name}"
        rows.append(f"  {label:<48}" + "  ".join(f"{cell:<24}" for cell in cells))
    rows += [
        "",
        "one overflow, milliseconds   capped step  fallback step  it adds  fallback + lag capped steps  compiled",
    ]
    for name, found in figures["rejections"].items():
        times = [f"{found[key] * 1e3:.1f}" for key in ("capped", "fallback", "rejection", "predicted")]
        compiled = figures["compiled_for_the_first_overflow"][name]
        rows.append(f"  {name:<27}{times[0]:>11}{times[1]:>15}{times[2]:>9}{times[3]:>29}{compiled:>10}")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return rounds_command(
        "benchmarks.runner",
        __doc__,
        argv,
        rounds=(40, 4),
        minimum=2,
        measure=lambda quick, rounds: measure(QUICK if quick else Sizes(), rounds=rounds),
        render=render,
    )


if __name__ == "__main__":
    sys.exit(main())
