"""AdaptiveGrow: a capacity that follows the router, up at once and down with patience."""

from __future__ import annotations

import dataclasses

from moe_blocks.capacity import Capacity, CapacitySpec, LayerCapacities, positive_factor, positive_int
from policies import ladder as rungs
from policies.base import CapacityPolicy, Demand, PolicyState, Report, Verdict, count, fits
from policies.profile import Profile, affordable, grown, lowered

ON_OVERFLOW = ("retry", "drop")
# A finer ladder saves little memory, and every rung is one more program to compile.
MINIMAL_GROWTH = 1.1


@dataclasses.dataclass(frozen=True)
class AdaptiveGrow(CapacityPolicy):
    """Grows to the rung that an overflow asked for, stays there, and shrinks only after a quiet while.

    The rungs are ``initial_factor * growth**i`` up to dropless. After ``patience`` consecutive steps that
    the next lower rung would have served, the capacity goes down by one rung, never below the first.

    With ``on_overflow="retry"`` a step that overflows runs again on the larger rung. The demand of a
    damaged step can be too low, since later layers saw activations that earlier ones had dropped from,
    so it may take several rungs; the last one always ends it. With ``"drop"`` every step counts and an
    overflow enlarges the steps that are dispatched after its report: with ``StepRunner(lag=n)`` those
    are n steps later, and the same holds for shrinking.

    With ``per_layer=True`` each MoE layer has a rung of its own, which follows the layer's own demand alike: up at
    once, down by at most one rung after each ``patience`` steps without overflow. The step must ask for
    ``capacity.layer(i)``, so the layers cannot be scanned, and return their demands in that order. Every combination of
    rungs is one more program: when ``programs`` of them have been used, the smallest of these that suffices is taken.

    Attributes:
      initial_factor: multiple of the balanced size to start from, and the smallest ever used.
      growth: ratio of one rung to the next.
      patience: steps to wait before shrinking. A shrink that was wrong costs one retry, so at the default
        of 100 it wastes at most 1% of the steps.
      on_overflow: ``"retry"`` or ``"drop"``.
      per_layer: whether each layer has a rung of its own.
      programs: with ``per_layer``, how many programs there may be, the first and the dropless one included.

    Raises:
      ValueError: if a number is out of range; the message names it.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)
      >>> policy = AdaptiveGrow(initial_factor=0.5)
      >>> state = policy.init(spec)
      >>> state.ladder
      (64, 128, 256, 512)
      >>> policy.update(state, Report(0, 0, 200, policy.capacity(state), accepted=False)).slots
      256
      >>> policy = AdaptiveGrow(initial_factor=0.5, per_layer=True)
      >>> policy.update(state, Report(0, 0, 200, policy.capacity(state), False, by_layer=(200, 50))).profile
      (256, 64)
    """

    initial_factor: float = 1.25
    growth: float = 2.0
    patience: int = 100
    on_overflow: str = "retry"
    per_layer: bool = False
    programs: int = 8

    def __post_init__(self) -> None:
        positive_factor("AdaptiveGrow.initial_factor", self.initial_factor)
        if positive_factor("AdaptiveGrow.growth", self.growth) < positive_factor("growth", MINIMAL_GROWTH):
            raise ValueError(f"AdaptiveGrow.growth must be at least {MINIMAL_GROWTH}, got {self.growth!r}")
        positive_int("AdaptiveGrow.patience", self.patience)
        if self.on_overflow not in ON_OVERFLOW:
            raise ValueError(f"AdaptiveGrow.on_overflow must be one of {ON_OVERFLOW}, got {self.on_overflow!r}")
        positive_int("AdaptiveGrow.programs", self.programs, minimum=2)

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The geometric ladder from the initial factor to dropless."""
        return rungs.geometric(spec, self.initial_factor, self.growth)

    def capacity(self, state: PolicyState) -> Capacity:
        """The rung of all layers, or of each."""
        if not self.per_layer or len(set(state.profile)) < 2:
            return super().capacity(state)
        return LayerCapacities.of(tuple(rungs.rung(state.ladder, slots) for slots in state.profile))

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """One for each rung; with ``per_layer`` the first, those of the profiles used so far, and dropless."""
        if not self.per_layer:
            return super().capacities(state)
        used = (self.capacity(state._replace(slots=max(profile), profile=profile)) for profile in state.profiles)
        ends = (rungs.rung(state.ladder, slots) for slots in (state.ladder[0], state.ladder[-1]))
        first, *between, last = dict.fromkeys((next(ends), *used, next(ends)))
        return (first, *between, last)

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """No overflow, or with ``on_overflow="drop"`` always."""
        return True if self.on_overflow == "drop" else fits(total_recv_tokens, capacity)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """Up to the rung that holds the demand, or down one rung after ``patience`` quiet steps."""
        current, state = self.capacity(state), count(state, report)
        if self.per_layer:
            return self._update_each(state, report, current)
        if report.overflow:
            # At least the current rung: the report may be of a step dispatched before the last growth.
            return state._replace(slots=max(state.slots, rungs.fitting(state.ladder, report.demand)), quiet=0)
        if report.capacity != current:
            return state
        lower = rungs.below(state.ladder, state.slots)
        quiet = state.quiet + 1 if report.demand <= lower < state.slots else 0
        return state._replace(slots=lower, quiet=0) if quiet >= self.patience else state._replace(quiet=quiet)

    def _update_each(self, state: PolicyState, report: Report, current: Capacity) -> PolicyState:
        """`update` of every layer."""
        profile = state.profile or (state.slots,) * len(report.demands)
        if report.overflow:
            return self._take(state, grown(profile, state.ladder, report.demands))
        if report.capacity != current:
            return state
        seen = tuple(map(max, state.seen or report.demands, report.demands))
        if state.quiet + 1 < self.patience:
            return state._replace(quiet=state.quiet + 1, seen=seen)
        return self._take(state, lowered(profile, state.ladder, seen))

    def _take(self, state: PolicyState, wanted: Profile) -> PolicyState:
        """The state that has this profile, or the smallest one that suffices if there may be no more."""
        ends = ((slots,) * len(wanted) for slots in (state.ladder[0], state.ladder[-1]))
        known = dict.fromkeys((*ends, *state.profiles))
        profile = affordable(wanted, known, most=self.programs)
        profiles = state.profiles if profile in known else (*state.profiles, profile)
        return state._replace(slots=max(profile), profile=profile, profiles=profiles, quiet=0, seen=())
