"""StaticFactor: one capacity, and an overflow is an error."""

from __future__ import annotations

import dataclasses

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import ladder as rungs
from policies.base import CapacityOverflowError, CapacityPolicy, Demand, PolicyState, Report, Verdict, count, fits


@dataclasses.dataclass(frozen=True)
class StaticFactor(CapacityPolicy):
    """Always the same capacity; a step that overflows it is not applied and stops the run.

    Attributes:
      factor: multiple of the balanced size. None: dropless, which nothing can overflow.

    Raises:
      ValueError: if the factor is not a finite number above 0.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)
      >>> policy = StaticFactor(factor=1.25)
      >>> policy.capacity(policy.init(spec)).slots
      160
    """

    factor: float | None

    def __post_init__(self) -> None:
        rungs.check_factor("StaticFactor.factor", self.factor)

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The factor's rung, and dropless, which is never used."""
        return rungs.two_rungs(spec, self.factor)

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """The one capacity there is."""
        return (self.capacity(state),)

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """No overflow."""
        return fits(total_recv_tokens, capacity)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """Counts the attempt.

        Raises:
          CapacityOverflowError: if it was rejected; tells the factor that would have fitted.
        """
        if not report.accepted:
            raise CapacityOverflowError.of(state, report)
        return count(state, report)
