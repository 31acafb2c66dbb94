"""The laws that every policy keeps, over every registered policy and random runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import policies
from moe_blocks.capacity import Capacity, CapacitySpec
from policies import CapacityOverflowError, CapacityPolicy, PolicyState, Report

FACTORS = st.sampled_from([0.01, 0.125, 0.5, 1.0, 1.25, 2.0, 7.5, 1000.0])
PLAIN = {
    "static_factor": st.builds(policies.StaticFactor, st.none() | FACTORS),
    "drop": st.builds(policies.Drop, st.none() | FACTORS),
    "retry_dropless": st.builds(policies.RetryDropless, st.none() | FACTORS, st.sampled_from(["step", "layer"])),
    "adaptive_grow": st.builds(
        policies.AdaptiveGrow,
        FACTORS,
        st.sampled_from([1.1, 1.5, 2.0, 10.0]),
        st.integers(1, 4),
        st.sampled_from(["retry", "drop"]),
    ),
}
SKIPPING = st.builds(policies.SkipNonFinite, st.one_of(*PLAIN.values()), st.just(("loss",)), st.integers(1, 3))
ALARMED = st.builds(policies.RejectionAlarm, st.one_of(*PLAIN.values(), SKIPPING), st.integers(1, 3), st.integers(1, 5))
EXAMPLES = PLAIN | {"skip_non_finite": SKIPPING, "rejection_alarm": ALARMED}
# The alarm is not what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::policies.RunawayRouterWarning")
SPECS = st.builds(
    lambda tokens, ep, scope: CapacitySpec(tokens, 2 * ep, 2, ep, scope=scope, multiple_of=4),
    st.integers(1, 40),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["rank", "expert"]),
)


def test_every_policy_is_here() -> None:
    assert set(EXAMPLES) == set(policies.names())


every_policy = pytest.mark.parametrize("name", sorted(EXAMPLES))


def attempt(policy: CapacityPolicy, step: int, number: int, demand: int, capacity: Capacity) -> Report:
    """The report of an attempt with this demand, as the compiled step would judge it."""
    return Report(step, number, demand, capacity, bool(policy.accept(jnp.array([demand], jnp.int32), capacity)))


def run(
    policy: CapacityPolicy, spec: CapacitySpec, loads: list[float]
) -> Iterator[tuple[PolicyState, Report, PolicyState]]:
    """All attempts of a run whose steps have these demands, as fractions of dropless; ends at an error."""
    state = policy.init(spec)
    for step, load in enumerate(loads):
        demand, number, accepted = math.ceil(load * spec.dropless), 0, False
        while not accepted:
            report = attempt(policy, step, number, demand, policy.capacity(state))
            accepted, number = report.accepted, number + 1
            try:
                after = policy.update(state, report)
            except CapacityOverflowError:
                assert not report.accepted
                return
            yield state, report, after
            state = after


def size(capacity: Capacity) -> float:
    return math.inf if capacity.slots is None else capacity.slots


LOAD = st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0])
LOADS = st.lists(LOAD, max_size=12)


@every_policy
@given(data=st.data(), spec=SPECS, loads=LOADS)
def test_capacities_are_finite_and_retries_bounded(
    name: str, data: Any, spec: CapacitySpec, loads: list[float]
) -> None:
    policy = data.draw(EXAMPLES[name])
    start = policy.init(spec)
    capacities = policy.capacities(start)
    assert policy.ladder(spec) == start.ladder == tuple(sorted(set(start.ladder)))
    assert start.ladder[-1] == spec.dropless
    assert sorted(map(size, capacities)) == list(map(size, capacities))
    assert len(capacities) <= len(start.ladder)
    for before, report, after in run(policy, spec, loads):
        assert report.capacity in capacities
        assert report.attempt < len(capacities)
        assert policy.capacities(after) == capacities
        assert policy.capacity(after) in capacities
        assert (after.ladder, after.balanced) == (before.ladder, spec.balanced)
        if not report.accepted:
            assert size(policy.capacity(after)) > size(report.capacity)
        assert after.overflows - before.overflows == report.overflow
        assert after.rejections - before.rejections == (not report.accepted)


@every_policy
@given(data=st.data())
def test_a_dropless_attempt_always_counts_and_costs_nothing(name: str, data: Any) -> None:
    policy = data.draw(EXAMPLES[name])
    assert policy.accept(jnp.array([2**31 - 1], jnp.int32), Capacity(None)) is True


@every_policy
@given(data=st.data(), spec=SPECS, demand=st.integers(0, 700))
def test_accept_judges_the_fullest_buffer_of_every_layer(name: str, data: Any, spec: CapacitySpec, demand: int) -> None:
    policy = data.draw(EXAMPLES[name])
    tree = {"one": jnp.array([0, demand], jnp.int32), "many": jnp.zeros((2, 3), jnp.int32)}
    for capacity in policy.capacities(policy.init(spec)):
        verdict = policy.accept(tree, capacity)
        assert bool(verdict) == attempt(policy, 0, 0, demand, capacity).accepted
        assert verdict is True or (verdict.shape, verdict.dtype) == ((), jnp.bool_)


@every_policy
@given(data=st.data(), spec=SPECS, loads=LOADS)
def test_update_depends_on_its_arguments_alone(name: str, data: Any, spec: CapacitySpec, loads: list[float]) -> None:
    policy = data.draw(EXAMPLES[name])
    twin = policies.from_config(policies.to_config(policy))
    assert twin.init(spec) == policy.init(spec)
    for before, report, after in list(run(policy, spec, loads)):
        assert twin.update(before, report) == after
        assert all(type(leaf) is int for leaf in jax.tree.leaves(after))


@every_policy
@given(data=st.data(), spec=SPECS, loads=LOADS)
def test_state_survives_being_saved(name: str, data: Any, spec: CapacitySpec, loads: list[float]) -> None:
    policy = data.draw(EXAMPLES[name])
    for before, report, after in run(policy, spec, loads):
        leaves, structure = jax.tree.flatten(before)
        for saved in (
            jax.tree.unflatten(structure, leaves),
            PolicyState.from_json(before.to_json()),
            jax.tree.map(np.int64, before),
            jax.tree.map(np.asarray, before),  # 0-d arrays
        ):
            assert policy.capacity(saved) == report.capacity
            assert hash(policy.capacity(saved)) == hash(report.capacity)
            assert policy.update(saved, report).plain() == after
            assert policy.resume(spec, saved) == before


@every_policy
@given(data=st.data(), spec=SPECS, loads=LOADS)
def test_to_a_policy_a_skipped_step_never_was(name: str, data: Any, spec: CapacitySpec, loads: list[float]) -> None:
    def choice(state: PolicyState) -> PolicyState:
        return state._replace(skips=0, recent=0)

    policy = data.draw(EXAMPLES[name])
    for before, report, after in run(policy, spec, loads):
        if report.accepted:
            skipped = policy.skip(before, report)
            assert choice(skipped) == choice(after if report.attempt else before)
            assert all(type(leaf) is int for leaf in jax.tree.leaves(skipped))


@every_policy
@given(data=st.data(), spec=SPECS, loads=LOADS, load=LOAD)
def test_a_report_at_another_capacity_is_harmless(
    name: str, data: Any, spec: CapacitySpec, loads: list[float], load: float
) -> None:
    policy = data.draw(EXAMPLES[name])
    states = [policy.init(spec), *(after for _, _, after in run(policy, spec, loads))]
    state, demand = data.draw(st.sampled_from(states)), math.ceil(load * spec.dropless)
    for capacity in policy.capacities(state):
        if capacity == policy.capacity(state):
            continue
        report = attempt(policy, 0, 0, demand, capacity)
        after = policy.update(state, report)
        assert after.quiet <= state.quiet  # no credit towards shrinking
        assert after.slots >= state.slots  # never lower
        if not report.overflow or demand <= state.slots:
            assert after.slots == state.slots  # nor higher for what it already holds
        if not report.accepted:
            assert size(policy.capacity(after)) > size(report.capacity)
