"""RetryDropless: a small capacity, and a step that overflows it runs again without a limit."""

from __future__ import annotations

import dataclasses

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import ladder as rungs
from policies.base import CapacityPolicy, Demand, PolicyState, Report, Verdict, count, fits


@dataclasses.dataclass(frozen=True)
class RetryDropless(CapacityPolicy):
    """The factor's capacity; after an overflow the same batch again, dropless, then back to the factor.

    The dropless attempt runs in ``ceil(dropless / slots)`` chunks, so that it needs no larger buffers
    than the capped one. The training is that of a dropless run, to the bit where the arithmetic is the
    same. Two programs are compiled.

    Attributes:
      factor: multiple of the balanced size. None: dropless from the start.
      scope: what is run again: ``"step"``, the whole step.

    Raises:
      ValueError: if the factor is not a finite number above 0, or the scope is not available.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)
      >>> policy = RetryDropless(factor=1.25)
      >>> [capacity.slots for capacity in policy.capacities(policy.init(spec))]
      [160, None]
      >>> policy.capacities(policy.init(spec))[-1].chunks
      4

    References:
      AI-Hypercomputer/maxtext#5080 and AI-Hypercomputer/maxtext#5321, where this retry was first tried.
    """

    factor: float | None
    scope: str = "step"

    def __post_init__(self) -> None:
        rungs.check_factor("RetryDropless.factor", self.factor)
        if self.scope != "step":
            raise ValueError(
                f'RetryDropless.scope must be "step", got {self.scope!r}; "layer", which would run only the layer that '
                "overflowed again, is not available yet"
            )

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The factor's rung and dropless."""
        return rungs.two_rungs(spec, self.factor)

    def capacity(self, state: PolicyState) -> Capacity:
        """The factor's slots, or after a rejection dropless in chunks no larger than those."""
        chunks = -(-int(state.ladder[-1]) // int(state.ladder[0]))
        return rungs.rung(state.ladder, state.slots, dropless_chunks=chunks)

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """No overflow."""
        return fits(total_recv_tokens, capacity)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """Dropless after a rejection; back to the factor once a dropless attempt was accepted."""
        state = count(state, report)
        if not report.accepted:
            return state._replace(slots=state.ladder[-1])
        return state._replace(slots=state.ladder[0]) if report.capacity.slots is None else state
