from __future__ import annotations

import jax.numpy as jnp
import pytest

from moe_blocks.capacity import Capacity
from policies import Report, RetryDropless
from tests.policies.toy import SPEC


def test_dropless_for_one_step_and_back() -> None:
    policy = RetryDropless(1.0)
    state = policy.init(SPEC)
    fallback = Capacity(None, chunks=8)  # 8 chunks of 4 slots cover the 32 that no routing exceeds
    assert policy.capacities(state) == (Capacity(4), fallback)
    state = policy.update(state, Report(0, 0, 4, Capacity(4), accepted=True))
    assert policy.capacity(state) == Capacity(4)
    state = policy.update(state, Report(1, 0, 5, Capacity(4), accepted=False))
    assert policy.capacity(state) == fallback
    state = policy.update(state, Report(1, 1, 7, fallback, accepted=True))
    assert policy.capacity(state) == Capacity(4)
    assert (state.overflows, state.rejections) == (1, 1)


def test_another_steps_report_does_not_end_the_retry() -> None:
    policy = RetryDropless(1.0)
    state = policy.update(policy.init(SPEC), Report(1, 0, 5, Capacity(4), accepted=False))
    assert policy.update(state, Report(0, 0, 3, Capacity(4), accepted=True)) == state


@pytest.mark.parametrize(("factor", "chunks"), [(1.0, 8), (1.25, 7), (3.0, 3), (4.0, 2), (8.0, 1), (None, 1)])
def test_the_fallback_needs_no_larger_buffers(factor: float | None, chunks: int) -> None:
    policy = RetryDropless(factor)
    state = policy.init(SPEC)
    assert policy.capacities(state)[-1] == Capacity(None, chunks=chunks)
    assert -(-SPEC.dropless // chunks) <= SPEC.slots(factor)


def test_in_the_scope_of_a_layer_nothing_is_rejected() -> None:
    """The fallback is inside the one program, so a report only counts."""
    policy = RetryDropless(1.0, scope="layer")
    state, capacity = policy.init(SPEC), Capacity(4, on_overflow="recompute")
    assert policy.capacities(state) == (capacity,)
    assert policy.accept(jnp.array([10**6], jnp.int32), capacity) is True
    state = policy.update(state, Report(0, 0, 5, capacity, accepted=True))
    assert policy.capacity(state) == capacity and (state.overflows, state.rejections) == (1, 0)


def test_the_scope_of_a_layer_without_a_factor_is_dropless() -> None:
    policy = RetryDropless(None, scope="layer")
    assert policy.capacities(policy.init(SPEC)) == (Capacity(None),)


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"RetryDropless.scope must be one of \('step', 'layer'\), got 'model'"):
        RetryDropless(1.0, scope="model")
    with pytest.raises(ValueError, match="RetryDropless.factor must be a finite number above 0, got nan"):
        RetryDropless(float("nan"))
