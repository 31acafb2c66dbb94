from __future__ import annotations

import pytest

from moe_blocks.capacity import Capacity
from policies import AdaptiveGrow, PolicyState, Report
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
