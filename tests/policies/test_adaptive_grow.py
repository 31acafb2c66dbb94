from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moe_blocks.capacity import Capacity, LayerCapacities
from policies import AdaptiveGrow, PolicyState, Report, StepRunner
from policies.base import checked_update
from tests.policies.toy import SPEC


def go(policy: AdaptiveGrow, state: PolicyState, *demands: int) -> tuple[PolicyState, list[int | None]]:
    """Runs steps with these demands; returns the slots of every attempt too."""
    used = []
    for step, demand in enumerate(demands):
        accepted = False
        while not accepted:
            capacity = policy.capacity(state)
            accepted = bool(policy.accept(demand, capacity))
            state = policy.update(state, Report(step, 0, demand, capacity, accepted))
            used.append(capacity.slots)
    return state, used


def test_pol_10_grows_to_the_rung_that_the_demand_needs() -> None:
    policy = AdaptiveGrow(1.0)
    state, used = go(policy, policy.init(SPEC), 5, 6, 7, 8, 9, 8, 5)
    assert used == [4, 8, 8, 8, 8, 8, 16, 16, 16]
    assert (state.overflows, state.rejections) == (2, 2)
    assert go(policy, policy.init(SPEC), 17)[1] == [4, None]  # rungs that cannot hold it are skipped
    assert policy.capacities(state) == (Capacity(4), Capacity(8), Capacity(16), Capacity(None))


def test_shrinks_one_rung_after_a_quiet_while() -> None:
    policy = AdaptiveGrow(1.0, patience=3)
    state, _ = go(policy, policy.init(SPEC), 9)
    state, used = go(policy, state, 8, 8, 8, 8)
    assert used == [16, 16, 16, 8]
    state, used = go(policy, state, 4, 4, 5, 4, 4, 4, 4, 4, 4, 4)  # the 5 starts the count anew
    assert used == [8, 8, 8, 8, 8, 8, 4, 4, 4, 4]
    assert (state.slots, state.quiet) == (4, 0)  # never below the first rung


def test_the_overflow_starts_the_count_anew() -> None:
    policy = AdaptiveGrow(1.0, patience=2)
    state, _ = go(policy, policy.init(SPEC), 9, 8)
    assert state.quiet == 1
    state, used = go(policy, state, 17, 16, 8)
    assert used == [16, None, None, None]
    assert (state.slots, state.quiet) == (16, 0)


def test_drop_counts_every_step_and_grows_for_the_next() -> None:
    policy = AdaptiveGrow(1.0, on_overflow="drop")
    state, used = go(policy, policy.init(SPEC), 5, 9, 9)
    assert used == [4, 8, 16]
    assert (state.overflows, state.rejections) == (2, 0)
    # Reports of steps that were in flight when it grew ask for nothing more.
    for _ in range(3):
        state = policy.update(state, Report(0, 0, 15, Capacity(8), accepted=True))
    assert state.slots == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial_factor": 0}, "AdaptiveGrow.initial_factor must be a finite number above 0, got 0"),
        ({"initial_factor": None}, "AdaptiveGrow.initial_factor must be a finite number above 0, got None"),
        ({"growth": 1.0}, "AdaptiveGrow.growth must be at least 1.1, got 1.0"),
        ({"growth": 0.5}, "AdaptiveGrow.growth must be at least 1.1, got 0.5"),
        ({"growth": float("nan")}, "AdaptiveGrow.growth must be a finite number above 0, got nan"),
        ({"patience": 0}, "AdaptiveGrow.patience must be an integer of at least 1, got 0"),
        ({"patience": 1.5}, "AdaptiveGrow.patience must be an integer of at least 1, got 1.5"),
        ({"on_overflow": "stop"}, r"AdaptiveGrow.on_overflow must be one of \('retry', 'drop'\), got 'stop'"),
    ],
)
def test_refuses(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveGrow(**fields)


# --- a rung for each layer


def each(policy: AdaptiveGrow, state: PolicyState, *steps: tuple[int, ...]) -> tuple[PolicyState, list[Any]]:
    """Runs steps with these demands of the layers; returns the slots of every attempt too."""
    used = []
    for step, demands in enumerate(steps):
        accepted = False
        while not accepted:
            capacity = policy.capacity(state)
            accepted = bool(policy.accept([jnp.int32(demand) for demand in demands], capacity))
            report = Report(step, 0, max(demands), capacity, accepted, by_layer=demands)
            state = checked_update(policy, state, report)
            used.append(tuple(capacity.layer(i).slots for i in range(len(demands))))
    return state, used


def test_each_layer_grows_to_its_own_demand() -> None:
    policy = AdaptiveGrow(1.0, per_layer=True)
    state, used = each(policy, policy.init(SPEC), (3, 9, 4), (5, 9, 1), (8, 16, 4))
    assert used == [(4, 4, 4), (4, 16, 4), (4, 16, 4), (8, 16, 4), (8, 16, 4)]
    assert (state.slots, state.overflows, state.rejections) == (16, 2, 2)
    assert policy.capacity(state) == LayerCapacities.of((Capacity(8), Capacity(16), Capacity(4)))
    assert policy.capacities(state)[0] == Capacity(4) and policy.capacities(state)[-1] == Capacity(None)
    whole = go(AdaptiveGrow(1.0), policy.init(SPEC), 9, 9, 16)[0]
    assert sum(used[-1]) < 3 * whole.slots  # one rung for all is that of the worst


def test_each_layer_shrinks_after_a_quiet_while() -> None:
    """The retry of the step that made it grow is the first of two steps, and needed what it grew to."""
    policy = AdaptiveGrow(1.0, patience=2, per_layer=True)
    state, _ = each(policy, policy.init(SPEC), (3, 9))
    state, used = each(policy, state, (3, 8), (4, 8), (4, 4), (4, 4), (1, 1), (1, 1))
    assert used == [(4, 16), (4, 16), (4, 16), (4, 8), (4, 8), (4, 4)]
    assert state.profile == (4, 4) and policy.capacity(state) == Capacity(4)


def test_the_peak_of_the_quiet_while_counts() -> None:
    """Demands that no single step has at once: each layer keeps what it needed in any of them."""
    policy = AdaptiveGrow(1.0, patience=3, per_layer=True)
    state, _ = each(policy, policy.init(SPEC), (9, 9))
    state, _ = each(policy, state, (9, 2), (2, 9), (2, 2))
    assert state.profile == (16, 16)


def test_there_are_no_more_programs_than_allowed() -> None:
    rng = np.random.default_rng(0)
    policy = AdaptiveGrow(1.0, patience=1, per_layer=True, programs=5)
    state, used = each(policy, policy.init(SPEC), *(tuple(map(int, rng.integers(0, 33, 4))) for _ in range(200)))
    assert len(set(used)) == 5 == len(policy.capacities(state))
    free = AdaptiveGrow(1.0, patience=1, per_layer=True, programs=10**6)
    steps = (tuple(map(int, rng.integers(0, 33, 4))) for _ in range(200))
    assert len(set(each(free, free.init(SPEC), *steps)[1])) > 50  # so the limit was what kept them few


def test_a_change_of_the_ladder_keeps_what_each_layer_had() -> None:
    policy = AdaptiveGrow(1.0, per_layer=True)
    state, _ = each(policy, policy.init(SPEC), (3, 9))
    finer = AdaptiveGrow(1.0, growth=1.5, per_layer=True)
    resumed = finer.resume(SPEC, state.to_json())
    assert resumed.profile == (4, 21) and resumed.profiles == () and resumed.rejections == 1
    assert policy.resume(SPEC, state.to_json()) == state


def test_in_a_runner() -> None:
    """Two layers of unequal demand under every lag: the states are those of a dropless run."""

    def step(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        slots = [capacity.layer(i).slots for i in range(2)]
        kept = [batch[i] if held is None else jnp.minimum(batch[i], held) for i, held in enumerate(slots)]
        return state + kept[0] + 100 * kept[1], [batch[0][None], batch[1][None]], {}

    batches = [jnp.array(pair, jnp.int32) for pair in ((3, 9), (5, 9), (8, 16), (1, 1))]
    for lag in (0, 1, 3):
        runner = StepRunner(step, AdaptiveGrow(1.0, per_layer=True), SPEC, lag=lag)
        reports = list(runner.run(jnp.int32(0), batches))
        assert int(runner.state) == 17 + 100 * 35
        assert [report.by_layer for report in reports] == [(3, 9), (5, 9), (8, 16), (1, 1)]
        assert [report.attempts for report in reports] == [2, 2, 1, 1]
        assert runner.policy_state.profile == (8, 16)
