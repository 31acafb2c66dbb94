from __future__ import annotations

import jax.numpy as jnp
import pytest

from moe_blocks.capacity import Capacity
from policies import Drop, Report
from tests.policies.toy import SPEC


def test_every_step_counts_and_drops_are_counted() -> None:
    policy = Drop(1.0)
    assert policy.accept(jnp.array([10**6]), Capacity(4)) is True
    state = policy.init(SPEC)
    for step, demand in enumerate((4, 5, 9)):
        state = policy.update(state, Report(step, 0, demand, policy.capacity(state), accepted=True))
        assert policy.capacity(state) == Capacity(4)
    assert (state.overflows, state.rejections) == (2, 0)
    assert policy.capacities(state) == (Capacity(4),)


@pytest.mark.parametrize("factor", [0, -1, float("nan")])
def test_refuses(factor: float) -> None:
    with pytest.raises(ValueError, match="Drop.factor must be a finite number above 0, got"):
        Drop(factor)
