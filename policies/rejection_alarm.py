"""RejectionAlarm: a router that overflows again and again is told of, instead of being retried in silence."""

from __future__ import annotations

import dataclasses
import warnings

from moe_blocks.capacity import positive_int
from policies.base import CapacityOverflowError, PolicyState, Report
from policies.decorator import Decorator

ACTIONS = ("warn", "raise")


class RunawayRouterWarning(RuntimeWarning):
    """Many attempts were rejected within few steps. As an exception, the step was not applied.

    Attributes:
      rejections: attempts that were rejected.
      since: number of the first step that was looked at.
      step: number of the last one, which is the one whose attempt was rejected last.
      demand: assignments that the fullest buffer of that attempt was sent.
      slots: assignments that it could hold.
      factor: the smallest factor that would have fitted, to four decimals.
    """

    def __init__(self, rejections: int, since: int, step: int, demand: int, slots: int, factor: float) -> None:
        super().__init__(rejections, since, step, demand, slots, factor)
        self.rejections, self.since, self.step = rejections, since, step
        self.demand, self.slots, self.factor = demand, slots, factor

    def __str__(self) -> str:
        return (
            f"{self.rejections} attempts were rejected in the steps {self.since} to {self.step}; the last one sent "
            f"{self.demand} assignments to a receive buffer of {self.slots} slots, and a factor of {self.factor} would "
            "have held them. Choose a larger factor, or the policy adaptive_grow; if the demand keeps growing, the "
            "router has run away: raise the weight of its auxiliary loss, or lower the learning rate"
        )


@dataclasses.dataclass(frozen=True)
class RejectionAlarm(Decorator):
    """The inner policy, and a word when too many of its attempts are rejected in a window of steps.

    The windows are the steps ``0`` to ``window - 1``, and so on, and each gives the alarm once at most.

    Attributes:
      inner: the policy that decides on capacities.
      rejections: rejected attempts in one window that give the alarm.
      window: length of a window in steps.
      action: ``"warn"`` with a ``RunawayRouterWarning``, or ``"raise"`` it, with the training state as it was before
        the step.

    Raises:
      ValueError: if ``inner`` is no policy, a number no integer of at least 1, or the action unknown.

    Example:
      >>> from moe_blocks.capacity import Capacity, CapacitySpec
      >>> from policies import RetryDropless
      >>> spec = CapacitySpec(tokens_per_rank=4, num_experts=4, num_experts_per_tok=1, ep_size=4, multiple_of=1)
      >>> policy = RejectionAlarm(RetryDropless(1.0), rejections=1, action="raise")
      >>> policy.update(policy.init(spec), Report(7, 0, demand=9, capacity=Capacity(4), accepted=False))
      Traceback (most recent call last):
      policies.rejection_alarm.RunawayRouterWarning: 1 attempts were rejected in the steps 0 to 7; ...
    """

    rejections: int = 50
    window: int = 100
    action: str = "warn"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("RejectionAlarm.rejections", self.rejections)
        positive_int("RejectionAlarm.window", self.window)
        if self.action not in ACTIONS:
            raise ValueError(f"RejectionAlarm.action must be one of {ACTIONS}, got {self.action!r}")

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """The inner policy's; counts the rejections of this window.

        Raises:
          RunawayRouterWarning: if this rejection gives the alarm, and the action is ``"raise"``.
        """
        recent = self._recent(state, report) + (not report.accepted)
        after = super().update(state, report)._replace(recent=recent)
        if not report.accepted and recent == self.rejections:
            self._alarm(state, report)
        return after

    def skip(self, state: PolicyState, report: Report) -> PolicyState:
        """The inner policy's."""
        return super().skip(state, report)._replace(recent=self._recent(state, report))

    def _recent(self, state: PolicyState, report: Report) -> int:
        """Rejections in the window of the report, before it. The first attempt at its first step opens a window."""
        return 0 if report.attempt == 0 and report.step % self.window == 0 else state.recent

    def _alarm(self, state: PolicyState, report: Report) -> None:
        last, since = CapacityOverflowError.of(state, report), report.step - report.step % self.window
        alarm = RunawayRouterWarning(self.rejections, since, report.step, last.demand, last.slots, last.factor)
        if self.action == "raise":
            raise alarm
        warnings.warn(alarm, stacklevel=3)
