from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import ladder

SPECS = st.builds(
    lambda tokens, local, ep, k, multiple, scope: CapacitySpec(
        tokens, local * ep, min(k, local * ep), ep, scope=scope, multiple_of=multiple
    ),
    tokens=st.integers(1, 300),
    local=st.integers(1, 8),
    ep=st.integers(1, 16),
    k=st.integers(1, 8),
    multiple=st.sampled_from([1, 8, 128]),
    scope=st.sampled_from(["rank", "expert"]),
)
FACTORS = st.sampled_from([1e-9, 0.125, 0.1, 0.5, 1.0, 1.1, 1.25, 2.0, 3, 100.0])


@given(SPECS, FACTORS, st.sampled_from([1.1, 1.5, 2, 2.0, 10.0]))
def test_geometric_is_finite_increasing_and_ends_dropless(spec: CapacitySpec, first: float, growth: float) -> None:
    rungs = ladder.geometric(spec, first, growth)
    assert rungs[0] == spec.slots(first)
    assert rungs[-1] == spec.dropless
    assert list(rungs) == sorted(set(rungs))
    # Each rung is the size of an exact power of the growth: no float error has crept in.
    factor, exact = Fraction(str(first)), []
    while not exact or exact[-1] < spec.dropless:
        slots = -(-math.ceil(spec.balanced * factor) // spec.multiple_of) * spec.multiple_of
        exact.append(min(spec.dropless, slots))
        factor *= Fraction(str(growth))
    assert list(rungs) == sorted(set(exact))


@given(SPECS, st.none() | FACTORS)
def test_two_rungs(spec: CapacitySpec, factor: float | None) -> None:
    rungs = ladder.two_rungs(spec, factor)
    assert rungs == ((spec.dropless,) if spec.slots(factor) == spec.dropless else (spec.slots(factor), spec.dropless))


@pytest.mark.parametrize(("demand", "slots"), [(0, 4), (4, 4), (5, 8), (8, 8), (9, 16), (10**9, 16)])
def test_fitting(demand: int, slots: int) -> None:
    assert ladder.fitting((4, 8, 16), demand) == slots


@pytest.mark.parametrize(("slots", "lower"), [(4, 4), (8, 4), (16, 8)])
def test_below(slots: int, lower: int) -> None:
    assert ladder.below((4, 8, 16), slots) == lower


def test_rung() -> None:
    assert ladder.rung((4, 16), 4) == Capacity(4)
    assert ladder.rung((4, 16), 16) == Capacity(None)
    assert ladder.rung((16,), 16) == Capacity(None)
