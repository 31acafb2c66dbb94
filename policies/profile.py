"""Profiles: a rung of the ladder for each layer, and how one follows from another. Pure, in plain integers.

Each profile is one more compiled program, so there may be only so many of them.
"""

from __future__ import annotations

from collections.abc import Collection

from policies import ladder as rungs

Profile = tuple[int, ...]


def grown(profile: Profile, ladder: tuple[int, ...], demands: tuple[int, ...]) -> Profile:
    """The rungs that hold the demands, and none below what it was.

    Example:
      >>> grown((4, 8), (4, 8, 16), (9, 3))
      (16, 8)
    """
    fitting = (rungs.fitting(ladder, demand) for demand in demands)
    return tuple(map(max, profile, fitting))


def lowered(profile: Profile, ladder: tuple[int, ...], demands: tuple[int, ...]) -> Profile:
    """One rung down in each layer whose demand still fits there.

    Example:
      >>> lowered((16, 16, 4), (4, 8, 16), (3, 9, 1))
      (8, 16, 4)
    """
    below = (rungs.below(ladder, slots) for slots in profile)
    return tuple(
        lower if demand <= lower else slots for slots, lower, demand in zip(profile, below, demands, strict=True)
    )


def affordable(wanted: Profile, known: Collection[Profile], *, most: int) -> Profile:
    """``wanted`` if it is known or one more may be; else the known one with the fewest slots that covers it.

    Args:
      wanted: a profile.
      known: those that there are programs for, one of which covers every other.
      most: how many there may be.

    Example:
      >>> affordable((4, 8), [(4, 4), (16, 16)], most=3), affordable((4, 8), [(4, 4), (16, 16)], most=2)
      ((4, 8), (16, 16))
    """
    if wanted in known or len(known) < most:
        return wanted
    covering = [one for one in known if all(slots >= least for slots, least in zip(one, wanted, strict=True))]
    return min(covering, key=sum)
