"""RetryDropless: a small capacity, and a step or a layer that overflows it runs again without a limit."""

from __future__ import annotations

import dataclasses

from moe_blocks.capacity import Capacity, CapacitySpec, fallback
from policies import ladder as rungs
from policies.base import CapacityPolicy, Demand, PolicyState, Report, Verdict, count, fits

SCOPES = ("step", "layer")


@dataclasses.dataclass(frozen=True)
class RetryDropless(CapacityPolicy):
    """The factor's capacity, and what overflows it runs again without a limit.

    With scope ``"step"`` an overflow makes the step an identity, and the same batch runs again, dropless in
    ``ceil(dropless / slots)`` chunks, so that it needs no larger buffers than the capped one; then back to the
    factor. Two programs are compiled. With ``"layer"`` each layer decides inside the one compiled step, and one that
    overflows runs dropless, in the same chunks. Nothing is ever rejected; it costs one all-reduce and a branch for each
    layer, and saves the other layers from running twice.

    The training is that of a dropless run, to the bit where the arithmetic is the same.

    Attributes:
      factor: multiple of the balanced size. None: dropless from the start.
      scope: what is run again, ``"step"`` or ``"layer"``.

    Raises:
      ValueError: if the factor is not a finite number above 0, or the scope is unknown.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)
      >>> policy = RetryDropless(factor=1.25)
      >>> [(capacity.slots, capacity.chunks) for capacity in policy.capacities(policy.init(spec))]
      [(160, 1), (None, 4)]
      >>> policy = RetryDropless(factor=1.25, scope="layer")
      >>> policy.capacities(policy.init(spec))
      (Capacity(slots=160, chunks=1, on_overflow='recompute'),)

    References:
      AI-Hypercomputer/maxtext#5080 and AI-Hypercomputer/maxtext#5321, where both scopes were first tried.
    """

    factor: float | None
    scope: str = "step"

    def __post_init__(self) -> None:
        rungs.check_factor("RetryDropless.factor", self.factor)
        if self.scope not in SCOPES:
            raise ValueError(f"RetryDropless.scope must be one of {SCOPES}, got {self.scope!r}")

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The factor's rung and dropless."""
        return rungs.two_rungs(spec, self.factor)

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """The capped one and its fallback; with scope ``"layer"`` the fallback is inside the capped one."""
        return super().capacities(state) if self.scope == "step" else (self.capacity(state),)

    def capacity(self, state: PolicyState) -> Capacity:
        """The factor's slots, or after a rejection dropless in chunks no larger than those."""
        first, dropless = int(state.ladder[0]), int(state.ladder[-1])
        if state.slots == dropless:
            return fallback(first, dropless)
        return Capacity(first, on_overflow="drop" if self.scope == "step" else "recompute")

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """No overflow; with scope ``"layer"`` always."""
        return True if self.scope == "layer" else fits(total_recv_tokens, capacity)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """Dropless after a rejection; back to the factor once a dropless attempt was accepted."""
        state = count(state, report)
        if not report.accepted:
            return state._replace(slots=state.ladder[-1])
        return state._replace(slots=state.ladder[0]) if report.capacity.slots is None else state
