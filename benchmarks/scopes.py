"""What an overflow costs when the step runs again, and when only the layer does, by how often it happens.

Usage: python -m benchmarks.scopes [--rounds N] [--quick] [--json FILE]

The model is that of benchmarks.runner. Some of its batches crowd all tokens on the same experts: none, one in a
hundred, one in ten, all. Under each policy the same batches run in turns of one round each; speeds are relative to
dropless in the same round. "step": RetryDropless(2.0). "layer": RetryDropless(2.0, scope="layer"). "drop": Drop(2.0),
which does other mathematics, as the bound that neither can beat.

Exit codes: 0 done; 2 bad arguments.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import race
from benchmarks.output import aligned, environment, rounds_command
from benchmarks.runner import FACTOR, QUICK, Sizes, training
from policies import CapacityPolicy, Drop, RetryDropless, StaticFactor, StepRunner

POLICIES: dict[str, CapacityPolicy] = {
    "dropless": StaticFactor(None),
    "drop": Drop(FACTOR),
    "step": RetryDropless(FACTOR),
    "layer": RetryDropless(FACTOR, scope="layer"),
}
RATES = (0.0, 0.01, 0.1, 1.0)  # of the steps
STEPS, QUICK_STEPS = 100, 10
# AI-Hypercomputer/maxtext#5080, tokens per second and device: a factor of 0.125, which most steps overflow, retried by
# step; over its dropless run.
MAXTEXT = 391.64 / 631.26


def measure(sizes: Sizes, *, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds for one step by rate and policy, one entry for each round, and what the runners report."""
    step, state, spread, crowded = training(sizes)
    runners = {name: StepRunner(step, policy, sizes.spec) for name, policy in POLICIES.items()}
    for runner in runners.values():
        runner.compile(state, spread)
        runner.start(race.copy(state))
        for batch in (spread, crowded, spread):
            runner.submit(batch)
        runner.drain()
    found: dict[str, Any] = {}
    for rate in RATES:
        every = round(1 / rate) if rate else steps + 1
        batches = [crowded if number % every == every - 1 else spread for number in range(steps)]
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        attempts, overflows = {}, {}
        for turn in range(rounds):
            for name in race.rotated(list(runners), turn):
                started = time.perf_counter()
                reports = [report for batch in batches for report in runners[name].submit(batch)]
                reports += runners[name].drain()
                jax.block_until_ready(runners[name].state)
                seconds[name].append((time.perf_counter() - started) / steps)
                attempts[name] = sum(report.attempts for report in reports)
                overflows[name] = sum(report.overflow for report in reports)
        found[f"{rate:g}"] = {"seconds": seconds, "attempts": attempts, "overflows": overflows}
    return {
        "environment": environment("optax"),
        "sizes": vars(sizes),
        "factor": FACTOR,
        "steps": steps,
        "rounds": rounds,
        "rates": found,
    }


def render(figures: dict[str, Any]) -> str:
    """The table for people."""
    where, sizes = figures["environment"], figures["sizes"]
    lines = [
        " ".join(f"{name}={size}" for name, size in sizes.items()) + f", factor {figures['factor']:g}, 2 layers, Adam",
        f"{where['cores']} cores, python {where['python']}, jax {where['jax']}, flax {where['flax']}, {where['date']}, "
        f"{figures['rounds']} rounds of {figures['steps']} steps",
        "",
    ]
    heads = [
        ["steps that", "dropless", *("speed over" for _ in range(3)), "attempts", ""],
        ["overflow", "ms", *(f"dropless: {name}" for name in ("drop", "step", "layer")), "step", "layer"],
    ]
    body = []
    for rate, found in figures["rates"].items():
        base = found["seconds"]["dropless"]
        cells = [f"{float(rate):.0%}", f"{1e3 * statistics.median(base):.1f}"]
        for name in ("drop", "step", "layer"):
            speeds = [a / b for a, b in zip(base, found["seconds"][name], strict=True)]
            cells.append(f"{statistics.median(speeds):.3f}")
        body.append([*cells, *(str(found["attempts"][name]) for name in ("step", "layer"))])
    told = f"MaxText, retried by step at a factor that most steps overflow: {MAXTEXT:.3f} of dropless"
    return "\n".join((*lines, *aligned(heads, body), told))


def _measure(quick: bool, rounds: int) -> dict[str, Any]:
    sizes, steps = (QUICK, QUICK_STEPS) if quick else (Sizes(tokens=512), STEPS)
    return measure(sizes, steps=steps, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return rounds_command(
        "benchmarks.scopes",
        __doc__,
        argv,
        rounds=(5, 1),
        minimum=1,
        measure=_measure,
        render=render,
    )


if __name__ == "__main__":
    sys.exit(main())
