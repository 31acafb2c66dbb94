"""EvalRunner: evaluation without drops, and without waiting for each batch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from moe_blocks.capacity import Capacity, positive_int
from policies.base import peak_demand
from policies.commit import unpack

DROPLESS = Capacity(slots=None)


@dataclasses.dataclass(frozen=True)
class EvalReport:
    """One evaluated batch.

    Attributes:
      step: its number, from 0.
      metrics: what the step returned: device arrays, not read yet.
      capacity: what it was compiled for.
      demand: largest demand on a receive buffer, in assignments.
      overflow: whether assignments were dropped.
    """

    step: int
    metrics: Any
    capacity: Capacity
    demand: int
    overflow: bool


class EvalRunner:
    """Runs an evaluation step over batches, dropless unless told otherwise. The state is not donated.

    Args:
      step: pure, ``step(state, batch, *, capacity) -> (total_recv_tokens, metrics)``.
      capacity: of every batch. Drops bias an evaluation, so the default has none.
      lag: batches that may be in flight while the next one is dispatched.

    Raises:
      ValueError: if ``lag`` is not an integer of at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> def step(state, batch, *, capacity):
      ...     return batch.max(keepdims=True), {"sum": state + batch.sum()}
      >>> [report] = EvalRunner(step).run(jnp.int32(1), [jnp.array([2, 3])])
      >>> report.demand, report.overflow, int(report.metrics["sum"])
      (3, False, 6)
    """

    def __init__(self, step: Callable[..., tuple[Any, Any]], *, capacity: Capacity = DROPLESS, lag: int = 1) -> None:
        self._capacity = capacity
        self._lag = positive_int("lag", lag, minimum=0)

        def evaluate(state: Any, batch: Any) -> tuple[jax.Array, Any]:
            outputs = step(state, batch, capacity=capacity)
            total_recv_tokens, metrics = unpack(outputs, "an evaluation step must return (total_recv_tokens, metrics)")
            return peak_demand(total_recv_tokens), metrics

        self._evaluate = jax.jit(evaluate)

    def run(self, state: Any, batches: Iterable[Any]) -> Iterator[EvalReport]:
        """Evaluates the batches in order; yields one report per batch, ``lag`` batches late.

        Raises:
          ValueError: if the step does not return its two values, or no usable demand.
        """
        flights: collections.deque[tuple[int, jax.Array, Any]] = collections.deque()
        for number, batch in enumerate(batches):
            flights.append((number, *self._evaluate(state, batch)))
            while len(flights) > self._lag:
                yield self._report(*flights.popleft())
        while flights:
            yield self._report(*flights.popleft())

    def _report(self, number: int, demand: jax.Array, metrics: Any) -> EvalReport:
        peak = int(jax.device_get(demand))
        return EvalReport(number, metrics, self._capacity, peak, self._capacity.overflows(peak))
