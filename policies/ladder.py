"""The ladder: the finite increasing set of capacities that a policy may use, in slots.

A ladder is a tuple of ints, strictly increasing. Its last rung is the dropless size, so that a climb
always ends, and its length bounds the number of programs that are ever compiled.
"""

from __future__ import annotations

import itertools

from moe_blocks.capacity import Capacity, CapacitySpec, positive_factor


def check_factor(name: str, factor: float | None) -> None:
    """Refuses a capacity factor that is neither None (dropless) nor a finite number above 0."""
    if factor is not None:
        positive_factor(name, factor)


def two_rungs(spec: CapacitySpec, factor: float | None) -> tuple[int, ...]:
    """The rungs of one factor and of dropless; a single one where the factor reaches dropless.

    Example:
      >>> two_rungs(CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4), 1.25)
      (160, 512)
    """
    return tuple(sorted({spec.slots(factor), spec.dropless}))


def geometric(spec: CapacitySpec, initial_factor: float, growth: float) -> tuple[int, ...]:
    """The rungs of ``initial_factor * growth**i``, i = 0, 1, ..., up to dropless, without repetitions.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)
      >>> geometric(spec, 0.5, 2.0)
      (64, 128, 256, 512)
    """
    first, ratio = positive_factor("initial_factor", initial_factor), positive_factor("growth", growth)
    sizes = (spec.slots(float(first * ratio**i)) for i in itertools.count())
    below = itertools.takewhile(lambda slots: slots < spec.dropless, sizes)
    return (*sorted(set(below)), spec.dropless)


def fitting(ladder: tuple[int, ...], demand: int) -> int:
    """The smallest rung that holds ``demand`` assignments; the last rung holds whatever comes.

    Example:
      >>> fitting((4, 8, 16), 8), fitting((4, 8, 16), 9)
      (8, 16)
    """
    return next((slots for slots in ladder if slots >= demand), ladder[-1])


def below(ladder: tuple[int, ...], slots: int) -> int:
    """The next smaller rung, or the first where there is none.

    Example:
      >>> below((4, 8, 16), 16), below((4, 8, 16), 4)
      (8, 4)
    """
    return max((rung for rung in ladder if rung < slots), default=ladder[0])


def rung(ladder: tuple[int, ...], slots: int) -> Capacity:
    """What a step is compiled for on the rung of that many slots.

    Example:
      >>> rung((4, 16), 4), rung((4, 16), 16).slots
      (Capacity(slots=4, chunks=1, on_overflow='drop'), None)
    """
    return Capacity(int(slots) if slots < ladder[-1] else None)
