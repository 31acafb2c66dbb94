"""Drop: one capacity, and what does not fit is dropped, counted and reported."""

from __future__ import annotations

import dataclasses

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import ladder as rungs
from policies.base import CapacityPolicy, Demand, PolicyState, Report, count


@dataclasses.dataclass(frozen=True)
class Drop(CapacityPolicy):
    """Always the same capacity, and every step counts, dropped assignments or not.

    Attributes:
      factor: multiple of the balanced size. None: dropless.

    Raises:
      ValueError: if the factor is not a finite number above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> policy = Drop(factor=1.25)
      >>> policy.accept(jnp.array([10**6]), Capacity(slots=160))
      True
    """

    factor: float | None

    def __post_init__(self) -> None:
        rungs.check_factor("Drop.factor", self.factor)

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The factor's rung, and dropless, which is never used."""
        return rungs.two_rungs(spec, self.factor)

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """The one capacity there is."""
        return (self.capacity(state),)

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> bool:
        """Always: Python True, so nothing of it is compiled."""
        return True

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """Counts the attempt; ``overflows`` tells how many steps lost assignments."""
        return count(state, report)
