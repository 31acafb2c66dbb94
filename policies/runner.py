"""StepRunner: the only place that dispatches steps, holds them in flight and runs rejected ones again.

The host never waits for the step that it has just dispatched. It reads the verdicts ``lag`` steps late,
a device-to-host copy of two integers, and that is all it ever reads::

    dispatch 0   dispatch 1   read 0   dispatch 2   read 1 (rejected)   1 again   read 1   dispatch 2 ...

A step behind a rejected one finds the latch down and changes nothing, so it is simply dispatched again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_blocks.capacity import Capacity, CapacitySpec, positive_int
from policies.base import CapacityPolicy, PolicyState, Report, checked_update
from policies.commit import Step
from policies.programs import Programs
from policies.transaction import Carry, Outcome, place


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step that is done: accepted, or skipped.

    Attributes:
      step: its number, which is also that of its batch.
      metrics: what the last attempt returned: device arrays, not read yet. In a skipped step those that are computed
        from the new state are of the old one instead.
      capacity: of the last attempt.
      demand: of the last attempt, in assignments.
      overflow: whether the first attempt overflowed its capacity.
      rejected: the attempts before the last one.
      skipped: whether the training state is the one before it, since its numbers were not valid.
      by_layer: the demand of each layer of the last attempt, likewise.
    """

    step: int
    metrics: Any
    capacity: Capacity
    demand: int
    overflow: bool
    rejected: tuple[Report, ...] = ()
    skipped: bool = False
    by_layer: tuple[int, ...] = ()

    @property
    def attempts(self) -> int:
        """How often the step ran, 1 when nothing went wrong."""
        return len(self.rejected) + 1


class _Waiting(NamedTuple):
    """A batch that is to be dispatched, perhaps not for the first time."""

    batch: Any
    rejected: tuple[Report, ...] = ()


class _Flight(NamedTuple):
    """A batch that was dispatched, and what comes of it."""

    waited: _Waiting
    capacity: Capacity
    verdict: jax.Array  # <int32>[1 + layers]
    metrics: Any


class StepRunner:
    """Runs training steps under a capacity policy, each as one transaction.

    For every ``lag`` the accepted states and metrics are those of ``lag=0``, and a rejection or a skip wastes at most
    ``lag`` dispatched steps. One exception follows from the lag itself: where a policy changes the capacity
    after an *accepted* step (``AdaptiveGrow`` with ``on_overflow="drop"``, or when it shrinks), the change
    reaches the steps that are dispatched later, ``lag`` steps behind.

    The state given to ``run`` is donated: its buffers become those of the next state. Go on from
    ``runner.state``, which is valid until the next step.

    Args:
      step: pure, ``step(state, batch, *, capacity) -> (new_state, total_recv_tokens, metrics)``;
        ``total_recv_tokens`` is any pytree of the layers' ``<int32>[num_buffers]``.
      policy: decides on capacities, verdicts and retries.
      spec: of the MoE layers; where they differ, of the one with the largest buffers.
      lag: steps that may be in flight while the next one is dispatched.
      policy_state: saved by an earlier run, as it is, as a mapping of its fields, or as JSON; None: the policy's first
        state.
      first_step: number of the first step.

    Raises:
      ValueError: if ``lag`` or ``first_step`` is not an integer of at least 0, or ``policy_state`` is none.

    Example:
      >>> from policies import RetryDropless
      >>> def step(state, batch, *, capacity):
      ...     return state + batch.sum(), batch.max(keepdims=True), {"seen": batch.size}
      >>> spec = CapacitySpec(tokens_per_rank=4, num_experts=4, num_experts_per_tok=1, ep_size=4, multiple_of=1)
      >>> runner = StepRunner(step, RetryDropless(factor=1.0), spec)
      >>> batches = [jnp.array([1, 4]), jnp.array([2, 9])]
      >>> for report in runner.run(jnp.int32(0), batches):
      ...     print(report.step, report.capacity.slots, report.demand, report.attempts)
      0 4 4 1
      1 None 9 2
      >>> int(runner.state)
      16
    """

    def __init__(
        self,
        step: Step,
        policy: CapacityPolicy,
        spec: CapacitySpec,
        *,
        lag: int = 1,
        policy_state: PolicyState | Mapping[str, Any] | str | None = None,
        first_step: int = 0,
    ) -> None:
        self.policy = policy
        self._lag = positive_int("lag", lag, minimum=0)
        self._policy_state = policy.init(spec) if policy_state is None else policy.resume(spec, policy_state)
        self._next = positive_int("first_step", first_step, minimum=0)
        self._capacities = policy.capacities(self._policy_state)
        self._programs = Programs(step, policy, self._capacities)
        self._carry = Carry(alive=None, state=None)  # alive is None until the first batch tells where a state belongs
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._flying: collections.deque[_Flight] = collections.deque()
        self._reports: collections.deque[StepReport] = collections.deque()

    @property
    def state(self) -> Any:
        """The training state after every batch submitted so far; waits for the steps in flight."""
        self._advance(0)
        return self._carry.state

    @property
    def submitted(self) -> int:
        """Number of the next step to be submitted; so many are done once ``drain`` or ``state`` has settled them."""
        return self._next + len(self._flying) + len(self._waiting)

    @property
    def policy_state(self) -> PolicyState:
        """The policy's state after the last step that was read; save it after ``drain`` or ``state``."""
        return self._policy_state

    @property
    def executables(self) -> int:
        """Number of programs compiled or being compiled for the present structure of the state."""
        return len(self._programs)

    def compile(self, state: Any, batch: Any) -> None:
        """Compiles ahead: the first capacity and the fallback now, the rungs between in the background.

        Nothing is run and nothing donated. Without this call every program is compiled when it is first needed.

        Raises:
          ValueError: if the step breaks its contract; the message names the leaf.
        """
        self._programs = self._programs.serving(state, batch)
        self._programs.get(self.policy.capacity(self._policy_state), batch)
        self._programs.get(self._capacities[-1], batch)
        self._programs.build_ahead(self._capacities, batch)

    def start(self, state: Any) -> None:
        """Takes over a training state; steps still in flight are settled first."""
        self._advance(0)
        self._carry = Carry(None, state)

    def run(self, state: Any, batches: Iterable[Any]) -> Iterator[StepReport]:
        """Trains on the batches, in order.

        Leaving the loop early loses nothing: what is in flight is settled by ``drain`` or ``state``, and its
        reports are handed out by ``drain`` or by the next ``run``.

        Args:
          state: any pytree of arrays; donated.
          batches: pytrees of arrays, NumPy or jax; another shape (a shorter last batch) is another program.

        Yields:
          One ``StepReport`` per batch, in order.

        Raises:
          CapacityOverflowError: from a policy that cannot go on. ``runner.state`` is then the state before
            that step; neither its batch nor those behind it were applied.
          NonFiniteError: from `SkipNonFinite`, after too many skipped steps. Likewise.
          ValueError: if the step breaks its contract, or a batch does not suit it. Likewise.
        """
        self.start(state)
        for batch in batches:
            self._submit(batch)
            yield from self._take()
        self._advance(0)
        yield from self._take()

    def submit(self, batch: Any) -> list[StepReport]:
        """Dispatches one batch after ``start``; returns the reports of the steps that this settled."""
        self._submit(batch)
        return list(self._take())

    def drain(self) -> list[StepReport]:
        """Settles every step in flight; returns the reports that were not handed out yet."""
        self._advance(0)
        return list(self._take())

    def _take(self) -> Iterator[StepReport]:
        while self._reports:
            yield self._reports.popleft()

    def _submit(self, batch: Any) -> None:
        state = self._carry.state
        if state is None:
            raise ValueError("the runner has no training state yet; call run(state, batches), or start(state) first")
        if self._carry.alive is None:
            self._programs = self._programs.serving(state, batch)
            self._carry = Carry(_armed(self._programs.home), place(state, self._programs.layout))
        self._waiting.append(_Waiting(batch))
        self._advance(self._lag)

    def _advance(self, lag: int) -> None:
        """Dispatches and settles until nothing waits and at most ``lag`` steps are in flight.

        What is done is in the fields, which change together; so it may be interrupted anywhere and called again.
        """
        while True:
            self._dispatch()
            if len(self._flying) <= lag and not self._retrying():
                return
            self._settle()

    def _retrying(self) -> bool:
        """Whether the step in flight is a retry. It flies alone: its verdict decides on the next capacity."""
        return bool(self._flying and self._flying[0].waited.rejected)

    def _dispatch(self) -> None:
        """Dispatches all that waits, up to and including a retry."""
        while self._waiting and not self._retrying():
            waited = self._waiting[0]
            capacity = self.policy.capacity(self._policy_state)
            try:
                program = self._programs.get(capacity, waited.batch)
                with _uninterrupted():  # the call consumes the old state, so the new one must not get lost
                    self._carry, verdict, metrics = program(self._carry, waited.batch)
                    self._flying.append(_Flight(self._waiting.popleft(), capacity, verdict, metrics))
            except Exception:
                self._waiting.clear()  # a batch that cannot run, and those behind it
                raise

    def _settle(self) -> None:
        """Reads the verdict on the oldest step in flight, and counts it or puts it back."""
        (batch, rejected), capacity, verdict, metrics = self._flying[0]
        outcome, *by_layer = (int(number) for number in jax.device_get(verdict))  # the only wait
        report = Report(
            self._next, len(rejected), max(by_layer), capacity, outcome != Outcome.REJECTED, tuple(by_layer)
        )
        skipped = outcome == Outcome.SKIPPED
        with _uninterrupted():
            again: list[_Waiting] = []
            if outcome != Outcome.COMMITTED:  # this step changed nothing, nor did those behind it
                again = [*(flight.waited for flight in self._flying), *self._waiting][1:]
                self._carry = self._carry._replace(alive=_armed(verdict.sharding))
                self._flying.clear()
                self._waiting.clear()
            self._policy_state = checked_update(self.policy, self._policy_state, report, skipped=skipped)
            if report.accepted:
                overflow = (*rejected, report)[0].overflow
                self._reports.append(
                    StepReport(
                        self._next, metrics, capacity, report.demand, overflow, rejected, skipped, report.by_layer
                    )
                )
                self._next += 1
            else:
                again.insert(0, _Waiting(batch, (*rejected, report)))
            if outcome == Outcome.COMMITTED:
                self._flying.popleft()
            self._waiting.extend(again)


def _armed(where: jax.sharding.Sharding | None) -> jax.Array:
    """The latch, up. Made on the device: the host sends nothing."""
    return jnp.ones((), jnp.bool_, device=where)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield  # no KeyboardInterrupt comes here
        return
    held: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)
