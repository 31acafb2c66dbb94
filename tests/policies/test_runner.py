from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moe_blocks.capacity import Capacity
from policies import (
    AdaptiveGrow,
    CapacityOverflowError,
    CapacityPolicy,
    Drop,
    PolicyState,
    Report,
    RetryDropless,
    StaticFactor,
    StepReport,
    StepRunner,
)
from tests.policies.toy import SPEC, batches, by_hand, same_bits, state_of_every_kind, step

# Overflows at the start, twice running, one step apart, and at the end; 4 is exactly full.
DEMANDS = (9, 3, 4, 5, 17, 2, 6, 1, 4, 32)


def train(policy: CapacityPolicy, *demands: int, lag: int = 1) -> tuple[StepRunner, list[StepReport]]:
    runner = StepRunner(step, policy, SPEC, lag=lag)
    return runner, list(runner.run(state_of_every_kind(), batches(*demands)))


# --- the accepted sequence


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("policy", [RetryDropless(1.0), AdaptiveGrow(1.0, patience=2), StaticFactor(None)])
def test_every_lag_trains_as_a_dropless_run_does(policy: CapacityPolicy, lag: int) -> None:
    runner, reports = train(policy, *DEMANDS, lag=lag)
    state, metrics = by_hand(None, *DEMANDS)
    assert same_bits(runner.state, state)
    assert all(same_bits(report.metrics, metric) for report, metric in zip(reports, metrics, strict=True))
    assert [report.step for report in reports] == [int(report.metrics["step"]) for report in reports] == list(range(10))
    assert [report.demand for report in reports] == list(DEMANDS)
    retries = sum(report.attempts - 1 for report in reports)
    assert retries == runner.policy_state.rejections
    assert (retries >= 2) == (policy != StaticFactor(None))


def test_the_small_buffer_alone_trains_otherwise() -> None:
    """The control of the test above: the drops do change the training."""
    runner, reports = train(Drop(1.0), *DEMANDS)
    assert same_bits(runner.state, by_hand(4, *DEMANDS)[0])
    assert not same_bits(runner.state, by_hand(None, *DEMANDS)[0])
    assert [report.overflow for report in reports] == [demand > 4 for demand in DEMANDS]
    assert all(report.attempts == 1 for report in reports)
    assert (runner.policy_state.overflows, runner.policy_state.rejections) == (5, 0)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_reports_tell_what_happened(lag: int) -> None:
    _, reports = train(RetryDropless(1.0), *DEMANDS, lag=lag)
    for report in reports:
        first = Capacity(4)
        if report.demand <= 4:
            assert (report.capacity, report.attempts, report.overflow, report.rejected) == (first, 1, False, ())
        else:
            assert (report.capacity, report.attempts, report.overflow) == (Capacity(None, chunks=8), 2, True)
            [rejected] = report.rejected
            assert rejected == (report.step, 0, report.demand, first, False, (report.demand,))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_pol_1_a_rejection_wastes_at_most_lag_steps(lag: int, dispatched: list[int | None]) -> None:
    runner, _ = train(RetryDropless(1.0), 2, 9, 2, lag=lag)
    behind = min(lag, 1)  # only one step comes after the rejected one
    assert dispatched == [4, 4, *[4] * behind, None, 4]
    assert same_bits(runner.state, by_hand(None, 2, 9, 2)[0])


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_retry_is_settled_before_the_next_step_starts(lag: int, dispatched: list[int | None]) -> None:
    """So the steps behind an overflow run at the grown capacity, whatever the lag."""
    _, reports = train(AdaptiveGrow(1.0), 1, 9, 9, 9, 9, 9, lag=lag)
    assert [report.capacity.slots for report in reports] == [4, 16, 16, 16, 16, 16]
    assert dispatched[-5:] == [16] * 5
    assert len(dispatched) == 1 + 1 + lag + 5


def test_a_demand_that_drops_made_too_low() -> None:
    """The second layer sees what the first has dropped from, so its demand comes to light only in the retry."""

    def two_layers(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        first, second = batch["demand"], batch["demand"] + 4
        damaged = False if capacity.slots is None else first > capacity.slots
        return state + second, [first[None], jnp.where(damaged, 0, second)[None]], {}

    runner = StepRunner(two_layers, AdaptiveGrow(1.0), SPEC)
    [report] = runner.run(jnp.int32(0), batches(6))
    assert [(r.attempt, r.demand, r.capacity.slots) for r in report.rejected] == [(0, 6, 4), (1, 10, 8)]
    assert (report.demand, report.capacity.slots, report.attempts, report.overflow) == (10, 16, 3, True)
    assert (int(runner.state), runner.policy_state.rejections) == (10, 2)


def test_drops_grow_the_steps_that_start_after_their_report() -> None:
    demands = (5, 5, 5, 5, 5)
    for lag in (0, 1, 2):
        _, reports = train(AdaptiveGrow(1.0, on_overflow="drop"), *demands, lag=lag)
        assert [report.capacity.slots for report in reports] == [4] * (lag + 1) + [8] * (4 - lag)


def test_metrics_stay_readable_while_the_state_moves_on() -> None:
    """Also where the step returns one array as state and as metric, and the state is donated next."""
    _, reports = train(Drop(1.0), 1, 2, 3, 4)
    _, metrics = by_hand(4, 1, 2, 3, 4)
    assert all(same_bits(report.metrics, metric) for report, metric in zip(reports, metrics, strict=True))


# --- StaticFactor


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_overflow_error_leaves_the_state_before_the_step(lag: int) -> None:
    runner, seen = StepRunner(step, StaticFactor(1.0), SPEC, lag=lag), []
    with pytest.raises(CapacityOverflowError, match="step 2 sent 9 assignments") as caught:
        for report in runner.run(state_of_every_kind(), batches(1, 2, 9, 3, 4, 1)):
            seen.append(report.step)
    assert caught.value.factor == 2.25
    assert same_bits(runner.state, by_hand(None, 1, 2)[0])
    seen += [report.step for report in runner.drain()]
    assert seen == [0, 1]
    # It can go on: here without the batch.
    reports = list(runner.run(runner.state, batches(1, 2, 9, 3)[3:]))
    assert [report.step for report in reports] == [2]


@pytest.mark.parametrize("lag", [0, 2])
def test_an_error_after_a_retry_abandons_the_batches_behind_it_too(lag: int) -> None:
    @dataclasses.dataclass(frozen=True)
    class OneRetry(AdaptiveGrow):
        def update(self, state: PolicyState, report: Report) -> PolicyState:
            if report.attempt and not report.accepted:
                raise CapacityOverflowError.of(state, report)
            return super().update(state, report._replace(demand=min(report.demand, 8)))

    runner = StepRunner(step, OneRetry(1.0), SPEC, lag=lag)
    with pytest.raises(CapacityOverflowError, match="step 1 sent 9 assignments to a receive buffer of 8 slots"):
        list(runner.run(state_of_every_kind(), batches(1, 9, 3, 4)))
    assert same_bits(runner.state, by_hand(None, 1)[0])


# --- programs


def test_pol_10_programs_are_bounded_by_the_rungs_in_use() -> None:
    runner, reports = train(AdaptiveGrow(1.0), 5, 6, 7, 8, 9, 8, 5)
    assert [report.capacity.slots for report in reports] == [8, 8, 8, 8, 16, 16, 16]  # only grows
    assert runner.executables == 3  # 4, and two new ones


def test_compile_builds_all_before_the_first_step() -> None:
    traced: list[int | None] = []

    def counted(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        traced.append(capacity.slots)
        return step(state, batch, capacity=capacity)

    runner, state, data = StepRunner(counted, AdaptiveGrow(1.0), SPEC), state_of_every_kind(), batches(1, 5, 9, 32)
    runner.compile(state, data[0])
    assert (runner.executables, traced) == (4, [4, None, 8, 16])  # the first and the fallback come first
    assert not state["params"]["w"].is_deleted()
    reports = list(runner.run(state, data))
    assert [report.capacity.slots for report in reports] == [4, 8, 16, None]
    assert (runner.executables, len(traced)) == (4, 4)


@pytest.mark.parametrize(
    ("policy", "programs"), [(StaticFactor(1.0), 1), (Drop(1.0), 1), (RetryDropless(1.0), 2), (RetryDropless(None), 1)]
)
def test_compile_builds_only_what_the_policy_may_ask_for(policy: CapacityPolicy, programs: int) -> None:
    runner = StepRunner(step, policy, SPEC)
    assert runner.executables == 0
    runner.compile(state_of_every_kind(), batches(1)[0])
    assert runner.executables == programs


def test_train_1_a_shorter_last_batch_is_one_more_program() -> None:
    def mean(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        return state + batch.mean(), jnp.array([batch.size]), {}

    runner = StepRunner(mean, RetryDropless(1.0), SPEC)
    data = [np.float32([1, 2, 3]), np.float32([4, 5, 6]), np.float32([7])]
    assert [report.demand for report in runner.run(jnp.float32(0), data)] == [3, 3, 1]
    assert (float(runner.state), runner.executables) == (14.0, 2)


# --- what the host reads


def test_pol_9_the_host_reads_verdicts_alone_and_late(monkeypatch: pytest.MonkeyPatch, dispatched: list) -> None:
    """On CPU the transfer guard lets reads pass, since they copy nothing; so every way to read is counted too."""
    array_type, reads, values = type(jnp.ones(())), [], []
    device_get, value = jax.device_get, array_type._value

    def counted_get(x: Any) -> Any:
        reads.append((len(dispatched), x.shape, x.dtype))
        return device_get(x)

    monkeypatch.setattr(jax, "device_get", counted_get)
    monkeypatch.setattr(array_type, "_value", property(lambda self: (values.append(self.shape), value.fget(self))[1]))
    for policy in (StaticFactor(1.0), Drop(1.0), RetryDropless(1.0), AdaptiveGrow(1.0)):
        state, data = jax.device_put((state_of_every_kind(), batches(1, 2, 3, 4, 1)))
        dispatched.clear(), reads.clear(), values.clear()
        with jax.transfer_guard_device_to_host("disallow"):
            runner = StepRunner(step, policy, SPEC, lag=2)
            assert sum(1 for _ in runner.run(state, data)) == 5
        # Step n is read when step n + 2 is on its way: two integers each, once.
        assert reads == [(count, (2,), jnp.int32) for count in (3, 4, 5, 5, 5)]
        assert values == [(2,)] * 5
    int(jnp.ones((), jnp.int32))
    assert values[-1] == (), "a read that went unnoticed"


# --- over a mesh


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [True, False])
def test_a_sharded_state_stays_where_it_is(kind: AxisType, in_context: bool) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"), axis_types=(kind, kind))
    by_expert, everywhere = NamedSharding(mesh, PartitionSpec("expert")), NamedSharding(mesh, PartitionSpec())
    by_both = NamedSharding(mesh, PartitionSpec(("data", "expert")))

    def sharded_step(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        slots = SPEC.dropless if capacity.slots is None else capacity.slots
        w = state["w"] + jnp.minimum(batch["demand"].max(), slots)
        # Left to itself, the compiler would spread this leaf as the batch is.
        pulled = state["pulled"] + (0 if kind == AxisType.Explicit else batch["demand"])
        new_state = {"w": w, "pulled": pulled, "count": state["count"] + 1}
        return new_state, batch["demand"], {"count": state["count"]}

    def run(lay: Callable[[np.ndarray, Any], Any]) -> tuple[StepRunner, list[StepReport]]:
        runner = StepRunner(sharded_step, RetryDropless(1.0), SPEC)
        # The counter is where optimisers put theirs: on the default device.
        state = {"w": lay(np.zeros(8, np.int32), by_expert), "pulled": jnp.zeros(8, jnp.int32), "count": jnp.int32(0)}
        data = [{"demand": lay(np.arange(8, dtype=np.int32) * m, by_both)} for m in (0, 1, 0, 2, 0)]
        runner.compile(state, data[0])
        return runner, list(runner.run(state, data))

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        runner, reports = run(jax.device_put)
        state = runner.state
    _, expected = run(lambda array, _: jnp.asarray(array))
    assert state["w"].tolist() == [7 + 14] * 8
    for name, sharding in {"w": by_expert, "pulled": everywhere, "count": everywhere}.items():
        assert state[name].sharding.is_equivalent_to(sharding, state[name].ndim), name
    assert [r.attempts for r in reports] == [r.attempts for r in expected] == [1, 2, 1, 2, 1]
    assert runner.executables == 2


def test_a_replicated_state_and_a_sharded_batch() -> None:
    """Data parallelism: the mesh comes with the first batch, and the state follows it there."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    batch = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, PartitionSpec("data")))
    runner = StepRunner(lambda s, b, capacity: (s + b.sum(), b, {}), RetryDropless(1.0), SPEC)
    assert [report.attempts for report in runner.run(jnp.int32(0), [batch, batch])] == [2, 2]
    assert int(runner.state) == 56
    assert runner.state.sharding == NamedSharding(mesh, PartitionSpec())
    assert runner.executables == 2


# --- resuming


@pytest.mark.parametrize("policy", [RetryDropless(1.0), AdaptiveGrow(1.0, patience=2)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(policy: CapacityPolicy) -> None:
    whole, reports = train(policy, *DEMANDS, lag=0)
    first = StepRunner(step, policy, SPEC, lag=0)
    told = list(first.run(state_of_every_kind(), batches(*DEMANDS)[:6]))
    saved_state, saved_policy = jax.device_get(first.state), first.policy_state.to_json()

    second = StepRunner(step, policy, SPEC, lag=0, policy_state=PolicyState.from_json(saved_policy), first_step=6)
    told += list(second.run(saved_state, batches(*DEMANDS)[6:]))
    assert same_bits(second.state, whole.state)
    assert second.policy_state == whole.policy_state
    assert [(r.step, r.capacity, r.rejected) for r in told] == [(r.step, r.capacity, r.rejected) for r in reports]
