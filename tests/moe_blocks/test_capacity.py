from __future__ import annotations

import dataclasses
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.capacity import Capacity, CapacitySpec, as_capacity

# --- Capacity


def test_exactly_full_fits() -> None:
    assert [Capacity(4).overflows(demand) for demand in (0, 3, 4, 5)] == [False, False, False, True]
    assert not Capacity(None).overflows(10**12)


def test_capacity_is_a_static_argument() -> None:
    assert Capacity(8, chunks=2) == Capacity(8, chunks=2) != Capacity(8)
    assert len({Capacity(8), Capacity(8), Capacity(np.int64(8)), Capacity(None)}) == 2
    assert pickle.loads(pickle.dumps(Capacity(8))) == Capacity(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capacity(8).slots = 9  # type: ignore[misc]


def test_as_capacity() -> None:
    assert as_capacity(8) == as_capacity(np.int32(8)) == Capacity(8)
    assert as_capacity(None) == Capacity(None)
    assert as_capacity(Capacity(3, chunks=2)) == Capacity(3, chunks=2)


@pytest.mark.parametrize("slots", [0, -1, 1.25, 8.0, True, "8", math.nan])
def test_a_factor_is_no_number_of_slots(slots: object) -> None:
    message = (
        rf"Capacity\.slots must be an integer of at least 1, got {re.escape(repr(slots))}\. "
        r"Slots are rows of the buffer: for a factor call CapacitySpec\.slots\(factor\); under jit .* static argument"
    )
    for make in (Capacity, as_capacity):
        with pytest.raises(ValueError, match=message):
            make(slots)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [0, 1.5, None, False])
def test_wrong_chunks(chunks: object) -> None:
    with pytest.raises(ValueError, match=rf"Capacity\.chunks must be an integer of at least 1, got {chunks!r}"):
        Capacity(8, chunks=chunks)  # type: ignore[arg-type]


def test_wrong_on_overflow() -> None:
    with pytest.raises(ValueError, match=r"Capacity\.on_overflow must be one of \('drop',.*\), got 'explode'"):
        Capacity(8, on_overflow="explode")


# --- CapacitySpec


@pytest.mark.parametrize(
    ("T", "E", "k", "factor", "slots"),
    [(1, 8, 2, 1.0, 1), (5, 4, 1, 1.0, 2), (6, 4, 1, 1.25, 3), (7, 4, 2, 1.0, 4), (4, 4, 1, 0.1, 1)],
)
def test_pol_3_rounds_up_and_never_to_zero(T: int, E: int, k: int, factor: float, slots: int) -> None:
    """A factor multiplies the balanced slots, a whole number: ceil(ceil(6 / 4) * 1.25) is 3, where ceil(6 / 4 * 1.25)
    would be 2.
    """
    spec = CapacitySpec(T, E, k, scope="expert", multiple_of=1)
    assert spec.balanced == math.ceil(Fraction(T * k, E))
    assert spec.slots(factor) == slots


def test_pol_3_exact_where_floating_point_is_not() -> None:
    """7680 assignments on 8 experts at factor 4.05: 3888 slots, which float32 rounds up to 3889."""
    assert CapacitySpec(7680, 8, 1, scope="expert", multiple_of=1).slots(4.05) == 3888
    assert math.ceil(np.float32(7680 / 8) * np.float32(4.05)) == 3889
    # In double, 100 * 1.1 is a hair above 110, and its ceiling one slot too many.
    assert CapacitySpec(100, 2, 1, ep_size=2, multiple_of=1).slots(1.1) == 110
    assert math.ceil(100 * 1.1) == 111


@pytest.mark.parametrize(("k", "bound"), [(2, 16), (3, 16)])
def test_pol_4_a_token_counts_once_for_each_local_expert(k: int, bound: int) -> None:
    assert CapacitySpec(4, 4, k, ep_size=2).dropless == bound


@pytest.mark.parametrize(
    ("E", "k", "T", "ep", "worst", "at_1", "at_2"),
    [
        (8, 2, 64, 2, 256, 128, 256),
        (8, 2, 256, 2, 1024, 512, 1024),
        (256, 8, 4096, 8, 262_144, 32_768, 65_536),
        (256, 8, 4096, 64, 1_048_576, 32_768, 65_536),
    ],
)
def test_v9_without_alignment(E: int, k: int, T: int, ep: int, worst: int, at_1: int, at_2: int) -> None:
    spec = CapacitySpec(T, E, k, ep)
    assert (spec.dropless, spec.slots(1.0), spec.slots(2.0), spec.slots(None)) == (worst, at_1, at_2, worst)


def test_scope_expert() -> None:
    spec = CapacitySpec(64, 8, 2, ep_size=2, scope="expert")
    assert (spec.balanced, spec.dropless) == (32, 128)
    assert (spec.buffers_per_rank, spec.experts_per_rank) == (4, 4)
    assert CapacitySpec(3, 8, 2, scope="expert").dropless == 3  # choices are distinct: T, not T * k


@st.composite
def specs(draw: st.DrawFn) -> CapacitySpec:
    ep, here = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    return CapacitySpec(
        draw(st.integers(1, 10**6)),
        ep * here,
        draw(st.integers(1, ep * here)),
        ep,
        draw(st.sampled_from(["rank", "expert"])),
        draw(st.integers(1, 256)),
    )


factors = st.decimals("0.001", "40", places=3)


@given(specs(), factors)
def test_slots_are_exact(spec: CapacitySpec, factor: object) -> None:
    """The definition in fractions, with the factor as the decimal that the user wrote."""
    T, E, k, ep = spec.tokens_per_rank, spec.num_experts, spec.num_experts_per_tok, spec.ep_size
    if spec.scope == "rank":
        balanced, dropless = T * k, T * ep * min(k, E // ep)
    else:
        balanced, dropless = math.ceil(Fraction(T * ep * k, E)), T * ep
    wanted = math.ceil(balanced * Fraction(str(factor)))
    aligned = math.ceil(Fraction(wanted, spec.multiple_of)) * spec.multiple_of
    assert (spec.balanced, spec.dropless) == (balanced, dropless)
    slots = spec.slots(float(factor))  # type: ignore[arg-type]
    assert slots == min(dropless, aligned) >= 1
    assert type(slots) is int


@given(specs(), factors, factors)
def test_slots_grow_with_the_factor(spec: CapacitySpec, one: float, other: float) -> None:
    low, high = sorted((float(one), float(other)))
    assert 1 <= spec.slots(low) <= spec.slots(high) <= spec.slots(None) == spec.dropless
    assert spec.slots(1e9) == spec.dropless


@given(specs(), factors)
def test_rows_bound_the_memory(spec: CapacitySpec, factor: float) -> None:
    slots = spec.slots(float(factor))
    assert spec.rows(slots) <= spec.rows(None) <= spec.buffers_per_rank * spec.dropless
    assert spec.rows(spec.dropless) == spec.rows(None)
    if spec.scope == "rank":
        assert spec.rows(slots) == slots
    assert spec.factor(slots) == slots / spec.balanced


def test_factors_of_other_kinds() -> None:
    spec = CapacitySpec(100, 4, 1, ep_size=2, multiple_of=1)
    assert {spec.slots(f) for f in (1.1, Fraction(11, 10), Decimal("1.1"), np.float32(1.1), np.float64(1.1))} == {110}
    assert spec.slots(1) == 100


ERRORS = [
    ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be at most num_experts=4, got 5; .*distinct"),
    ({"num_experts_per_tok": 0}, r"num_experts_per_tok must be an integer of at least 1, got 0"),
    ({"num_experts": 6, "ep_size": 4}, r"num_experts=6 must be a multiple of ep_size=4"),
    ({"num_experts": 0}, r"num_experts must be an integer of at least 1, got 0"),
    ({"tokens_per_rank": 0}, r"tokens_per_rank must be an integer of at least 1, got 0"),
    ({"tokens_per_rank": 2.5}, r"tokens_per_rank must be an integer of at least 1, got 2\.5"),
    ({"ep_size": -1}, r"ep_size must be an integer of at least 1, got -1"),
    ({"multiple_of": 0}, r"multiple_of must be an integer of at least 1, got 0"),
    ({"scope": "node"}, r"scope must be one of \('rank', 'expert'\), got 'node'"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_erg_1_wrong_sizes(change: dict[str, object], message: str) -> None:
    good = {"tokens_per_rank": 4, "num_experts": 4, "num_experts_per_tok": 2}
    CapacitySpec(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        CapacitySpec(**(good | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, "much", "1.1", [1]])
def test_erg_1_wrong_factors(factor: object) -> None:
    message = rf"factor must be a finite number above 0, got {re.escape(repr(factor))}; 1\.0 is the balanced size"
    with pytest.raises(ValueError, match=message):
        CapacitySpec(4, 4, 2).slots(factor)  # type: ignore[arg-type]


def test_it_tells_the_same_capacity_in_everybodys_units() -> None:
    """T=64, E=8, k=2, ep=2 at factor 1.25, width 512 in float32, by hand.

    Balanced 64 * 2 = 128, dropless 64 * 2 * min(2, 4) = 256, slots 160. 160 rows * 512 * 4 bytes = 320 KiB. The
    factors of Megatron, MaxText and TransformerEngine are multiples of T * k = 128, Switch's is one of T: twice that.
    """
    text = CapacitySpec(64, 8, 2, ep_size=2).describe(1.25, width=512, dtype="float32")
    for fact in (
        "T=64 per rank, E=8, k=2, ep=2, scope=rank",
        "160 (balanced 128, dropless 256, factor 1.25)",
        "160 rows per rank, 320.0 KiB per layer at width 512, float32",
        "moe_expert_rank_capacity_factor=1.25",
        "moe_expert_capacity_factor=1.25",
        "ragged_buffer_factor=1.25",
        "recv_capacity_per_rank=160, recv_capacity_factor=1.25",
        "capacity_factor=2.5 (tokens per expert, without k)",
        "of the worst case    0.625",
    ):
        assert fact in text


def test_it_tells_scope_expert_in_everybodys_units() -> None:
    """G=128 tokens, balanced 128 * 2 / 8 = 32; factor 1.5: 48 slots for each of 4 local experts, 192 rows of 256."""
    text = CapacitySpec(64, 8, 2, ep_size=2, scope="expert").describe(1.5, width=1024)
    for fact in (
        "48 (balanced 32, dropless 128, factor 1.5)",
        "192 rows per rank, 384.0 KiB per layer at width 1024, bfloat16",
        "moe_expert_capacity_factor=1.5)",
        "capacity_factor=3 ",
        "worst case    0.75",
    ):
        assert fact in text
    dropless = CapacitySpec(64, 8, 2, ep_size=2, scope="expert").describe(None)
    assert "128 (balanced 32, dropless 128, factor 4)" in dropless
    assert "256 rows per rank" in dropless and "worst case    1" in dropless


def test_print_is_the_description() -> None:
    spec = CapacitySpec(64, 8, 2)
    assert str(spec) == spec.describe(1.0)
    with pytest.raises(ValueError, match=r"width must be an integer of at least 1, got 0"):
        spec.describe(width=0)
