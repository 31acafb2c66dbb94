"""Decorator: a policy around another one, which adds to it and leaves the capacities to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_blocks.capacity import Capacity, CapacitySpec
from policies.base import CapacityPolicy, Demand, PolicyState, Report, Verdict


@dataclasses.dataclass(frozen=True)
class Decorator(CapacityPolicy):
    """Decides as the inner policy does. Subclass it and override what is to differ.

    Both share one state; a decorator calls the inner policy first and then sets the counters that are its own.

    Attributes:
      inner: any policy, another decorator included.

    Raises:
      ValueError: if ``inner`` is no policy.
    """

    inner: CapacityPolicy

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(type(self.inner)):
            raise ValueError(
                f"{type(self).__name__}.inner must be a policy, in a config a mapping with its name such as "
                f'{{"name": "retry_dropless", "factor": 1.25}}, got {self.inner!r}'
            )

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """The inner policy's."""
        return self.inner.ladder(spec)

    def init(self, spec: CapacitySpec) -> PolicyState:
        """The inner policy's."""
        return self.inner.init(spec)

    def resume(self, spec: CapacitySpec, saved: PolicyState | Mapping[str, Any] | str) -> PolicyState:
        """The inner policy's, which may have been saved without a decorator, or with another one."""
        return self.inner.resume(spec, saved)

    def capacity(self, state: PolicyState) -> Capacity:
        """The inner policy's."""
        return self.inner.capacity(state)

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """The inner policy's."""
        return self.inner.capacities(state)

    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """The inner policy's."""
        return self.inner.accept(total_recv_tokens, capacity)

    def valid(self, metrics: Any) -> Verdict:
        """The inner policy's."""
        return self.inner.valid(metrics)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """The inner policy's."""
        return self.inner.update(state, report)

    def skip(self, state: PolicyState, report: Report) -> PolicyState:
        """The inner policy's."""
        return self.inner.skip(state, report)
