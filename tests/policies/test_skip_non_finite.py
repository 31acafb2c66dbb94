from __future__ import annotations

import functools
import pickle
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_blocks.capacity import Capacity
from policies import (
    AdaptiveGrow,
    CapacityPolicy,
    Drop,
    NonFiniteError,
    RejectionAlarm,
    RetryDropless,
    SkipNonFinite,
    StaticFactor,
    StepReport,
    StepRunner,
)
from tests.policies.toy import SPEC, batches, same_bits, state_of_every_kind, step

LAGS = pytest.mark.parametrize("lag", [0, 1, 3])


def skipping(inner: CapacityPolicy, max_consecutive: int = 10) -> SkipNonFinite:
    return SkipNonFinite(inner, watch=("loss",), max_consecutive=max_consecutive)


def spoiled(demands: list[int], factors: list[float]) -> list[dict[str, Any]]:
    """Batches times a number each: 1 leaves one as it is, and after NaN or inf it spoils every row."""
    return [b | {"x": b["x"] * np.float32(factor)} for b, factor in zip(batches(*demands), factors, strict=True)]


@functools.cache
def runner_of(policy: CapacityPolicy, lag: int) -> StepRunner:
    """Kept from one example to the next with what it has compiled."""
    return StepRunner(step, policy, SPEC, lag=lag)


plain = jax.jit(lambda state, batch: step(state, batch, capacity=Capacity(None)))


def by_hand(data: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """A plain dropless loop over the batches: what the training must amount to."""
    state, metrics = state_of_every_kind(), []
    for batch in data:
        state, _, metric = plain(state, batch)
        metrics.append(metric)
    return arrays(state), metrics


def arrays(state: Any) -> Any:
    """As a step would leave them: before the first one there may be Python numbers."""
    return jax.tree.map(jnp.asarray, state)


def train(policy: CapacityPolicy, data: list[dict[str, Any]], lag: int = 1) -> tuple[Any, list[StepReport]]:
    runner = runner_of(policy, lag)
    runner._policy_state = policy.init(SPEC)  # a new run with the same programs
    reports = list(runner.run(state_of_every_kind(), data))
    return arrays(runner.state), reports


BATCHES = st.lists(st.tuples(st.integers(1, 32), st.sampled_from([1.0, 1.0, np.nan, np.inf])), min_size=1, max_size=10)


# --- the training is that of a run which never saw the batches


@LAGS
@pytest.mark.parametrize(
    "inner", [RetryDropless(1.0), AdaptiveGrow(1.0, patience=2), StaticFactor(None), RejectionAlarm(RetryDropless(1.0))]
)
@given(drawn=BATCHES)
def test_a_skipped_batch_leaves_no_trace(inner: CapacityPolicy, lag: int, drawn: list[tuple[int, float]]) -> None:
    demands, factors = map(list, zip(*drawn, strict=True))
    data, good = spoiled(demands, factors), [factor == 1 for factor in factors]
    state, reports = train(skipping(inner), data, lag)
    expected, metrics = by_hand([batch for batch, fine in zip(data, good, strict=True) if fine])
    assert same_bits(state, expected)
    assert [report.skipped for report in reports] == [not fine for fine in good]
    assert same_bits([report.metrics for report in reports if not report.skipped], metrics)
    assert [report.demand for report in reports] == demands
    assert [report.step - reports[0].step for report in reports] == list(range(len(data)))
    assert not any(np.isfinite(report.metrics["loss"]) for report in reports if report.skipped)


@given(drawn=BATCHES)
def test_nor_in_the_capacities_of_a_policy_that_drops(drawn: list[tuple[int, float]]) -> None:
    """There the capacity changes the training, and the demand of a bad batch may be nonsense."""
    policy = skipping(AdaptiveGrow(1.0, patience=2, on_overflow="drop"))
    data = spoiled(*map(list, zip(*drawn, strict=True)))
    good = [batch for batch in data if np.isfinite(batch["x"]).all()]
    runner, states = runner_of(policy, 0), []
    for seen in (data, good):
        states.append((train(policy, seen, lag=0)[0], runner.policy_state._replace(skips=0)))
    assert same_bits(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


@pytest.mark.parametrize("inner", [RetryDropless(1.0), Drop(1.0)])
def test_the_net_is_needed(inner: CapacityPolicy) -> None:
    """Without it one bad batch spoils the parameters for good."""
    data = spoiled([3, 3, 3], [1, np.nan, 1])
    state, reports = train(inner, data)
    assert np.isnan(state["params"]["w"]).any()
    assert not np.isfinite(reports[-1].metrics["loss"])
    state, reports = train(skipping(inner), data)
    assert np.isfinite(state["params"]["w"]).all()
    assert [report.skipped for report in reports] == [False, True, False]


@LAGS
def test_an_overflow_is_judged_first(lag: int) -> None:
    runner = StepRunner(step, skipping(RetryDropless(1.0)), SPEC, lag=lag)
    data = spoiled([1, 9, 2, 9], [1, np.nan, 1, 1])
    _, bad, after, overflown = runner.run(state_of_every_kind(), data)
    assert (bad.skipped, bad.attempts, bad.overflow, bad.capacity) == (True, 2, True, Capacity(None, chunks=8))
    assert [(r.capacity, r.demand, r.accepted) for r in bad.rejected] == [(Capacity(4), 9, False)]
    assert (after.skipped, after.attempts, after.capacity) == (False, 1, Capacity(4))  # back at the factor
    assert (overflown.skipped, overflown.attempts) == (False, 2)
    assert same_bits(runner.state, by_hand([data[0], *data[2:]])[0])
    assert (runner.policy_state.rejections, runner.policy_state.skips) == (2, 0)


def test_over_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_data = NamedSharding(mesh, PartitionSpec("data"))

    def mean(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        loss = batch.mean()
        return state + loss * batch, jnp.ones(8, jnp.int32), {"loss": loss}

    rows = np.ones((3, 8), np.float32)
    rows[1, 5] = np.inf  # on one device alone
    runner = StepRunner(mean, skipping(RetryDropless(1.0)), SPEC)
    state = jax.device_put(np.zeros(8, np.float32), by_data)
    assert [r.skipped for r in runner.run(state, jax.device_put(list(rows), by_data))] == [False, True, False]
    assert runner.state.tolist() == [2.0] * 8
    assert runner.state.sharding == by_data


# --- too many in a row


@LAGS
@pytest.mark.parametrize("most", [0, 2])
def test_too_many_in_a_row_are_an_error_with_the_state_before_them(most: int, lag: int) -> None:
    runner = StepRunner(step, skipping(RetryDropless(1.0), most), SPEC, lag=lag)
    data, seen = spoiled([3] * (most + 4), [1, *[np.nan] * (most + 1), 1, 1]), []
    with pytest.raises(
        NonFiniteError, match=f"loss is not finite in step 1 .*to step {1 + most}: .*before step 1"
    ) as caught:
        for report in runner.run(state_of_every_kind(), data):
            seen.append((report.step, report.skipped))
    assert (caught.value.since, caught.value.step, caught.value.watch) == (1, 1 + most, ("loss",))
    assert same_bits(runner.state, by_hand(data[:1])[0])
    seen += [(report.step, report.skipped) for report in runner.drain()]
    assert seen == [(0, False), *[(number, True) for number in range(1, 1 + most)]]
    # It can go on: here without the batch.
    assert [(r.step, r.skipped) for r in runner.run(runner.state, data[-2:])] == [(1 + most, False), (2 + most, False)]
    assert same_bits(runner.state, by_hand([data[0], *data[-2:]])[0])


def test_a_finite_step_ends_the_row() -> None:
    runner = StepRunner(step, skipping(RetryDropless(1.0), 1), SPEC)
    reports = list(runner.run(state_of_every_kind(), spoiled([3] * 6, [np.nan, 1] * 3)))
    assert [report.skipped for report in reports] == [True, False] * 3


def test_a_row_goes_on_after_a_restart() -> None:
    policy, data = skipping(RetryDropless(1.0), 2), spoiled([3] * 4, [1, np.nan, np.nan, np.nan])
    first = StepRunner(step, policy, SPEC)
    assert len(list(first.run(state_of_every_kind(), data[:2]))) == 2
    state, saved = jax.device_get(first.state), first.policy_state.to_json()
    second = StepRunner(step, policy, SPEC, policy_state=saved, first_step=2)
    with pytest.raises(NonFiniteError) as caught:
        list(second.run(state, data[2:]))
    assert (caught.value.since, caught.value.step) == (1, 3)
    assert same_bits(second.state, by_hand(data[:1])[0])


def test_the_error_can_be_pickled() -> None:
    error = NonFiniteError(7, 5, ("loss", "grad_norm"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("loss or grad_norm is not finite in step 5 and ever since, to step 7: 3 in a row")


# --- what is watched


def test_gradients_are_watched_beside_a_finite_loss() -> None:
    """The square root at 0 has an infinite slope."""

    def root(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.sqrt(w * batch).sum())(state)
        return state - 0.125 * grad, jnp.ones(1, jnp.int32), {"loss": loss, "grad_norm": jnp.abs(grad)}

    data = [jnp.float32(1), jnp.float32(0), jnp.float32(1)]
    runner = StepRunner(root, SkipNonFinite(Drop(None)), SPEC)
    reports = list(runner.run(jnp.float32(4), data))
    assert [report.skipped for report in reports] == [False, True, False]
    assert np.isfinite(reports[1].metrics["loss"]) and np.isfinite(runner.state)
    loss_alone = StepRunner(root, SkipNonFinite(Drop(None), watch=("loss",)), SPEC)
    assert [r.skipped for r in loss_alone.run(jnp.float32(4), data)] == [False, False, True]
    assert not np.isfinite(loss_alone.state)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"los": jnp.float32(1)}, r"names the metric 'loss', but the step's metrics are \('los',\); return a mapping"),
        (jnp.float32(1), r"names the metric 'loss', but the step's metrics are a .*; return a mapping"),
        ({"loss": jnp.ones(2)}, r"'loss', which must be a floating-point scalar, got float32\[2\]; return its mean"),
        ({"loss": jnp.int32(1)}, r"'loss', which must be a floating-point scalar, got int32\[\]"),
    ],
)
def test_metrics_that_cannot_be_watched_are_told_before_the_first_step(metrics: Any, message: str) -> None:
    def returning(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        return state, batch, metrics

    runner, state = StepRunner(returning, skipping(RetryDropless(1.0)), SPEC), jnp.zeros(3)
    with pytest.raises(ValueError, match=message):
        list(runner.run(state, [jnp.array([1])]))
    assert runner.state.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"watch": "loss"}, r"SkipNonFinite.watch must be a list of names of metrics, such as \['loss'\], got 'loss'"),
        ({"watch": []}, r"SkipNonFinite.watch must be a list .* got \[\]"),
        ({"watch": [1]}, r"SkipNonFinite.watch must be a list .* got \[1\]"),
        ({"max_consecutive": -1}, r"SkipNonFinite.max_consecutive must be an integer of at least 0, got -1"),
        ({"max_consecutive": 1.5}, r"SkipNonFinite.max_consecutive must be .* got 1.5"),
    ],
)
def test_bad_numbers_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipNonFinite(Drop(1.0), **given)


def test_two_of_them_watch_all_names() -> None:
    policy = SkipNonFinite(SkipNonFinite(Drop(1.0), watch=("loss",)), watch=("norm",))
    fine, bad = jnp.float32(1), jnp.float32(np.nan)
    for loss, norm in [(fine, fine), (fine, bad), (bad, fine)]:
        assert bool(policy.valid({"loss": loss, "norm": norm})) == (loss is norm)
