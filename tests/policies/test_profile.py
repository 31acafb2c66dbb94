from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from policies.profile import affordable, grown, lowered

LADDER = (4, 8, 16, 32)
RUNG = st.sampled_from(LADDER)
PROFILE = st.tuples(RUNG, RUNG, RUNG)
DEMANDS = st.tuples(*[st.integers(0, 40)] * 3)


def covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


@given(PROFILE, DEMANDS)
def test_grown_holds_the_demands_and_takes_nothing_away(profile: tuple[int, ...], demands: tuple[int, ...]) -> None:
    after = grown(profile, LADDER, demands)
    assert covers(after, profile)
    assert all(slots in LADDER for slots in after)
    assert covers(after, tuple(min(demand, LADDER[-1]) for demand in demands))
    assert grown(after, LADDER, demands) == after


@given(PROFILE, DEMANDS)
def test_lowered_goes_down_one_rung_where_that_is_enough(profile: tuple[int, ...], demands: tuple[int, ...]) -> None:
    after = lowered(profile, LADDER, demands)
    for before, slots, demand in zip(profile, after, demands, strict=True):
        down = LADDER[max(LADDER.index(before) - 1, 0)]
        assert slots == (down if demand <= down else before)


@given(PROFILE, st.lists(PROFILE, max_size=5, unique=True), st.integers(2, 8))
def test_affordable_is_known_or_one_more(wanted: tuple[int, ...], known: list, most: int) -> None:
    known = [*known, (32, 32, 32)]
    found = affordable(wanted, known, most=most)
    assert covers(found, wanted)
    assert found == wanted if wanted in known or len(known) < most else found in known
    if found != wanted:
        assert all(sum(found) <= sum(one) for one in known if covers(one, wanted))
