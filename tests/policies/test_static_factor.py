from __future__ import annotations

import pytest

from moe_blocks.capacity import Capacity
from policies import CapacityOverflowError, Report, StaticFactor
from tests.policies.toy import SPEC


def test_an_overflow_is_an_error_that_tells_the_factor() -> None:
    policy = StaticFactor(1.0)
    state = policy.init(SPEC)
    fine = policy.update(state, Report(0, 0, 4, Capacity(4), accepted=True))
    assert fine == state
    with pytest.raises(
        CapacityOverflowError, match="step 1 sent 5 assignments to a receive buffer of 4 slots"
    ) as caught:
        policy.update(fine, Report(1, 0, 5, Capacity(4), accepted=False))
    assert caught.value.factor == 1.25
    assert StaticFactor(caught.value.factor).init(SPEC).slots == 5


def test_one_capacity() -> None:
    for policy, capacity in ((StaticFactor(1.0), Capacity(4)), (StaticFactor(None), Capacity(None))):
        assert policy.capacities(policy.init(SPEC)) == (capacity,)
    assert StaticFactor(100.0) != StaticFactor(None)
    assert StaticFactor(100.0).capacity(StaticFactor(100.0).init(SPEC)) == Capacity(None)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), "x", True])
def test_refuses(factor: float) -> None:
    with pytest.raises(ValueError, match="StaticFactor.factor must be a finite number above 0, got"):
        StaticFactor(factor)
